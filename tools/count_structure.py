"""Count the structure of the package: files, lines, names, and the files that one training run executes.

    python tools/count_structure.py           everything; trains for a few seconds on generated JPEGs
    python tools/count_structure.py --static  without the training

"Runs functions of" counts the Python files with at least one function (not just a class or module body) that was
called, in any thread, from the first import to the end of `headrace train` on folders of JPEGs.

What a module calls while it is imported (tables that are built, rules that are registered) does not count.

"Between an image and a weight update" counts the files of the functions in WALK: those that somebody who follows one
image from its file to the weights has to read, one for each thing that happens to it. The run must have called each of
them, so that the list cannot name what is no longer used. "Executed on that path" counts every file that was called
below opening the dataset, feeding it, or tracing the training call, helpers included; packages that only prepare or
observe a run (OUTSIDE) are left out of it.
"""

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src" / "headrace"
PATH = ("open_dataset", "TrainFeed.", "BlockReader.", "DeviceLoop.compile")
WALK = (
    "open_dataset",  # which kind of dataset, where its files are
    "detect",
    "open_image_set",
    "read_folders",
    "FileSamples.",
    "TrainFeed._make",  # which images make up a block of steps
    "step_indices",
    "BlockReader.read",  # read and decode them
    "ImageSource.",
    "OnOneMesh.put",  # send the block to the devices
    "put_on",
    "place_share",
    "make_call.",  # on the devices: K steps
    "make_step.",
    "fetch",  # images of a micro-batch, normalised and augmented
    "preprocess",
    "bits",
    "apply_blocks",  # forward and backward
    "Network.apply_range",
    "Chain.apply",
    "Conv.apply",
    "conv2d",
    "training_loss",
    "make_optimizer.<locals>.update",  # the update of the weights
    "make_lr_curve.<locals>.lr_curve",
    "write_weights",
    "next_ema",
)
OUTSIDE = ("cli", "config", "job", "plan", "telemetry", "checkpoint")
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def source_files(src: Path = SRC) -> list[Path]:
    """Return the Python files of the package."""
    return sorted(src.rglob("*.py"))


def repeated_names(files: list[Path]) -> list[str]:
    """Return the base names that more than one file has; every package needs its `__init__`."""
    counts = Counter(path.name for path in files if path.name != "__init__.py")
    return sorted(name for name, count in counts.items() if count > 1)


def pipeline_executors(files: list[Path], src: Path = SRC) -> list[str]:
    """Return the files outside plan/ that execute a schedule: they take a table's actions `.in_order()`."""
    found = []
    for path in files:
        if path.relative_to(src).parts[0] == "plan":
            continue
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if any(isinstance(call.func, ast.Attribute) and call.func.attr == "in_order" for call in calls):
            found.append(path.relative_to(src).as_posix())
    return found


def signatures_with_any(files: list[Path]) -> int:
    """Return how many functions say `Any` of a parameter or of what they return."""
    functions = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    signatures = ((node.args, node.returns) for node in functions if isinstance(node, ast.FunctionDef))
    names = ([name for part in parts if part for name in ast.walk(part)] for parts in signatures)
    return sum(any(isinstance(name, ast.Name) and name.id == "Any" for name in found) for found in names)


def static_counts(src: Path = SRC) -> dict[str, Any]:
    """Return the counts that need no run."""
    files = source_files(src)
    lines = {path: path.read_text().splitlines() for path in files}
    return {
        "files": len(files),
        "lines": sum(map(len, lines.values())),
        "comment lines": sum(line.lstrip().startswith("#") for text in lines.values() for line in text),
        # Files that are little more than their imports; a package and its entry point may be.
        "small files": [
            path.relative_to(src).as_posix()
            for path, text in lines.items()
            if len(text) < 20 and path.name not in ("__init__.py", "__main__.py")
        ],
        "signatures with Any": signatures_with_any(files),
        "repeated names": repeated_names(files),
        "pipeline executors": pipeline_executors(files, src),
    }


class Recorder:
    """A profile function that notes the package's files whose functions are called, and which below a PATH function."""

    def __init__(self, src: Path = SRC) -> None:
        self.called: set[str] = set()
        self.on_path: set[tuple[str, str]] = set()  # (file, qualified name of a function)
        self._prefix = f"{src}{os.sep}"
        self._depth = threading.local()
        self._known: dict[CodeType, tuple[str, bool, bool]] = {}

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if event not in ("call", "return"):
            return
        file, is_entry, is_module = self._known.get(frame.f_code) or self._look_up(frame.f_code)
        if not file:
            return
        change = 1 if event == "call" else -1
        depth = self._depth.value = getattr(self._depth, "value", 0) + change * is_entry
        imports = self._depth.imports = getattr(self._depth, "imports", 0) + change * is_module
        if event == "return" or imports:
            return
        self.called.add(file)
        if depth and file.partition("/")[0] not in OUTSIDE:
            self.on_path.add((file, frame.f_code.co_qualname))

    def _look_up(self, code: CodeType) -> tuple[str, bool, bool]:
        is_module = code.co_name == "<module>"
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in _COMPREHENSIONS
        inside = (is_function or is_module) and code.co_filename.startswith(self._prefix)
        file = Path(code.co_filename).relative_to(self._prefix).as_posix() if inside else ""
        self._known[code] = file, bool(file) and code.co_qualname.startswith(PATH), bool(file) and is_module
        return self._known[code]


def walked_files(on_path: Iterable[tuple[str, str]], walk: Sequence[str] = WALK) -> list[str]:
    """Return the files of the walk's functions, in its order; each must have been called."""
    files: dict[str, None] = {}
    for step in walk:
        found = {file for file, name in on_path if name == step or (step[-1] == "." and name.startswith(step))}
        assert len(found) == 1, f"{step} was called in {sorted(found) or 'no file'}: correct WALK in {__file__}"
        files |= dict.fromkeys(found)
    return list(files)


def write_jpegs(folder: Path, *, classes: int = 2, images: int = 12, size: int = 40) -> None:
    """Write folders of random JPEGs, one for each class."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(classes):
        place = folder / f"class_{number}"
        place.mkdir(parents=True)
        for image in range(images):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{image}.jpg")


def train_and_record(output: Path) -> None:
    """Train on generated JPEGs in this process and write what was called; meant for a process of its own."""
    sys.path.insert(0, str(SRC.parent))
    with tempfile.TemporaryDirectory() as place:
        write_jpegs(Path(place) / "images")
        recorder = Recorder()
        threading.setprofile(recorder.profile)
        sys.setprofile(recorder.profile)
        from headrace.cli.main import main

        options = {
            "dataset-path": f"{place}/images",
            "log-dir": f"{place}/runs",
            "compilation-cache-dir": "none",
            "model-name": "cifar_resnet8",
            "image-size": "16",
            "dataset-cache": "host",  # so small a dataset would be decoded once and stay on the device
            "ema-decay": "0.9",
            "micro-batch-size": "4",
            "num-epochs": "2",
            "platform": "cpu",
            "cpu-kernels": "off",  # so that the walk is the same where they are not compiled
        }
        code = main(["train", *(part for item in options.items() for part in _option(*item))])
        sys.setprofile(None)
        threading.setprofile(None)
    output.write_text(
        json.dumps({"code": code, "called": sorted(recorder.called), "on_path": sorted(recorder.on_path)})
    )


def _option(name: str, value: str) -> tuple[str, str]:
    return f"--{name}", value


def run_counts() -> dict[str, Any]:
    """Train in a new process; return the files that it ran functions of."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "called.json"
        subprocess.run(
            [sys.executable, __file__, "--record", str(output)], check=True, stdout=sys.stderr, stderr=sys.stderr
        )
        found = json.loads(output.read_text())
    assert found["code"] == 0, f"the training ended with exit code {found['code']}"
    return found


def main() -> None:
    """Print the counts, and with `--list` the files behind them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true", help="without the training")
    parser.add_argument("--list", action="store_true", help="name the files, too")
    parser.add_argument("--record", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        train_and_record(arguments.record)
        return
    counts = static_counts()
    rows: list[tuple[str, int, list[str]]] = [
        ("files in src", counts["files"], []),
        ("lines in src", counts["lines"], []),
        ("of them full-line comments", counts["comment lines"], []),
        ("files of fewer than 20 lines", len(counts["small files"]), counts["small files"]),
        ("signatures with Any", counts["signatures with Any"], []),
        ("base names that occur twice", len(counts["repeated names"]), counts["repeated names"]),
        ("pipeline executors", len(counts["pipeline executors"]), counts["pipeline executors"]),
    ]
    if not arguments.static:
        found = run_counts()
        rows.append(("files that one headrace train runs functions of", len(found["called"]), found["called"]))
        walked = walked_files([(file, name) for file, name in found["on_path"]])
        rows.append(("files between an image and a weight update", len(walked), walked))
        executed = sorted({file for file, _ in found["on_path"]})
        rows.append(("files executed on that path", len(executed), executed))
    for name, count, names in rows:
        print(f"{name:50}{count:8,}")
        for file in names if arguments.list else ():
            print(f"    {file}")


if __name__ == "__main__":
    main()

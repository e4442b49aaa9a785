"""Show that two commits give the same results: options, plans, networks, programs, weights and records.

    .venv/bin/python tools/same_results.py OLD_SRC NEW_SRC        # two src folders, of two work trees

A change that moves code, or says the same in another way, prints nothing but counts. Everything is asked for by
commands and by `headrace.build_network`, which stay when files move:

- options: what 675 sets of options resolve to (`option_cases.jsonl`: those that the tests use), with origins, notes and
  the whole text of errors; second names (`groups` of `norm_layer`) as what they say, as trees may have them in the
  configuration or not;
- plans: `headrace plan --json` of every recipe;
- networks: names, shapes and bits of the weights that seed 0 draws, for every name;
- runs: the commands below, each with the programs that XLA was given (without places in the source), the weights of its
  last checkpoint, and its records without times.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASES = Path(__file__).with_name("option_cases.jsonl")
TINY = (
    "train --config none --dataset generated --num-samples 64 --image-size 16 --num-classes 10 --model cifar_resnet8 "
    "--batch-size 16 --epochs 2 --lr 0.05 --precision 32.32 --progress none --run-name r"
)
RUNS = {
    "sgd": "",
    "kernels off": "--cpu-kernels off",
    "ema, smoothing, mixup": "--ema-decay 0.9 --label-smoothing 0.1 --mixup-alpha 0.2",
    "augmentation": "--rand-augment 2 --cutmix-alpha 1 --random-erasing 0.3",
    "replicas, accumulation": "--num-replicas 2 --gradient-accumulation-count 2",
    "stages": "--num-pipeline-stages 2 --gradient-accumulation-count 4 --pipeline-schedule interleaved",
    "stages, recomputed": "--num-pipeline-stages 2 --gradient-accumulation-count 4 --recomputation",
    "half": "--precision 16.16",
    "frozen": "--layer-lr backbone=0.1 --weight-decay 0.001 --weight-decay-exclude bn",
    "sharded": "--num-replicas 2 --optimizer adamw --replicated-optimizer-state-sharding",
    "offloaded": "--optimizer lamb --weight-decay 0.02 --optimizer-state-offload",
    "group norm": "--norm-layer name=group_norm,num_groups=4 --label-smoothing 0.2",
}
TIMES = re.compile(r"second|time|verdict|wait|bytes|path|directory|image.*per|split|^start$")
PLACES = re.compile(r", metadata=\{[^}]*\}|, stack_frame_id=\d+|FileNames\n.*?(?=\n\n(?:%|ENTRY))", re.DOTALL)


def texts_of(value: Any) -> Any:
    """Return a value as JSON has it, what JSON does not know as its text."""
    return json.loads(json.dumps(value, default=str, sort_keys=True))


def _moved(name: str) -> Any:
    """Return a function that is in another file in older trees: the oldest first, as this one's package may be seen."""
    for place in ("headrace.reference.entrance", "headrace_reference.entrance", "headrace.config.load"):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(place), name)
    raise ModuleNotFoundError(name)


def options() -> Iterator[tuple[str, Any]]:
    """Yield what each set of options resolves to."""
    from headrace.config.load import to_flat
    from headrace.core.errors import HeadraceError

    resolve = _moved("resolve")

    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        try:
            found = resolve(case.get("options", {}), case.get("name"), None, case.get("environ", {}))
        except HeadraceError as error:
            yield f"options {line}", ["refused", type(error).__name__, error.problem, error.rule, error.remedy]
            continue
        yield f"options {line}", texts_of([*_facts(found, to_flat(found.config)), found.notes, found.warnings])


# Second names: those that say all of an option, and those that say a part of one.
WHOLES = {
    **dict.fromkeys(("batch_norm", "groups", "group_norm"), "norm_layer"),
    "normalise_input": "normalization",
    "model_size": "model_name",
    "output": "run_name",
}
PARTS = ("learning_rate", "momentum", "warmup_epochs")


def _facts(found: Any, flat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return values, origins that are no defaults, and what was given in other words, without second names."""
    from headrace.config.section_model import norm_choice

    data = found.config.data
    facts = flat | {"norm_layer": norm_choice(found.config.model)}
    facts["normalization"] = getattr(data, "wanted_normalization", data.normalization)
    origins = {name: str(origin) for name, origin in found.origins.items() if origin.kind != "default"}
    said = {name: [given.value, str(given.origin)] for name, given in found.source.items()}
    for name in PARTS:
        value, origin = facts.pop(name, None), origins.pop(name, "")
        said |= {name: [value, origin]} if value is not None else {}
    for name, fact in WHOLES.items():
        facts.pop(name, None)
        origin = origins.pop(name, "")
        origins |= {fact: origin} if origin else {}
    return facts, origins, said


def plans() -> Iterator[tuple[str, Any]]:
    """Yield the plan of every recipe."""
    from headrace.cli.main import main

    for name in _moved("named_blocks")(None):
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(["plan", "--config", name, "--json"])
        yield f"plan {name}", [code, out.getvalue(), errors.getvalue()]


def networks() -> Iterator[tuple[str, Any]]:
    """Yield the weights that every network begins with."""
    import jax
    import numpy as np

    import headrace

    for name in headrace.model_names():
        network = headrace.build_network(headrace.config_from({"model_name": name}).model, 10, (64, 64, 3))
        digest = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(network.init(0)):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes()[:4096])
        yield f"network {name}", digest.hexdigest()


def runs() -> Iterator[tuple[str, Any]]:
    """Yield programs, weights and records of each run."""
    for name, more in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            environ = os.environ | {
                "XLA_FLAGS": f"--xla_dump_to={place}/hlo --xla_dump_hlo_as_text",
                "XDG_CACHE_HOME": folder,
            }
            words = [*TINY.split(), *more.split(), "--log-dir", folder, "--compilation-cache-dir", "none"]
            ended = subprocess.run(
                [sys.executable, "-m", "headrace", *words], env=environ, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                yield f"run {name}", ["refused", ended.returncode, ended.stderr.replace(folder, "")]
                continue
            given = sorted(place.glob("hlo/*before_optimizations.txt"))
            hashes = [hashlib.sha256(PLACES.sub("", file.read_text()).encode()).hexdigest()[:16] for file in given]
            yield f"run {name}: programs", sorted(hashes)
            (weights,) = sorted(place.glob("r/checkpoints/*/*.safetensors"))[-1:]
            yield f"run {name}: weights", hashlib.sha256(weights.read_bytes()).hexdigest()
            lines = (place / "r" / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines if '"note"' not in line[:20]]
            # A checkpoint's record and that of a validation are of two threads, and come in any order.
            records.sort(key=lambda each: (each.get("step", 0), each["kind"], str(each.get("weights"))))
            yield f"run {name}: records", [_timeless(each) for each in records]


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if not TIMES.search(key)}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def record(kinds: list[str]) -> None:
    """Print the results of the headrace that Python imports, a line each."""
    known = {"options": options, "plans": plans, "networks": networks, "runs": runs}
    for kind in kinds or known:
        for name, found in known[kind]():
            print(json.dumps([name, texts_of(found)]), flush=True)


def results_of(source: str, kinds: list[str]) -> dict[str, Any]:
    """Return the results of a tree, from processes of its own."""
    environ = os.environ | {"PYTHONPATH": str(Path(source).resolve()), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--record", *kinds]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{source}: {ended.stderr[-2000:]}")
    return dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Return the places in which two results differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = {**old, **new}
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{place}.{key}")][:20]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in _differences(a, b, f"{place}[{i}]")][:20]
    return [] if old == new else [f"{place}: {json.dumps(old)[:300]} -> {json.dumps(new)[:300]}"]


def main(words: list[str]) -> int:
    """Compare two trees; return 1 if a result differs."""
    if words[:1] == ["--record"]:
        record(words[1:])
        return 0
    old, new = (results_of(source, words[2:]) for source in words[:2])
    different = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    for name in different[:40]:
        print(name, *_differences(old.get(name), new.get(name)), sep="\n  ")
    print(f"{len(old)} and {len(new)} results, {len(different)} differ")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

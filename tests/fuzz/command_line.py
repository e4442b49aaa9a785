"""Fuzzed command lines and YAML through `headrace plan`: hostile values for every option, one to three at a time."""

import contextlib
import io
import random
import time
from pathlib import Path

from headrace.cli.main import main
from headrace.config.translations import known_options
from tests.fuzz.harness import mutate

HOSTILE = (
    *("", " ", "-", "--", "-1", "0", "1", "2", "3", "7", "1e400", "-1e400", "nan", "inf", "1e-400", "0x10", "1_0"),
    *("1000000000", "9" * 400, "a" * 1000, "é", "\u2028", "none", "auto", "null", "true", "off", "yes", "[", "{"),
    *("[]", "{}", "[1]", "[[1]]", '["a"]', '{"name": [1]}', '{"name": {}}', '{"a": {"b": 1}}', '{"": null}', "[null]"),
    *("1,2", "1,,2", ",", "1:2", ":", "a=b", "=", "a=1,b=2", "../..", "(", ".*", "\\", "%s", "{0}", "1 2 3", "0.5"),
    *("block1", "resnet50", "cosine", "[0.1, 0.2]", '{"name": "batch", "groups": []}', "[1e999]", "1.5.2", "2**70"),
)
BASE = "a:\n  dataset: generated\n  model_name: cifar_resnet8\n  image_size: 8\n  num_classes: 4\n  num_samples: 64\n"
START = (
    "--config",
    "none",
    "--dataset",
    "generated",
    "--image-size",
    "16",
    "--num-classes",
    "4",
    "--num-samples",
    "64",
)
# Options that name a file to write or to run, or measure on a device.
LEFT_OUT = ("measure_splits", "config", "config_path")


def command_line(rng: random.Random) -> list[str]:
    """Return the arguments of `headrace plan` with one to three options of hostile values."""
    names = [name for name in known_options() if name not in LEFT_OUT]
    words = [*START]
    for _ in range(rng.randint(1, 3)):
        option = f"--{rng.choice(names).replace('_', rng.choice('-_'))}"
        value = rng.choice(HOSTILE)
        words += rng.choice(([option, value], [f"{option}={value}"], [option]))
    return words


def yaml_file(rng: random.Random) -> bytes:
    """Return a file with a block named `a`: options with hostile values, damaged now and then."""
    names = [name for name in known_options() if name not in LEFT_OUT]
    text = BASE + "".join(f"  {rng.choice(names)}: {rng.choice(HOSTILE)}\n" for _ in range(rng.randint(1, 3)))
    return mutate(text.encode(), rng) if rng.random() < 0.5 else text.encode()


def outcome(words: list[str], max_seconds: float = 10.0) -> str:
    """Return `error`, `accepted` or, for a finding, its description."""
    before, said = time.monotonic(), io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = main(["plan", *words])
    except SystemExit as error:
        code = error.code
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if time.monotonic() - before > max_seconds:
        return f"took over {max_seconds:g} s"
    return "accepted" if code == 0 else "error" if code in (2, 3) and "headrace" in said.getvalue() else f"code {code}"


def findings(seed: int, cases: int, folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return the counts of outcomes and the findings of so many cases, half of them YAML."""
    rng, counts, found = random.Random(seed), dict[str, int](), []
    file = folder / "fuzzed.yml"
    for number in range(cases):
        words = command_line(rng)
        if number % 2:
            file.write_bytes(yaml_file(rng))
            words = ["--config-path", str(file), "--config", "a"]
        what = outcome(words)
        counts[what] = counts.get(what, 0) + 1
        if what not in ("error", "accepted"):
            found.append(f"{words} {file.read_bytes() if number % 2 else b''}: {what[:300]}")
    return counts, found

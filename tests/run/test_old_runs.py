"""Run directories made by commit 08c4c9e, before modules were moved and merged, still resume, validate and export.

The runs under files/old_runs/ and the numbers in files/old_runs/expected.json come from that commit:

    git worktree add /tmp/old 08c4c9e
    cd tests/run/files/old_runs && rm -rf plain tf1
    export PYTHONPATH=/tmp/old/src JAX_PLATFORMS=cpu
    python -m headrace train --config none --run-name plain --log-dir . --dataset digits --model-name toy_model_bn \
        --micro-batch-size 16 --global-batch-size 64 --weight-updates-per-epoch 4 --num-epochs 2 --seed 3 \
        --optimizer momentum --lr-schedule cosine --bn-momentum 0.9 --ema-decay 0.9 --platform cpu --progress none
    python -m headrace train --dialect tf1 --run-name tf1 --log-dir . --dataset digits --model toy_model_bn \
        --batch-size 16 --gradient-accumulation-count 20 --epochs 2 --seed 3 --optimiser momentum --momentum 0.9 \
        --base-learning-rate -8 --learning-rate-schedule 0.5 --learning-rate-decay 0.1 --epochs-per-ckpt 1 \
        --weight-avg-exp 0.5 --platform cpu --progress none
    python ../../test_old_runs.py record

The last line runs `measure` below with the old code. Plots and tables were deleted: nothing reads them.
"""

import io
import json
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from headrace.cli.main import main

FILES = Path(__file__).parent / "files" / "old_runs"
RUNS = ("plain", "tf1")


def run_command(*words: str | Path) -> str:
    """Run a command; return what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main([str(word) for word in words])
    assert code == 0, printed.getvalue()
    return printed.getvalue()


def sums(file: Path) -> dict[str, float]:
    """Return a number for each tensor of a file that changes with every element and its position."""
    tensors = {name: tensor.astype(np.float64).ravel() for name, tensor in load_file(file).items()}
    return {name: float(flat @ np.cos(np.arange(flat.size))) for name, flat in sorted(tensors.items())}


def measure(run: Path) -> dict[str, Any]:
    """Validate, predict, export, average and at last resume a run; return the numbers that this gives."""
    image = run.parent / "image.png"
    Image.fromarray((np.arange(64).reshape(8, 8) * 4).astype(np.uint8)).save(image)
    reports = [json.loads(line) for line in run_command("validate", run, "--json").splitlines() if line[:1] == "{"]
    predicted = json.loads(run_command("predict", run, image, "--format", "json", "--platform", "cpu"))
    exported = run.parent / "weights.safetensors"
    run_command("export", run, "--format", "safetensors", "--out", exported, "--weights", "raw")
    run_command("average", run, "--mode", "mean", "--filename", "mean", "--no-validate")
    averaged = run / "averages" / "mean" / "state.safetensors"
    run_command("resume", run, "--num-epochs", "3")
    newest = max((run / "checkpoints").glob("step_*"))
    return {
        "validate": [
            {"step": report["step"]}
            | {
                kind: [report[kind][name] for name in ("top1", "top5", "loss")]
                for kind in ("raw", "ema")
                if kind in report
            }
            for report in reports
        ],
        "predict": predicted,
        "export": sums(exported),
        "average": sums(averaged),
        "resumed_to": newest.name,
        "resume": sums(newest / "state.safetensors"),
    }


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested values: numbers to rounding, the rest exactly.

    The numbers are equal to the bit with the XLA_FLAGS of a user's run; those of the tests compile other programs.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{where}/{number}")
    elif isinstance(expected, float):
        # 16-bit gradients that are zero but for rounding; sums of tensors, which AVX2 and AVX-512 round differently
        assert found == pytest.approx(expected, rel=2e-4, abs=5e-4), where
    else:
        assert found == expected, where


@pytest.mark.reference  # what runs were saved with before its options had a place of their own
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    shutil.copytree(FILES / name, tmp_path / name)
    expected = json.loads((FILES / "expected.json").read_text())[name]
    found = measure(tmp_path / name)
    for path in (found, expected):  # the path of the image on another machine
        path["predict"] = json.loads(json.dumps(path["predict"]).replace(str(tmp_path), "").replace("WHERE", ""))
    assert_equal(found, expected)


if __name__ == "__main__" and sys.argv[1:] == ["record"]:
    import tempfile

    results = {}
    for run_name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(FILES / run_name, Path(folder) / run_name)
            results[run_name] = json.loads(json.dumps(measure(Path(folder) / run_name)).replace(folder, "WHERE"))
    (FILES / "expected.json").write_text(json.dumps(results, indent=1) + "\n")

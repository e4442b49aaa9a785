"""`headrace validate`: of several checkpoints, the best one is described further."""

import json
from pathlib import Path

from headrace.cli.validate import _show
from headrace.run.validation import Validated


def validated(step: int, problem: str = "", **top1: float) -> Validated:
    numbers = {"top5": None, "loss": 1.0 if step else float("nan"), "balanced_accuracy": 0.5, "num_samples": 8}
    reports = {weights: {"top1": share, **numbers} for weights, share in top1.items()}
    path = Path(f"step_{step:08d}")
    return Validated(checkpoint=path, step=step, reports=reports, seconds=dict.fromkeys(reports, 0.1), problem=problem)


def test_the_best_checkpoint_is_chosen_not_the_last(capsys):
    found = [validated(1, raw=0.5), validated(2, raw=0.6, ema=0.8), validated(3, raw=0.8), validated(4, "damaged")]
    best = _show(found, as_json=False)
    assert best is found[1]
    assert "best: step_00000002 (ema), top-1 80.00 %" in capsys.readouterr().out
    assert _show([validated(1, "damaged")], as_json=True) is None


def test_lines_of_json_have_no_nan(capsys):
    _show([validated(0, raw=0.1)], as_json=True)
    line = json.loads(capsys.readouterr().out, parse_constant=lambda name: f"not JSON: {name}")
    assert line["raw"]["loss"] is None

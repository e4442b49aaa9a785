"""Document 000's periodic host events: how long a call keeps the device, on digits and epochs of five steps."""

from pathlib import Path

import jax
import numpy as np
import pytest

from headrace.cli.options import parse
from headrace.run.callbacks import Callback
from headrace.run.design import CustomParts, design_run
from headrace.run.fit import train
from headrace_reference.scripts import script_words

# The document's command but for the network, the images and their number.
TYPED = "--model toy_model --num-epochs 6 --micro-batch-size 2 --validation False --gradient-accumulation 5"
FEW = "--dataset digits --weight-updates-per-epoch 5"
HERE = "--platform cpu --progress none --precision 32.32 --seed 1 --weight_decay 0 --log-dir runs --clean-dir False"


class CallEnds(Callback):
    """Remembers after which step each call came back to the host."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_call_end(self, event):
        self.steps.append(event.step)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(more: str):
    """Return (after which step each call ended, plan, final weights) of `train.py` with these words."""
    words = script_words("train", f"{TYPED} {FEW} {HERE} {more}".split())
    resolved, _ = parse(words[1:], "headrace train")
    ends = CallEnds()
    result = train(resolved, CustomParts(callbacks=(ends,)))
    assert result.state
    return ends.steps, design_run(resolved.config).plan, result.state["params"]


@pytest.mark.parametrize(
    ("logs", "ends"),
    [("1", [5, 10, 15, 20, 25, 30]), ("0.5", [10, 20, 30]), ("0.3333333333333333333", [15, 30]), ("0", [30])],
)
def test_a_call_keeps_the_device_for_as_many_epochs_as_the_logs_say(logs, ends):
    steps, plan, _ = trained(f"--logs-per-epoch {logs}")
    assert steps == ends
    assert plan.steps.num_calls == len(ends)
    assert (plan.cache.where == "device") == (logs != "1")


def test_the_device_makes_the_pixels_that_the_host_makes():
    _, on_host, expected = trained("--logs-per-epoch 0 --accelerator-side-preprocess False")
    _, on_device, found = trained("--logs-per-epoch 0")
    assert (on_host.cache.where, on_device.cache.where) == ("host", "device")
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_where_the_images_of_a_call_do_not_fit_the_plan_warns_and_says_what_helps():
    def warned(more: str) -> list[str]:
        resolved, _ = parse(script_words("train", f"{TYPED} --logs-per-epoch 0.5 {more}".split())[1:], "headrace plan")
        warnings = design_run(resolved.config, absent_ok=True).plan.warnings
        return [text for text in warnings if text.startswith("--logs-per-epoch 0.5 asks for calls of 10,000 steps")]

    assert not warned(""), "bytes of all images fit"
    (told,) = warned("--accelerator-side-preprocess False")
    assert "at most 5,821" in told, "2 GiB / (3 blocks x 10 images x (32 x 32 x 3 x 4 + 8 bytes))"
    assert told.endswith("Raise --dataset-device-budget to 4GiB, or add --accelerator-side-preprocess True.")
    assert not warned("--accelerator-side-preprocess False --dataset-device-budget 4GiB")
    (told,) = warned("--dataset-device-budget 100MiB")
    assert told.endswith("(176.0 MiB do not fit the budget of 100.0 MiB). Raise --dataset-device-budget to 4GiB.")
    assert not warned("--dataset-device-budget 177MiB")

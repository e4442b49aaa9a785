"""The verdict in words, by hand-made numbers; calls behind one that failed."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import RunStopped
from headrace.engine.devices import CompileCounts
from headrace.telemetry.bottleneck import Measured, verdict
from headrace.telemetry.call_reader import CallReader
from headrace.telemetry.metric_totals import Unlogged


def judged(**changes: Any) -> str:
    numbers = {
        "images": 10_000,
        "seconds": 10.0,
        "wait_seconds": 0.0,
        "read_seconds": 2.0,
        "threads": 2,
        "cached": False,
    }
    return verdict(Measured(**(numbers | changes)))  # pyright: ignore[reportArgumentType]


def test_a_device_that_never_waited() -> None:
    assert judged(wait_seconds=0.03) == "compute-bound: the device waited 0.3 % of the time"
    decoded_first = judged(wait_seconds=0.03, cached=True, first_wait_seconds=18.0, wall_seconds=42.0)
    assert "the dataset is on the device, which waited 0.3 % of the time after the first images" in decoded_first
    assert "reading the first images took 43 % of the 42.0 s" in decoded_first
    assert "on the device" in judged(cached=True)


def test_a_device_that_starved() -> None:
    said = judged(wait_seconds=4.1, read_seconds=9.0)
    assert said.startswith("input-bound: the host prepares 1,111 img/s, the device takes 1,695 img/s")
    assert "waited 41.0 % of the 10.0 s after the first call" in said
    assert "--dataset-cache device" in said
    assert "--pipeline-num-parallel (now 2)" in said


def test_a_little_waiting_is_told_without_advice() -> None:
    said = judged(wait_seconds=0.5, read_seconds=8)
    assert said.startswith("mostly compute-bound: the device waited 5.0 % of the 10.0 s after the first call; ")
    assert "the host prepares 1,250 img/s" in said
    assert "--dataset-cache" not in said


def test_a_resident_set_that_waits_needs_longer_calls() -> None:
    said = judged(wait_seconds=5, cached=True)
    assert "--logs-per-epoch" in said
    assert "--dataset-cache" not in said


@pytest.mark.parametrize("changes", [{"images": 0}, {"seconds": 0.0}, {"seconds": -1.0}])
def test_nothing_measured(changes: dict[str, float]) -> None:
    assert judged(**changes).startswith("no verdict")


@pytest.mark.parametrize(
    "changes",
    [{"wait_seconds": 20.0}, {"wait_seconds": -1.0}, {"read_seconds": 0.0, "wait_seconds": 5.0}],
)
def test_odd_measurements_do_not_break_it(changes: dict[str, float]) -> None:
    assert "bound: " in judged(**changes)


def test_decoding_and_sending_are_told_apart() -> None:
    """10,000 images in 8 s, in 1 s of it 150,528 bytes each are sent: 1,250 img/s read, 10,000 and 1.5 GB/s sent."""
    said = judged(wait_seconds=5, read_seconds=8.0, send_seconds=1.0, bytes_per_image=150_528, decodes=True)
    assert "the host prepares 1,250 img/s (decodes 1,250, sends 10,000 at 1.5 GB/s)" in said
    assert "headrace data pack" in said
    sending = judged(wait_seconds=5, read_seconds=1.0, send_seconds=8.0, bytes_per_image=602_112, decodes=True)
    assert "sending is the limit" in sending


def test_waiting_for_validation_images_or_a_disk_is_waiting() -> None:
    """10 s of training, 1 of evaluating and 5 of waiting: 31 %."""
    said = judged(validate_seconds=1.0, validation_wait_seconds=5.0)
    assert said.startswith(
        "validation-bound: the device waited 31.2 % of the 16.0 s after the first call for validation images"
    )
    assert "--validations-per-epoch" in said
    assert judged(validation_wait_seconds=0.5, save_seconds=0.1) == (
        "mostly compute-bound: the device waited 4.7 % of the 10.6 s after the first call for validation images"
    )
    said = judged(save_seconds=30.0, wait_seconds=2.0)
    assert said.startswith("saving-bound: the device waited 75.0 % of the 40.0 s after the first call for checkpoints")
    assert "--ckpts-per-epoch" in said
    assert judged(wait_seconds=4.0, save_seconds=2.0).startswith("input-bound")


@pytest.mark.parametrize(
    ("part", "said", "option"),
    [
        ("start_seconds", "starting took 50 % of the 20.0 s", "headrace data pack"),
        ("first_wait_seconds", "reading the first images took 50 % of the 20.0 s", "headrace data pack"),
        ("compile_seconds", "compiling took 50 % of the 20.0 s", "--compilation-cache-dir"),
        ("validate_seconds", "validation took 50 % of the 20.0 s", "--validations-per-epoch"),
        ("rest_seconds", "the host between calls took 50 % of the 20.0 s", "--call-seconds"),
    ],
)
def test_the_largest_avoidable_part_is_named_with_its_option(part: str, said: str, option: str) -> None:
    text = judged(**{part: 10.0, "wall_seconds": 20.0, "decodes": True})
    assert text.startswith("compute-bound")
    assert said in text
    assert option in text.split(said)[1]
    assert said.split(" took")[0] + " took" not in judged(**{part: 1.0, "wall_seconds": 11.0})  # 9 % is little
    assert " took " not in judged(**{part: 3.0, "wait_seconds": 4.0, "wall_seconds": 13.0})  # waiting took longer


def test_one_batch_cannot_be_larger() -> None:
    options = {"validate_seconds": 10.0, "wall_seconds": 20.0}
    assert "--validation-micro-batch-size" in judged(**options, num_validation_batches=3)
    assert "--validation-micro-batch-size" not in judged(**options, num_validation_batches=1)


def test_waits_that_are_small_alone_are_not_nothing_together() -> None:
    said = judged(wait_seconds=0.15, validation_wait_seconds=0.16)
    assert (
        said == "mostly compute-bound: the device waited 1.6 % of the 10.2 s after the first call for validation images"
    )


def test_a_cache_that_was_used_is_not_recommended() -> None:
    for counts, advice in ((CompileCounts(2, 0), "came from the cache"), (CompileCounts(1, 1), "the next run")):
        said = judged(compile_seconds=10.0, wall_seconds=20.0, programs=counts)
        assert advice in said
        assert "--compilation-cache-dir" not in said


def test_a_step_that_is_left_out_enters_no_sum() -> None:
    """With --nan-policy skip the record of a call is the mean of its good steps: here of the first and the last."""
    rows = {
        "loss": [4.0, np.nan, np.inf, 2.0],
        "top1": [3.0, 8.0, 8.0, 1.0],
        "top5": [4.0, 8.0, 8.0, 2.0],
        "count": [8.0, 8.0, 8.0, 8.0],
        "skipped": [0.0, 1.0, 1.0, 0.0],
        "metric/mine": [1.0, np.nan, 5.0, 7.0],
    }
    found = Unlogged().add({key: np.array(values, np.float32) for key, values in rows.items()}, 0.0)
    assert (found.loss, found.top1, found.top5, found.count, found.skipped) == (6, 4, 6, 16, 2)
    assert found.mean(found.loss) == 6 / 16
    assert found.metric_means() == {"mine": 8 / 16}


def test_nothing_is_read_behind_a_call_that_failed() -> None:
    read: list[int] = []

    def read_call(number: int) -> None:
        if number == 2:
            raise RunStopped("bad numbers")
        read.append(number)

    with closing(CallReader(read_call)) as reader:
        for number in (1, 2, 3):
            reader.submit(number)
        with pytest.raises(RunStopped):
            reader.drain()
    assert read == [1]


def test_packing_is_advised_for_image_files_only() -> None:
    slow = {"start_seconds": 30.0, "wall_seconds": 42.0}
    assert judged(**slow).endswith("starting took 71 % of the 42.0 s: train longer in one run")
    assert judged(**slow, decodes=True).endswith("pack the images (headrace data pack), or train longer in one run")

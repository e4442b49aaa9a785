"""dataset_benchmark and infeed_benchmark: the fields, the arithmetic between them, and a known speed."""

import json
import time

import numpy as np
import pytest

from headrace import HeadraceError, Infeed, dataset_benchmark, infeed_benchmark
from headrace.data.sets.source import memory_source

FIELDS = {"elements_processed", "total_bytes_processed", "time_elapsed", "elements_per_second", "bandwidth"}
ELEMENTS = [{"x": np.zeros((4, 100), np.float32), "y": np.zeros(4, np.int32)}] * 3  # 1,616 bytes each


@pytest.mark.parametrize(
    "run",
    [
        lambda: dataset_benchmark(ELEMENTS, 4, 10),
        lambda: dataset_benchmark(lambda: iter(ELEMENTS), 4, 10),
        lambda: infeed_benchmark(Infeed(ELEMENTS, repeat=True), 4, 10),
    ],
    ids=["list", "function", "infeed"],
)
def test_the_fields_and_their_arithmetic(run):
    epochs = json.loads(run())["epochs"]
    assert len(epochs) == 4
    for epoch in epochs:
        assert set(epoch) == FIELDS
        assert epoch["elements_processed"] == 10
        assert epoch["total_bytes_processed"] == 10 * 1616
        assert epoch["elements_per_second"] == pytest.approx(10 / epoch["time_elapsed"])
        assert epoch["bandwidth"] == pytest.approx(16160 / epoch["time_elapsed"] / 1e9)


@pytest.mark.parametrize("measure", [lambda d: dataset_benchmark(d, 2, 5), lambda d: infeed_benchmark(Infeed(d), 2, 5)])
def test_a_slow_dataset_is_measured_as_slow(measure):
    def dataset():
        for _ in range(20):
            time.sleep(0.02)
            yield np.zeros(3)

    for epoch in json.loads(measure(dataset))["epochs"]:
        assert 0.06 < epoch["time_elapsed"] < 5  # 5 x 0.02, some read ahead
        assert epoch["elements_per_second"] < 80


def test_a_source():
    source = memory_source(np.zeros((10, 2, 2, 1), np.uint8), np.zeros(10, np.int32))
    epoch = json.loads(dataset_benchmark(source, 1, 6, batch_size=4))["epochs"][0]
    assert epoch["total_bytes_processed"] == 6 * (4 * 4 + 4 * 4)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: dataset_benchmark(ELEMENTS, 0, 10), "num_epochs is 0"),
        (lambda: dataset_benchmark(ELEMENTS, 1, 0), "elements_per_epoch is 0"),
        (lambda: dataset_benchmark(ELEMENTS, 1.5, 1), "num_epochs is 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: dataset_benchmark(7, 1, 1), "of type int"),  # pyright: ignore[reportArgumentType]
        (lambda: dataset_benchmark(iter(ELEMENTS), 1, 4), "cannot be started again"),
        (lambda: dataset_benchmark([np.zeros((0, 2))], 1, 1), r"float32\[0, 2\].*No dim"),
        (lambda: infeed_benchmark(ELEMENTS, 1, 1), "of type list"),  # pyright: ignore[reportArgumentType]
        (lambda: infeed_benchmark(Infeed(ELEMENTS), 1, 4), "0 elements are left"),
        (lambda: infeed_benchmark(Infeed(ELEMENTS), 0, 4), "num_epochs is 0"),
    ],
)
def test_what_cannot_work_is_refused(run, message):
    with pytest.raises(HeadraceError, match=message):
        run()

"""How fast a dataset gives its elements, alone and through an infeed onto the device, as JSON."""

import json
import time
from collections.abc import Callable
from typing import Any

import jax

from headrace.core.errors import ConfigError, DataError
from headrace.core.tree import PyTree
from headrace.program.infeed import Dataset, Infeed, passes_over
from headrace.program.structure import host_arrays, structure_of, whole_number


def dataset_benchmark(
    dataset: Dataset, num_epochs: int, elements_per_epoch: int, *, batch_size: int | None = None
) -> str:
    """Time the dataset alone, on the calling thread; start it again at its end. Return JSON.

    {"epochs": [{"elements_processed", "total_bytes_processed", "time_elapsed" (seconds), "elements_per_second",
    "bandwidth" (GB/s)}, ...]}. The first epoch holds what starting costs.
    """
    passes = passes_over(dataset, batch_size, None)
    number, elements = 0, iter(passes(0))

    def take() -> PyTree:
        nonlocal number, elements
        for element in elements:
            return host_arrays(element)
        number += 1
        elements = iter(passes(number))
        for element in elements:
            return host_arrays(element)
        raise DataError(
            "The dataset ended, and cannot be started again.",
            remedy="Give a list, a function that returns a fresh iterator, or ask for fewer elements.",
        )

    return _measure(take, num_epochs, elements_per_epoch)


def infeed_benchmark(infeed: Infeed, num_epochs: int, elements_per_epoch: int) -> str:
    """Time the elements through the infeed's thread and onto the device; return JSON as dataset_benchmark does."""
    if not isinstance(infeed, Infeed):
        raise ConfigError(f"infeed is of type {type(infeed).__name__}.", remedy="Write Infeed(dataset).")

    def take() -> PyTree:
        element = infeed.take_all(1, "the benchmark")[0]
        return jax.block_until_ready(jax.device_put(element))

    return _measure(take, num_epochs, elements_per_epoch)


def _measure(take: Callable[[], Any], num_epochs: int, elements_per_epoch: int) -> str:
    num_epochs = whole_number(num_epochs, "num_epochs", 1)
    elements_per_epoch = whole_number(elements_per_epoch, "elements_per_epoch", 1)
    epochs = []
    for _ in range(num_epochs):
        num_bytes, start = 0, time.perf_counter()
        for _ in range(elements_per_epoch):
            element = take()
            if any(0 in leaf.shape for leaf in jax.tree.leaves(element)):
                raise DataError(
                    f"An element of the dataset holds nothing: {structure_of(element)}.",
                    rule="No dim of an element is 0.",
                )
            num_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(element))
        seconds = time.perf_counter() - start
        epochs.append(
            {
                "elements_processed": elements_per_epoch,
                "total_bytes_processed": num_bytes,
                "time_elapsed": seconds,
                "elements_per_second": elements_per_epoch / seconds,
                "bandwidth": num_bytes / seconds / 1e9,
            }
        )
    return json.dumps({"epochs": epochs})

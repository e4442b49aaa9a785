"""Measure the host's input path alone: reading, decoding, and whole views, for each number of threads."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError
from headrace.data.dataset import open_dataset
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.feeding.block_reader import BlockReader, feed_options
from headrace.data.feeding.order import epoch_order
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.source import Source


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One part of the input path, timed."""

    part: str  # read | decode | view | block
    threads: int
    elements_processed: int
    total_bytes_processed: int
    time_elapsed: float
    processor_seconds: float  # of all threads

    def to_dict(self) -> dict[str, Any]:
        """Return the row with its rates, in the field names of the known dataset benchmark; bandwidth is GB/s."""
        return {
            "part": self.part,
            "threads": self.threads,
            "elements_processed": self.elements_processed,
            "total_bytes_processed": self.total_bytes_processed,
            "time_elapsed": self.time_elapsed,
            "processor_seconds": self.processor_seconds,
            "elements_per_second": self.elements_processed / self.time_elapsed,
            "bandwidth": self.total_bytes_processed / self.time_elapsed / 1e9,
        }


PARTS = ("read", "decode", "view", "block")


def bench_input(
    data: Data, seed: int, threads: tuple[int, ...], seconds: float, parts: tuple[str, ...] = PARTS
) -> tuple[list[Rate], str]:
    """Time each part of the training set's input path for about this many seconds, after a warm-up.

    Also returns a sentence on the images that could not be read, which are not counted; as in training, more than
    max_bad_samples of them are a DataError.
    """
    if seconds <= 0 or any(count < 1 for count in threads):
        raise ConfigError(f"{seconds:g} seconds with {threads} threads.", rule="Both must be above 0.")
    data = replace(data, decode_once="off")  # what is measured is decoding
    dataset = open_dataset(data, seed)
    source = dataset.train
    order = epoch_order(seed, 0, len(source), data.shuffle)
    rates = []
    for count in threads:
        for part, work in _parts(source, dataset.bad).items():
            if part in parts:
                rates.append(_timed(part, work, order, count, seconds))
        if "block" in parts:
            options = replace(feed_options(data, dataset.info, seed, 1), num_threads=count)
            with closing(BlockReader(source, options, train=True)) as reader:
                rates.append(_timed_blocks(reader, order, count, seconds))
    return rates, dataset.bad.describe() if dataset.bad else ""


def _parts(source: Source, bad: BadSamples | None) -> dict[str, Callable[[int], int]]:
    """Return the parts to time, functions of a sample that return bytes; only sources that decode have parts."""
    samples = source.samples
    if samples is None:
        return {}

    def read(sample: int) -> int:
        return samples.content(sample).num_bytes

    def whole(sample: int) -> int:
        image = samples.content(sample).image
        return (image if isinstance(image, np.ndarray) else decode(image, read_header(image))).nbytes

    def view(sample: int) -> int:
        return source.read(np.array([sample]), 0).nbytes

    def counted(work: Callable[[int], int]) -> Callable[[int], int]:
        """Return the work, for which a bad sample is nothing but counted."""

        def run(sample: int) -> int:
            try:
                return work(sample)
            except BadImage as error:
                if bad is None:
                    raise
                bad.add("train", sample, samples.name(sample), str(error))
                return 0

        return run

    return {"read": counted(read), "decode": counted(whole), "view": view}


def _timed(part: str, work: Callable[[int], int], order: np.ndarray, threads: int, seconds: float) -> Rate:
    """Let the threads take samples in turn until the time is up."""
    samples = order.tolist()
    for sample in samples[: 4 * threads]:
        work(sample)
    begin, spent = time.perf_counter(), time.process_time()
    stop = begin + seconds

    def run(number: int) -> tuple[int, int]:
        done = total = taken = 0
        while time.perf_counter() < stop:
            num_bytes = work(samples[(number + taken * threads) % len(samples)])
            total, done, taken = total + num_bytes, done + (num_bytes > 0), taken + 1
        return done, total

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(run, range(threads)))
    elapsed, spent = time.perf_counter() - begin, time.process_time() - spent
    return Rate(
        part=part,
        threads=threads,
        elements_processed=sum(done for done, _ in results),
        total_bytes_processed=sum(total for _, total in results),
        time_elapsed=elapsed,
        processor_seconds=spent,
    )


def _timed_blocks(reader: BlockReader, order: np.ndarray, threads: int, seconds: float) -> Rate:
    """Read blocks in sequence, as a feed does."""
    size = max(64, 16 * threads)  # smaller than a real block; threads wait for each other at its end
    done = total = epoch = 0
    reader.read(np.resize(order, size), 0)
    begin, spent = time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - begin) < seconds:
        index = np.take(order, np.arange(done, done + size), mode="wrap")
        total += reader.read(index, epoch)["images"].nbytes
        done += size
        epoch = done // len(order)
    return Rate(
        part="block",
        threads=threads,
        elements_processed=done,
        total_bytes_processed=total,
        time_elapsed=elapsed,
        processor_seconds=time.process_time() - spent,
    )

"""The images of an evaluation: the same in every one, so they are prepared once and kept where they fit.

Blocks that fit nowhere are read again for each evaluation, the first of them before the evaluation is due.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from headrace.config.schema import Validation
from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.core.units import format_bytes, parse_bytes
from headrace.data.dataset import DataInfo
from headrace.data.feeding.block_reader import BlockReader, FeedOptions
from headrace.data.feeding.cache import Put, Resident
from headrace.data.feeding.feed import SplitFeed, places, sent
from headrace.data.feeding.prefetch import FeedStats, Kept, Prefetcher, ReadingGate
from headrace.data.sets.source import Source

DEVICE, HOST, STREAMED = "device", "host", "streamed"
_BLOCK_BYTES = 256 << 20  # of the images in a block, unless the dataset is on the device
_BYTES_BESIDE_IMAGE = 12  # label, index and mask


@dataclass(frozen=True, kw_only=True)
class EvalCache:
    """How validation images are cut into blocks, and where the blocks are between two validations."""

    where: str  # device, host or streamed
    reason: str
    num_bytes: int  # of all images, as they are sent, labels included
    batches_per_block: int  # at most
    block_bytes: int
    host_bytes: int = 0  # that may be kept in the host's memory
    resident: bool = False  # the whole dataset is on the device

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        return {"where": self.where, "reason": self.reason, "bytes": self.num_bytes}


def plan_eval_cache(
    info: DataInfo, options: FeedOptions, wanted: Validation, batch_size: int, num_replicas: int, num_processes: int
) -> EvalCache:
    """Decide where validation images are kept. A device holds its replica's part, a host its process's."""
    num_batches = -(-info.num_validation // batch_size)
    per_image = info.num_values * (1 if options.eight_bit_transfer else 4) + _BYTES_BESIDE_IMAGE
    total = num_batches * batch_size * per_image
    asked = wanted.validation_cache
    if options.cache.where == "device":
        if asked not in ("auto", DEVICE):
            raise ConfigError(
                f"validation_cache is {asked}, but the whole dataset is kept on the device.",
                rule=f"Validation images are part of it: {options.cache.reason}.",
                remedy="Leave validation_cache out, or add --dataset-cache host.",
            )
        size = info.num_validation * (info.image_bytes + 4)
        return EvalCache(
            where=DEVICE,
            reason="with the training images",
            num_bytes=size,
            batches_per_block=num_batches,
            block_bytes=size,
            resident=True,
        )
    batches = max(1, min(num_batches, _BLOCK_BYTES // (batch_size * info.image_bytes)))
    on_device, on_host = parse_bytes(wanted.validation_device_budget), parse_bytes(wanted.validation_host_budget)
    # Divided, unlike a resident training set: an evaluation shards its batches over the replicas, in the same way
    # every time.
    a_device, a_host = -(-total // num_replicas), -(-total // num_processes)
    device_text, host_text = (f"budget of {format_bytes(budget)}" for budget in (on_device, on_host))
    where, host_bytes = STREAMED, 0
    if asked == "none":
        reason = "--validation-cache none"
    elif asked == "auto" and info.synthetic_on:
        reason = "generated images measure the transfer"
    elif asked == DEVICE or (asked == "auto" and a_device <= on_device):
        each = f"{format_bytes(a_device)} each, " if num_replicas > 1 else ""
        where, why = DEVICE, f"--validation-cache {DEVICE}" if asked == DEVICE else f"within the {device_text}"
        reason = each + why
    elif asked == HOST:
        where, host_bytes, reason = HOST, a_host, f"--validation-cache {HOST}"
    elif not info.place:  # a second copy in memory would save nothing
        reason = f"beyond the device's {device_text}; the dataset is in host memory as it is"
    elif a_host <= on_host:
        where, host_bytes, reason = HOST, a_host, f"within the host's {host_text}"
    else:
        host_bytes = on_host
        reason = f"beyond the host's {host_text}, which keeps what it can"
    return EvalCache(
        where=where,
        reason=reason,
        num_bytes=total,
        batches_per_block=batches,
        block_bytes=batches * batch_size * per_image,
        host_bytes=host_bytes,
    )


class EvalFeed(SplitFeed):
    """The blocks of an evaluation: every sample exactly once, in order, padded with samples of mask 0.

    Iterating starts anew each time; all blocks have one shape, [batches_per_block, batch_size]. With a cache, blocks
    are kept from one iteration to the next, on the devices or in host memory.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        max_batches_per_block: int,
        options: FeedOptions,
        put: Put,
        cache: EvalCache | None = None,
    ) -> None:
        self._put, self._num_samples = put, len(source)
        self._columns = options.shard.columns(batch_size)
        num_batches = -(-len(source) // batch_size)
        self.num_blocks = -(-num_batches // max_batches_per_block)
        # Blocks of nearly equal size: least padding.
        self._shape = (-(-num_batches // self.num_blocks), batch_size)
        self.gate = ReadingGate()  # held while other images are more urgent
        resident, described = options.cache.where == DEVICE, options.only_described
        self._resident = Resident(source, put, options.shard, only_described=described) if resident else None
        self._reader = BlockReader(source, options, train=False, gate=self.gate) if self._resident is None else None
        self._source, self._eight_bit = source, options.eight_bit_transfer
        on_device = cache is not None and cache.where == DEVICE
        in_host = self._blocks_in(cache.host_bytes) if cache and not on_device else 0
        self._prefetcher = Prefetcher(
            self._make,
            options.prefetch_depth,
            FeedStats(),
            self._send,
            num_blocks=self.num_blocks,
            kept=Kept(in_host, on_device),
            apart=self._reader is not None,
        )
        self._ahead = False  # whether blocks are prepared before the next iteration begins

    @property
    def stats(self) -> FeedStats:
        """What the latest iteration cost."""
        return self._prefetcher.stats

    def prefetch(self) -> None:
        """Prepare blocks from now on between iterations too, except while the gate is held."""
        self._ahead = True
        self._prefetcher.prefetch()

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        self._prefetcher.stats = FeedStats()
        self.gate.hurry(True)
        try:
            for number in range(self.num_blocks):
                yield self._prefetcher.take(number)
        finally:
            self.gate.hurry(False)
        if self._ahead:
            self._prefetcher.prefetch()

    def described(self) -> tuple[PyTree, PyTree]:
        """Return the resident set and a block without values: shapes and devices, to compile with."""
        return self._resident and self._resident.described(), self._put(self._shapes(), "batches")

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads; wait for what is being read, or do not."""
        self.gate.hurry(True)
        super().close(wait=wait)
        self._prefetcher.close(wait=wait)

    def _blocks_in(self, num_bytes: int) -> int:
        """Return how many blocks of this process fit host memory of that size."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in self._shapes().values())
        mine = size * len(range(self._shape[1])[self._columns]) // self._shape[1]
        return min(self.num_blocks, num_bytes // mine)

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a block of all processes together."""
        kinds = {"index": ((), np.int32), "mask": ((), np.float32)}
        if self._reader is not None:
            dtype = np.uint8 if self._eight_bit else np.float32
            kinds |= {
                "images": (self._source.image_hwc, dtype),
                "labels": (self._source.label_shape, self._source.labels.dtype),
            }
        return {name: jax.ShapeDtypeStruct((*self._shape, *dims), dtype) for name, (dims, dtype) in kinds.items()}

    def _make(self, number: int) -> dict[str, np.ndarray]:
        place = places(self._shape, number, self._columns)
        counted = place < self._num_samples
        # Padding reads sample 0, which is certain to exist; its mask is 0.
        index = np.where(counted, place, 0).astype(np.int32)
        block = {"index": index, "mask": counted.astype(np.float32)}
        return block | (self._reader.read(index, 0) if self._reader is not None else {})

    def _send(self, block: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return sent(block, lambda: self._put(block, "batches"), self.stats)

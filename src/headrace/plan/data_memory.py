"""What the data set takes of a device's memory, resident or sent in blocks, by the part that the device has."""

from dataclasses import dataclass

from headrace.config.schema import Config
from headrace.core.units import format_bytes
from headrace.data.blocks import FeedOptions
from headrace.data.dataset import DataInfo
from headrace.data.made_up import distinct_images
from headrace.plan.batch import BatchPlan
from headrace.plan.memory import MemoryRow

LABEL_BYTES = 4
LABEL_AND_INDEX_BYTES = 8  # int32 each, beside the pixels of an image that is sent


@dataclass(frozen=True, kw_only=True)
class DataMemory:
    """The data row of a device that takes images, of one that takes labels alone, and of one between the two."""

    images: MemoryRow
    labels: MemoryRow
    neither: MemoryRow

    def row_of(self, *, first: bool, last: bool) -> MemoryRow:
        """Return the row of a device that has the first stage, the last one, or neither of them."""
        return self.images if first else self.labels if last else self.neither


@dataclass(frozen=True, kw_only=True)
class SentData:
    """A set that is sent block by block: one block in use, others ahead, all within the data set's device budget."""

    images_per_step: int  # of one device
    image_bytes: int
    num_blocks: int

    @property
    def bytes_per_step(self) -> int:
        """Return what a step takes in all blocks together."""
        return self.num_blocks * self.images_per_step * (self.image_bytes + LABEL_AND_INDEX_BYTES)

    def memory(self, steps_per_call: int) -> DataMemory:
        """Return the rows for calls of so many steps."""

        def row(image_bytes: int) -> MemoryRow:
            block = self.images_per_step * (image_bytes + LABEL_AND_INDEX_BYTES) * steps_per_call
            return MemoryRow(
                name="data",
                num_bytes=block * self.num_blocks,
                detail=f"{self.num_blocks} blocks of {steps_per_call:,} steps, {format_bytes(block)} each",
            )

        return DataMemory(images=row(self.image_bytes), labels=row(0), neither=no_data())


def sent_data(feed: FeedOptions, info: DataInfo, batch: BatchPlan) -> SentData:
    """Return how a set is sent to the devices of a batch."""
    return SentData(
        images_per_step=batch.micro_batch_size * batch.gradient_accumulation_count,
        image_bytes=info.num_train_values * (1 if feed.eight_bit_transfer else 4),
        num_blocks=1 + feed.prefetch_depth,
    )


def resident_data(config: Config, info: DataInfo, budget: int) -> DataMemory:
    """Return the rows of a set that is kept on the devices as it is; each validates and so has that part."""
    counts = [info.num_train, info.num_validation]
    if info.made_up:
        counts = [distinct_images(count, info.image_bytes, budget) for count in counts]
    train, validation = counts[0], counts[1] * config.validation.validation
    bits = 8 * info.image_bytes // info.num_values

    def row(num_images: int, num_labels: int = 0, sent: int = 0) -> MemoryRow:
        larger = sent * (info.train_image_bytes - info.image_bytes)
        num_bytes = num_images * (info.image_bytes + LABEL_BYTES) + larger + num_labels * LABEL_BYTES
        labels = f", and {num_labels:,} labels" if num_labels else ""
        return MemoryRow(name="data", num_bytes=num_bytes, detail=f"{num_images:,} images of {bits} bits{labels}")

    return DataMemory(
        images=row(train + validation, sent=train), labels=row(validation, train), neither=row(validation)
    )


def no_data() -> MemoryRow:
    """Return the row of a device that the set does not reach."""
    return MemoryRow(name="data", num_bytes=0, detail="goes to the first and the last stage alone")

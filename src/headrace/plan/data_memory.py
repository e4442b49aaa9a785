"""Memory of the dataset, kept on the devices or sent in blocks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from headrace.config.schema import Config
from headrace.core.units import format_bytes
from headrace.data.dataset import DataInfo
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.eval_feed import DEVICE, EvalCache
from headrace.data.sets.synthetic import distinct_images
from headrace.plan.batch import BatchPlan, ValidationPlan
from headrace.plan.memory import MemoryPlan, MemoryRow

LABEL_BYTES = 4
LABEL_AND_INDEX_BYTES = 8  # two int32 sent with every image


@dataclass(frozen=True, kw_only=True)
class DataMemory:
    """The data row of a device that receives images, only labels, or neither."""

    images: MemoryRow
    labels: MemoryRow
    neither: MemoryRow

    def row_of(self, *, first: bool, last: bool) -> MemoryRow:
        """Return the row of a device that runs the first stage, the last one, or neither."""
        return self.images if first else self.labels if last else self.neither


@dataclass(frozen=True, kw_only=True)
class SentData:
    """A dataset sent block by block: one block in use and the prefetched ones, all within the device budget."""

    images_per_step: int  # of one device
    image_bytes: int
    num_blocks: int

    @property
    def bytes_per_step(self) -> int:
        """Return the bytes that one step takes in all blocks together."""
        return self.num_blocks * self.images_per_step * (self.image_bytes + LABEL_AND_INDEX_BYTES)

    def memory(self, steps_per_call: int) -> DataMemory:
        """Return the rows for calls of that many steps."""

        def row(image_bytes: int) -> MemoryRow:
            block = self.images_per_step * (image_bytes + LABEL_AND_INDEX_BYTES) * steps_per_call
            return MemoryRow(
                name="data",
                num_bytes=block * self.num_blocks,
                detail=f"{self.num_blocks} blocks of {steps_per_call:,} steps, {format_bytes(block)} each",
            )

        nothing = MemoryRow(name="data", num_bytes=0, detail="only the first and the last stage receive data")
        return DataMemory(images=row(self.image_bytes), labels=row(0), neither=nothing)


def sent_data(feed: FeedOptions, info: DataInfo, batch: BatchPlan) -> SentData:
    """Return what is sent to each device for a batch."""
    return SentData(
        images_per_step=batch.micro_batch_size * batch.gradient_accumulation_count,
        image_bytes=info.num_train_values * (1 if feed.eight_bit_transfer else 4),
        num_blocks=1 + feed.prefetch_depth,
    )


def resident_data(config: Config, info: DataInfo, budget: int) -> DataMemory:
    """Return the rows of a dataset kept on the devices, with the validation set where it is evaluated."""
    counts = [info.num_train, info.num_validation]
    if info.synthetic_on:
        counts = [distinct_images(count, info.image_bytes, budget) for count in counts]
    train, validation = counts[0], counts[1] * config.validation.validation
    bits = 8 * info.image_bytes // info.num_values

    def row(num_images: int, num_labels: int = 0, sent: int = 0) -> MemoryRow:
        larger = sent * (info.train_image_bytes - info.image_bytes)
        num_bytes = num_images * (info.image_bytes + LABEL_BYTES) + larger + num_labels * LABEL_BYTES
        labels = f", and {num_labels:,} labels" if num_labels else ""
        return MemoryRow(name="data", num_bytes=num_bytes, detail=f"{num_images:,} images of {bits} bits{labels}")

    # Through stages, images enter at the first one alone; otherwise every device evaluates the whole network.
    everywhere = 0 if config.validation.pipeline_validation_model else validation
    return DataMemory(
        images=row(train + validation, sent=train),
        labels=row(everywhere, train + validation - everywhere),
        neither=row(everywhere),
    )


def with_validation(
    by_device: Sequence[MemoryPlan],
    holders: Collection[int],
    cache: EvalCache,
    validation: ValidationPlan,
    prefetch_depth: int,
) -> tuple[MemoryPlan, ...]:
    """Return the estimates with the validation images that these devices of a replica hold."""
    if cache.where == DEVICE:
        num_bytes, detail = cache.num_bytes, f"{validation.num_samples:,} validation images, kept"
    else:
        num_bytes = min((1 + prefetch_depth) * cache.block_bytes, cache.num_bytes)
        detail = f"at most {1 + prefetch_depth} blocks of validation images"
    # Divided: an evaluation cuts its batches over the replicas, each of which has a resident training set as a whole.
    row = MemoryRow(name="validation data", num_bytes=-(-num_bytes // validation.num_replicas), detail=detail)
    return tuple(
        replace(plan, rows=(*plan.rows, row)) if device in holders else plan for device, plan in enumerate(by_device)
    )

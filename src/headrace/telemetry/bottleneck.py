"""The verdict on what limited a run: computing on the device, or preparing its input on the host."""

from dataclasses import dataclass, field

from headrace.core.units import format_duration
from headrace.engine.devices import CompileCounts

# Shares of the time that the device waited: below the first nothing worth changing is lost, above the second a lot.
_COMPUTE, _MIXED = 0.02, 0.10

_SHORT = 1.0  # seconds: in less, the first checkpoint alone is a large share


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured over a run's calls, the first one excluded."""

    images: int
    seconds: float
    wait_seconds: float  # of `seconds`: the device had no block
    read_seconds: float  # the host took to prepare that many images in its memory
    send_seconds: float = 0.0  # beside reading: until the devices had the bytes
    bytes_per_image: float = 0.0
    threads: int = 1
    cached: bool = False  # the dataset is on the device
    decodes: bool = False  # the host decodes image files
    validate_seconds: float = 0.0  # beside `seconds`: the device evaluated
    validation_wait_seconds: float = 0.0  # and it waited for validation images
    save_seconds: float = 0.0  # and it waited for a checkpoint
    start_seconds: float = 0.0  # before the first call
    first_wait_seconds: float = 0.0  # before the first call, with programs compiled: for its images, or the whole set
    compile_seconds: float = 0.0
    programs: CompileCounts = field(default_factory=CompileCounts)  # found in the cache, and compiled
    num_validation_batches: int = 2  # of each validation
    rest_seconds: float = 0.0  # nothing of all this
    wall_seconds: float = 0.0  # of the whole run
    link: str = ""  # the store that images came from
    link_bytes_per_second: float = 0.0  # while anything was on its way
    link_waited_seconds: float = 0.0  # of all reading threads, for images to arrive

    @property
    def link_is_the_limit(self) -> bool:
        """Whether reading was waiting for the store, for the most part."""
        reading = self.threads * (self.read_seconds + self.first_wait_seconds)
        return bool(self.link) and self.link_waited_seconds > 0.5 * reading


def verdict(run: Measured) -> str:
    """Return a sentence on what limited the run and, where the device waited a lot, which options would help.

    The longest kind of waiting is named first, then what else took longer than that.
    """
    said = _bound(run)
    if run.images <= 0 or run.seconds <= 0:
        return said
    # What is worth naming must be larger than the waiting that is already named.
    waited = max(run.wait_seconds, run.validation_wait_seconds, run.save_seconds)
    parts = {part: seconds for part, seconds in _other_parts(run).items() if seconds > waited}
    wall = run.wall_seconds
    largest = max(parts, key=lambda part: parts[part], default="")
    if not largest or parts[largest] < _MIXED * wall:
        return said
    share = f"{100 * parts[largest] / wall:.0f} % of the {format_duration(wall)}"
    advice = _CHANGED_BY[largest] or _compiling_advice(run.programs)
    if largest == "validation" and run.num_validation_batches > 1:
        advice += " or in larger batches (--validation-micro-batch-size)"
    if run.link_is_the_limit and largest == "reading the first images":
        return f"{said}; {largest} took {share}: {_link_advice(run)}"
    if run.decodes and largest in _HELPED_BY_PACKING:
        advice = f"pack the images (headrace data pack), or {advice}"
    return f"{said}; {largest} took {share}: {advice}"


# What else takes time beside training, and what changes it.
_CHANGED_BY = {
    "starting": "train longer in one run",
    "reading the first images": "train longer in one run",
    "compiling": "",  # it depends on the cache
    "validation": "validate less often (--validations-per-epoch)",
    "the host between calls": "make calls longer (--call-seconds, a lower --logs-per-epoch)",
}
_HELPED_BY_PACKING = ("starting", "reading the first images")  # where there are image files


def _compiling_advice(programs: CompileCounts) -> str:
    if not programs.hits + programs.misses:
        return "keep the compiled programs for the next run (--compilation-cache-dir)"
    if programs.misses:
        return "the next run of this network and batch finds its programs in the cache"
    return "the programs came from the cache, and only a longer run makes tracing and loading them a smaller part"


def _other_parts(run: Measured) -> dict[str, float]:
    before = (run.start_seconds, run.first_wait_seconds, run.compile_seconds)
    return dict(zip(_CHANGED_BY, (*before, run.validate_seconds, run.rest_seconds), strict=True))


def _bound(run: Measured) -> str:
    """Say whether the device computed or what it waited for."""
    if run.images <= 0 or run.seconds <= 0:
        return "no verdict: no call after the first one was timed"
    waited_seconds = min(max(run.wait_seconds, 0.0), run.seconds)
    # Without start and compilation, which do not grow with the run.
    total = run.seconds + run.validate_seconds + run.validation_wait_seconds + run.save_seconds
    waits = {"input": waited_seconds, "validation": run.validation_wait_seconds, "saving": run.save_seconds}
    bound = max(waits, key=lambda kind: waits[kind])
    share = sum(waits.values()) / total
    # A set that was decoded before the first call made the device wait, and the split of the wall time shows it.
    time = "the time after the first images" if run.first_wait_seconds > _COMPUTE * run.wall_seconds else "the time"
    # Below 2 % nothing is worth changing, and advice would only distract.
    if share < _COMPUTE:
        where = "the dataset is on the device, which" if run.cached else "the device"
        return f"compute-bound: {where} waited {100 * share:.1f} % of {time}"
    if total < _SHORT:
        return f"no verdict: {format_duration(total)} after the first call are too short to tell what limited the run"
    # The time is named: that of the whole run, which is printed above, has the start and the first call in it.
    waited = f"{100 * waits[bound] / total:.1f} % of the {format_duration(total)} after the first call"
    rates = _rates(run, run.seconds - waited_seconds)
    if bound == "input":
        if share < _MIXED:
            return f"mostly compute-bound: the device waited {waited}; {rates}"
        return f"input-bound: {rates} and waited {waited}; {_advice(run)}"
    what, advice = {
        "validation": (
            "validation images",
            "keep them (--validation-cache host, or a larger --validation-host-budget), validate less often (a lower "
            f"--validations-per-epoch) or use more --pipeline-num-parallel (now {run.threads})",
        ),
        "saving": (
            "checkpoints",
            "save less often (no --ckpts-per-epoch, or a lower one) or to a faster disk (--checkpoint-dir)",
        ),
    }[bound]
    if share < _MIXED:
        return f"mostly compute-bound: the device waited {waited} for {what}"
    return f"{bound}-bound: the device waited {waited} for {what}; {advice}"


def _rates(run: Measured, busy_seconds: float) -> str:
    host = "the host is idle"
    slower = max(run.read_seconds, run.send_seconds)  # they overlap
    if slower > 0:
        host = f"the host prepares {run.images / slower:,.0f} img/s"
    if run.send_seconds > 0 and run.read_seconds > 0 and run.bytes_per_image > 0:
        bandwidth = run.images * run.bytes_per_image / run.send_seconds / 1e9
        verb = "decodes" if run.decodes else "reads"
        read, sent = run.images / run.read_seconds, run.images / run.send_seconds
        host += f" ({verb} {read:,.0f}, sends {sent:,.0f} at {bandwidth:.2g} GB/s)"
    device = f"{run.images / busy_seconds:,.0f}" if busy_seconds > 0 else "any number of"
    return f"{host}, the device takes {device} img/s"


def _link_advice(run: Measured) -> str:
    rate = run.link_bytes_per_second
    delivered = f"{rate / 1e6:,.1f} MB/s" if rate >= 1e6 else f"{rate / 1e3:,.1f} kB/s"
    return (
        f"the link is the limit: {run.link} delivered {delivered}; what the disk keeps "
        "(--dataset-disk-budget) is not fetched again, and packed images (headrace data pack) are fewer bytes"
    )


def _advice(run: Measured) -> str:
    if run.cached:
        return "the set is already on the device: make calls longer (a lower --logs-per-epoch)"
    if run.link_is_the_limit:
        return _link_advice(run)
    # Sending dominates: more threads or packed files would not help.
    if run.send_seconds > run.read_seconds:
        return "sending is the limit: leave --eight-bit-transfer on, or use --dataset-cache device"
    if run.decodes:
        return (
            "pack the images (headrace data pack), keep them decoded (--dataset-cache decoded), "
            f"or use more --pipeline-num-parallel (now {run.threads})"
        )
    return f"use --dataset-cache device or more --pipeline-num-parallel (now {run.threads})"

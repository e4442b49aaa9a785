"""Read the trace that JAX's profiler wrote, and sum up where the time of the devices went.

On GPUs and TPUs a device is a plane of the trace, whose lines hold kernels; on CPUs the host's plane has them, by
thread. At each moment one kernel is charged: where several overlap, the one that started last, and computation before
exchanges and transfers, so that kinds and blocks and idle time add up to the whole.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.core.errors import DataError
from headrace.engine.hlo_text import (
    COLLECTIVE,
    CONVOLUTION,
    COPY,
    ELEMENTWISE,
    IDLE,
    KINDS,
    OTHER,
    PRODUCT,
    TRANSFER,
    HloProgram,
    kernel_name,
)

REST = "rest"  # what no named scope accounts for
_NUM_KERNELS = 10
NUM_BLOCKS = 14  # of the blocks in a text; a page has all of them
_NS = 1e-9


@dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """One run of a kernel on a device, or a transfer; times are in seconds."""

    kernel: str
    op: str  # the HLO instruction that it belongs to, '' if unknown
    module: str
    op_name: str  # where in the Python program it comes from, '' if the trace does not say
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class OpFacts:
    """What is known of the instruction of an event."""

    kind: str
    block: str = ""
    backward: bool = False
    num_bytes: int = 0
    target: str = ""  # what a call calls
    container: bool = False  # a loop or branch, whose time is that of what it contains
    by_name: bool = False  # only the kernel's name is known


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of an instruction, over all its runs on one device."""

    name: str
    op: str
    kind: str
    block: str
    backward: bool
    seconds: float  # charged to it
    count: int
    bytes_per_second: float  # over all the time in which it ran, also beside others

    @property
    def place(self) -> str:
        """The block that it computes, and in which pass."""
        return f"{self.block}{', backward' if self.backward else ''}"


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """The seconds of a block on one device."""

    name: str
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Both passes together."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What ran while the trace was recorded, and what the device can do at most."""

    model: str
    device: str
    num_devices: int
    num_steps: int
    num_images: int  # of all devices
    flops_per_image: int  # of a step: forward and backward pass
    peak_flops: float = 0.0  # per second of one device, measured by a large product; 0 if unknown
    published_flops: float = 0.0
    peak_bytes: float = 0.0  # per second, measured by adding to a large array


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """Where the time of a device went (the mean over devices), in seconds."""

    workload: Workload
    seconds: float
    kinds: dict[str, float]
    blocks: tuple[BlockTime, ...]
    kernels: tuple[Kernel, ...]
    num_bytes: float  # that one device moved at least

    @property
    def flops_per_second(self) -> float:
        """The model's FLOPs of one device."""
        work = self.workload
        return work.flops_per_image * work.num_images / work.num_devices / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """What one device read and wrote at least."""
        return self.num_bytes / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def summary_from(values: Mapping[str, Any]) -> ProfileSummary:
    """Return the summary that `to_dict` described; what does not fit is a TypeError or KeyError."""
    return ProfileSummary(
        workload=Workload(**values["workload"]),
        seconds=float(values["seconds"]),
        kinds={str(kind): float(seconds) for kind, seconds in values["kinds"].items()},
        blocks=tuple(BlockTime(**each) for each in values["blocks"]),
        kernels=tuple(Kernel(**each) for each in values["kernels"]),
        num_bytes=float(values["num_bytes"]),
    )


def read_trace(directory: Path) -> dict[str, list[TraceEvent]]:
    """Return the events of each device in the newest trace under a directory; DataError if there is none."""
    from jax.profiler import ProfileData

    files = sorted(directory.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise DataError(f"{directory} holds no trace.", rule="JAX's profiler writes one as *.xplane.pb.")
    planes = list(ProfileData.from_file(str(files[-1])).planes)
    devices: dict[str, list[TraceEvent]] = defaultdict(list)
    for plane in planes:
        if plane.name.startswith("/device:") and "CUSTOM" not in plane.name:
            for line in _kernel_lines(list(plane.lines)):
                devices[plane.name] += [_event(event) for event in line.events]
    if not any(devices.values()):
        for plane in planes:
            if plane.name == "/host:CPU":
                for line in plane.lines:
                    for event in line.events:
                        stats = dict(event.stats)
                        if "hlo_op" in stats:
                            devices[f"cpu:{stats.get('device_ordinal', 0)}"].append(_event(event))
    return {name: sorted(events, key=lambda event: event.start) for name, events in devices.items() if events}


def _kernel_lines(lines: list[Any]) -> list[Any]:
    """Return the lines that hold kernels: streams of a GPU, operations of a TPU; others repeat them in groups."""
    return (
        [line for line in lines if line.name.startswith("Stream")]
        or [line for line in lines if line.name == "XLA Ops"]
        or lines
    )


def _event(event: Any) -> TraceEvent:
    stats = {key: value for key, value in event.stats if key in ("hlo_op", "hlo_module", "tf_op", "name")}
    start = event.start_ns * _NS
    return TraceEvent(
        kernel=event.name,
        op=str(stats.get("hlo_op", "")),
        module=str(stats.get("hlo_module", "")),
        op_name=str(stats.get("name") or stats.get("tf_op", "")),
        start=start,
        end=start + event.duration_ns * _NS,
    )


def name_instructions(events: Sequence[TraceEvent], programs: Sequence[HloProgram]) -> list[TraceEvent]:
    """Return the events, those of CUDA graphs with their instruction.

    In a graph an event has the name of its kernel and the graph's number. Equal fusions share a kernel; each step runs
    them in the order of the schedule, so that the events in their order are theirs in turn.
    """
    known = {name for program in programs for name in program.instructions}
    by_kernel = {kernel: (program.name, names) for program in programs for kernel, names in program.by_kernel.items()}
    alone = {event.op for event in events if event.op in known}
    places: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        if event.op not in known and event.kernel in by_kernel:
            places[by_kernel[event.kernel]].append(place)
    named = list(events)
    for (module, names), found in places.items():
        in_turn = [name for name in names if name not in alone]
        if not in_turn or len(found) % len(in_turn):  # some ran elsewhere: only the kernel's name is certain
            in_turn = [name for name in names if kernel_name(name) == events[found[0]].kernel]
        for number, place in enumerate(found):
            op = in_turn[number % len(in_turn)]
            named[place] = replace(events[place], op=op, module=module, op_name="")
    return named


def exclusive_seconds(spans: Sequence[tuple[float, float, bool]]) -> list[float]:
    """Return the seconds charged to each (start, end, is computation); spans are sorted by their start.

    Of those that overlap, computation wins, then the one that started last.
    """
    charged = [0.0] * len(spans)
    active: list[tuple[bool, int, float]] = []  # a heap: (not computation, -number, end)
    now, following = 0.0, 0
    while active or following < len(spans):
        if not active:
            now = spans[following][0]
        while following < len(spans) and spans[following][0] <= now:
            _, end, computes = spans[following]
            heapq.heappush(active, (not computes, -following, end))
            following += 1
        while active and active[0][2] <= now:
            heapq.heappop(active)
        if not active:
            continue
        until = active[0][2]
        if following < len(spans):
            until = min(until, spans[following][0])
        charged[-active[0][1]] += until - now
        now = until
    return charged


def summarise(
    devices: Mapping[str, Sequence[TraceEvent]], facts: Callable[[TraceEvent], OpFacts], workload: Workload
) -> ProfileSummary:
    """Return where the time went, the mean over devices."""
    share = 1 / len(devices)
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    blocks: dict[tuple[str, bool], float] = defaultdict(float)
    # By kernel, instruction and program: those of several stages may have the same names.
    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    running: dict[tuple[str, str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)  # on each device
    about: dict[tuple[str, str, str], OpFacts] = {}
    window, moved = 0.0, 0.0
    for device, events in devices.items():
        known = [(event, facts(event)) for event in events]
        work = [(event, fact) for event, fact in known if not fact.container and event.end > event.start]
        if not work:
            continue
        whole = max(event.end for event, _ in work) - work[0][0].start
        charged = exclusive_seconds(
            [(event.start, event.end, fact.kind not in (COLLECTIVE, TRANSFER)) for event, fact in work]
        )
        kernels_of = _kernels_by_op(event for event, _ in work)
        places = _places([fact for _, fact in work])
        until: dict[tuple[str, str, str], float] = {}  # the end of a kernel's runs so far, of which some may overlap
        for (event, fact), place, spent in zip(work, places, charged, strict=True):
            key = (event.kernel, event.op, event.module)
            kinds[fact.kind] += spent * share
            blocks[place.block or REST, place.backward] += spent * share
            seconds[key] += spent * share
            running[key] += max(event.end - max(event.start, until.get(key, 0.0)), 0.0) * share
            until[key] = max(event.end, until.get(key, 0.0))
            counts[key][device] += 1
            about[key] = fact
            moved += fact.num_bytes / kernels_of[event.op, event.module] * share
        kinds[IDLE] += max(whole - sum(charged), 0.0) * share
        window += whole * share
    names = dict.fromkeys(name for name, _ in blocks)
    return ProfileSummary(
        workload=workload,
        seconds=window,
        kinds={kind: spent for kind, spent in kinds.items() if spent},
        blocks=tuple(
            BlockTime(name=name, forward=blocks.get((name, False), 0.0), backward=blocks.get((name, True), 0.0))
            for name in names
        ),
        kernels=tuple(
            Kernel(
                name=f"{key[0]} {about[key].target}" if about[key].target and key[0] == key[1] else key[0],
                op=key[1],
                kind=about[key].kind,
                block=about[key].block or REST,
                backward=about[key].backward,
                seconds=spent,
                count=round(counts[key].total() / len(counts[key])),  # a stage's kernel runs on its devices alone
                bytes_per_second=about[key].num_bytes * counts[key].total() * share / running[key],
            )
            for key, spent in heapq.nlargest(_NUM_KERNELS, seconds.items(), key=lambda item: item[1])
        ),
        num_bytes=moved,
    )


def _places(facts: Sequence[OpFacts]) -> list[OpFacts]:
    """Return, for each event in their order, the facts that say in which block it is.

    A library's kernels in a CUDA graph have a name alone. Convolutions and products run before what else their block
    does with the result, and in the backward pass behind it: they are taken for the next block's or the last one's.
    """
    following: list[OpFacts | None] = [None] * len(facts)
    for number in range(len(facts) - 1, 0, -1):
        following[number - 1] = facts[number] if facts[number].block else following[number]
    found, before = [], None
    for fact, after in zip(facts, following, strict=True):
        place = fact
        if fact.by_name and not fact.block and fact.kind in (CONVOLUTION, PRODUCT):
            place = next((near for near in (before, after) if near is not None and near.backward), after) or fact
        found.append(place)
        before = fact if fact.block else before
    return found


def _kernels_by_op(events: Iterable[TraceEvent]) -> dict[tuple[str, str], int]:
    """Return how many different kernels each instruction launches: its bytes are moved by all of them together."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in events:
        found[event.op, event.module].add(event.kernel)
    return {op: len(kernels) for op, kernels in found.items()}


# What a kernel is by its name alone, where no program has an instruction for it; the first word that it contains.
_WORDS = {
    **dict.fromkeys(("h2d", "d2h", "p2p", "htod", "dtoh", "ptop"), TRANSFER),
    **dict.fromkeys(("memcpy", "memset"), COPY),
    "nccl": COLLECTIVE,
    **dict.fromkeys(("conv", "fprop", "dgrad", "wgrad", "depthwise"), CONVOLUTION),
    **dict.fromkeys(("gemm", "cublas", "nvjet"), PRODUCT),
    "fusion": ELEMENTWISE,
}


def kind_by_name(kernel: str) -> str:
    """Return the kind of an event that belongs to no instruction."""
    name = kernel.lower().replace(" ", "")
    return next((kind for word, kind in _WORDS.items() if word in name), OTHER)

"""The profile in a run's report: where the time of the devices went, by kind of work, block and kernel."""

from collections.abc import Iterable

from headrace.core.units import format_bytes, format_duration
from headrace.engine.hlo_text import IDLE, KINDS
from headrace.report.markup import Html, element, rows_table, section
from headrace.report.run_files import RunFiles
from headrace.telemetry.device_trace import ProfileSummary, summary_from
from headrace.telemetry.profile_text import utilisation_lines

_MOST_BLOCKS = 200


def draw_profile(files: RunFiles) -> Html:
    """Return the section of a run that was profiled."""
    if not files.profile:
        return Html("")
    found = summary_from(files.profile)
    work = found.workload
    about = (
        f"{work.num_steps:,} steps ({work.num_images:,} images) of {work.num_devices} x {work.device}, recorded after "
        "the first calls; of several devices, the mean. Where kernels overlap, the one that started last counts."
    )
    blocks = (
        element("h3", "By block"),
        rows_table(_block_rows(found), ("block", "forward ms", "backward ms", "share %"), numbers=(1, 2, 3)),
    )
    kernels = (
        element("h3", "Slowest kernels"),
        rows_table(
            _kernel_rows(found),
            ("kernel", "kind", "block", "ms", "share %", "times", "memory"),
            numbers=(3, 4, 5, 6),
        ),
    )
    return section(
        "profile",
        f"Where the devices' time went: {format_duration(found.seconds)} recorded",
        *_bar(found),
        element("pre", "\n".join(utilisation_lines(found))),
        element("div", element("div", *blocks), element("div", *kernels), class_="pair"),
        element("p", about, class_="note"),
    )


def _bar(found: ProfileSummary) -> list[Html]:
    rows = []
    for kind, seconds in found.kinds.items():
        color = KINDS.index(kind) % 6 if kind in KINDS else 3
        # The page has six colours for more kinds: those of a second round are faint.
        rows.append((kind, seconds, color, kind == IDLE or color != KINDS.index(kind)))
    return share_bar(rows, found.seconds)


def share_bar(rows: Iterable[tuple[str, float, int, bool]], whole: float) -> list[Html]:
    """Return a bar of (name, seconds, number of the colour, is it faint) and its legend, the longest first."""
    bars, parts = [], []
    for name, seconds, color, is_faint in sorted(rows, key=lambda row: -row[1]):
        look = f"{'opacity:.45;' * is_faint}background:var(--c{color})"
        text = f"{name} {format_duration(seconds)} ({seconds / whole:.1%})"
        if seconds > 0.0005 * whole:  # anything thinner would be less than a pixel of the bar
            bars.append(element("div", style=f"width:{100 * seconds / whole:.2f}%;{look}", title=text))
        parts.append(element("span", element("i", style=look), text))
    return [element("div", *bars, class_="bar"), element("div", *parts, class_="parts")]


def _block_rows(found: ProfileSummary) -> list[tuple[str, ...]]:
    return [
        (
            block.name,
            f"{1e3 * block.forward:.3f}",
            f"{1e3 * block.backward:.3f}",
            f"{100 * block.seconds / found.seconds:.2f}",
        )
        for block in sorted(found.blocks, key=lambda block: -block.seconds)[:_MOST_BLOCKS]
    ]


def _kernel_rows(found: ProfileSummary) -> list[tuple[str, ...]]:
    return [
        (
            kernel.name[:120],
            kernel.kind,
            kernel.place,
            f"{1e3 * kernel.seconds:.3f}",
            f"{100 * kernel.seconds / found.seconds:.2f}",
            f"{kernel.count:,}",
            f"{format_bytes(int(kernel.bytes_per_second))}/s" if kernel.bytes_per_second else "",
        )
        for kernel in found.kernels
    ]

"""The profile in a run's report: where the time of the devices went, by kind of work, block and kernel."""

from headrace.core.units import format_bytes, format_duration
from headrace.engine.hlo_text import IDLE, KINDS
from headrace.report.markup import Html, element, rows_table, section
from headrace.report.run_files import RunFiles
from headrace.telemetry.device_trace import ProfileSummary, summary_from, utilisation_lines

_MOST_ROWS = 200


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
    bars, parts = [], []
    for kind, seconds in sorted(found.kinds.items(), key=lambda item: -item[1]):
        color = KINDS.index(kind) % 6 if kind in KINDS else 3
        faint = "opacity:.4;" if kind == IDLE or color != KINDS.index(kind) else ""
        text = f"{kind} {format_duration(seconds)} ({seconds / found.seconds:.1%})"
        if seconds > 0.0005 * found.seconds:
            style = f"{faint}width:{100 * seconds / found.seconds:.2f}%;background:var(--c{color})"
            bars.append(element("div", style=style, title=text))
        parts.append(element("span", element("i", style=f"{faint}background:var(--c{color})"), text))
    return [element("div", *bars, class_="bar"), element("div", *parts, class_="parts")]


def _block_rows(found: ProfileSummary) -> list[tuple[str, ...]]:
    return [
        (
            block.name,
            f"{1e3 * block.forward:.3f}",
            f"{1e3 * block.backward:.3f}",
            f"{100 * block.seconds / found.seconds:.2f}",
        )
        for block in sorted(found.blocks, key=lambda block: -block.seconds)[:_MOST_ROWS]
    ]


def _kernel_rows(found: ProfileSummary) -> list[tuple[str, ...]]:
    return [
        (
            kernel.name[:120],
            kernel.kind,
            f"{kernel.block}{', backward' if kernel.backward else ''}",
            f"{1e3 * kernel.seconds:.3f}",
            f"{100 * kernel.seconds / found.seconds:.2f}",
            f"{kernel.count:,}",
            f"{format_bytes(int(kernel.bytes_per_second))}/s" if kernel.bytes_per_second else "",
        )
        for kernel in found.kernels
    ]

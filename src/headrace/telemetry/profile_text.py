"""A profile as lines for people."""

from headrace.core.units import format_bytes, format_duration
from headrace.telemetry.device_trace import NUM_BLOCKS, ProfileSummary


def profile_lines(found: ProfileSummary) -> list[str]:
    """Return the summary as lines of at most 80 columns."""
    work = found.workload
    lines = [
        f"{work.model} on {work.num_devices} x {work.device}: {work.num_steps:,} steps, {work.num_images:,} images in "
        f"{format_duration(found.seconds)}",
        "",
        "where the time went",
    ]
    for kind, spent in sorted(found.kinds.items(), key=lambda item: -item[1]):
        share = spent / found.seconds
        lines.append(f"  {kind:16}{share:7.1%}  {format_duration(spent):>9}  {'█' * round(40 * share)}")
    ranked = sorted(found.blocks, key=lambda block: -block.seconds)
    lines += ["", f"{'by block':30}{'forward':>10}{'backward':>11}{'share':>8}"]
    for block in ranked[:NUM_BLOCKS]:
        both = (format_duration(block.forward), format_duration(block.backward) if block.backward else "")
        lines.append(f"  {block.name[:28]:28}{both[0]:>10}{both[1]:>11}{block.seconds / found.seconds:8.1%}")
    if len(ranked) > NUM_BLOCKS:
        others = sum(block.seconds for block in ranked[NUM_BLOCKS:])
        lines.append(f"  {f'{len(ranked) - NUM_BLOCKS} others':49}{others / found.seconds:8.1%}")
    lines += ["", "slowest kernels"]
    for kernel in found.kernels:
        rate = f", {format_bytes(int(kernel.bytes_per_second))}/s" if kernel.bytes_per_second else ""
        lines.append(
            f"  {kernel.seconds / found.seconds:6.1%}  {kernel.kind}, {kernel.place}, {kernel.count:,} times{rate}"
        )
        lines.append(f"          {kernel.name[:68]}")
    return [*lines, "", *utilisation_lines(found)]


def utilisation_lines(found: ProfileSummary) -> list[str]:
    """Return how much of the device's arithmetic and memory bandwidth was used."""
    work, flops = found.workload, found.flops_per_second
    lines = [f"model FLOPs  {_flops(flops)}"]
    if work.peak_flops:
        share = flops / work.peak_flops
        lines[0] += f": {share:.1%} of the {_flops(work.peak_flops)} measured here"
        lines += [f"{'':13}(of a large product; Winograd convolutions multiply less)"] if share > 1 else []
    if work.published_flops:
        lines.append(f"{'':13}{flops / work.published_flops:.1%} of the {_flops(work.published_flops)} published")
    lines.append(f"memory       {format_bytes(int(found.bytes_per_second))}/s at least")
    if work.peak_bytes:
        share = found.bytes_per_second / work.peak_bytes
        lines[-1] += f": {share:.1%} of the {format_bytes(int(work.peak_bytes))}/s measured here"
        lines += [f"{'':13}(what stays in caches moves faster)"] if share > 1 else []
    return lines


def _flops(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= s), (1.0, ""))
    return f"{value / scale:.3g} {unit}FLOP/s"

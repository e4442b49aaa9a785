"""The same run on other numbers of devices: replicas and accumulation change, the global batch does not."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import ConfigError
from headrace.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """The batch arithmetic of the run on one number of devices."""

    num_devices: int
    num_replicas: int
    devices_per_replica: int
    micro_batch_size: int
    gradient_accumulation_count: int
    global_batch_size: int
    idle: float  # fraction of device time, if all stages take the same time

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return dict(vars(self))


def replicas_on(plan: Plan, num_devices: int) -> int:
    """Return how many replicas fill that many devices; a number they cannot fill raises ConfigError."""
    wide = plan.devices_per_replica
    if num_devices < 1 or num_devices % wide:
        below, above = num_devices // wide * wide, -(-max(num_devices, 1) // wide) * wide
        near = " or ".join(str(number) for number in (below, above) if number > 0)
        raise ConfigError(
            f"--num-devices {num_devices} with replicas of {wide} devices.",
            rule="A replica keeps its stages, so the number of devices must be a multiple of a replica's devices.",
            remedy=f"Give {near}, or other stages (--pipeline-splits, --device-mapping).",
        )
    return num_devices // wide


def device_counts(plan: Plan, num_devices: int) -> tuple[int, ...]:
    """Return the numbers of devices to list: from that of the plan to the requested one, by factors of two."""
    planned = plan.batch.num_replicas * plan.devices_per_replica
    low, high = sorted((planned, num_devices))
    counts = {low, high}
    while low * 2 < high:
        low *= 2
        counts.add(low)
    return tuple(sorted(counts))


def scale_row(plan: Plan) -> ScaleRow:
    batch, pipeline = plan.batch, plan.pipeline
    return ScaleRow(
        num_devices=batch.num_replicas * plan.devices_per_replica,
        num_replicas=batch.num_replicas,
        devices_per_replica=plan.devices_per_replica,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_count=batch.gradient_accumulation_count,
        global_batch_size=batch.global_batch_size,
        idle=pipeline.bubble if pipeline and not plan.one_program else 0.0,
    )


def format_scale(rows: Iterable[ScaleRow], num_devices: int) -> str:
    """Return the rows as a table, and the options for the row with that many devices."""
    lines = ["devices  replicas x devices  micro batch  accumulation  global batch   idle"]
    options, rows = "", tuple(rows)
    kept = {row.global_batch_size for row in rows}
    for row in rows:
        lines.append(
            f"{row.num_devices:>7,}  {f'{row.num_replicas:,} x {row.devices_per_replica}':>18}  "
            f"{row.micro_batch_size:>11,}  {row.gradient_accumulation_count:>12,}  {row.global_batch_size:>12,}  "
            f"{row.idle:>5.1%}"
        )
        if row.num_devices == num_devices:
            options = (
                f"--num-replicas {row.num_replicas} --gradient-accumulation-count {row.gradient_accumulation_count}"
            )
    if len(kept) > 1:
        lines.append("the global batch cannot be kept everywhere: accumulation is a whole number, at least 1")
    return "\n".join([*lines, f"on {num_devices} devices: {options}"])

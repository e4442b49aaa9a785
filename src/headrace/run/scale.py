"""The configuration of a run for another number of devices, and the rows in between, all with one global batch."""

from dataclasses import replace

from headrace.config.load import Resolved
from headrace.plan.plan import Plan
from headrace.plan.scale import ScaleRow, device_counts, replicas_on, scale_row
from headrace.reference.entrance import override
from headrace.run.design import design_run


def scaled(resolved: Resolved, num_devices: int) -> tuple[Resolved, tuple[ScaleRow, ...]]:
    """Return the configuration that fills so many devices with the same global batch, and a row for each step there."""
    own = design_run(resolved.config, absent_ok=True).plan
    replicas_on(own, num_devices)  # refuses what does not fill the devices
    found: dict[int, tuple[Resolved, Plan]] = {}
    for count in device_counts(own, num_devices):
        changed = _with_replicas(resolved, own, replicas_on(own, count))
        found[count] = changed, design_run(changed.config, absent_ok=True).plan
    return found[num_devices][0], tuple(scale_row(plan) for _, plan in found.values())


def _with_replicas(resolved: Resolved, own: Plan, num_replicas: int) -> Resolved:
    if num_replicas == own.batch.num_replicas:
        return resolved
    options = {"num_replicas": num_replicas, "global_batch_size": own.batch.global_batch_size}
    changed = override(resolved, options)
    return replace(changed, warnings=resolved.warnings, notes=resolved.notes)

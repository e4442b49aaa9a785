"""Measure the blocks of a run's network where it will run, and cut its stages by that."""

from dataclasses import replace

from headrace.config.field import Origin
from headrace.config.load import Resolved
from headrace.engine.devices import start_devices, use_compilation_cache
from headrace.engine.measure import measure_blocks
from headrace.run.design import OwnParts, design_run
from headrace.run.group import current_group


def with_measured_blocks(resolved: Resolved, own: OwnParts | None = None) -> Resolved:
    """Return the configuration with `block_seconds` filled in, if it asks to measure; else as it is.

    The times become part of the configuration, so that the run, its records and a later resume have the same stages.
    """
    config = resolved.config
    if not config.pipeline.measure_splits:
        return resolved
    # Made from shapes first: whatever cannot work is refused before a device is touched.
    group = current_group()
    design = design_run(config, own, group.num_processes)
    use_compilation_cache(config.run.compilation_cache_dir)
    device = start_devices(config.run.platform, design.plan.num_devices, group.num_processes)[0]

    def measure() -> dict[str, float]:
        micro, dtype = config.batch.micro_batch_size, design.precision.compute_dtype
        seconds = measure_blocks(design.network, micro, dtype, device)
        return {name: float(f"{value:.4g}") for name, value in seconds.items()}

    rounded = group.share(group.first(measure))  # one process measures: all must cut alike
    pipeline = replace(config.pipeline, block_seconds=rounded, measure_splits=False)
    origins = {**resolved.origins, "block_seconds": Origin(kind="measured", where=device.device_kind)}
    return replace(resolved, config=replace(config, pipeline=pipeline), origins=origins)

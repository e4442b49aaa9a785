"""Join the other processes of a job, before anything touches a device."""

import os
from dataclasses import replace

import jax

from headrace.core.find_place import find_place
from headrace.core.place import Place

HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 10, 5


def join_job(*, distributed: bool = False) -> Place | None:
    """Find this process's place in the environment and join the others; None where there are none."""
    place = find_place(os.environ, distributed=distributed)
    return None if place is None else join(place)


def join(place: Place) -> Place:
    """Meet the other processes; return the place, with what only JAX could know. A second time nothing happens."""
    if not place.is_alone and not jax.distributed.is_initialized():
        # XLA's own CPU collectives know one process only. On other platforms nobody reads this.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        known = place.num_processes > 0
        jax.distributed.initialize(
            coordinator_address=place.coordinator or None,
            num_processes=place.num_processes or None,
            process_id=place.process if known else None,
            cluster_detection_method="deactivate" if known else None,
            initialization_timeout=int(place.join_seconds),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    if not place.num_processes:
        place = replace(place, process=jax.process_index(), num_processes=jax.process_count())
    return place

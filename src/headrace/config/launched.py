"""What the way in which processes were started means for options: it has the last word on the number of replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config.field import Origin
from headrace.config.layers import Given, Layer
from headrace.core.find_place import find_place
from headrace.core.place import Place

LAUNCHER = "launcher"  # the kind of origin of what comes from here


def launcher_layer(layers: Sequence[Layer], environ: Mapping[str, str]) -> tuple[Layer, tuple[str, ...]]:
    """Return the layer over all others, and warnings about what it overrules. A process alone has an empty one."""
    distributed = _find(layers, "distributed")
    place = find_place(environ, distributed=bool(distributed and distributed.value))
    if place is None:
        return {}, ()
    written = _find(layers, "num_replicas")
    number = _replicas(place, written)
    if number is None:
        return {}, ()
    layer = {"num_replicas": Given(value=number, origin=Origin(kind=LAUNCHER, where=place.found_by))}
    if place.num_replicas is None or written is None or written.origin.kind == LAUNCHER or written.value == number:
        return layer, ()
    told = (
        f"num_replicas {written.value} ({written.origin}) is ignored: the launcher says {number} replicas, "
        f"{number // place.num_processes} in each of {place.num_processes} processes"
    )
    return layer, (told,)


def _replicas(place: Place, written: Given | None) -> int | None:
    """Return the replicas of the whole job, or None where what is written holds."""
    if place.num_replicas is not None:
        return place.num_replicas
    if written is None:
        return place.num_processes or None  # one in each process
    if place.replicas_per_process and written.origin.kind != LAUNCHER:
        return written.value * place.num_processes
    return None


def _find(layers: Sequence[Layer], name: str) -> Any:
    return next((layer[name] for layer in reversed(layers) if name in layer), None)

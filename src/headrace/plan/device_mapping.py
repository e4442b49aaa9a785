"""The devices of a pipeline's stages."""

from collections.abc import Sequence

from headrace.core.errors import ConfigError

# One entry per stage: a device, or one device for each function of a concurrent stage.
DeviceMapping = tuple[int | tuple[int, ...], ...]

RULE = "A mapping names one device for each stage, and uses every device from 0 to the highest."
MAX_BRANCHES = 26  # branches are printed as the letters a to z


def check_device_mapping(
    mapping: Sequence[int | Sequence[int]] | None, num_stages: int, branches: Sequence[int | None] | None = None
) -> DeviceMapping:
    """Return the mapping as tuples (stage i on device i if None); raise ConfigError if it does not fit the stages.

    `branches[s]` is the number of functions of stage s if it is concurrent, None if it is one function; without
    `branches`, every stage is one function.
    """
    branches = [None] * num_stages if branches is None else branches
    assert len(branches) == num_stages, (branches, num_stages)
    if mapping is None:
        return _in_order(branches)
    if len(mapping) != num_stages:
        example = " ".join(map(str, range(num_stages)))
        raise ConfigError(
            f"--device-mapping has {len(mapping)} entries, but there are {num_stages} stages.",
            rule=RULE,
            remedy=f"Give {num_stages} entries, such as {example}.",
        )
    checked = tuple(_entry(stage, entry, branches[stage]) for stage, entry in enumerate(mapping))
    _check_ids(checked)
    return checked


def devices_of(entry: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the devices of one stage's entry."""
    return entry if isinstance(entry, tuple) else (entry,)


def mapping_text(mapping: DeviceMapping) -> str:
    """Return a mapping as it is written on a command line."""
    return " ".join(str(list(entry)) if isinstance(entry, tuple) else str(entry) for entry in mapping)


def branches_of(mapping: Sequence[int | Sequence[int]]) -> tuple[int | None, ...]:
    """Return the number of functions that a mapping implies for each stage, None for a plain stage."""
    return tuple(len(entry) if isinstance(entry, Sequence) else None for entry in mapping)


def _in_order(branches: Sequence[int | None]) -> DeviceMapping:
    """Assign a separate device to every function."""
    entries, free = [], 0
    for count in branches:
        entries.append(free if count is None else tuple(range(free, free + count)))
        free += count or 1
    return tuple(entries)


def _entry(stage: int, entry: int | Sequence[int], num_branches: int | None) -> int | tuple[int, ...]:
    if isinstance(entry, int):
        if num_branches is not None:
            raise ConfigError(
                f"--device-mapping gives stage {stage} the device {entry}, but the stage has {num_branches} functions.",
                rule="A concurrent stage needs a list with one device for each of its functions.",
                remedy=f"Write [{', '.join([str(entry)] * num_branches)}], or other devices.",
            )
        return entry
    if num_branches is None or len(entry) != num_branches or not 1 <= num_branches <= MAX_BRANCHES:
        functions = "is a single function" if num_branches is None else f"has {num_branches} functions"
        raise ConfigError(
            f"--device-mapping gives stage {stage} {len(entry)} devices, but the stage {functions}.",
            rule=f"A list of devices belongs to a concurrent stage, one for each of its 1 to {MAX_BRANCHES} functions.",
            remedy="Give the stage one device." if num_branches is None else f"Give {num_branches} devices.",
        )
    for device in entry:
        if not isinstance(device, int):
            raise ConfigError(
                f"--device-mapping entry {entry!r} of stage {stage} holds {device!r}, which is not a device.",
                rule="Concurrent stages are one level deep.",
                remedy="Give a flat list of device numbers.",
            )
    return tuple(entry)


def _check_ids(mapping: DeviceMapping) -> None:
    used = sorted({device for entry in mapping for device in devices_of(entry)})
    if used == list(range(len(used))):
        return
    number = {device: rank for rank, device in enumerate(used)}
    moved = tuple(tuple(number[d] for d in entry) if isinstance(entry, tuple) else number[entry] for entry in mapping)
    fault = f"device {used[0]} cannot be" if used[0] < 0 else f"device {_first_gap(used)} has nothing to do"
    raise ConfigError(
        f"--device-mapping {mapping_text(mapping)}: {fault}.",
        rule=RULE,
        remedy=f"The same without gaps is {mapping_text(moved)}.",
    )


def _first_gap(used: list[int]) -> int:
    return next(device for device in range(len(used) + 1) if device not in used)

"""Compare values that must be equal in all processes of a job, before training starts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import ConfigError
from headrace.job.control import ProcessGroup

_MAX_REPORTED = 6


def check_consistency(group: ProcessGroup, facts: Mapping[str, object]) -> None:
    """Raise ConfigError in every process, naming what differs, unless all processes pass equal named values.

    Values that JSON does not know are compared by their text. Each process sends a digest first; the values themselves
    are exchanged only to report a difference.
    """
    if group.is_alone:
        return
    # Sorted, so that equal facts give equal digests whatever order they were collected in.
    text = json.dumps(facts, sort_keys=True, default=str)
    if len(set(group.all_gather(hashlib.sha256(text.encode()).hexdigest()))) > 1:
        _report(group.all_gather(json.loads(text)))


def _report(by_process: Sequence[Mapping[str, Any]]) -> None:
    names = differing_names(by_process)
    listed = [f"{name}: {', '.join(_values(name, by_process))}" for name in names[:_MAX_REPORTED]]
    more = f"; and {len(names) - _MAX_REPORTED} more" if len(names) > _MAX_REPORTED else ""
    raise ConfigError(
        f"The processes differ in {'; '.join(listed)}{more}.",
        rule="Every process of a job runs the same command on the same data, with the same versions.",
        remedy="Start all of them with the same options; configuration files and data must be the same on all hosts.",
    )


def differing_names(by_process: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not equal in all processes; a missing name differs from any value."""
    # A dict keeps the order, options before what follows from them; a set would not.
    names = dict.fromkeys(name for facts in by_process for name in facts)
    missing = object()
    first = by_process[0]
    return [name for name in names if any(f.get(name, missing) != first.get(name, missing) for f in by_process)]


def _values(name: str, by_process: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{facts.get(name)} (process {number})" for number, facts in enumerate(by_process)][:_MAX_REPORTED]

"""What must be equal in all processes of a job, compared before they start: options, plan, data, versions."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from headrace.config.load import to_flat
from headrace.core.errors import ConfigError
from headrace.core.version import __version__
from headrace.data.dataset import DataSet
from headrace.job.control import Group
from headrace.run.design import Design

# What may differ between hosts: where things lie, how much a host can do, what it shows.
FREE = ("dataset_path", "log_dir", "checkpoint_dir", "compilation_cache_dir", "pipeline_num_parallel", "progress")
_SHOWN = 6


def refuse_difference(group: Group, design: Design, dataset: DataSet, first_step: int) -> None:
    """Refuse processes that were started with different options, data or versions; name what differs."""
    if group.is_alone:
        return
    for facts in (_options(design), _consequences(design, dataset, first_step)):
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        if len(set(group.gather(digest))) > 1:
            _refuse(group.gather(json.loads(json.dumps(facts, default=str))))


def _refuse(everybody: Sequence[Mapping[str, Any]]) -> None:
    differing = differing_keys(everybody)
    told = [f"{key}: {', '.join(_values(key, everybody))}" for key in differing[:_SHOWN]]
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise ConfigError(
        f"The processes differ in {'; '.join(told)}{more}.",
        rule="Every process of a job runs the same command on the same data, with the same versions.",
        remedy="Start all of them with the same options; files of options and data must be equal on all hosts.",
    )


def differing_keys(everybody: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names under which not all have the same value."""
    names = dict.fromkeys(name for facts in everybody for name in facts)
    missing = object()
    return [name for name in names if any(f.get(name, missing) != everybody[0].get(name, missing) for f in everybody)]


def _values(key: str, everybody: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{facts.get(key)} (process {number})" for number, facts in enumerate(everybody)][:_SHOWN]


def _options(design: Design) -> dict[str, Any]:
    """Return what was given to the process: everything else follows from it."""
    options = {name: value for name, value in to_flat(design.config).items() if name not in FREE}
    return options | {"version of headrace": __version__, "version of jax": jax.__version__}


def _consequences(design: Design, dataset: DataSet, first_step: int) -> dict[str, Any]:
    """Return what equal options may still not make equal: the data, and what is planned with it."""
    labels = {
        f"labels of the {split} set": hashlib.sha256(np.ascontiguousarray(source.labels).tobytes()).hexdigest()[:12]
        for split, source in (("training", dataset.train), ("validation", dataset.validation))
    }
    plan = {f"plan: {name}": value for name, value in design.plan.to_dict().items() if name != "warnings"}
    return labels | {"step to start from": first_step} | plan

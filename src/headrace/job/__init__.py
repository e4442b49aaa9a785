"""A job of several processes: launching them, finding out which one this is, joining, liveness, control messages.

Other packages import from here alone. The names are loaded when they are first used, so that reading options and
printing help load no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.job.consistency import check_consistency  # noqa: F401
    from headrace.job.control import ProcessGroup, current_group  # noqa: F401
    from headrace.job.detect_launcher import detect_process_info  # noqa: F401
    from headrace.job.join import (  # noqa: F401
        check_devices_per_replica,
        devices_of_this_process,
        is_watched,
        join_job,
        report_lost_process,
        watch_progress,
    )
    from headrace.job.launch_request import LAUNCH_OPTIONS, LaunchRequest, parse_launch_options  # noqa: F401
    from headrace.job.launcher import launch  # noqa: F401
    from headrace.job.process_info import ProcessInfo, Restart, detect_restart  # noqa: F401

_FILES = {
    "consistency": ("check_consistency",),
    "control": ("ProcessGroup", "current_group"),
    "detect_launcher": ("detect_process_info",),
    "process_info": ("ProcessInfo", "Restart", "detect_restart"),
    "join": (
        *("check_devices_per_replica", "devices_of_this_process", "is_watched"),
        *("join_job", "report_lost_process", "watch_progress"),
    ),
    "launch_request": ("LAUNCH_OPTIONS", "LaunchRequest", "parse_launch_options"),
    "launcher": ("launch",),
}


def __getattr__(name: str) -> Any:
    """Load a name from its file."""
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"headrace.job.{file}"), name)
    raise AttributeError(f"headrace.job has no name {name}")

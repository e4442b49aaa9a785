"""A job of several processes: launching them, finding out which one this is, joining, liveness, control messages.

Other rooms import from here alone. The names are loaded when they are first used, so that reading options and printing
help load no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.job.control import ProcessGroup, check_consistency, current_group
    from headrace.job.detect_launcher import ProcessInfo, detect_process_info
    from headrace.job.join import check_devices_per_replica, join_job, report_lost_process
    from headrace.job.launch_request import LAUNCH_OPTIONS, LaunchRequest, parse_launch_options
    from headrace.job.launcher import launch

_FILES = {
    "LAUNCH_OPTIONS": "launch_request",
    "LaunchRequest": "launch_request",
    "ProcessGroup": "control",
    "ProcessInfo": "detect_launcher",
    "check_consistency": "control",
    "check_devices_per_replica": "join",
    "current_group": "control",
    "detect_process_info": "detect_launcher",
    "join_job": "join",
    "launch": "launcher",
    "parse_launch_options": "launch_request",
    "report_lost_process": "join",
}

__all__ = [
    "LAUNCH_OPTIONS",
    "LaunchRequest",
    "ProcessGroup",
    "ProcessInfo",
    "check_consistency",
    "check_devices_per_replica",
    "current_group",
    "detect_process_info",
    "join_job",
    "launch",
    "parse_launch_options",
    "report_lost_process",
]


def __getattr__(name: str) -> Any:
    """Load a name from its file."""
    if name not in _FILES:
        raise AttributeError(f"headrace.job has no name {name}")
    return getattr(importlib.import_module(f"headrace.job.{_FILES[name]}"), name)

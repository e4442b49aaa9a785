"""What to launch: the arguments of `headrace launch` and `poprun`."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.local_path import local_text
from headrace.job.addresses import expand_hosts
from headrace.job.launchers import DRIVERS
from headrace.job.variables import SILENCE_LIMIT, read_seconds

_CHOICES = ("auto", "local", *DRIVERS)
_NO_IPUS = "IPU partitions do not exist here"


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Processes to start: how many, with which devices, where, and the program that they run."""

    program: tuple[str, ...]  # a headrace command with its options, or python, a script and its options
    num_processes: int
    num_replicas: int  # of all processes together
    devices_per_replica: int | None  # None: taken from the program's configuration
    hosts: tuple[str, ...] = ()
    driver: str = "auto"
    coordinator: str | None = None
    numa_aware: bool = False
    join_seconds: float | None = None
    silence_seconds: float | None = None
    hang_seconds: float | None = None
    only_output_from: int | None = None
    mpi_global_args: tuple[str, ...] = ()
    mpi_local_args: tuple[str, ...] = ()
    cache_dir: str | None = None
    max_restarts: int = 0
    min_processes: int | None = None  # with which a job may go on when hosts are gone; None: all
    dry_run: bool = False
    verbose: bool = False
    notes: tuple[str, ...] = ()  # about options without effect or with an interpretation worth mentioning

    @property
    def replicas_per_process(self) -> int:
        return self.num_replicas // self.num_processes

    @property
    def silence_limit(self) -> float:
        """Return the seconds of silence after which the processes count one of them as hung."""
        return self.silence_seconds or SILENCE_LIMIT


@dataclass(frozen=True, kw_only=True)
class LaunchOption:
    """An option of the launcher: how its value is parsed, or why it has no effect."""

    name: str
    help: str
    also: tuple[str, ...] = ()  # other names, most of them those of the reference
    read: Callable[[str, str], Any] = lambda _name, text: text
    sets: str = ""  # field of the request; "" if the option has no effect
    bare: Any = None  # value if none is given; options without one require a value
    metavar: str = ""
    may_be_bare: bool = False


def _number(name: str, text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} is {text!r}.", rule=f"It is a whole number of at least {least}.")
    return int(text)


def _count(name: str, text: str) -> int:
    return _number(name, text, least=1)


def _flag(name: str, text: str) -> bool:
    known = {"1": True, "yes": True, "true": True, "on": True, "0": False, "no": False, "false": False, "off": False}
    if text.lower() not in known:
        raise ConfigError(f"{name} is {text!r}.", rule="It is yes or no (1 or 0).")
    return known[text.lower()]


def _driver(name: str, text: str) -> str:
    if text not in _CHOICES:
        raise ConfigError(f"{name} is {text!r}.", remedy=did_you_mean(text, _CHOICES))
    return text


LAUNCH_OPTIONS = (
    LaunchOption(
        name="--num-processes",
        also=("--num-instances",),
        metavar="N",
        sets="num_processes",
        read=_count,
        help="number of processes",
    ),
    LaunchOption(
        name="--num-replicas",
        metavar="R",
        sets="num_replicas",
        read=_count,
        help="number of replicas in all processes together [N]",
    ),
    LaunchOption(
        name="--devices-per-replica",
        also=("--ipus-per-replica",),
        metavar="D",
        sets="devices_per_replica",
        read=_count,
        may_be_bare=True,
        help="devices per replica [from the program's configuration]",
    ),
    LaunchOption(
        name="--host",
        metavar="A,B",
        sets="hosts",
        read=lambda name, text: tuple(expand_hosts(text, name)),
        help="hosts; process 0 runs on the first; a[1-4] is short for a1,a2,a3,a4 [this host]",
    ),
    LaunchOption(
        name="--driver",
        metavar="NAME",
        sets="driver",
        read=_driver,
        help=f"what starts the processes: {', '.join(_CHOICES[1:])} [mpirun for other hosts, srun inside a Slurm job]",
    ),
    LaunchOption(
        name="--coordinator",
        metavar="HOST:PORT",
        sets="coordinator",
        help="address where the processes rendezvous [the first host, a port derived from the job]",
    ),
    LaunchOption(
        name="--join-seconds",
        metavar="S",
        sets="join_seconds",
        read=read_seconds,
        help="time limit for all to join [120]",
    ),
    LaunchOption(
        name="--silence-seconds",
        metavar="S",
        sets="silence_seconds",
        read=read_seconds,
        help="a process that does not respond for this long counts as hung [10]",
    ),
    LaunchOption(
        name="--hang-seconds",
        metavar="S",
        sets="hang_seconds",
        read=read_seconds,
        help="a run without progress for this long counts as hung and ends [1800 with --max-restarts]",
    ),
    LaunchOption(
        name="--max-restarts",
        metavar="K",
        sets="max_restarts",
        read=_number,
        help="start again from the last checkpoint when a process dies or hangs, up to K times [0]",
    ),
    LaunchOption(
        name="--min-processes",
        also=("--min-instances",),
        metavar="M",
        sets="min_processes",
        read=_count,
        help="restart with as few as M processes when hosts do not answer; the batch stays [N]",
    ),
    LaunchOption(
        name="--numa-aware",
        metavar="YES",
        sets="numa_aware",
        read=_flag,
        bare=True,
        may_be_bare=True,
        help="pin each process of a host to its own neighbouring cores [no]",
    ),
    LaunchOption(
        name="--only-output-from",
        also=("--only-output-from-instance",),
        metavar="NUMBER",
        sets="only_output_from",
        read=_number,
        help="show the output of one process only [all, each line prefixed with the process number]",
    ),
    LaunchOption(
        name="--compilation-cache-dir",
        also=("--executable-cache-path",),
        metavar="DIR",
        sets="cache_dir",
        read=lambda name, text: local_text(text, name),
        help="directory for compiled programs, as of train",
    ),
    LaunchOption(
        name="--mpi-global-args",
        metavar="ARGS",
        sets="mpi_global_args",
        read=lambda _name, text: tuple(shlex.split(text)),
        help="options for mpirun, such as '--mca btl_tcp_if_include 10.0.0.0/8'",
    ),
    LaunchOption(
        name="--mpi-local-args",
        metavar="ARGS",
        sets="mpi_local_args",
        read=lambda _name, text: tuple(shlex.split(text)),
        help="more options for mpirun; -x NAME=VALUE also sets a variable where mpirun is not used",
    ),
    LaunchOption(name="--dry-run", sets="dry_run", bare=True, help="print the commands without running them"),
    LaunchOption(
        name="--verbose", also=("-v", "-vv"), sets="verbose", bare=True, help="print the commands that are run"
    ),
    *(
        LaunchOption(name=f"--vipu-{what}", metavar="X", help=_NO_IPUS)
        for what in ("server-host", "server-port", "server-timeout", "partition", "allocation", "cluster")
    ),
    *(
        LaunchOption(name=f"--{what}-partition", metavar="X", help=_NO_IPUS, may_be_bare=True)
        for what in ("reset", "update", "remove")
    ),
    LaunchOption(name="--num-ilds", metavar="X", help="links between IPU-PODs do not exist here"),
    LaunchOption(name="--offline-mode", metavar="X", help="programs are compiled where they run", may_be_bare=True),
)


def parse_launch_options(words: Sequence[str], prog: str = "headrace launch") -> LaunchRequest:
    """Parse the launcher's options and, after `--` or at the first argument that is not an option, the program."""
    left, values, no_effect, notes = list(words), {}, [], []
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        row, name, text = _take(word, left, prog)
        if not row.sets:
            no_effect.append(row)
        elif text is None and row.bare is None:
            notes.append(f"{name} has no value: the program's configuration decides")
        else:
            values[row.sets] = row.bare if text is None else row.read(name, text)
    if no_effect:
        names = ", ".join(dict.fromkeys(row.name for row in no_effect))
        reasons = "; ".join(dict.fromkeys(row.help for row in no_effect))
        notes.append(f"without effect here: {names} ({reasons})")
    program, program_notes = _program(left, prog)
    return _checked(values, program, tuple(notes + program_notes))


def _take(word: str, left: list[str], prog: str) -> tuple[LaunchOption, str, str | None]:
    """Return an option, its name as given, and its value if there is one; removes the value from `left`."""
    name, equals, text = word.partition("=")
    name = name.replace("_", "-")
    rows = {known: row for row in LAUNCH_OPTIONS for known in (row.name, *row.also)}
    row = rows.get(name)
    if row is None:
        raise ConfigError(f"{prog} has no option {name}.", remedy=did_you_mean(name, rows))
    if equals:
        if not row.metavar:
            raise ConfigError(f"{name} takes no value, but {text!r} is given.")
        return row, name, text
    if not row.metavar:
        return row, name, None
    if row.may_be_bare and (not left or left[0].startswith("-") or not _looks_like_value(row, left[0])):
        return row, name, None
    if not left or left[0].startswith("--"):
        raise ConfigError(f"{name} needs a value: {row.help}.", remedy=f"{name} {row.metavar}.")
    return row, name, left.pop(0)


def _looks_like_value(row: LaunchOption, word: str) -> bool:
    """Whether the argument after an option with an optional value is that value, and not already the program."""
    try:
        row.read(row.name, word)
    except ConfigError:
        return False
    return bool(row.sets) or word.lower() in ("yes", "no", "0", "1", "true", "false")


def _program(words: list[str], prog: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the program, and notes about how it was interpreted."""
    if not words:
        raise ConfigError(
            f"{prog} has no program to start.",
            rule="It comes after the launcher's options.",
            remedy="headrace launch --num-processes 2 -- train --config NAME",
        )
    if is_python(words[0]) and (len(words) == 1 or words[1].startswith("--")):
        # The reference's command for 128 IPUs is written like this.
        return (words[0], "train.py", *words[1:]), [f"{words[0]} is given no script: train.py is assumed"]
    return tuple(words), []


def is_python(word: str) -> bool:
    """Whether an argument is a Python interpreter."""
    return PurePath(word).name.rstrip("0123456789.") == "python"


def script_and_arguments(program: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the script without its suffix (`train`), or of the headrace command, and its arguments."""
    if is_python(program[0]):
        return PurePath(program[1]).stem, list(program[2:])
    return program[0], list(program[1:])


def _check_restarts(values: dict[str, Any], processes: int) -> None:
    fewest, hosts = values.get("min_processes"), values.get("hosts", ())
    if fewest is None:
        return
    if fewest > processes:
        raise ConfigError(f"--min-processes {fewest} is more than the {processes} processes of the job.")
    if not values.get("max_restarts"):
        raise ConfigError("--min-processes is given without --max-restarts.", remedy="Give --max-restarts 3, say.")
    if len(hosts) < 2 or processes % len(hosts):
        raise ConfigError(
            f"--min-processes is given for {processes} processes on {len(hosts) or 1} hosts.",
            rule="Processes are given up with their host; each host has the same number of them.",
            remedy="Name several hosts with --host, and a multiple of their number with --num-processes.",
        )


def _checked(values: dict[str, Any], program: tuple[str, ...], notes: tuple[str, ...]) -> LaunchRequest:
    processes = values.get("num_processes") or max(1, len(values.get("hosts", ())))
    replicas = values.get("num_replicas") or processes
    values |= {"num_processes": processes, "num_replicas": replicas}
    values.setdefault("devices_per_replica", None)
    if replicas % processes:
        raise ConfigError(
            f"{replicas} replicas cannot be divided evenly among {processes} processes.",
            rule="Every process has the same number of replicas: --num-replicas is a multiple of --num-processes.",
            remedy=f"Give --num-replicas {-(-replicas // processes) * processes}, or fewer processes.",
        )
    if len(values.get("hosts", ())) > processes:
        raise ConfigError(
            f"There are {len(values['hosts'])} hosts for {processes} processes.",
            remedy="Increase --num-processes, or name fewer hosts.",
        )
    _check_restarts(values, processes)
    only = values.get("only_output_from")
    if only is not None and only >= processes:
        raise ConfigError(f"There is no process {only} of {processes}.", rule="Processes are numbered from 0.")
    return LaunchRequest(program=program, notes=notes, **values)

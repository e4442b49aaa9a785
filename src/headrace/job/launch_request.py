"""What is to be launched: the words of `headrace launch` or of a `poprun` line, read by a pure function."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from headrace.core.errors import ConfigError, did_you_mean
from headrace.job.detect_launcher import expand_hosts, read_seconds

DRIVERS = ("auto", "local", "mpirun", "srun")
_NO_IPUS = "it concerns the partition of IPUs"


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Processes to start: how many, what each owns, where, and the program that they run."""

    program: tuple[str, ...]  # as written: a command of headrace with its options, or python, a script and its options
    num_processes: int
    num_replicas: int  # of all processes together
    devices_per_replica: int | None  # None: as the program's configuration says
    hosts: tuple[str, ...] = ()
    driver: str = "auto"
    coordinator: str | None = None
    numa_aware: bool = False
    join_seconds: float | None = None
    silence_seconds: float | None = None
    only_output_from: int | None = None
    mpi_global_args: tuple[str, ...] = ()
    mpi_local_args: tuple[str, ...] = ()
    cache_dir: str | None = None
    dry_run: bool = False
    verbose: bool = False
    notes: tuple[str, ...] = field(default=())  # what has no effect, or was understood in a way worth saying

    @property
    def replicas_per_process(self) -> int:
        """Return how many replicas each process owns."""
        return self.num_replicas // self.num_processes


@dataclass(frozen=True, kw_only=True)
class Row:
    """An option of the launcher: what its value becomes, or why it has no effect."""

    name: str
    help: str
    read: Callable[[str, str], Any] = lambda _name, text: text
    sets: str = ""  # the field of the request; "" where it has no effect
    bare: Any = None  # the value where none is written; options without one need theirs
    metavar: str = ""
    may_be_bare: bool = False


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{name} is {text!r}.", rule="It is a number from 1 up.")
    return int(text)


def _index(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}.", rule="Processes are numbered from 0.")
    return int(text)


def _yes(name: str, text: str) -> bool:
    known = {"1": True, "yes": True, "true": True, "on": True, "0": False, "no": False, "false": False, "off": False}
    if text.lower() not in known:
        raise ConfigError(f"{name} is {text!r}.", rule="It is yes or no (1 or 0).")
    return known[text.lower()]


def _driver(name: str, text: str) -> str:
    if text not in DRIVERS:
        raise ConfigError(f"{name} is {text!r}.", remedy=did_you_mean(text, DRIVERS))
    return text


ROWS = (
    Row(name="--num-instances", metavar="I", sets="num_processes", read=_count, help="processes"),
    Row(name="--num-replicas", metavar="R", sets="num_replicas", read=_count, help="replicas of all processes [I]"),
    Row(
        name="--ipus-per-replica",
        metavar="P",
        sets="devices_per_replica",
        read=_count,
        may_be_bare=True,
        help="devices of a replica [as the program's configuration says]",
    ),
    Row(
        name="--host",
        metavar="A,B",
        sets="hosts",
        read=lambda name, text: tuple(expand_hosts(text, name)),
        help="hosts, the first of them with process 0; a[1-4] is short for a1,a2,a3,a4 [this one]",
    ),
    Row(
        name="--driver",
        metavar="WHO",
        sets="driver",
        read=_driver,
        help="who starts the processes: local, mpirun or srun [mpirun for other hosts, srun inside a job of Slurm]",
    ),
    Row(
        name="--coordinator",
        metavar="HOST:PORT",
        sets="coordinator",
        help="where the processes meet [the first host, a port of the job's own]",
    ),
    Row(name="--join-seconds", metavar="S", sets="join_seconds", read=read_seconds, help="time for all to start [120]"),
    Row(
        name="--silence-seconds",
        metavar="S",
        sets="silence_seconds",
        read=read_seconds,
        help="a process that is not heard of for so long counts as hung [10]",
    ),
    Row(
        name="--numa-aware",
        metavar="YES",
        sets="numa_aware",
        read=_yes,
        bare=True,
        may_be_bare=True,
        help="keep each process of a host on cores of its own, beside each other [no]",
    ),
    Row(
        name="--only-output-from-instance",
        metavar="N",
        sets="only_output_from",
        read=_index,
        help="show what one process prints [all, with their number in front]",
    ),
    Row(
        name="--executable-cache-path",
        metavar="DIR",
        sets="cache_dir",
        help="directory of compiled programs, as --compilation-cache-dir",
    ),
    Row(
        name="--mpi-global-args",
        metavar="ARGS",
        sets="mpi_global_args",
        read=lambda _name, text: tuple(shlex.split(text)),
        help="options for mpirun, such as '--mca btl_tcp_if_include 10.0.0.0/8'",
    ),
    Row(
        name="--mpi-local-args",
        metavar="ARGS",
        sets="mpi_local_args",
        read=lambda _name, text: tuple(shlex.split(text)),
        help="more options for mpirun; -x NAME=VALUE also sets a variable where mpirun is not used",
    ),
    Row(name="--dry-run", sets="dry_run", bare=True, help="print what would be started"),
    Row(name="-v", sets="verbose", bare=True, help="print what is started"),
    Row(name="-vv", sets="verbose", bare=True, help="the same"),
    Row(name="--verbose", sets="verbose", bare=True, help="the same"),
    Row(name="--vipu-server-host", metavar="X", help=_NO_IPUS),
    Row(name="--vipu-server-port", metavar="X", help=_NO_IPUS),
    Row(name="--vipu-server-timeout", metavar="X", help=_NO_IPUS),
    Row(name="--vipu-partition", metavar="X", help=_NO_IPUS),
    Row(name="--vipu-allocation", metavar="X", help=_NO_IPUS),
    Row(name="--vipu-cluster", metavar="X", help=_NO_IPUS),
    Row(name="--reset-partition", metavar="X", help=_NO_IPUS, may_be_bare=True),
    Row(name="--update-partition", metavar="X", help=_NO_IPUS, may_be_bare=True),
    Row(name="--remove-partition", metavar="X", help=_NO_IPUS, may_be_bare=True),
    Row(name="--num-ilds", metavar="X", help="links between IPU-PODs are not ours to arrange"),
    Row(name="--offline-mode", metavar="X", help="programs are compiled where they run", may_be_bare=True),
)


def read_launch(words: Sequence[str], prog: str = "headrace launch") -> LaunchRequest:
    """Return the request of a line: launcher's options, then the program (behind `--`, or the first other word)."""
    left, values, no_effect, notes = list(words), {}, [], []
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        row, text = _take(word, left, prog)
        if not row.sets:
            no_effect.append(row)
        elif text is None and row.bare is None:
            notes.append(f"{row.name} has no value: the program's configuration says it")
        else:
            values[row.sets] = row.bare if text is None else row.read(row.name, text)
    if no_effect:
        names = ", ".join(dict.fromkeys(row.name for row in no_effect))
        reasons = "; ".join(dict.fromkeys(row.help for row in no_effect))
        notes.append(f"without effect here: {names} ({reasons})")
    program, said = _program(left, prog)
    return _checked(values, program, tuple(notes + said))


def _take(word: str, left: list[str], prog: str) -> tuple[Row, str | None]:
    """Return the row of an option, and its value where one is written; takes it from the words that are left."""
    name, equals, text = word.partition("=")
    name = name.replace("_", "-")
    row = next((row for row in ROWS if row.name == name), None)
    if row is None:
        raise ConfigError(f"{prog} has no option {name}.", remedy=did_you_mean(name, [row.name for row in ROWS]))
    if equals:
        if not row.metavar:
            raise ConfigError(f"{name} takes no value, but {text!r} is given.")
        return row, text
    if not row.metavar:
        return row, None
    if row.may_be_bare and (not left or left[0].startswith("-") or not _looks_like_value(row, left[0])):
        return row, None
    if not left or left[0].startswith("--"):
        raise ConfigError(f"{name} needs a value: {row.help}.", remedy=f"{name} {row.metavar}.")
    return row, left.pop(0)


def _looks_like_value(row: Row, word: str) -> bool:
    """Say whether the word behind an option that may stand alone is its value, and not already the program."""
    try:
        row.read(row.name, word)
    except ConfigError:
        return False
    return bool(row.sets) or word.lower() in ("yes", "no", "0", "1", "true", "false")


def _program(words: list[str], prog: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the program, with a word about what was read into it."""
    if not words:
        raise ConfigError(
            f"{prog} has no program to start.",
            rule="It stands behind the launcher's options.",
            remedy="headrace launch --num-instances 2 -- train --config NAME, or poprun ... python train.py ...",
        )
    if is_python(words[0]) and (len(words) == 1 or words[1].startswith("--")):
        # As the line for 128 IPUs in the reference has it.
        return (words[0], "train.py", *words[1:]), [f"{words[0]} is given no script: train.py is meant"]
    return tuple(words), []


def is_python(word: str) -> bool:
    """Say whether a word calls Python."""
    return PurePath(word).name.rstrip("0123456789.") == "python"


def script_of(program: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script's name without its ending (`train`), and its arguments; a command of headrace is its name."""
    if is_python(program[0]):
        return PurePath(program[1]).stem, list(program[2:])
    return program[0], list(program[1:])


def _checked(values: dict[str, Any], program: tuple[str, ...], notes: tuple[str, ...]) -> LaunchRequest:
    processes = values.get("num_processes") or max(1, len(values.get("hosts", ())))
    replicas = values.get("num_replicas") or processes
    values |= {"num_processes": processes, "num_replicas": replicas}
    values.setdefault("devices_per_replica", None)
    if replicas % processes:
        raise ConfigError(
            f"{replicas} replicas cannot be dealt out to {processes} processes.",
            rule="A process owns whole replicas, and every process as many: --num-replicas is a multiple of "
            "--num-instances.",
            remedy=f"Give --num-replicas {-(-replicas // processes) * processes}, or fewer instances.",
        )
    if len(values.get("hosts", ())) > processes:
        raise ConfigError(
            f"There are {len(values['hosts'])} hosts for {processes} processes.",
            remedy="Raise --num-instances, or leave hosts out.",
        )
    only = values.get("only_output_from")
    if only is not None and only >= processes:
        raise ConfigError(f"There is no process {only} of {processes}.", rule="Processes are numbered from 0.")
    return LaunchRequest(program=program, notes=notes, **values)

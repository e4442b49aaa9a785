"""Compiled programs on disk, found without tracing: a second start of a job reads them instead of making them.

JAX's compilation cache is asked with what tracing and lowering make of Python: seconds of work for a large network.
Here a program has two names. By the first it is found: a digest of what it is made of (`kept_programs.key`), of
this package's source, and of all else that tracing and compiling depend on. The file of that name lists second ones,
digests of what was lowered, which name the files of the executables. So a change of the source that changes no program
costs one more tracing and no compilation.

An executable is written when XLA has just compiled it, never when it came from JAX's cache: on CPUs, one that was read
from there and is written again lacks functions, and fails when it runs. JAX's own functions make and read the bytes, as
for its cache. The files are this user's alone, with a checksum; whatever is wrong with one, the program is made in the
usual way. Jobs of several processes store none.
"""

import hashlib
import json
import os
import pickle
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from headrace.core.files import write_atomic
from headrace.core.json_text import parse_json
from headrace.core.session import session
from headrace.core.tree import PyTree
from headrace.engine.compiler import Options, compile_program
from headrace.engine.devices import Device, count_compilations, count_found
from headrace.engine.kept_programs import NoKeyError, kept, key
from headrace.engine.program_names import is_patched, leaf_description, source_digest, surroundings
from headrace.ops.tracing import lowered, target

_FORMAT = b"headrace programs 1\n"
_MOST_BYTES = 4 << 30  # above it, the files that were not used for the longest time are deleted


class UnusableError(Exception):
    """A program that was found cannot be loaded, or failed when it first ran."""


@dataclass(frozen=True)
class Programs:
    """Compiled programs, what was noted about them, and how long Python took to make them."""

    compiled: Sequence[jax.stages.Compiled]
    facts: Any = None
    trace_seconds: float = 0.0


Made = tuple[Sequence[jax.stages.Lowered], Any]  # lowered programs, and what is to be noted about them


@dataclass(frozen=True, kw_only=True)
class ProgramRequest:
    """What programs are made of: `make(spec, mesh, *more)` is jitted, for such arguments (arrays, or their shapes)."""

    make: Callable[..., jax.stages.Wrapped]
    spec: Any
    mesh: Mesh
    more: tuple[Any, ...] = ()
    arguments: tuple[PyTree, ...]
    options: Options  # of the compiler
    storable: bool = True  # False: the program calls Python, which no file can hold

    def prepare(self, trace: Callable[[], Made] | None = None) -> "Draft":
        """Find the programs, or make XLA's input from Python: by `trace`, or the one that `make` jits."""
        return Draft(self, self._name(), trace or (lambda: ([self.lower()], None)))

    def lower(self) -> jax.stages.Lowered:
        """Make XLA's input for what `make` jits."""
        return lowered(kept(self.make, self.spec, self.mesh, *self.more).trace(*self.arguments))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the mesh."""
        return tuple(self.mesh.devices.flat)

    def _name(self) -> str | None:
        """Return the name by which the programs are found; None where they can only be made."""
        if (
            not self.storable
            or folder() is None
            or not (source := source_digest())
            or is_patched()
            or jax.process_count() > 1
        ):
            return None
        leaves, tree = jax.tree.flatten(self.arguments)
        # The others should a version of JAX not have what is asked of it.
        with suppress(NoKeyError, AttributeError, TypeError):
            described = [leaf_description(leaf) for leaf in leaves]
            given = self.make, self.spec, self.mesh, self.more
            made_of = *given, target(), self.options, tree, described
            return _digest((source, surroundings(self.devices), made_of))
        return None


class Draft:
    """Programs that are to be loaded or compiled, once their devices have started; what is not found is traced now."""

    def __init__(self, request: ProgramRequest, name: str | None, trace: Callable[[], Made]) -> None:
        self._request, self._name, self._trace, self._seconds = request, name, trace, 0.0
        # With the devices themselves: a process may close its devices, and open others with the same numbers.
        self._key = ("programs", name, request.devices)
        self._found = (session().programs.get(self._key) or _find(name, request.devices)) if name else None
        self._made = None if self._found else self._make()

    def _make(self) -> Made:
        begin = time.perf_counter()
        made = self._trace()
        self._seconds += time.perf_counter() - begin
        return made

    def compile(self) -> Programs:
        """Return the programs."""
        options = self._request.options
        if self._found is not None:
            ready, facts = self._found
            try:
                compiled = [compile_program(each, options) for each in ready]
            except UnusableError:
                self._forget()
            else:
                return self._keep(compiled, facts)
        lowered, facts = self._made or self._make()
        new = [_New(each, self._request, writes=self._name is not None) for each in lowered]
        compiled = [compile_program(each, options) for each in new]
        if self._name is None or not all(each.is_as_requested for each in new):
            return Programs(compiled, facts, self._seconds)
        _store(self._name, [each.stored() for each in new], facts)
        return self._keep(compiled, facts)

    def _keep(self, compiled: Sequence[jax.stages.Compiled], facts: Any) -> Programs:
        """Keep programs for the next run of this process."""
        session().programs.put(self._key, ([_Ready(each) for each in compiled], facts))
        return Programs(compiled, facts, self._seconds)

    def _forget(self) -> None:
        """Delete what names programs that cannot be used."""
        if (place := folder()) and self._name:
            with suppress(OSError):
                (place / self._name).unlink()


# What `compile_program` takes in place of JAX's lowered programs.


@dataclass(frozen=True)
class _Ready:
    """A program that this process has."""

    compiled: jax.stages.Compiled

    @property
    def args_info(self) -> PyTree:
        return self.compiled.args_info

    def compile(self, compiler_options: Options | None) -> jax.stages.Compiled:
        return self.compiled


class _Stored:
    """A program on disk."""

    def __init__(self, content: bytes, devices: tuple[Device, ...]) -> None:
        self._content, self._devices = content, devices
        self._loaded: Any = None

    @property
    def args_info(self) -> PyTree:
        return self._loaded.args_info

    def compile(self, compiler_options: Options | None) -> jax.stages.Compiled:
        if self._loaded is not None:
            raise UnusableError("it failed when it first ran, and should be compiled with other options")
        try:
            self._loaded = serialize_executable.deserialize_and_load(
                *pickle.loads(self._content), backend=self._devices[0].client, execution_devices=self._devices
            )
        except Exception as error:  # pickle, JAX's classes and XLA raise whatever they like
            raise UnusableError(str(error)) from error
        count_found()
        return self._loaded


class _New:
    """A program that Python has made."""

    def __init__(self, lowered: jax.stages.Lowered, request: ProgramRequest, *, writes: bool) -> None:
        self._lowered, self._request, self._writes = lowered, request, writes
        self._content: bytes | None = None
        self.is_as_requested = False  # the compiler had all options that were asked for

    @property
    def args_info(self) -> PyTree:
        return self._lowered.args_info

    def compile(self, compiler_options: Options | None) -> jax.stages.Compiled:
        with count_compilations() as counts:
            compiled = self._lowered.compile(compiler_options=dict(compiler_options or {}) or None)
        self.is_as_requested = dict(compiler_options or {}) == dict(self._request.options)
        self._content = None
        if self._writes and self.is_as_requested and counts.misses and not counts.hits:
            # Before its first run, as JAX's cache does.
            with suppress(Exception):  # this backend or program cannot be written, and says so in its own way
                self._content = pickle.dumps(serialize_executable.serialize(compiled))
        return compiled

    def stored(self) -> str | None:
        """Write the program if it was compiled just now; return its name if it is on disk."""
        place, lowered = folder(), self._lowered
        with suppress(NoKeyError, OSError):
            described = [leaf_description(leaf) for leaf in jax.tree.leaves(lowered.args_info)]
            trees = str(lowered.in_tree), str(lowered.out_tree)
            made_of = lowered.as_text(), trees, described, self._request.options
            name = _digest(("program", surroundings(self._request.devices), made_of))
            if place is not None and self._content is not None:
                _write(place, name, self._content)
            return name if place is not None and (place / name).exists() else None
        return None


def _digest(value: object) -> str:
    return hashlib.sha256(key(value).encode()).hexdigest()


# Files.


def folder() -> Path | None:
    """Return where this user's programs are, in JAX's compilation cache; None where there is no cache."""
    cache_dir = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    # Each user's own: whoever may write a program may run code as the one who loads it.
    return Path(cache_dir) / f"headrace-{os.geteuid()}" if cache_dir else None


def _find(name: str, devices: tuple[Device, ...]) -> tuple[list[_Stored], Any] | None:
    """Read the programs that a name stands for, and what was noted about them."""
    place = folder()
    if place is None or (listed := _read(place, name)) is None:
        return None
    with suppress(ValueError, KeyError, TypeError):
        said = parse_json(listed)
        contents = [_read(place, each) for each in said["programs"]]
        if contents and None not in contents:
            return [_Stored(content, devices) for content in contents if content is not None], said["facts"]
    return None


def _store(name: str, programs: Sequence[str | None], facts: Any) -> None:
    """Write which programs a name stands for, if all of them are on disk."""
    place = folder()
    if place is not None and None not in programs:
        with suppress(OSError):
            _write(place, name, json.dumps({"programs": list(programs), "facts": facts}).encode())
            _delete_oldest(place)


def _read(place: Path, name: str) -> bytes | None:
    """Return what was written under a name; None if it is not there or not whole, or others could have written it."""
    try:
        handle = os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            data = file.read()
    except OSError:
        return None
    with suppress(OSError):  # a read-only folder
        os.utime(place / name)  # it was used
    begin = len(_FORMAT) + hashlib.sha256().digest_size
    head, content = data[:begin], data[begin:]
    return content if head == _head(name, content) else None


def _write(place: Path, name: str, content: bytes) -> None:
    place.mkdir(mode=0o700, exist_ok=True)
    write_atomic(place / name, _head(name, content) + content, mode=0o600, durable=False)


def _head(name: str, content: bytes) -> bytes:
    """Return what a file begins with; with its name, so that one that was renamed is not taken for another."""
    return _FORMAT + hashlib.sha256(name.encode() + content).digest()


def _delete_oldest(place: Path) -> None:
    """Keep the folder below its limit: JAX's own cache has none, but nobody looks at what is in here."""
    found = [(path, path.stat()) for path in place.iterdir()]
    total = 0
    for path, about in sorted(found, key=lambda each: each[1].st_mtime_ns, reverse=True):
        total += about.st_size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)

"""The roll call: all processes of a job meet at its coordinator's address before JAX is started.

Process 0 listens, the others report to it. Who is missing when the time is over is named. The lines stay open: the
watch (`watch.py`) hears through them when a process dies or hangs.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.errors import ConfigError, RunStopped
from headrace.job.detect_launcher import address, split_address
from headrace.job.process_info import COORDINATOR, JOIN_SECONDS, Place

# A line between two processes of a job: messages of JSON, one per row, over a socket. No tensor takes this way.


_MOST = 1 << 20  # bytes without an end of row: not one of us


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a job, as people find it again: its number, its id at the operating system, its host."""

    process: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid}, host {self.host})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


class Gone(Exception):
    """The other end of a line is closed."""


class Line:
    """One end of a line. `send` may be called by any thread, `receive` by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer, self._lock = connection, b"", threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(5.0)  # a peer that does not read any more must not hold us up

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; one that cannot be sent is lost, and `receive` will tell that the other end is gone."""
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = 5.0) -> list[dict[str, Any]]:
        """Return the messages that have come, after waiting for some bytes; raise Gone when the other end is closed."""
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return []
        except OSError as error:
            raise Gone from error
        finally:
            with suppress(OSError):
                self._socket.settimeout(5.0)
        if not data:
            raise Gone
        *rows, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MOST:
            raise Gone
        try:
            messages = [json.loads(row) for row in rows]
        except ValueError as error:
            raise Gone from error
        if not all(isinstance(message, dict) for message in messages):
            raise Gone
        return messages

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_TELL_AFTER = 10.0  # seconds of waiting before a word is said about it
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """Who is there: this process, the lines to the others (the workers have one, to process 0), JAX's own address."""

    me: Member
    lines: Mapping[Line, Member]
    jax_address: str


def rendezvous(place: Place) -> Attendance:
    """Meet the other processes; raise RunStopped, naming who is missing, when the time is over."""
    me = Member(process=place.process, pid=os.getpid(), host=socket.gethostname())
    return _Registrar(place, me).wait_for_all() if place.is_first else _report(place, me)


class _Registrar:
    """Process 0's side: where the others report."""

    def __init__(self, place: Place, me: Member) -> None:
        self._place, self._me = place, me
        self._here: dict[Line, Member] = {}
        self._waiting: set[Line] = set()  # connected, but have not said who they are
        self._host, port = split_address(place.coordinator, COORDINATOR)
        if place.found_by == "Open MPI":
            _refuse_elsewhere(self._host, me)
        self._listener = _listen(self._host, port)

    def wait_for_all(self) -> Attendance:
        """Wait until every process has reported; then tell all of them where JAX's service will be."""
        begin, told = time.monotonic(), False
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while missing := self._missing():
                waited = time.monotonic() - begin
                if waited > self._place.join_seconds:
                    self._refuse(self._too_late(missing))
                if waited > _TELL_AFTER and not told:
                    told = True
                    text = f"headrace: waiting for {_named(missing)} of {self._place.num_processes}"
                    print(text, file=sys.stderr, flush=True)
                for key, _ in selector.select(min(1.0, self._place.join_seconds / 4)):
                    self._hear(key.fileobj, selector)
        for line in self._waiting:
            line.close()
        jax_address = address(self._host, _free_port())
        for line in self._here:
            line.send(welcome=jax_address, first=self._me.to_dict())
        return Attendance(me=self._me, lines=self._here, jax_address=jax_address)

    def _missing(self) -> list[int]:
        here = {member.process for member in self._here.values()}
        return [number for number in range(1, self._place.num_processes) if number not in here]

    def _hear(self, source: Any, selector: selectors.BaseSelector) -> None:
        if source is self._listener:
            line = Line(self._listener.accept()[0])
            self._waiting.add(line)
            selector.register(line, selectors.EVENT_READ)
            return
        try:
            for message in source.receive():
                self._admit(source, message)
        except Gone:
            selector.unregister(source)
            source.close()
            self._waiting.discard(source)
            if source in self._here:
                member = self._here.pop(source)
                self._refuse(RunStopped(f"{_capital(member)} ended while others were still joining."))

    def _admit(self, line: Line, message: dict[str, Any]) -> None:
        try:
            member, size = Member(**message["member"]), message["num_processes"]
        except (KeyError, TypeError):
            raise Gone from None  # not one of us
        double = next((other for other in (self._me, *self._here.values()) if other.process == member.process), None)
        if size != self._place.num_processes:
            self._here[line] = member
            self._refuse(
                ConfigError(
                    f"{_capital(member)} belongs to a job of {size} processes, "
                    f"{self._me} to one of {self._place.num_processes}.",
                    remedy="Start all processes of a job with the same number; are there some of an earlier job left?",
                )
            )
        if double is not None:
            self._here[line] = member
            self._refuse(
                ConfigError(
                    f"There are two processes {member.process}: pid {double.pid} on host {double.host} "
                    f"and pid {member.pid} on host {member.host}.",
                    remedy="Give each process a number of its own; are there some of an earlier job left?",
                )
            )
        self._waiting.discard(line)
        self._here[line] = member

    def _too_late(self, missing: list[int]) -> RunStopped:
        return RunStopped(
            f"{_capital(_named(missing))} of {self._place.num_processes} did not join within "
            f"{self._place.join_seconds:g} s.",
            rule=f"All processes meet at {self._place.coordinator} before training starts.",
            remedy=f"Look at what they print; they must reach this address. A longer time: {JOIN_SECONDS}=600.",
        )

    def _refuse(self, error: RunStopped | ConfigError) -> None:
        """End the start-up of everybody."""
        for line in self._here:
            line.send(refused=str(error), code=error.exit_code)
            line.close()
        raise error


def _report(place: Place, me: Member) -> Attendance:
    """Report to process 0 and wait until everybody is there."""
    deadline = time.monotonic() + place.join_seconds
    line = _connect(place, deadline)
    line.send(member=me.to_dict(), num_processes=place.num_processes)
    # Process 0 may have begun to wait later than we did; its time limit holds, so give it all of that.
    deadline = time.monotonic() + place.join_seconds + 10
    while time.monotonic() < deadline:
        try:
            for message in line.receive(1.0):
                if "refused" in message:
                    error = RunStopped(message["refused"])
                    error.exit_code = message["code"]
                    raise error
                if "welcome" in message:
                    return Attendance(me=me, lines={line: Member(**message["first"])}, jax_address=message["welcome"])
        except Gone:
            raise RunStopped(
                "Process 0 ended before all processes had joined.", remedy="See what it printed."
            ) from None
    raise RunStopped(f"Process 0 at {place.coordinator} is silent.", remedy="See what it printed.")


def _connect(place: Place, deadline: float) -> Line:
    host, port = split_address(place.coordinator, COORDINATOR)
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            return Line(socket.create_connection((host, port), timeout=min(5.0, left)))
        except OSError as error:  # process 0 is not yet there, or its name not yet known
            reason = error.strerror or str(error)
            time.sleep(min(0.2, max(0.0, left)))
    raise RunStopped(
        f"Process 0 of {place.num_processes} did not answer at {place.coordinator} within {place.join_seconds:g} s: "
        f"{reason}.",
        rule=f"Its address was found by {place.found_by}; {COORDINATOR} overrides it.",
        remedy=f"See what process 0 printed, or whether it runs at all. A longer time: {JOIN_SECONDS}=600.",
    )


def _listen(host: str, port: int) -> socket.socket:
    """Listen at a port: on this host alone where the job is, else on all its addresses."""
    try:
        if host in _LOOPBACK:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise RunStopped(
            f"Process 0 cannot listen at port {port}: {error.strerror}.",
            rule="The processes of a job meet there; two jobs need two ports.",
            remedy=f"Choose another: {COORDINATOR}={host}:PORT for all processes.",
        ) from error


def _refuse_elsewhere(host: str, me: Member) -> None:
    """Refuse an address that is not this host's: mpirun tells its own, and may start process 0 on another one."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:
        raise RunStopped(
            f"The processes would meet at {host}, where mpirun runs, but process 0 runs on host {me.host}.",
            remedy=f"Say where they meet: mpirun -x {COORDINATOR}={me.host}:61440 ...",
        ) from None


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def _named(processes: list[int]) -> str:
    numbers = ", ".join(str(number) for number in processes[:8]) + (", ..." if len(processes) > 8 else "")
    return f"process{'es' * (len(processes) > 1)} {numbers}"


def _capital(text: object) -> str:
    return str(text)[:1].upper() + str(text)[1:]

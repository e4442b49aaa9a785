"""Rendezvous: all processes of a job connect to process 0 before JAX is initialized.

Process 0 listens at the coordinator's address and the others report to it. Processes that are missing when the time is
over are named. The channels stay open: through them the liveness monitor learns that a process has died or hangs.
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
from headrace.core.files import parse_json
from headrace.job.detect_launcher import (
    COORDINATOR,
    JOIN_SECONDS,
    ProcessInfo,
    format_address,
    free_port,
    split_address,
)

_MAX_MESSAGE_BYTES = 1 << 20  # without an end of line: not a message of ours
_SEND_SECONDS = 5.0  # a peer that no longer reads must not block us
_NOTICE_SECONDS = 10.0  # of waiting before process 0 says whom it waits for
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A process of a job as people find it again: its number, its pid and its host."""

    process: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid}, host {self.host})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


class ChannelClosed(Exception):
    """The other end of a channel is closed, or sends something that is not a message."""


class Channel:
    """Small JSON messages between two processes, one per line, over a TCP socket.

    `send` may be called by any thread, `receive` by one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer, self._lock = connection, b"", threading.Lock()
        # The messages are small and awaited: by default the kernel would hold each back to fill a packet.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_SECONDS)

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. One that cannot be sent is dropped; `receive` will raise ChannelClosed."""
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = _SEND_SECONDS) -> list[dict[str, Any]]:
        """Wait for data and return the messages that are complete; ChannelClosed if the other end is gone."""
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return []
        except OSError as error:
            raise ChannelClosed from error
        finally:
            with suppress(OSError):
                self._socket.settimeout(_SEND_SECONDS)
        if not data:
            raise ChannelClosed
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MAX_MESSAGE_BYTES:
            raise ChannelClosed
        try:
            messages = [parse_json(line, _MAX_MESSAGE_BYTES) for line in lines]
        except ValueError as error:
            raise ChannelClosed from error
        if not all(isinstance(message, dict) for message in messages):
            raise ChannelClosed
        return messages

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Result of a rendezvous: this process, its channels, and the address for JAX's coordination service.

    Process 0 has a channel to every other process; the others have one, to process 0.
    """

    me: Peer
    channels: Mapping[Channel, Peer]
    jax_address: str


def rendezvous(info: ProcessInfo) -> Connections:
    """Connect to the other processes; RunStopped, naming those that are missing, after the time limit."""
    me = Peer(process=info.process, pid=os.getpid(), host=socket.gethostname())
    return _RendezvousServer(info, me).wait_for_all() if info.is_first else _report_to_first(info, me)


class _RendezvousServer:
    """Process 0's side: where the others report."""

    def __init__(self, info: ProcessInfo, me: Peer) -> None:
        self._info, self._me = info, me
        self._joined: dict[Channel, Peer] = {}
        self._unidentified: set[Channel] = set()  # connected, but have not sent who they are
        self._host, port = split_address(info.coordinator, COORDINATOR)
        if info.detected_by == "Open MPI":
            _check_is_this_host(self._host, me)
        self._listener = _listen(self._host, port)

    def wait_for_all(self) -> Connections:
        """Wait until every process has reported; then send all of them the address of JAX's coordination service."""
        begin, noticed = time.monotonic(), False
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while missing := self._missing():
                waited = time.monotonic() - begin
                if waited > self._info.join_seconds:
                    self._refuse(self._too_late(missing))
                if waited > _NOTICE_SECONDS and not noticed:
                    noticed = True
                    text = f"headrace: waiting for {_enumerate(missing)} of {self._info.num_processes}"
                    print(text, file=sys.stderr, flush=True)
                for key, _ in selector.select(min(1.0, self._info.join_seconds / 4)):
                    self._handle(key.fileobj, selector)
        for channel in self._unidentified:
            channel.close()
        jax_address = format_address(self._host, free_port())
        for channel in self._joined:
            channel.send(welcome=jax_address, first=self._me.to_dict())
        return Connections(me=self._me, channels=self._joined, jax_address=jax_address)

    def _missing(self) -> list[int]:
        joined = {peer.process for peer in self._joined.values()}
        return [number for number in range(1, self._info.num_processes) if number not in joined]

    def _handle(self, source: Any, selector: selectors.BaseSelector) -> None:
        if source is self._listener:
            channel = Channel(self._listener.accept()[0])
            self._unidentified.add(channel)
            selector.register(channel, selectors.EVENT_READ)
            return
        try:
            for message in source.receive():
                self._admit(source, message)
        except ChannelClosed:
            selector.unregister(source)
            source.close()
            self._unidentified.discard(source)
            if source in self._joined:
                peer = self._joined.pop(source)
                self._refuse(RunStopped(f"{_capitalize(peer)} ended while others were still joining."))

    def _admit(self, channel: Channel, message: dict[str, Any]) -> None:
        try:
            peer, size = Peer(**message["member"]), message["num_processes"]
        except (KeyError, TypeError):
            raise ChannelClosed from None  # not a process of ours
        duplicate = next((other for other in (self._me, *self._joined.values()) if other.process == peer.process), None)
        self._unidentified.discard(channel)
        self._joined[channel] = peer
        if size != self._info.num_processes:
            self._refuse(
                ConfigError(
                    f"{_capitalize(peer)} belongs to a job of {size} processes, "
                    f"{self._me} to one of {self._info.num_processes}.",
                    remedy="Start all processes of a job with the same number of processes; is an earlier job still "
                    "running?",
                )
            )
        if duplicate is not None:
            self._refuse(
                ConfigError(
                    f"There are two processes {peer.process}: pid {duplicate.pid} on host {duplicate.host} "
                    f"and pid {peer.pid} on host {peer.host}.",
                    remedy="Give each process its own number; is an earlier job still running?",
                )
            )

    def _too_late(self, missing: list[int]) -> RunStopped:
        return RunStopped(
            f"{_capitalize(_enumerate(missing))} of {self._info.num_processes} did not join within "
            f"{self._info.join_seconds:g} s.",
            rule=f"All processes connect to {self._info.coordinator} before training starts.",
            remedy=f"See what they print; they must be able to reach this address. To wait longer: {JOIN_SECONDS}=600.",
        )

    def _refuse(self, error: RunStopped | ConfigError) -> None:
        """End the start-up of every process with this error."""
        for channel in self._joined:
            channel.send(refused=str(error), code=error.exit_code)
            channel.close()
        raise error


def _report_to_first(info: ProcessInfo, me: Peer) -> Connections:
    """Take the side of the other processes: report to process 0 and wait for its answer."""
    channel = _connect(info, time.monotonic() + info.join_seconds)
    channel.send(member=me.to_dict(), num_processes=info.num_processes)
    # Process 0 may have started to wait later than this process; its time limit counts, so wait for that long again.
    deadline = time.monotonic() + info.join_seconds + 10
    while time.monotonic() < deadline:
        try:
            for message in channel.receive(1.0):
                if "refused" in message:
                    error = RunStopped(message["refused"])
                    error.exit_code = message["code"]
                    raise error
                if "welcome" in message:
                    first = Peer(**message["first"])
                    return Connections(me=me, channels={channel: first}, jax_address=message["welcome"])
        except ChannelClosed:
            raise RunStopped(
                "Process 0 ended before all processes had joined.", remedy="See what it printed."
            ) from None
    raise RunStopped(f"Process 0 at {info.coordinator} does not answer.", remedy="See what it printed.")


def _connect(info: ProcessInfo, deadline: float) -> Channel:
    host, port = split_address(info.coordinator, COORDINATOR)
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            return Channel(socket.create_connection((host, port), timeout=min(5.0, left)))
        except OSError as error:  # process 0 does not listen yet, or its name cannot be resolved yet
            reason = error.strerror or str(error)
            time.sleep(min(0.2, max(0.0, left)))
    raise RunStopped(
        f"Process 0 of {info.num_processes} did not answer at {info.coordinator} within {info.join_seconds:g} s: "
        f"{reason}.",
        rule=f"The address comes from {info.detected_by}; {COORDINATOR} overrides it.",
        remedy=f"See what process 0 printed, or whether it runs at all. To wait longer: {JOIN_SECONDS}=600.",
    )


def _listen(host: str, port: int) -> socket.socket:
    """Listen at a port: on the loopback address if the job runs on this host alone, else on all addresses."""
    try:
        if host in _LOOPBACK:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        # Other hosts may resolve process 0's name to an address of either kind.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise RunStopped(
            f"Process 0 cannot listen at port {port}: {error.strerror}.",
            rule="The processes of a job connect to this port; two jobs need two ports.",
            remedy=f"Choose another one for all processes: {COORDINATOR}={host}:PORT.",
        ) from error


def _check_is_this_host(host: str, me: Peer) -> None:
    """Refuse an address of another host: mpirun passes its own, but may start process 0 elsewhere."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:
        raise RunStopped(
            f"The processes would connect to {host}, where mpirun runs, but process 0 runs on host {me.host}.",
            remedy=f"Set the address: mpirun -x {COORDINATOR}={me.host}:61440 ...",
        ) from None


def _enumerate(processes: list[int]) -> str:
    numbers = ", ".join(str(number) for number in processes[:8]) + (", ..." if len(processes) > 8 else "")
    return f"process{'es' * (len(processes) > 1)} {numbers}"


def _capitalize(text: object) -> str:
    return str(text)[:1].upper() + str(text)[1:]

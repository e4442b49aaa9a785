"""Rendezvous: all processes of a job connect to process 0 before JAX is initialized.

Process 0 listens at the coordinator's address and the others report to it. If some are missing when the time is up, it
names them. The channels stay open: through them the liveness monitor learns that a process has died or hangs.

Anybody can connect to an open port. Whoever does not prove knowledge of the job's secret, within seconds and in one
short line, is disconnected, and nothing else happens.
"""

import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.errors import ConfigError, RunStopped
from headrace.core.json_text import parse_json
from headrace.core.units import format_list
from headrace.job.addresses import format_address, free_port, split_address
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import COORDINATOR, JOIN_SECONDS, SECRET

MAX_MESSAGE_BYTES = 1 << 20  # without an end of line: not a message of ours
SEND_SECONDS = 5.0  # a peer that no longer reads must not block us


class ChannelClosed(Exception):
    """The other end of a channel is closed, or sends something that is not a message."""


class Channel:
    """Small JSON messages between two processes, one per line, over a TCP socket.

    `send` may be called by any thread, `receive` by one.
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._socket, self._buffer, self._lock = connection, b"", threading.Lock()
        self.max_message_bytes = max_message_bytes
        # The messages are small and awaited: by default the kernel would hold each back to fill a packet.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_SECONDS)

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def addresses(self) -> tuple[str, str]:
        """Return the addresses of this end and of the other one, without ports."""
        ends = (self._socket.getsockname()[0], self._socket.getpeername()[0])
        return ends[0].removeprefix("::ffff:"), ends[1].removeprefix("::ffff:")  # IPv4 at a socket for both kinds

    def send(self, **message: object) -> None:
        """Send a message. One that cannot be sent is dropped; `receive` will raise ChannelClosed."""
        # Under a lock: the parts of two long messages must not mix in the stream.
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = SEND_SECONDS) -> list[dict[str, Any]]:
        """Wait for data and return the messages that are complete; ChannelClosed if the other end is gone."""
        # The timeout belongs to the socket, for both directions; it is set back for senders below.
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return []
        except OSError as error:
            raise ChannelClosed from error
        finally:
            with suppress(OSError):
                self._socket.settimeout(SEND_SECONDS)
        if not data:
            raise ChannelClosed
        # TCP is a stream: a message may arrive in pieces, or several at once.
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > self.max_message_bytes:
            raise ChannelClosed
        try:
            messages = [parse_json(line, self.max_message_bytes) for line in lines]
        except ValueError as error:
            raise ChannelClosed from error
        if not all(isinstance(message, dict) for message in messages):
            raise ChannelClosed
        return messages

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_NOTICE_SECONDS = 10.0  # of waiting before process 0 says whom it waits for
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# For connections that have not proved yet that they belong to the job.
_PROOF_SECONDS, _MAX_UNPROVED, _MAX_PROOF_BYTES = 10.0, 128, 4096


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A process of a job as people find it again: its number, its pid and its host."""

    process: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid}, host {self.host})"

    @classmethod
    def read(cls, value: object) -> "Peer":
        """Return a peer from what `to_dict` returned in another process; ChannelClosed if it is something else."""
        # Exact types: True is an int for isinstance, and would be a process number.
        if isinstance(value, dict) and {key: type(found) for key, found in value.items()} == _FIELDS:
            return cls(**value)
        raise ChannelClosed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


_FIELDS = {"process": int, "pid": int, "host": str}


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Result of a rendezvous: this process, its channels, and the address for JAX's coordination service.

    Process 0 has a channel to every other process; the others have one, to process 0. `jax_bind` is the one address at
    which process 0's service has to listen, None for all of its host.
    """

    me: Peer
    channels: Mapping[Channel, Peer]
    jax_address: str
    jax_bind: str | None = None


def rendezvous(info: ProcessInfo) -> Connections:
    """Connect to the other processes; RunStopped, naming those that are missing, after the time limit."""
    me = Peer(process=info.process, pid=os.getpid(), host=socket.gethostname())
    return _RendezvousServer(info, me).wait_for_all() if info.is_first else _report_to_first(info, me)


def _proof(secret: str, *facts: object) -> str:
    """Return what only a process that knows the secret can compute; the secret itself is not sent."""
    # Over all facts of the message and both random numbers: neither can be replayed, nor a process number be changed
    # on the way.
    return hmac.new(secret.encode(), json.dumps(facts, sort_keys=True).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class _Stranger:
    """A connection that has not proved yet that it belongs to the job."""

    challenge: str
    since: float


class _RendezvousServer:
    """Process 0's side: where the others report."""

    def __init__(self, info: ProcessInfo, me: Peer) -> None:
        self._info, self._me = info, me
        self._joined: dict[Channel, Peer] = {}
        self._strangers: dict[Channel, _Stranger] = {}  # oldest first
        self._num_refused = 0
        self._host, port = split_address(info.coordinator, COORDINATOR)
        # Its address is that of mpirun, which need not be the host of process 0.
        if info.detected_by == "Open MPI":
            _check_is_this_host(self._host, me)
        self._listeners = _listen(self._host, port)
        if not info.secret and self._host not in _LOOPBACK:
            _warn(
                f"no {SECRET} is set: whoever reaches {info.coordinator} while processes join can take a place. "
                "Set it to the same random text for all processes"
            )

    def wait_for_all(self) -> Connections:
        """Wait until every process has reported; then send all of them the address of JAX's coordination service."""
        begin, noticed = time.monotonic(), False
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for listener in self._listeners:
                stack.enter_context(listener)
                selector.register(listener, selectors.EVENT_READ)
            stack.callback(lambda: [channel.close() for channel in self._strangers])
            while missing := self._missing():
                waited = time.monotonic() - begin
                if waited > self._info.join_seconds:
                    self._refuse(self._too_late(missing))
                # Not at once: processes of one job start seconds apart.
                if waited > _NOTICE_SECONDS and not noticed:
                    noticed = True
                    _warn(f"waiting for {_enumerate(missing)} of {self._info.num_processes}")
                for key, _ in selector.select(min(1.0, self._info.join_seconds / 4)):
                    self._handle(key.fileobj, selector)
                self._drop_silent_strangers(selector)
        # Where all came through one address, JAX's service needs to listen at that one only.
        came = {channel.addresses[0] for channel in self._joined}
        bind = came.pop() if len(came) == 1 else ""
        port = free_port(bind)
        for channel in self._joined:
            channel.send(welcome=format_address(self._host, port), first=self._me.to_dict())
        jax_address = format_address(bind or self._host, port)
        return Connections(
            me=self._me, channels=self._joined, jax_address=jax_address, jax_bind=jax_address if bind else None
        )

    def _missing(self) -> list[int]:
        joined = {peer.process for peer in self._joined.values()}
        return [number for number in range(1, self._info.num_processes) if number not in joined]

    def _handle(self, source: Any, selector: selectors.BaseSelector) -> None:
        if source in self._listeners:
            self._accept(source, selector)
            return
        if source not in self._joined and source not in self._strangers:
            return  # dropped a moment ago, for one that is new
        try:
            for message in source.receive():
                self._admit(source, message)
        except ChannelClosed:
            self._drop(source, selector)
            if source in self._joined:
                peer = self._joined.pop(source)
                self._refuse(RunStopped(f"{_capitalize(peer)} ended while others were still joining."))

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            channel = Channel(listener.accept()[0], _MAX_PROOF_BYTES)
        except OSError:
            return  # it is gone already, or no descriptors are left: those of silent connections become free
        if len(self._strangers) >= _MAX_UNPROVED:
            self._drop(next(iter(self._strangers)), selector)  # a process of ours connects again
        self._strangers[channel] = stranger = _Stranger(secrets.token_hex(16), time.monotonic())
        selector.register(channel, selectors.EVENT_READ)
        channel.send(challenge=stranger.challenge)

    def _drop(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        selector.unregister(channel)
        channel.close()
        self._strangers.pop(channel, None)

    def _drop_silent_strangers(self, selector: selectors.BaseSelector) -> None:
        late = time.monotonic() - _PROOF_SECONDS
        for channel in [channel for channel, stranger in self._strangers.items() if stranger.since < late]:
            self._drop(channel, selector)

    def _admit(self, channel: Channel, message: dict[str, Any]) -> None:
        """Take a process into the job if it proves that it belongs to it; else ChannelClosed."""
        if channel in self._joined:
            raise ChannelClosed  # nothing is left to say before all have joined
        peer, size, nonce = Peer.read(message.get("member")), message.get("num_processes"), message.get("nonce")
        challenge, secret = self._strangers[channel].challenge, self._info.secret
        expected = _proof(secret, "member", challenge, nonce, peer.to_dict(), size)
        # compare_digest takes the same time for any wrong proof, so that it cannot be guessed letter by letter.
        if not hmac.compare_digest(expected.encode(), str(message.get("proof")).encode()):
            refused = f"{SECRET} of this process is not that of process 0 (mpirun passes it on with -x {SECRET})."
            channel.send(refused=refused, code=ConfigError.exit_code)
            self._num_refused += 1
            # Once: whoever scans ports must not fill the log of a job that waits.
            if self._num_refused == 1:
                _warn(f"refused a connection from {channel.addresses[1]}, which does not know {SECRET} of this job")
            raise ChannelClosed
        # Strangers may send a line of 4 KiB only: 128 of them cannot fill the memory of process 0.
        channel.max_message_bytes = MAX_MESSAGE_BYTES
        channel.send(admitted=_proof(secret, "first", challenge, nonce))
        duplicate = next((other for other in (self._me, *self._joined.values()) if other.process == peer.process), None)
        del self._strangers[channel]
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
            rule=f"All processes connect to {self._info.coordinator} before training starts."
            + (f" {self._num_refused} connections did not know {SECRET}." if self._num_refused else ""),
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
    deadline = time.monotonic() + info.join_seconds
    while True:
        channel = _connect(info, deadline)
        incoming = _incoming(channel)
        try:
            _introduce(channel, incoming, info, me)
            break
        except ChannelClosed:  # process 0 drops connections if there are too many
            channel.close()
            time.sleep(0.2)
        except RunStopped:
            channel.close()
            raise
    # Process 0 may have started to wait later than this process; its time limit counts, so wait for that long again.
    deadline = time.monotonic() + info.join_seconds + 10
    try:
        while time.monotonic() < deadline:
            message = next(incoming)
            if "refused" in message:
                raise _refusal(message)
            if "welcome" in message:
                first = Peer.read(message["first"])
                return Connections(me=me, channels={channel: first}, jax_address=message["welcome"])
    except ChannelClosed:
        raise RunStopped("Process 0 ended before all processes had joined.", remedy="See what it printed.") from None
    raise RunStopped(f"Process 0 at {info.coordinator} does not answer.", remedy="See what it printed.")


def _incoming(channel: Channel) -> Iterator[Mapping[str, Any]]:
    """Yield messages as they come, and an empty one after each second without any."""
    while True:
        yield from channel.receive(1.0) or [{}]


def _introduce(channel: Channel, incoming: Iterator[Mapping[str, Any]], info: ProcessInfo, me: Peer) -> None:
    """Prove to process 0 that this process belongs to the job, and have it prove the same."""
    nonce, expected = secrets.token_hex(16), ""
    # Whatever listens there may accept a connection and never speak.
    deadline = time.monotonic() + _PROOF_SECONDS
    while time.monotonic() < deadline:
        if not (message := next(incoming)):
            continue
        if "refused" in message:
            raise _refusal(message)
        if isinstance(challenge := message.get("challenge"), str):
            proof = _proof(info.secret, "member", challenge, nonce, me.to_dict(), info.num_processes)
            channel.send(member=me.to_dict(), num_processes=info.num_processes, nonce=nonce, proof=proof)
            expected = _proof(info.secret, "first", challenge, nonce)
        elif expected and hmac.compare_digest(expected.encode(), str(message.get("admitted")).encode()):
            return
        else:
            raise RunStopped(
                f"What answers at {info.coordinator} is not process 0 of this job: it does not know {SECRET}.",
                remedy=f"Choose another address for all processes: {COORDINATOR}=HOST:PORT.",
            )
    raise ChannelClosed


def _refusal(message: Mapping[str, object]) -> RunStopped:
    error = RunStopped(str(message["refused"]))
    code = message.get("code")
    error.exit_code = code if isinstance(code, int) else RunStopped.exit_code
    return error


def _connect(info: ProcessInfo, deadline: float) -> Channel:
    host, port = split_address(info.coordinator, COORDINATOR)
    reason = "it closes the connection"
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


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen at the addresses of this host that a name or address stands for, without waiting in `accept`."""
    listeners: list[socket.socket] = []
    try:
        for address in _own_addresses(host):
            if not address and socket.has_dualstack_ipv6():
                listeners.append(socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True))
            else:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listeners.append(socket.create_server((address, port), family=family))
            listeners[-1].setblocking(False)  # who connected may be gone again before it is accepted
        return listeners
    except OSError as error:
        raise RunStopped(
            f"Process 0 cannot listen at port {port}: {error.strerror}.",
            rule="The processes of a job connect to this port; two jobs need two ports.",
            remedy=f"Choose another one for all processes: {COORDINATOR}={host}:PORT.",
        ) from error


def _own_addresses(host: str) -> list[str]:
    """Return the addresses to listen at; [""], all of this host, where those that others use are not known here."""
    if host in _LOOPBACK:
        return [host]
    try:
        found = list(dict.fromkeys(str(row[4][0]) for row in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)))
        for address in found:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.bind((address, 0))  # fails for an address that leads here through a router only
    except OSError:
        return [""]
    # Debian's /etc/hosts has 127.0.1.1 for the host's own name, for which others know another address.
    return [""] if any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found) else found


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
    return f"process{'es' * (len(processes) > 1)} {format_list(processes, 8)}"


def _warn(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)


def _capitalize(text: object) -> str:
    return str(text)[:1].upper() + str(text)[1:]

"""Strangers at the coordinator's port: whatever they send, the processes of the job join."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from headrace.core.errors import RunStopped
from headrace.job import rendezvous as module
from headrace.job.addresses import free_port
from headrace.job.process_info import ProcessInfo
from headrace.job.rendezvous import Connections, Peer, _own_addresses, rendezvous

SECRET = "only we know"
Send = Callable[[bytes], socket.socket]


def info(process: int, port: int, *, secret: str = SECRET, num_processes: int = 3, seconds: float = 30) -> ProcessInfo:
    return ProcessInfo(
        process=process,
        num_processes=num_processes,
        coordinator=f"127.0.0.1:{port}",
        detected_by="a test",
        secret=secret,
        join_seconds=seconds,
    )


class Joining(threading.Thread):
    """A process that joins, as a thread; `result` is what came of it."""

    def __init__(self, place: ProcessInfo) -> None:
        super().__init__(daemon=True)
        self.place = place
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = rendezvous(self.place)
        except Exception as error:
            self.result = error

    def end(self) -> Any:
        self.join(40)
        assert not self.is_alive(), "hangs"
        return self.result


@contextmanager
def listening(seconds: float = 30) -> Iterator[tuple[Joining, int, Send]]:
    """Let process 0 of three wait; yield it, its port, and a function that connects and sends bytes."""
    port, opened = free_port("127.0.0.1"), list[socket.socket]()
    first = Joining(info(0, port, seconds=seconds))

    def send(data: bytes) -> socket.socket:
        deadline = time.monotonic() + 10
        while True:
            with suppress(ConnectionRefusedError):
                opened.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                with suppress(OSError):  # it may hang up before it has read everything
                    opened[-1].sendall(data)
                return opened[-1]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    yield first, port, send
    for each in opened:
        each.close()


def assert_joins(first: Joining, port: int) -> None:
    """Join the two missing processes; all three are connected to one another and to nobody else."""
    others = [Joining(info(number, port)) for number in (1, 2)]
    found = first.end()
    assert isinstance(found, Connections), found
    assert sorted(peer.process for peer in found.channels.values()) == [1, 2]
    assert found.jax_bind == found.jax_address
    assert found.jax_address.startswith("127.0.0.1:")
    for other in others:
        result = other.end()
        assert isinstance(result, Connections), result
        assert result.jax_address == found.jax_address
        for channel in result.channels:
            channel.close()
    for channel in found.channels:
        channel.close()


def member(process: object, **more: object) -> bytes:
    body = {"member": {"process": process, "pid": 1, "host": "evil"}, "num_processes": 3, "nonce": "n", "proof": "p"}
    return json.dumps(body | more).encode() + b"\n"


HOSTILE = {
    "nothing": b"",
    "deep JSON": b"[" * 200_000 + b"\n",
    "deep JSON within the limit": b'{"member":' + b"[" * 2000 + b"\n",
    "a list for a number": member([]),
    "a forged member": member(1),
    "a forged member without a proof": b'{"member": {"process": 1, "pid": 1, "host": "x"}, "num_processes": 3}\n',
    "a member that is a list": b'{"member": [1]}\n',
    "true for a number": member(True),
    "an oversized line": b"x" * 3_000_000,
    "half a line": b'{"member": {"process": 1',
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(200),
    "zeros": bytes(5000),
    "not UTF-8": b"\xff\xfe{}\n",
    "half a surrogate pair": b'{"member": "\\ud800", "proof": "\\udfff"}\n',
    "a proof that is no text": member(1, proof={"a": [1]}),
    "numbers out of range": member(10**400, num_processes=-1),
    "infinity": b'{"member": {"process": Infinity, "pid": NaN, "host": ""}}\n',
    "the words of process 0": b'{"welcome": "127.0.0.1:1", "refused": "go away", "code": 3, "admitted": "x"}\n',
    "the words of a member": b'{"failed": "x", "lost": "y", "done": true}\n',
    "many lines": b"{}\n" * 100_000,
}


def test_hostile_bytes_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as (first, port, send):
        for data in HOSTILE.values():
            send(data)
        reset = send(b"{")
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        assert_joins(first, port)
    printed = capsys.readouterr().err
    assert printed.count("refused a connection from 127.0.0.1, which does not know HEADRACE_SECRET") == 1
    assert "Traceback" not in printed


def test_many_silent_connections_do_not_keep_the_members_out() -> None:
    with listening() as (first, port, send):
        for _ in range(module._MAX_UNPROVED + 150):
            send(b"{")
        assert_joins(first, port)


def test_who_sends_a_byte_now_and_then_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROOF_SECONDS", 0.5)
    with listening() as (first, port, send):
        slow, begin = send(b"{"), time.monotonic()
        with suppress(OSError):
            while time.monotonic() < begin + 10:
                slow.sendall(b" ")
                time.sleep(0.05)
        assert time.monotonic() < begin + 10, "it is still connected"
        assert_joins(first, port)


def test_a_proof_is_good_once() -> None:
    """What a process of the job sent is sent again, with the challenge of another connection."""
    with listening() as (first, port, send):
        one = send(b"")
        challenge = json.loads(one.recv(200))["challenge"]
        peer = Peer(process=1, pid=1, host="h").to_dict()
        proof = module._proof(SECRET, "member", challenge, "n", peer, 3)
        again = send(member(1, member=peer, proof=proof))
        answers = b"".join(iter(lambda: again.recv(1000), b""))
        assert b"HEADRACE_SECRET of this process is not that of process 0" in answers
        assert_joins(first, port)


def test_a_process_with_another_secret_is_told_so() -> None:
    with listening(seconds=4) as (first, port, _):
        other = Joining(info(1, port, secret="another"))
        assert "HEADRACE_SECRET of this process is not that of process 0" in str(other.end())
        assert other.result.exit_code == 2
        assert "1 connections did not know HEADRACE_SECRET" in str(first.end())


def test_a_stranger_in_the_place_of_process_0_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        joining = Joining(info(1, server.getsockname()[1], seconds=10))
        connection = server.accept()[0]
        connection.sendall(b'{"challenge": "c"}\n')
        connection.recv(4096)
        connection.sendall(b'{"admitted": "forged"}\n{"welcome": "127.0.0.1:1", "first": {}}\n')
        assert isinstance(joining.end(), RunStopped)
        assert "is not process 0 of this job" in str(joining.result)
        connection.close()


def test_the_addresses_that_are_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"me": ["127.0.0.1"], "debian": ["127.0.1.1"], "elsewhere": ["192.0.2.1"]}

    def look_up(host: str, *_: object, **__: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

    assert _own_addresses("127.0.0.1") == ["127.0.0.1"]
    assert _own_addresses("0.0.0.0") == ["0.0.0.0"]
    own = next(iter({str(row[4][0]) for row in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)}))
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert _own_addresses("debian") == _own_addresses("elsewhere") == _own_addresses("unknown") == [""]
    known["mine"] = [own]
    assert _own_addresses("mine") == ([""] if own.startswith("127.") else [own])

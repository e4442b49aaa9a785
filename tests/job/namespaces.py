"""Hosts made of Linux namespaces: each with its own host name, address, process numbers and ssh server, on one machine.

The cable between them is a program that forwards Ethernet frames between their TAP devices (`python -m
tests.job.namespaces`, started by `Hosts`): it can delay and lose frames, as `tc netem` would, which not every kernel
has, and it can be pulled. Nothing outside the new namespaces is changed.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

PROGRAMS = ("unshare", "nsenter", "ip", "mount", "hostname")
NETWORK = "10.77.0."
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_MOST_FRAME_BYTES = 65536


@cache
def why_not() -> str:
    """Return why this machine cannot have such hosts, "" if it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be used"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


_UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class Host:
    """One host: a first process in its own namespaces, whose end ends everything on it."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self._folder = name, address, folder
        self._start()

    def _start(self) -> None:
        setup = (
            f"hostname {self.name} && mount --bind {self._folder}/hosts /etc/hosts && mount -t tmpfs none /run && "
            "mkdir /run/sshd && ip link set lo up && echo up && exec sleep infinity"
        )
        self._first = subprocess.Popen([*_UNSHARE, "sh", "-c", setup], stdout=subprocess.PIPE)
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == b"up\n", f"host {self.name} did not start"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self.pid = int(children[0])

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a program on this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", "--", *words]

    def run(self, *words: str) -> str:
        """Run a program on this host; return what it prints."""
        done = subprocess.run(self.command(words), capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self, words: Sequence[str], output: Path, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a program on this host; what it prints is appended to a file."""
        with output.open("ab") as file:
            return subprocess.Popen(
                self.command(words), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **more}
            )

    def set_link(self, state: str) -> None:
        """Take this host's network device `down`, or `up` again."""
        self.run("ip", "link", "set", "eth0", state)

    def power_off(self) -> None:
        """End everything on this host at once, without a word to the others."""
        self.set_link("down")
        self._first.kill()
        self._first.wait()
        assert self._first.stdout is not None
        self._first.stdout.close()


class Hosts:
    """Hosts on one cable, while the block runs."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names, self._folder = names, folder
        self._cable: subprocess.Popen[bytes] | None = None
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> "Hosts":
        self._folder.mkdir(parents=True, exist_ok=True)
        addresses = {name: f"{NETWORK}{number}" for number, name in enumerate(self._names, 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        for name, address in addresses.items():
            self.hosts[name] = Host(name, address, self._folder)
        self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.power_off()
        self._disconnect()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def _connect(self) -> None:
        pids = [str(host.pid) for host in self.hosts.values()]
        command = [sys.executable, str(Path(__file__).resolve()), *pids]
        self._cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._cable.stdout is not None
        assert self._cable.stdout.readline() == b"up\n", "the cable could not be laid"
        for host in self.hosts.values():
            host.run("ip", "address", "replace", f"{host.address}/24", "dev", "eth0")
            host.set_link("up")

    def _disconnect(self) -> None:
        assert self._cable is not None
        self._cable.kill()
        self._cable.communicate()

    def impair(self, *, delay_seconds: float = 0.0, loss: float = 0.0) -> None:
        """Delay every frame from now on, and lose a share of them."""
        self._tell(f"quality {delay_seconds} {loss}")

    def pull(self, name: str) -> None:
        """Pull a host's cable: its device stays up, but no frame leaves or reaches it."""
        self._tell(f"pull {list(self.hosts).index(name)}")

    def plug(self, name: str) -> None:
        """Plug a host's cable in again."""
        self._tell(f"plug {list(self.hosts).index(name)}")

    def _tell(self, line: str) -> None:
        assert self._cable is not None
        assert self._cable.stdin is not None
        self._cable.stdin.write(line.encode() + b"\n")
        self._cable.stdin.flush()

    def restart(self, name: str) -> Host:
        """Start a host again after `power_off`."""
        self._disconnect()
        self.hosts[name] = Host(name, self.hosts[name].address, self._folder)
        self._connect()
        return self.hosts[name]

    def serve_ssh(self) -> None:
        """Let the user of one host log in at the others, without a password."""
        keys, user = self._folder / "ssh", self._folder / "ssh/user"
        if not user.exists():
            keys.mkdir()
            for name in ("host", "user"):
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
                subprocess.run(command, check=True)
            (keys / "client").write_text(
                f"Host *\n  IdentityFile {user}\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
                "  LogLevel ERROR\n"
            )
            (keys / "server").write_text(
                f"HostKey {keys}/host\nAuthorizedKeysFile {user}.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
                "PermitRootLogin yes\nPasswordAuthentication no\n"
            )
        for host in self.hosts.values():
            host.run("mount", "--bind", str(keys / "client"), "/etc/ssh/ssh_config")
            host.run("/usr/sbin/sshd", "-f", str(keys / "server"))


def _open_tap(pid: int) -> int:
    """Return the descriptor of a new device `eth0` in the network namespace of a process."""
    library = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as space:
        if library.setns(space.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"eth0", _TAP_WITHOUT_HEADER))
    return tap


def _carry(taps: Sequence[int]) -> None:
    """Forward every frame to all other hosts until standard input ends; obey its lines."""
    delay, loss, pulled = 0.0, 0.0, set[int]()
    waiting: list[tuple[float, int, int, bytes]] = []  # when it is due, its number, its target
    generator, number = random.Random(0), 0
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([0, *taps], [], [], pause)[0]:
            if source == 0:
                words = os.read(0, 4096).decode().split()
                if not words:
                    return
                if words[0] == "quality":
                    delay, loss = float(words[1]), float(words[2])
                else:
                    (pulled.add if words[0] == "pull" else pulled.discard)(int(words[1]))
                continue
            try:
                frame = os.read(source, _MOST_FRAME_BYTES)
            except OSError:  # its device is down
                time.sleep(0.001)
                continue
            for place, target in enumerate(taps):
                if target == source or {place, taps.index(source)} & pulled or generator.random() < loss:
                    continue
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay, number, target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            with suppress(OSError):  # a device that is down loses what it is sent
                os.write(target, frame)


if __name__ == "__main__":
    ends = [_open_tap(int(word)) for word in sys.argv[1:]]
    print("up", flush=True)
    _carry(ends)

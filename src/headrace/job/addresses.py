"""Addresses and ports of a job, and lists of hosts."""

import re
import socket

from headrace.core.errors import ConfigError

FIRST_PORT, NUM_PORTS = 61440, 4096  # above the ephemeral ports of Linux (32768 to 60999)
LOOPBACK = "127.0.0.1"


def job_port(number: int) -> int:
    """Return a port for a job, derived from a number that all its processes know."""
    return FIRST_PORT + number % NUM_PORTS


def free_port(host: str = "") -> int:
    """Return a port that nobody uses now, on one address of this host or on all."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.getsockname()[1]


def format_address(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, name: str) -> tuple[str, int]:
    """Return host and port of an address; errors call it `name`."""
    # From the right: an IPv6 address has colons of its own.
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{name} is {text!r}.",
            rule="An address is a host, a colon and a port from 1 to 65535.",
            remedy=f"For example {name}=node0:61440.",
        )
    return host, int(port)


def expand_hosts(text: str, name: str) -> list[str]:
    """Return the hosts of a list in Slurm's notation: `a,b`, `node[01-03,7]`, `rack[1-2]n[1-4]`."""
    if text.count("[") != text.count("]") or not text.strip(", "):
        raise ConfigError(f"{name} is {text!r}: not a list of hosts.", remedy="An example: node[01-03,07],other.")
    parts = re.split(r",(?![^\[]*\])", text)  # commas outside brackets
    return [host for part in parts if part for host in _expand(part.strip(), name)]


def _expand(part: str, name: str) -> list[str]:
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        return [part]
    before, ranges, after = found.groups()
    numbers = [number for entry in ranges.split(",") for number in _numbers(entry, name)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expand(after, name)]


def _numbers(entry: str, name: str) -> list[str]:
    """Return the numbers of `07` or `08-11`, zero-padded like the first one."""
    first, _, last = entry.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"{name} has the range [{entry}].", rule="A range of hosts is ascending, such as [08-11].")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]

"""Addresses of hosts as schedulers write them: lists such as `node[01-03,7],gpu5`, and ports that a job agrees on."""

import re

from headrace.core.errors import ConfigError

FIRST_PORT, NUM_PORTS = 61440, 4096  # above the ports that Linux hands out by itself (32768 to 60999)


def port_of(number: int) -> int:
    """Return the port of a job from a number that all its processes know."""
    return FIRST_PORT + number % NUM_PORTS


def address(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, name: str) -> tuple[str, int]:
    """Return host and port of an address; `name` says in errors where it came from."""
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
    """Return the hosts of a list as Slurm writes it: `a,b`, `node[01-03,7]`, `rack[1-2]n[1-4]`."""
    if text.count("[") != text.count("]") or not text.strip(", "):
        raise ConfigError(f"{name} is {text!r}: not a list of hosts.", remedy="It looks like node[01-03,07],other.")
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
    """Return the numbers of `07` or `08-11`, with the zeros in front that the first has."""
    first, _, last = entry.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"{name} has the range [{entry}].", rule="Ranges of hosts go up, such as [08-11].")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]

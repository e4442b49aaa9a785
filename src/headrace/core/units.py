"""Numbers with units, as people write and read them: bytes, durations, counts. Text of another form is a ValueError."""

import re
from collections.abc import Iterable

BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

_NUMBER = r"(\d[\d,_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)"


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes from '2GiB', '512 MB', '4096' or a whole number."""
    found = re.fullmatch(_NUMBER + r"\s*([A-Za-z]*)", str(text).strip())
    unit = BYTE_UNITS.get((found[2] or "B").upper()) if found else None
    if found is None or unit is None:
        raise ValueError(
            f"{text!r} is not a number of bytes such as 4096, 512MB or 2GiB (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)"
        )
    number = found[1].replace(",", "").replace("_", "")
    # Whole numbers stay whole: a float counts bytes exactly only up to 2^53.
    return round((int(number) if number.isdigit() else float(number)) * unit)


def format_bytes(num_bytes: float) -> str:
    """Return bytes in the binary unit that keeps the number below 1024, such as '1.5 GiB'."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while round(abs(value), 1) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str | float) -> float:
    """Return seconds from '10m', '1h30m', '90 s', '2 h 05 min' or a number of them."""
    words = str(text).strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", words)
    # Everything must have been read, and a number without a unit stands alone.
    is_whole = re.fullmatch(r"(\d+(\.\d+)?\s*[a-z]*\s*)+", words) is not None
    if not is_whole or any((unit or "s") not in _SECONDS or (not unit and len(parts) > 1) for _, unit in parts):
        raise ValueError(f"{text!r} is not a time such as 90s, 10m or 1h30m (s, m, h, d)")
    return sum(float(number) * _SECONDS[unit or "s"] for number, unit in parts)


def format_duration(seconds: float) -> str:
    """Return a duration with the detail a reader wants: '85 us', '12.3 ms', '4.2 s', '2 min 05 s', '1 h 02 min'."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min"


def format_list(items: Iterable[object], most: int) -> str:
    """Return the first items, and how many more there are: 'a, b and 3 more'."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")


def format_percent(share: float | None) -> str:
    """Return a share as percent with two digits, '91.25 %'; a dash where there is none."""
    return "-" if share is None else f"{100 * share:.2f} %"


def format_measured(value: float) -> str:
    """Return a measured time or rate with about three digits: '0.42', '12.3', '2,010'."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def format_count(count: float, *, short: bool = False) -> str:
    """Return a count with thousands marked, '25,557,032', or in short, '25.6 M'."""
    if not short or round(abs(count)) < 1000:
        return f"{count:,.0f}"
    value, units = float(count), ["", "k", "M", "G", "T"]
    while round(abs(value), 1) >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.1f} {units[0]}".strip()

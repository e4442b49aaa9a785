"""Numbers with units, as people write and read them: bytes, durations, counts, rates. A wrong text is a ValueError."""

import re

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
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}

_NUMBER = r"(\d[\d,_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)"


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes from '2GiB', '512 MB', '4096' or a whole number."""
    found = re.fullmatch(_NUMBER + r"\s*([A-Za-z]*)", str(text).strip())
    unit = BYTE_UNITS.get((found[2] or "B").upper()) if found else None
    if found is None or unit is None:
        raise ValueError(
            f"{text!r} is not a number of bytes such as 4096, 512MB or 2GiB (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)"
        )
    return round(_number(found[1]) * unit)


def format_bytes(num_bytes: float) -> str:
    """Return bytes in the binary unit that keeps the number below 1024, such as '1.5 GiB'."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while round(abs(value), 1) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def parse_duration(text: str | float) -> float:
    """Return seconds from '90', '1.5s', '250ms', '2min' or '1h 30min'."""
    words = str(text).strip()
    if re.fullmatch(_NUMBER, words):
        return float(_number(words))
    part = _NUMBER + r"\s*(us|ms|min|s|h|d)\s*"
    if not re.fullmatch(f"(?:{part})+", words):
        raise ValueError(f"{text!r} is not a duration such as 90, 1.5s, 2min or 1h30min (us, ms, s, min, h, d)")
    return float(sum(_number(number) * SECONDS[unit] for number, unit in re.findall(part, words)))


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


def parse_count(text: str | int) -> int:
    """Return a whole number from '50000', '50,000', '50k', '1.28M' or '1e6'."""
    found = re.fullmatch(_NUMBER + r"\s*([A-Za-z]?)", str(text).strip())
    unit = COUNT_UNITS.get(found[2].lower()) if found else None
    value = _number(found[1]) * unit if found and unit else None
    if value is None or abs(value - round(value)) > 1e-9 * value:
        raise ValueError(f"{text!r} is not a whole number such as 50000, 50k or 1.28M")
    return round(value)


def format_count(count: float, *, short: bool = False) -> str:
    """Return a count with thousands marked, '25,557,032', or in short, '25.6 M'."""
    if not short or round(abs(count)) < 1000:
        return f"{count:,.0f}"
    value, units = float(count), ["", "k", "M", "G", "T"]
    while round(abs(value), 1) >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.1f} {units[0]}".strip()


def parse_rate(text: str | float) -> float:
    """Return the number per second of '6,870 images/s', '50k/s' or a plain number."""
    found = re.fullmatch(_NUMBER + r"\s*([kKMGT]?)\s*(?:\w*/s(?:ec)?)?", str(text).strip())
    if found is None:
        raise ValueError(f"{text!r} is not a rate such as 6870, 6,870 images/s or 50k/s")
    return float(_number(found[1]) * COUNT_UNITS[found[2].lower()])


def format_rate(per_second: float, what: str = "images") -> str:
    """Return a rate with about three digits that matter: '6,870 images/s', '12.3 images/s', '0.40 images/s'."""
    decimals = 0 if abs(per_second) >= 99.95 else 1 if abs(per_second) >= 9.995 else 2
    return f"{per_second:,.{decimals}f} {what}/s"


def _number(text: str) -> float:
    plain = text.replace(",", "").replace("_", "")
    return int(plain) if plain.isdigit() else float(plain)

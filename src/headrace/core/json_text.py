"""JSON from files and other processes, with bounds: the standard reader recurses as deep as the text says."""

import json
from typing import Any

MAX_BYTES = 64 << 20
MAX_DEPTH = 64


def parse_json(text: str | bytes, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value; whatever is wrong with the text is a ValueError.

    Refused beside what is not JSON: more than `max_bytes`, nesting deeper than MAX_DEPTH, and halves of surrogate
    pairs, which no file can hold again. Memory: at most about 40 times the text (a text of empty lists).
    """
    if len(text) > max_bytes:
        raise ValueError(f"{len(text):,} bytes of JSON, more than {max_bytes:,}")
    try:
        value = json.loads(text)
        _refuse_deep(value)
        if "\\u" in (text if isinstance(text, str) else text.decode("latin1")):  # only an escape can write half a pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"JSON nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"JSON with a text that is not Unicode ({error.reason})") from None
    return value


def _refuse_deep(value: object) -> None:
    """Refuse nesting that code which walks the value could not bear."""
    # Level by level: recursion is what this protects other code from.
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"JSON nested deeper than {MAX_DEPTH} levels")

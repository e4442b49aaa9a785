"""Addresses that open something private: used as they are, and never written down.

A signed address holds its permission in its query (`?token=...`, `X-Amz-Signature`) or before its host. Options,
records, logs and messages have its hidden form alone, and only this process knows the whole one.
"""

import hashlib
import re

_ADDRESS = re.compile(r"(?i:https?)://[^\s#'\"<>]+")
_HIDDEN = re.compile(r"\?private=([0-9a-f]{12})$")
_whole: dict[str, str] = {}  # by the hidden form


def hide_addresses(text: str) -> str:
    """Return a text with every address in it without its query, its user and its password.

    The twelve digits in their place tell one address from another, and find its file in the cache.
    """
    return _ADDRESS.sub(lambda found: _hidden(found[0]), text)


def whole_address(address: str) -> str | None:
    """Return the address that was hidden, as far as this process knows it; what was not hidden as it is."""
    return address if digits_of(address) is None else _whole.get(address)


def digits_of(address: str) -> str | None:
    """Return the digits in a hidden address, None for any other."""
    found = _HIDDEN.search(address)
    return found[1] if found else None


def address_digits(address: str) -> str:
    """Return the digits that stand for an address, hidden or not."""
    return digits_of(address) or hashlib.sha256(address.encode()).hexdigest()[:12]


def _hidden(address: str) -> str:
    if digits_of(address) is not None:
        return address
    scheme, _, rest = address.partition("://")
    place, question, _ = rest.partition("?")
    host, slash, path = place.partition("/")
    _, at, host = host.rpartition("@")
    if not question and not at:
        return address
    hidden = f"{scheme}://{host}{slash}{path}?private={address_digits(address)}"
    _whole[hidden] = address
    return hidden

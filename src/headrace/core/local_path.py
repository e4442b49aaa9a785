"""Paths of this machine: one with a scheme, such as s3://, is refused where it is given, not made a folder `s3:`."""

import os
import re
from pathlib import Path

from headrace.core.errors import ConfigError

WEB = ("http", "https", "hf", "hf-hub", "hf_hub")  # what names of weights may begin with
# A Path of s3://bucket is s3:/bucket. One letter is a drive, and hf:OWNER/NAME has no slashes after its scheme.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/|(hf(?:[-_]hub)?):", re.IGNORECASE)


def local_path(text: str | os.PathLike[str], what: str = "The path") -> Path:
    """Return a path as given; one with a scheme is refused. `what` begins the message."""
    return Path(local_text(text, what))


def local_text(text: str | os.PathLike[str], what: str = "The path", accepted: tuple[str, ...] = ()) -> str:
    """Return a path's text; one with a scheme that is not accepted is refused."""
    text = os.fspath(text)
    scheme = scheme_of(text)
    if scheme and scheme not in accepted:
        plain = re.sub(r"^file:/+", "/", text, flags=re.IGNORECASE)
        raise ConfigError(
            f"{what} is {text}.",
            rule=f"Only paths of this machine work: {scheme}: is not supported."
            + (f" Weights may also begin with {', '.join(accepted[:3])}." if accepted else ""),
            remedy=f"Give {plain}." if scheme == "file" else "Copy the files, or mount them, and give a path here.",
        )
    return text


def scheme_of(text: str) -> str:
    """Return the scheme that a text begins with, in lower case, or an empty text."""
    found = _SCHEME.match(text)
    return (found[1] or found[2]).lower() if found else ""

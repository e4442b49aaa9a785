"""Paths of this machine, and addresses of stores: where only a path works, a scheme is refused at once."""

import os
import re
from pathlib import Path

from headrace.core.errors import ConfigError

# What addresses of places in stores begin with, before `://` (core/store.py).
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "https", "http", "memory")
WEB = (
    "http",
    "https",
    "hf",
    "hf-hub",
    "hf_hub",
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "memory",
)  # what names of weights may begin with
_ONLY = "Only paths of this machine work"
# A Path of s3://bucket is s3:/bucket. One letter is a drive, and hf:OWNER/NAME has no slashes after its scheme.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/|(hf(?:[-_]hub)?):", re.IGNORECASE)
_PATTERN = re.compile(r"[*?\[]|\{[^{}]*(?:,|\.\.)[^{}]*\}")  # as shells have them


def is_address(text: object) -> bool:
    """Say whether a text is the address of a place in a store."""
    return isinstance(text, str) and scheme_of(text) in STORES and "://" in text


def is_set_name(text: object) -> bool:
    """Say whether a text names a dataset of the Hugging Face hub or of TFDS: hf:OWNER/NAME, tfds:NAME."""
    return isinstance(text, str) and text.startswith(("hf:", "tfds:")) and "://" not in text


def is_pattern(text: object) -> bool:
    """Say whether a text is a pattern of files, and not the path of what is there."""
    return isinstance(text, str) and _PATTERN.search(text) is not None and not Path(text).expanduser().exists()


def local_path(text: str | os.PathLike[str], what: str = "The path") -> Path:
    """Return a path as given; one with a scheme is refused. `what` begins the message."""
    return Path(local_text(text, what))


def run_place(text: str) -> str:
    """Return the path or the address of a run."""
    return local_text(text, "The run", STORES)


def local_text(text: str | os.PathLike[str], what: str = "The path", accepted: tuple[str, ...] = ()) -> str:
    """Return a path's text; one with a scheme that is not accepted is refused."""
    text = os.fspath(text)
    scheme = scheme_of(text)
    if scheme in STORES and accepted is STORES and "://" in text:
        return text
    if scheme and (scheme not in accepted or accepted is STORES):
        plain = re.sub(r"^file:/+", "/", text, flags=re.IGNORECASE)
        raise ConfigError(
            f"{what} is {text}.",
            rule=f"{'Paths of this machine work, and addresses of stores' if accepted is STORES else _ONLY}: {scheme}: "
            f"is {'none' if accepted is STORES else 'not supported'}."
            + (f" Weights may also begin with {', '.join(accepted[:3])}." if accepted is WEB else ""),
            remedy=f"Give {plain}."
            if scheme == "file"
            else f"Known are {', '.join(f'{name}://' for name in STORES)}; as a text, since a Path loses a slash."
            if accepted is STORES
            else "Copy the files, or mount them, and give a path here.",
        )
    return text


def scheme_of(text: str) -> str:
    """Return the scheme that a text begins with, in lower case, or an empty text."""
    found = _SCHEME.match(text)
    return (found[1] or found[2]).lower() if found else ""

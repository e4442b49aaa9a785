"""Signed addresses are used and never written down; names from elsewhere stay inside their folder."""

from pathlib import Path

import pytest

from headrace.core.addresses import address_digits, hide_addresses, whole_address
from headrace.core.files import path_inside

SIGNED = "https://bucket.example/w.pth?token=SECRET&X-Amz-Signature=abc"


@pytest.mark.parametrize(
    "address",
    [
        SIGNED,
        "https://user:SECRET@host.example/w.pth",
        "HTTP://user@host/",
        "https://host?SECRET",
        f"{SIGNED}#sha256=00",
    ],
)
def test_what_is_private_in_an_address_is_hidden_and_still_known(address: str) -> None:
    hidden = hide_addresses(address)
    assert "SECRET" not in hidden
    assert "user" not in hidden
    assert "?private=" in hidden
    assert hide_addresses(hidden) == hidden
    plain, _, fragment = hidden.partition("#")
    assert whole_address(plain) == address.partition("#")[0]
    assert fragment == address.partition("#")[2]
    # the digits, by which the cache finds the file, do not depend on who hid it
    assert address_digits(plain) == address_digits(address.partition("#")[0])


def test_addresses_inside_a_text() -> None:
    words = hide_addresses(f"--weights={SIGNED} and 'https://a.example/b?c' but not https://a.example/b.pth")
    assert "SECRET" not in words
    assert "b?c" not in words
    assert words.endswith("' but not https://a.example/b.pth")
    assert words.startswith("--weights=https://bucket.example/w.pth?private=")


def test_another_process_knows_the_hidden_form_alone() -> None:
    assert whole_address("https://host.example/w.pth?private=0123456789ab") is None
    assert whole_address("https://host.example/w.pth") == "https://host.example/w.pth"


@pytest.mark.parametrize("name", ["a", "a.b", "refs/pr/1", "v1..2", "x" * 255])
def test_names_inside_a_folder(name: str, tmp_path: Path) -> None:
    assert path_inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/etc/passwd", "a/../../b", "a//b", "a/", "..\\b", "a\x00b", "a\nb", "x" * 256, "\u00e4" * 128],
)
def test_names_that_could_lead_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name of a file"):
        path_inside(tmp_path, name)

"""Units: known texts to known numbers and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.units import (
    format_bytes,
    format_count,
    format_duration,
    format_measured,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2147483648),
        ("512MB", 512000000),
        ("512 MB", 512000000),
        ("1.5KiB", 1536),
        ("1kB", 1000),
        ("0.5 tib", 549755813888),
        ("4096", 4096),
        ("4_096", 4096),
        ("1e3", 1000),
        (7, 7),
        ("0", 0),
        (2**63, 9223372036854775808),
    ],
)
def test_parse_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2G", "-1", "2 GiBs", "two", "1.2.3", "nan", "inf", "2GiB2"])
def test_bytes_that_are_none(text):
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048570, "1.0 MiB"),
        (1610612736, "1.5 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**44))
def test_formatted_bytes_read_back_within_their_digits(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.0000854, "85 us"),
        (0.0123, "12.3 ms"),
        (0.9999, "999.9 ms"),
        (0.99999, "1.0 s"),
        (4.21, "4.2 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (90000, "25 h 00 min"),
        (-2, "-2.0 s"),
    ],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_format_count():
    assert format_count(25557032) == "25,557,032"
    assert format_count(25557032, short=True) == "25.6 M"
    assert format_count(999, short=True) == "999"
    assert format_count(999960, short=True) == "1.0 M"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4249, "0.42"), (9.994, "9.99"), (9.996, "10.0"), (12.34, "12.3"), (99.96, "100"), (2009.6, "2,010")],
)
def test_a_measured_number_has_about_three_digits(value, text):
    assert format_measured(value) == text

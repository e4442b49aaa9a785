"""Units: known texts to known numbers and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_rate,
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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("2min", 120),
        ("1h30min", 5400),
        ("1 h 02 min", 3720),
        ("1d", 86400),
        (3, 3),
    ],
)
def test_parse_duration(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1m", "h", "1h30", "-5s", "abc"])
def test_durations_that_are_none(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@given(st.integers(0, 3599))
def test_formatted_whole_seconds_read_back_exactly(seconds):
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "count"),
    [("50000", 50000), ("50,000", 50000), ("50k", 50000), ("1.28M", 1280000), ("1e6", 1000000), (3, 3)],
)
def test_parse_count(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "1.5", "0.0001k", "x", "-3", "3q"])
def test_counts_that_are_none(text):
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


def test_format_count():
    assert format_count(25557032) == "25,557,032"
    assert format_count(25557032, short=True) == "25.6 M"
    assert format_count(999, short=True) == "999"
    assert format_count(999960, short=True) == "1.0 M"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(6870.4, "6,870 images/s"), (99.96, "100 images/s"), (12.34, "12.3 images/s"), (0.4, "0.40 images/s")],
)
def test_rates(rate, text):
    assert format_rate(rate) == text
    assert parse_rate(text) == pytest.approx(rate, rel=0.005)


def test_rates_with_units_and_wrong_ones():
    assert parse_rate("50k/s") == 50000
    assert parse_rate(12) == 12
    with pytest.raises(ValueError, match="rate"):
        parse_rate("fast")

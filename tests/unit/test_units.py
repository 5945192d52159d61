"""Sizes, counts and durations read as people write them and come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import BadDuration, BadSize, UsageError
from legroom.units import exact_size, format_duration, format_size, parse_count, parse_duration, parse_size

MB, GB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64m", 64 * MB), ("64MB", 64 * MB), ("64 MiB", 64 * MB), ("64M", 64 * MB), ("64mib", 64 * MB),
        ("1.5GiB", 3 * GB // 2), ("8G", 8 * GB), ("8gb", 8 * GB), ("1t", 1 << 40), ("2P", 2 << 50), ("1E", 1 << 60),
        ("512", 512), ("512b", 512), ("512 bytes", 512), ("1 byte", 1), ("0", 0), (".5k", 512), ("  10K ", 10240),
        ("5.75MB", 6029312), ("0.1", 1), (12345, 12345), (np.int64(600_000), 600_000),
    ],
)  # fmt: skip
def test_reads_what_people_type(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "m", "-1", "1e3", "64X", "64 M B", "1,5G", "1..5G", "٣G", "64mbb", "nan", "inf", True, 1.5]
)
def test_refuses_what_has_no_meaning(text: str) -> None:
    with pytest.raises(BadSize) as caught:
        parse_size(text)
    assert "64MB" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_negative_numbers_are_refused() -> None:
    for bad in (-1, -(1 << 40), np.int32(-1)):
        with pytest.raises(BadSize):
            parse_size(bad)
        with pytest.raises(BadSize):
            exact_size(bad)


@pytest.mark.parametrize(
    ("text", "count"),
    [("125M", 125 * 10**6), ("1.5B", 1_500_000_000), (" 7b ", 7 * 10**9), ("2t", 2 * 10**12), ("12", 12)],
)
def test_counts_of_parameters_are_decimal(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "-1", "1.5GB", "1e9"])
def test_what_is_not_a_count_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a number of parameters"):
        parse_count(text)


@given(st.integers(0, 1 << 70))
def test_exact_text_reads_back_exactly(count: int) -> None:
    assert parse_size(exact_size(count)) == count


@given(st.integers(0, 1 << 70))
def test_text_for_people_is_within_half_a_percent_and_stable(count: int) -> None:
    text = format_size(count)
    back = parse_size(text)
    assert abs(back - count) <= count / 200 + 1
    assert format_size(back) == text


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_order_is_kept(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert parse_size(format_size(small)) <= parse_size(format_size(large))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KB"), (64 * MB, "64 MB"), (276 * MB, "276 MB"), (3 * GB // 2, "1.5 GB"),
     (GB - 1, "1 GB"), (6029312, "5.75 MB"), (-3 * MB, "-3 MB"), (1 << 72, "4096 EB")],
)  # fmt: skip
def test_prints_three_digits(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 10), ("10s", 10), ("7d", 604800), ("1h30m", 5400), ("1h 30min", 5400), ("500ms", 0.5), ("2 weeks", 1209600),
     ("1.5 hours", 5400), ("90 seconds", 90), ("0", 0), (2.5, 2.5), (3, 3.0)],
)  # fmt: skip
def test_reads_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "x", "5 5", "-1s", "1y", "h", float("nan"), float("inf"), -1.0, True])
def test_refuses_durations_without_meaning(text: str) -> None:
    with pytest.raises(BadDuration):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0 ms"), (0.85, "850 ms"), (1, "1 s"), (9.94, "9.9 s"), (12.3, "12 s"), (59.7, "1 min"), (365, "6 min 5 s"),
     (3600, "1 h"), (5400, "1 h 30 min"), (273600, "3 d 4 h"), (-5, "-5 s")],
)  # fmt: skip
def test_prints_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 1e9))
def test_printed_durations_read_back_close(seconds: float) -> None:
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= max(0.05 * seconds, 0.0006)

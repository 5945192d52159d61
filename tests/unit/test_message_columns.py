"""Text by columns: Chinese takes two a character, breaks without spaces, and English is wrapped as ever."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.messages import cells, cut, fill, left, right

CHINESE = "/dev/shm 为 64 MB，是容器的默认值：带 worker 进程的数据加载器会在这里失败（Bus error）。"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abc", 3), ("内存", 4), ("，", 2), ("█░", 2), ("e\u0301", 1), ("\x1b[31m内存\x1b[0m", 4), ("", 0)],
)
def test_columns_of_a_text(text: str, expected: int) -> None:
    assert cells(text) == expected


def test_padding_counts_columns() -> None:
    assert left("未知", 8) == "未知    " and right("未知", 8) == "    未知"
    assert left("unknown", 8) == "unknown " and right("too long a text", 3) == "too long a text"


@pytest.mark.parametrize(("columns", "expected"), [(6, "内存余"), (5, "内存…"), (4, "内…"), (1, "…")])
def test_a_cut_line_fits_its_columns(columns: int, expected: str) -> None:
    assert cut("内存余", columns) == expected


@given(st.text(alphabet="ab ，。（）内存x/-", min_size=1), st.integers(12, 40))
def test_no_line_is_wider_and_nothing_is_lost(text: str, columns: int) -> None:
    shown = fill(text, columns, "  做：", "      ")
    lines = shown.splitlines()
    unbroken = max((len(word) for word in text.split()), default=0)
    assert all(cells(line) <= max(columns, 6 + 2 * unbroken) for line in lines)
    assert "".join(shown.split()) == "做：" + "".join(text.split())


def test_chinese_breaks_anywhere_but_before_a_closing_mark() -> None:
    for columns in range(20, 60):
        lines = fill(CHINESE, columns, "", "").splitlines()
        assert all(cells(line) <= columns for line in lines), lines
        assert all(line[0] not in "，。：）" and line[-1] not in "（" for line in lines), lines
        assert "worker" in " ".join(lines) and "Bus" in " ".join(lines)


def test_english_is_wrapped_as_it_was() -> None:
    text = "start the container again with: docker run --shm-size=2G and a-very-long-option=" + "x" * 90
    expected = textwrap.fill(
        text, width=60, initial_indent="  do:  ", subsequent_indent="       ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    assert fill(text, 60, "  do:  ", "       ") == expected

"""Which lines of a source fill a name; no process, nothing is run."""

from __future__ import annotations

import pytest

from legroom.leak.lines_that_fill_containers import fill_lines, lines_for, passing_lines

SOURCE = """\
history = []
def train(self, total):
    history.append(1)
    self.cache[step] = x
    total += loss
    total = total + loss
    out, hidden = model(x, hidden)
    seen[name].append(out)
    groups.setdefault(key, []).append(out)
    results.put(out)
    helper(kept, out)
    print(len(kept))
    fresh = []
    text: str = text + "more"
    self.losses += [loss]
    first, *rest = rest
def other():
    history.extend(more)
"""


@pytest.mark.parametrize(
    ("word", "lines"),
    [("history", [3, 18]), ("cache", [4]), ("total", [5, 6]), ("hidden", [7]), ("seen", [8]), ("groups", [9]),
     ("results", [10]), ("text", [14]), ("losses", [15]), ("rest", [16]), ("fresh", []), ("kept", [])],
)  # fmt: skip
def test_lines_that_fill_a_name(word: str, lines: list[int]) -> None:
    assert lines_for(SOURCE, word) == lines


def test_the_function_of_a_local_variable_comes_first() -> None:
    assert lines_for(SOURCE, "history", "other") == [18]
    assert lines_for(SOURCE, "history", "elsewhere") == [3, 18]


def test_sums_and_hidden_states_are_made_from_themselves() -> None:
    assert lines_for(SOURCE, "total", itself=True) == [5, 6]
    assert lines_for(SOURCE, "hidden", itself=True) == [7]
    assert lines_for(SOURCE, "history", itself=True) == []


def test_a_list_that_is_passed_to_a_function() -> None:
    assert passing_lines(SOURCE, "kept") == [11]  # not print, nor len
    assert passing_lines(SOURCE, "history") == []


@pytest.mark.parametrize("source", ["", "def (", "\0", "x = " + "(" * 5000])
def test_a_source_that_cannot_be_parsed_fills_nothing(source: str) -> None:
    assert fill_lines(source) == () and passing_lines(source, "x") == []


def test_a_part_that_has_a_name_of_its_own_is_filled_where_that_name_is() -> None:
    source = (
        "class Errors:\n"
        "    def add(self, name, text):\n"
        "        bucket = self.by_class.setdefault(name, [])\n"
        "        bucket.append(text)\n"
        "    def read(self, name):\n"
        "        bucket = self.by_class[name]\n"
        "        return len(bucket)\n"
        "def other(bucket):\n"
        "    bucket.append(1)\n"
    )
    assert lines_for(source, "by_class") == [4]


def test_what_a_call_returns_is_not_a_part_of_it() -> None:
    assert (
        lines_for("def f():\n    out = model(x)\n    out.append(1)\n    rows = []\n    rows.append(2)\n", "model") == []
    )
    assert lines_for("cache.setdefault(k, 1)\n", "cache") == [1]

"""Which lines of a source fill a name; no process, nothing is run."""

from __future__ import annotations

import pytest

from legroom.leak.lines_that_fill_containers import fill_lines, line_that_added, lines_for, passing_lines

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


def test_only_lines_that_fill_that_entry_of_a_dict() -> None:
    source = 'log["a"].append(1)\nlog["b"][0].append(2)\nlog.setdefault("a", []).append(3)\nlog[key].append(4)\n'
    assert lines_for(source, "log") == [1, 2, 3, 4]
    assert lines_for(source, "log", entry="a") == [1, 3, 4]
    assert lines_for(source, "log", entry="b") == [2, 4]


ADDED = """\
loss = criterion(model(x), y)
keep.append(loss)
keep.append(torch.ones(
    size,
))
big = [
    make(),
]
for one in loader:
    keep.append(one)
    log.keep(big)
class Log:
    def name(self, text):
        self.rows.append(text)
    def keep(self, value):
        part = value[0]
        self.rows.append(part)
    def both(self, first, second):
        self.rows.append(first)
        self.rows.append(second)
log.both(make(), make())
"""


@pytest.mark.parametrize(
    ("frames", "line"),
    [([1], 2), ([4], 3), ([3], 3), ([9], 10), ([7], 17), ([16], 17), ([21], None), ([99, 4], 3), ([99], None), ([], None)],
)  # fmt: skip
def test_the_line_that_added_an_object_made_in_these_lines(frames: list[int], line: int | None) -> None:
    assert line_that_added(ADDED, [2, 3, 10, 14, 17, 19, 20], frames) == line

"""Every error has a code of its own, says what, why and what to do, and crosses process borders whole."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest

from legroom.errors import (
    DatasetOutOfMemory,
    LegroomError,
    MissingKey,
    NoRoom,
    RaggedBatch,
    RemoteError,
    TransferDamaged,
    UnknownFormat,
    UsageError,
)
from legroom.messages import cells, speak


def _all(kind: type[LegroomError] = LegroomError) -> list[type[LegroomError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _all(child))]


def test_codes_are_unique_and_well_formed() -> None:
    codes = [kind.code for kind in _all()]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", code) for code in codes)


@pytest.mark.parametrize("kind", _all())
def test_reads_as_a_few_lines_and_survives_pickling(kind: type[LegroomError]) -> None:
    error = kind("it broke", why="3 of 4 MB", fix=("do this", "or that"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == f"it broke [{kind.code}]\n  why: 3 of 4 MB\n  do:  do this\n  do:  or that"
    assert again.as_dict() == {
        "code": kind.code, "message": "it broke", "why": "3 of 4 MB", "fix": ["do this", "or that"],
    }  # fmt: skip


@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_attributes_of_one_error_go_with_it(again: Callable[[LegroomError], LegroomError]) -> None:
    full = DatasetOutOfMemory("it broke")
    full.pool, full.taken, full.found, full.loader = "shm", 5, True, {"batch_size": 8}
    given = [
        RemoteError("x", status=403), TransferDamaged("x", path="s3://a/b", digest="0f"),
        UnknownFormat("x", converts=True), full,
    ]  # fmt: skip
    for error in given:
        error.add_note("while reading")
        assert vars(again(error)) == vars(error), type(error)


def test_exit_statuses() -> None:
    assert UsageError("x").exit_status == 2
    assert NoRoom("x").exit_status == 1


def test_a_missing_key_is_still_a_key_error() -> None:
    with pytest.raises(KeyError) as caught:
        raise MissingKey("no 'imgaes'", fix=("did you mean 'images'?",))
    assert str(caught.value).startswith("no 'imgaes' [missing-key]")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_further_lines_stand_below_the_first(language: str) -> None:
    speak(language)
    _, *lines = str(UsageError("x", why="A\nB", fix=("A\nB", "A"))).splitlines()
    columns = [cells(line[: line.index(line.lstrip()[-1])]) for line in lines]
    assert len(lines) == 5 and len(set(columns)) == 1, lines


def test_an_error_that_torch_makes_again_from_a_traceback_has_its_code_once() -> None:
    text = f"Caught RaggedBatch in DataLoader worker process 0.\nOriginal Traceback:\n{RaggedBatch('it broke', fix=('do',))}\n"
    assert str(RaggedBatch(text)) == text.rstrip("\n") and text.count("[ragged-batch]") == 1

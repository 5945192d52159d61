"""Garbage collections of a process and its workers: counted, postponed, expedited, predicted."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAD = """
import gc, os
from legroom.loader.measure.memory_copied_by_gc import ForkedCollections, young_until_full

def ran():
    return sum(of["collections"] for of in gc.get_stats())

def collect(times):
    for _ in range(times):
        before, objects = ran(), []
        while ran() == before:
            objects.append([])

def forked(times):
    pid = os.fork()
    if not pid:
        before = gc.get_stats()[2]["collections"]
        collect(times)
        os._exit(gc.get_stats()[2]["collections"] - before)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

kept = [[] for _ in range(200_000)]
"""
_DUE = "gc.freeze(); gc.collect(); gc.unfreeze(); collect(100)\n"  # a full collection comes within the cycle


def _run(program: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", _HEAD + program], capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_the_next_full_collection_is_predicted_and_the_process_stays_as_it_was() -> None:
    ahead, here, count, same = _run(
        f"{_DUE}before = gc.get_count(); ahead = young_until_full(); after = gc.get_count(); seen = []\n"
        "gc.callbacks.append(lambda phase, about: phase == 'stop' and seen.append(about['generation']))\n"
        "collect(150); print(ahead, seen.index(2) + 1, len(seen) > 2, before[1:] == after[1:])\n"
    )
    assert ahead == here and count == same == "True"


@pytest.mark.parametrize("state", ["gc.collect()", "gc.freeze(); gc.collect(); gc.unfreeze(); gc.disable()"])
def test_none_is_predicted_where_none_comes(state: str) -> None:
    """After a full collection of many objects the next one waits for new ones."""
    assert _run(f"{state}; print(young_until_full())") == ["None"]


def test_full_collections_are_postponed_in_forked_processes() -> None:
    assert _run(f"{_DUE}print(forked(40)); ForkedCollections(caller=False).postpone(); print(forked(40))") == ["1", "0"]


@pytest.mark.parametrize(("own", "theirs", "expected"), [(0, 0, "00"), (0, 1, "00"), (9, 1, "10"), (0, 9, "01")])
def test_those_that_collect_again_and_again_run_a_full_one_at_once(own: int, theirs: int, expected: str) -> None:
    """A worker that collects once or twice, at its start, is none of them."""
    found = _run(
        "gc.collect(); collect(3); of = ForkedCollections(caller=False); of.postpone(); of.forked()\n"
        f"forked({theirs}); collect({own}); print(of.go_on(workers=True, restarted=False)); of.expedite(); of.forked()\n"
        "theirs = forked(2); print(of.full(1)); before = gc.get_stats()[2]['collections']; collect(2)\n"
        "print(gc.get_stats()[2]['collections'] - before, theirs, of.full(1))\n"
    )
    full = "True" if expected in ("00", "01") else "False"
    assert found == [str(expected != "00"), full, *expected, "True"]


@pytest.mark.parametrize(("times", "expected"), [(3, False), (40, True)])
def test_workers_that_reach_the_next_full_collection_by_far_are_expected_to_run_it(times: int, expected: bool) -> None:
    found = _run(
        f"{_DUE}of = ForkedCollections(caller=False); of.postpone(); of.forked(); forked({times}); forked({times})\n"
        "print(of.go_on(workers=True, restarted=False), of.expected(2), of.expected(3), of.go_on(workers=False, restarted=False))"
    )
    assert found == ["True", str(expected), "False", "False"]


@pytest.mark.parametrize(
    ("left", "own", "theirs", "restarted", "expected"),
    [
        (1, 0, 2, True, True),  # two reach it: a script is one collection behind
        (1, 1, 1, True, True),  # workers of the next epoch inherit the main process's count
        (1, 1, 1, False, False),
        (9, 1, 2, True, False),
        (9, 3, 1, True, True),  # the main process goes on: it is due in a later epoch
        (121, 0, 1, True, True),  # a full one was just run: a script is just before it
    ],
)
def test_workers_that_collect_once_can_meet_a_full_collection_that_is_due(
    left: int, own: int, theirs: int, restarted: bool, expected: bool
) -> None:
    found = _run(
        f"{_DUE}collect(young_until_full() - {left} if {left} < 121 else young_until_full())\n"
        f"of = ForkedCollections(caller=False); of.postpone(); of.forked(); forked({theirs}); collect({own})\n"
        f"print(of.go_on(workers=True, restarted={restarted}))"
    )
    assert found == [str(expected)]


@pytest.mark.parametrize(("left", "expected"), [(7, True), (8, False)])
def test_the_program_of_a_dataset_object_goes_on_before_it_starts_its_workers(left: int, expected: bool) -> None:
    found = _run(
        f"{_DUE}collect(young_until_full() - {left}); of = ForkedCollections(caller=True); of.postpone(); of.forked()\n"
        "forked(2); print(of.go_on(workers=True, restarted=False))"
    )
    assert found == [str(expected)]


def test_this_interpreter_has_generations_and_the_question_changes_nothing() -> None:
    told = _run(
        "from legroom.loader.measure.memory_copied_by_gc import has_generations\n"
        "before = gc.get_count(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)\n"
        "print(has_generations())\n"
        "after = gc.get_count(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)\n"
        "print(before[1:] == after[1:] and before[0][1:] == after[0][1:])\n"
    )
    assert told[1] == "True"
    if sys.version_info < (3, 14):  # of later ones it is found out
        assert told[0] == "True"


_INCREMENTAL = """
import legroom.loader.measure.memory_copied_by_gc as module
module.has_generations = lambda: False
"""


@pytest.mark.parametrize(("own", "theirs"), [(9, 1), (0, 9), (9, 9), (1, 1)])
def test_of_another_collector_nothing_is_predicted_and_the_most_is_a_full_one_at_the_fork(
    own: int, theirs: int
) -> None:
    found = _run(
        f"{_INCREMENTAL}before = gc.get_threshold(); of = ForkedCollections(caller=False); of.postpone(); of.forked()\n"
        "print(before == gc.get_threshold())\n"
        f"forked({theirs}); collect({own}); print(of.go_on(workers=True, restarted=False), of.expected(1)); of.expedite()\n"
        "print(before == gc.get_threshold()); full = gc.get_stats()[2]['collections']; of.forked()\n"
        "print(gc.get_stats()[2]['collections'] - full); pid = os.fork()\n"
        "if not pid: os._exit(gc.get_stats()[2]['collections'] - full)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), of.full(1))\n"
    )
    mine, others = int(own > 2), int(theirs > 2)
    assert found == ["True", str(own + theirs > 2), "False", "True", str(mine), str(mine + others), "True"]


def test_what_a_program_has_frozen_stays_frozen() -> None:
    assert _run(
        "of = ForkedCollections(caller=False); gc.freeze(); before = gc.get_freeze_count(); of.postpone(); of.expedite()\n"
        "print(before == gc.get_freeze_count() > 0)"
    ) == ["True"]

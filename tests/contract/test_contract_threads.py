"""Every thread of the package is started where it was asked whether there is room for it.

Where ``ulimit -v`` leaves none, CPython's ``Thread.start()`` waits forever for a thread that could not begin.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "legroom"
HELPERS = SOURCES / "system" / "processes_and_threads.py"
ASKS = {"room_for_threads", "start_daemon_thread"}
STARTS = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}


def called(text: str) -> set[str]:
    """The last part of the name of everything that is called."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in calls}


def faults(text: str) -> set[str]:
    """What starts threads there without asking."""
    names = called(text)
    unasked = names & STARTS if not names & ASKS else set()
    return unasked | names & {"Thread", "Timer"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("threading.Thread(target=f).start()", {"Thread"}),
        ("room_for_threads(1)\nThread(target=f).start()", {"Thread"}),
        ("ThreadPoolExecutor(2)", {"ThreadPoolExecutor"}),
        ("if room_for_threads(2): ThreadPoolExecutor(2)", set()),
        ("start_daemon_thread(f, 'name')", set()),
    ],
)
def test_what_counts_as_a_fault(text: str, expected: set[str]) -> None:
    assert faults(text) == expected


def test_no_module_starts_a_thread_without_asking() -> None:
    modules = [path for path in SOURCES.rglob("*.py") if path != HELPERS]
    found = {str(path.relative_to(SOURCES)): faults(path.read_text(encoding="utf-8")) for path in modules}
    assert {name: what for name, what in found.items() if what} == {}

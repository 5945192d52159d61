"""Ends a test that pytest-timeout cannot interrupt, and prints where each thread was.

pytest-timeout raises an exception in the main thread, which prints its stack and fails the test. A main thread that waits
in C code, or has blocked the signal, does not get it. Such a process is ended here a minute later; pytest-xdist reports
the test as the one that crashed a worker, starts another worker and continues. pytest loads this file as a plugin
(tests/conftest.py).
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

GRACE = "hang_grace"
_STDERR = pytest.StashKey[int]()  # not the one that pytest captures


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(GRACE, "seconds after a test's timeout, after which the process is ended", default="60")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit = _limit(item)
    if limit:
        seconds = limit + float(item.config.getini(GRACE))
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)  # type: ignore[misc]
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit(item: pytest.Item) -> float:
    """The seconds that pytest-timeout gives the test; 0: no limit."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        return float(mark.kwargs.get("timeout", mark.args[0] if mark.args else 0))
    try:
        return float(item.config.getvalue("timeout") or item.config.getini("timeout") or 0)
    except (KeyError, ValueError):  # pytest-timeout is not installed
        return 0.0

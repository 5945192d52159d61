"""What every test shares: the rigs' switch, and a guard against leaving anything behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import rigs
from file_order import position
from forked_measurements import use_forks
from freed_memory import anonymous_bytes, return_freed_memory
from huge_pages import use_huge_pages

from killed_semaphores import remove_killed_semaphores
from legroom import messages

pytest_plugins = ["hang_limit", "load_sensitive"]
_BEGUN = time.time()

# Tests import helpers by their file names, from every folder here.
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")} - set(sys.path))

# Hundreds of processes import torch, and few are about the way they end: those tests use the fixture ordinary_exit.
QUICK_EXIT = str(Path(__file__).parent / "quick_exit")
if QUICK_EXIT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [QUICK_EXIT, os.environ.get("PYTHONPATH")]))

# `make test &` in a script and `nohup make test` ignore these signals for all children; tests send them to what they start.
for _ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_ignored) == signal.SIG_IGN:
        signal.signal(_ignored, signal.default_int_handler if _ignored == signal.SIGINT else signal.SIG_DFL)

try:
    from hypothesis import settings
except ImportError:  # `make gpu` needs pytest alone
    pass
else:
    # Speed is never asserted: on a busy machine an example may take its time.
    settings.register_profile("legroom", deadline=None)
    settings.load_profile("legroom")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, all else in its order."""
    items.sort(key=lambda item: position(item.path.name))


def pytest_collection_finish() -> None:
    """Take what importing made out of the collector's sight.

    With torch and hundreds of test modules loaded a full collection takes a good part of a second, and tests that
    look at lifetimes ask for many; what a test makes itself is collected as ever. Forks share more pages, too.
    """
    gc.collect()
    gc.freeze()
    use_huge_pages()  # thousands of forks follow


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # once, when all processes of the run have ended
        remove_killed_semaphores(_BEGUN)


@cache
def _why_not(need: str) -> str | None:
    return rigs.WHY_NOT[need]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a real test where its rig cannot be had; in CI as root that is a failure, not a skip."""
    for marker in item.iter_markers("real"):
        for need in marker.args:
            reason = _why_not(need)
            if reason is None:
                continue
            if os.environ.get("CI") and rigs.why_no_rigs() is None and need not in rigs.OPTIONAL:
                pytest.fail(f"the {need} rig must work in CI as root: {reason}", pytrace=False)
            pytest.skip(reason)


_OWN_LIMITS = {"real", "gpu", "nodes", "soak", "release"}  # folders whose tests choose /dev/shm or a disk themselves


@pytest.fixture(scope="session")
def _stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where the stores of tests are that name none, in memory and on disk: never those of the person who runs them."""
    folder = tmp_path_factory.mktemp("stores")
    # On a disk every page that a test writes is written back, and other tests wait for it.
    in_memory = tempfile.mkdtemp(prefix="tests-legroom-", dir="/dev/shm" if os.path.isdir("/dev/shm") else folder)
    yield in_memory, str(folder)
    for path in (in_memory, folder):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _freed_memory() -> Iterator[None]:
    """A file whose tests had much memory leaves none of it to the files that follow."""
    before = anonymous_bytes()
    yield
    if anonymous_bytes() > before + (64 << 20):
        return_freed_memory()


@pytest.fixture(autouse=True)
def _own_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test depends on the switches of the person who runs it, on their cached data, nor on the language."""
    for name in [name for name in os.environ if name.startswith("LEGROOM_")]:
        monkeypatch.delenv(name)
    if request.path.relative_to(Path(__file__).parent).parts[0] not in _OWN_LIMITS:
        stores = request.getfixturevalue("_stores")
        for name, folder in zip(("LEGROOM_SHM", "LEGROOM_DIR"), stores, strict=True):
            monkeypatch.setenv(name, folder)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("LANGUAGE", raising=False)
    messages.speak(messages.ENGLISH)
    yield
    messages.speak(messages.ENGLISH)
    os.environ.pop(messages.VARIABLE, None)  # --lang sets it for the processes that follow


@pytest.fixture
def ordinary_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python processes that a test starts end as everywhere, with a last garbage collection."""
    others = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != QUICK_EXIT]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(others))


@pytest.fixture
def child_in_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a named dataset, and run a trial, in a fork of this process, which has torch, not in one that imports it.

    Some tests do without: they show that a new process does the same.
    """
    use_forks(monkeypatch.setattr)

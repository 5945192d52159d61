"""How tests are run: which of them `make check` takes, in which order files begin, what is retried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from changed import nearest
from file_order import LONG

TESTS = Path(__file__).parents[1]

SOURCES = {
    "src/legroom/errors.py": "",
    "src/legroom/cache/__init__.py": "",
    "src/legroom/cache/store_directories.py": "from legroom.errors import LegroomError",
    "src/legroom/loader/worker.py": "def f():\n    return lazily('legroom.cache.store_directories')",
    "src/legroom/other.py": "import os",
    "src/legroom/cli/__init__.py": "",
    "src/legroom/cli/main.py": "def command(name):\n    return import_module(f'legroom.cli.{name}')",
    "src/legroom/cli/watch.py": "import os",
    "tests/unit/cache_scenario_process.py": "from legroom.cache import store_directories",
    "tests/unit/test_store.py": "import legroom.cache.store_directories",
    "tests/unit/test_stage.py": "from cache_scenario_process import ScenarioProcess",
    "tests/unit/test_worker.py": "from legroom.loader import worker",
    "tests/unit/test_other.py": "from legroom import other",
    "tests/unit/test_watch.py": "from legroom.cli.main import command",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["src/legroom/cache/store_directories.py"], ["test_store", "test_worker", "test_stage"]),
        (["src/legroom/errors.py"], ["test_store", "test_worker", "test_stage"]),
        (["tests/unit/cache_scenario_process.py"], ["test_stage"]),
        (["src/legroom/other.py", "tests/unit/test_store.py"], ["test_store", "test_other"]),
        (["src/legroom/cli/watch.py"], ["test_watch"]),
        (["docs/run.md", "src/legroom/gone.py"], []),
    ],
)
def test_the_tests_that_reach_a_change_nearest_first(changed: list[str], expected: list[str]) -> None:
    sources = {Path(name): text for name, text in SOURCES.items()}
    assert [path.stem for path in nearest(sources, {Path(name) for name in changed})] == expected


def test_every_file_that_begins_early_exists_once() -> None:
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name in LONG if names[name] != 1] == []
    assert len(set(LONG)) == len(LONG)


def test_helpers_have_names_of_their_own() -> None:
    """They are imported by these, from every folder of tests."""
    names = Counter(path.stem for path in TESTS.rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert [name for name, count in names.items() if count > 1] == []


def run(folder: Path, text: str, *flags: str) -> str:
    """What pytest prints about these tests, with the plugins for retries and for hangs alone."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "hang_limit", "-p", "load_sensitive", "-p", "no:cacheprovider", *flags],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize("flags", [(), ("-n", "1")])
def test_only_a_marked_test_is_retried_and_the_run_lists_it(tmp_path: Path, flags: tuple[str, ...]) -> None:
    text = """
import pathlib, pytest

def attempt(name):
    path = pathlib.Path(name)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())

@pytest.fixture
def fresh(tmp_path):
    yield attempt("fixture")

@pytest.mark.load_sensitive(reason="counts seconds")
def test_second(fresh):
    assert attempt("second") == 2 == fresh

@pytest.mark.load_sensitive(reason="never right")
def test_never():
    assert attempt("never") == 0

@pytest.mark.load_sensitive(reason="not needed")
def test_first():
    assert attempt("first") == 1

def test_unmarked():
    assert attempt("unmarked") == 2
"""
    said = run(tmp_path, text, *flags)
    assert "2 failed, 2 passed" in said
    assert "retried once, by the mark load_sensitive: 2" in said
    assert "passed: test_it.py::test_second: counts seconds; first failure: " in said
    assert "failed again: test_it.py::test_never: never right; first failure: " in said
    counts = {name: len((tmp_path / name).read_text()) for name in ("second", "never", "first", "unmarked")}
    assert counts == {"second": 2, "never": 2, "first": 1, "unmarked": 1}


def test_a_mark_without_a_reason_is_refused(tmp_path: Path) -> None:
    said = run(tmp_path, "import pytest\n@pytest.mark.load_sensitive\ndef test_it():\n    pass\n")
    assert 'test_it.py::test_it: load_sensitive needs reason="..."' in said


def test_a_test_that_hangs_is_reported_with_its_stack_and_the_others_run(tmp_path: Path) -> None:
    text = """
import signal, time, pytest

@pytest.mark.timeout(1)
@pytest.mark.load_sensitive(reason="a hang is not tried again")
def test_interrupted():
    time.sleep(600)

@pytest.mark.timeout(1)
def test_not_interrupted():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)

def test_after_them():
    pass
"""
    said = run(tmp_path, text, "-n", "1", "-o", "hang_grace=1", "-o", "timeout_method=signal")
    assert "2 failed, 1 passed" in said, said
    assert "Timeout (>1.0s) from pytest-timeout" in said and "crashed while running" in said
    assert re.search(r'test_it\.py", line 12 in test_not_interrupted', said), said  # its stack
    assert "retried" not in said


def test_on_a_gpu_machine_a_missing_package_stops_the_tests_of_its_file_alone(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "test_works.py").write_text("def test_works(): pass\n")
    flags = [
        "-c",
        str(TESTS / "gpu" / "pytest.ini"),
        "--rootdir",
        str(tmp_path),
        "--noconftest",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run([sys.executable, "-m", "pytest", *flags, str(tmp_path)], capture_output=True, text=True)
    assert "1 passed" in done.stdout and "1 error" in done.stdout, done.stdout

"""Runs torch's own tests of its DataLoader with ``legroom.DataLoader`` in its place.

    make test-torch-suite TORCH_TESTS=path/to/pytorch/test

The tests are those of the torch source tree of the installed version. They are divided among several processes, because
most of their time is spent waiting. What fails runs once more alone, and then with torch's own class: a test that fails
there too says nothing about ours. Exits with 1 if any other test fails that is not in EXCEPTIONS, or did not run.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

SUITE = "test_dataloader"
LIMIT_S = 3600  # a test; test_proper_exit takes minutes on an idle machine
LONG = ("test_proper_exit", "multiprocessing")  # begun first
JOBS = int(os.environ.get("LEGROOM_TORCH_JOBS", "4"))
JOIN_S = 600.0  # how long the tests wait for a process: their 60 s fail on a busy machine, whatever the class
FOLDER, WITH_TORCHS_CLASS = "LEGROOM_TORCH_TESTS", "LEGROOM_TORCH_SUITE_PLAIN"
# The end of a test's id -> whether it is excused here; why: docs/dataloader.md
EXCEPTIONS: dict[str, Callable[[], bool]] = {"test_partial_workers": lambda: torch.cuda.is_available()}

# Also in the processes that the tests spawn: they import this file before they unpickle anything.
import torch.utils.data  # noqa: E402

if os.environ.get(WITH_TORCHS_CLASS) != "1":
    import legroom

    torch.utils.data.DataLoader = legroom.DataLoader  # type: ignore[misc]
sys.path.insert(0, os.environ.get(FOLDER, "."))

# Some tests run a program of their own as "python -c".
SITE = f"""import sys
if any("from torch.utils.data import" in word for word in sys.orig_argv):
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import torch_suite
"""


class Result(unittest.TextTestResult):
    """The usual result, with the time of each test, a limit for it, and the names of those that ended."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.finished: list[str] = []

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LIMIT_S)
        self._began = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        signal.alarm(0)
        self.stream.writeln(f"    {time.monotonic() - self._began:.1f} s")
        self.stream.flush()
        self.finished.append(test.id())
        super().stopTest(test)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the test took more than {LIMIT_S} s")


def tests() -> list[unittest.TestCase]:
    """Every test of the module, those that take long first."""
    module = importlib.import_module(SUITE)
    module.JOIN_TIMEOUT = JOIN_S  # type: ignore[attr-defined]
    kinds = [
        one for one in vars(module).values() if isinstance(one, type) and issubclass(one, unittest.TestCase)
    ]
    found: list[Any] = []
    for kind in kinds:
        if kind.__module__ == SUITE:
            found += unittest.defaultTestLoader.loadTestsFromTestCase(kind)
    order = {test.id(): [name in test.id() for name in LONG] for test in found}
    return sorted(found, key=lambda test: order[test.id()], reverse=True)


def run_here(ids: Collection[str]) -> dict[str, str]:
    """Run these tests in this process; what came of each."""
    chosen = unittest.TestSuite(test for test in tests() if test.id() in ids)
    result: Any = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=Result).run(chosen)
    came = dict.fromkeys(result.finished, "ok")
    came |= {test.id(): "skipped" for test, _ in result.skipped}
    came |= {test.id(): "failed" for test, _ in [*result.failures, *result.errors]}
    # torch expects it to fail, with its own class: that it works is no fault.
    came |= {test.id(): "unexpected success" for test in result.unexpectedSuccesses}
    return came


def run_apart(ids: Collection[str], name: str, **environment: str) -> dict[str, str]:
    """The same in a process of its own, which writes to ``name``.log; a test that did not end is not in the result."""
    came = Path(f"{name}.json")
    came.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--here", str(came), *ids]
    with open(f"{name}.log", "w") as log:
        subprocess.run(command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)
    return dict(json.loads(came.read_text())) if came.exists() else {}


def passes(test: str, name: str, **environment: str) -> bool:
    """Whether that test passes alone."""
    return run_apart([test], name, **environment).get(test) in ("ok", "skipped", "unexpected success")


def main(wanted: list[str], folder: str) -> int:
    ids = [test.id() for test in tests() if not wanted or any(one in test.id() for one in wanted)]
    shares = [ids[number::JOBS] for number in range(JOBS) if ids[number::JOBS]]
    names = [str(Path(folder, f"part-{number}")) for number in range(len(shares))]
    print(f"{len(ids)} tests in {len(shares)} processes: {folder}/part-*.log", flush=True)
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(run_apart, shares, names))
    came = {test: result for part in parts for test, result in part.items()}
    for name in names:
        print(Path(f"{name}.log").read_text())
    left = []
    for test in ids:
        if came.get(test) in ("ok", "skipped", "unexpected success"):
            continue
        alone = str(Path(folder, test))
        if any(test.endswith(name) and excused() for name, excused in EXCEPTIONS.items()):
            print(f"{test}: a known exception")
        elif passes(test, alone):
            came[test] = "ok"
            print(f"{test}: passes alone")
        elif not passes(test, alone + "-torch", **{WITH_TORCHS_CLASS: "1"}):
            print(f"{test}: fails with torch's own class too")
        else:
            print(Path(f"{alone}.log").read_text())
            print(f"{test}: FAILS")
            left.append(test)
    counts = Counter(came.get(test, "did not end") for test in ids)
    print(
        f"torch {torch.__version__}: {len(ids)} tests, {dict(counts)}, {len(left)} fail because of our class"
    )
    return int(bool(left))


if __name__ == "__main__":
    if FOLDER not in os.environ:
        raise SystemExit(f"{FOLDER} is not set: run  make test-torch-suite TORCH_TESTS=path/to/pytorch/test")
    os.environ["PYTORCH_TEST_WITH_SLOW"] = "1"
    faulthandler.register(
        signal.SIGUSR1, all_threads=True
    )  # where a test that does not end stands: kill -USR1
    if sys.argv[1:2] == ["--here"]:
        path = Path(sys.argv[2])
        found = run_here(sys.argv[3:])
        path.write_text(json.dumps(found))
        raise SystemExit(0)
    with tempfile.TemporaryDirectory(prefix="legroom-torch-suite-") as site:
        Path(site, "sitecustomize.py").write_text(SITE)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        raise SystemExit(main(sys.argv[1:], site))

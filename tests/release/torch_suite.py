"""Runs torch's own tests of its DataLoader with ``legroom.DataLoader`` in its place.

    make test-torch-suite TORCH_TESTS=path/to/pytorch/test

The tests are those of the torch source tree of the installed version. They are divided among several processes, because
most of their time is spent waiting. What fails runs once more alone, and then with torch's own class: a test that fails
there too says nothing about ours. A test that hangs is not tried again. Exits with 1 if any other test fails that is not
in EXCEPTIONS, hangs, did not run, or is skipped with our class only.
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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

SUITE = "test_dataloader"
LIMIT_S = 3600  # a test; test_proper_exit takes minutes on an idle machine
LONG = ("test_proper_exit", "multiprocessing")  # begun first
JOBS = int(os.environ.get("LEGROOM_TORCH_JOBS", "4"))
JOIN_S = 600.0  # how long the tests wait for a process: their 60 s fail on a busy machine, whatever the class
FOLDER, WITH_TORCHS_CLASS = "LEGROOM_TORCH_TESTS", "LEGROOM_TORCH_SUITE_PLAIN"
FAILED, HUNG, AS_TORCH = "failed", "hung", "as with torch's class"
# torch expects some tests to fail, with its own class: that they work is not a fault.
PASSED = ("ok", "skipped", "unexpected success")
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
    """The usual result, with a limit for each test and its time; what came of each is written to a file at once."""

    def __init__(self, *arguments: Any, file: Path, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._file, self._came = file, dict[str, str]()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self._note(test, HUNG)  # unless it ends
        self._before = self._counts()
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LIMIT_S)
        self._began = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        signal.alarm(0)
        took = time.monotonic() - self._began
        self.stream.writeln(f"    {took:.1f} s")
        self.stream.flush()
        more = [now > before for now, before in zip(self._counts(), self._before, strict=True)]
        failed, skipped, unexpected = more
        if failed:
            self._note(test, HUNG if took >= JOIN_S else FAILED)
        else:
            self._note(test, "skipped" if skipped else "unexpected success" if unexpected else "ok")
        super().stopTest(test)

    def _counts(self) -> tuple[int, int, int]:
        return len(self.failures) + len(self.errors), len(self.skipped), len(self.unexpectedSuccesses)

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        self._came[test.id()] = outcome
        self._file.write_text(json.dumps(self._came))


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the test took more than {LIMIT_S} s")


def tests() -> list[unittest.TestCase]:
    """Every test of the module, those that take long first."""
    module = importlib.import_module(SUITE)
    module.JOIN_TIMEOUT = JOIN_S  # type: ignore[attr-defined]
    kinds = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, unittest.TestCase)]
    found: list[Any] = []
    for kind in kinds:
        if kind.__module__ == SUITE:
            found += unittest.defaultTestLoader.loadTestsFromTestCase(kind)
    order = {test.id(): [name in test.id() for name in LONG] for test in found}
    return sorted(found, key=lambda test: order[test.id()], reverse=True)


def run_here(ids: Collection[str], file: Path) -> None:
    """Run these tests in this process; what came of each is written to ``file``."""
    chosen = unittest.TestSuite(test for test in tests() if test.id() in ids)
    kind: Any = partial(Result, file=file)
    unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=kind).run(chosen)


def run_apart(ids: Collection[str], name: str, **environment: str) -> dict[str, str]:
    """The same in a process of its own, which writes to ``name``.log; a test that did not begin is not in the result."""
    came = Path(f"{name}.json")
    came.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--here", str(came), *ids]
    with open(f"{name}.log", "w") as log:
        subprocess.run(command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)
    return dict(json.loads(came.read_text())) if came.exists() else {}


def alone(test: str, name: str, **environment: str) -> str:
    """What comes of that test alone."""
    return run_apart([test], name, **environment).get(test, FAILED)


def judged(first: str | None, again: Callable[[], str], with_torch: Callable[[], str]) -> tuple[str, str]:
    """(what a test counts as, what to print), from its result among others.

    A failure may come from the load of the machine, so the test runs again alone. A hang is not excused by a second run
    that ends: it may be a race, which hangs one time in hundreds.
    """
    if first in PASSED:
        return first, ""
    second = HUNG if first == HUNG else again()
    if second in PASSED:
        return second, "passes alone"
    if with_torch() == second:
        return AS_TORCH, f"{second} with torch's own class too"
    return second, "HANGS" if second == HUNG else "FAILS"


def only_ours_skips(skipped: list[str], name: str) -> list[str]:
    """Which of these tests torch's own class does not skip."""
    with_torch = run_apart(skipped, name, **{WITH_TORCHS_CLASS: "1"}) if skipped else {}
    return [test for test in skipped if with_torch.get(test) != "skipped"]


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
        name = str(Path(folder, test))
        if came.get(test) not in PASSED and any(
            test.endswith(end) and excused() for end, excused in EXCEPTIONS.items()
        ):
            came[test], note = "excepted", "a known exception"
        else:
            came[test], note = judged(
                came.get(test),
                partial(alone, test, name),
                partial(alone, test, f"{name}-torch", **{WITH_TORCHS_CLASS: "1"}),
            )
        if came[test] in (FAILED, HUNG):
            left.append(test)
            if Path(f"{name}.log").exists():
                print(Path(f"{name}.log").read_text())
        if note:
            print(f"{test}: {note}", flush=True)
    skipped = [test for test in ids if came[test] == "skipped"]
    for test in only_ours_skips(skipped, str(Path(folder, "skipped-torch"))):
        came[test] = FAILED
        left.append(test)
        print(f"{test}: SKIPPED WITH OUR CLASS ONLY", flush=True)
    print(
        f"torch {torch.__version__}: {len(ids)} tests, {dict(Counter(came[test] for test in ids))}, "
        f"{len(left)} fail because of our class"
    )
    return int(bool(left))


if __name__ == "__main__":
    if FOLDER not in os.environ:
        raise SystemExit(f"{FOLDER} is not set: run  make test-torch-suite TORCH_TESTS=path/to/pytorch/test")
    os.environ["PYTORCH_TEST_WITH_SLOW"] = "1"
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where a test that does not end stands: kill -USR1
    if sys.argv[1:2] == ["--here"]:
        run_here(sys.argv[3:], Path(sys.argv[2]))
        raise SystemExit(0)
    with tempfile.TemporaryDirectory(prefix="legroom-torch-suite-") as site:
        Path(site, "sitecustomize.py").write_text(SITE)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        raise SystemExit(main(sys.argv[1:], site))

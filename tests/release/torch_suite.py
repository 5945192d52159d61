"""Runs torch's own tests of its DataLoader with ``legroom.DataLoader`` in its place.

    make test-torch-suite TORCH_TESTS=path/to/pytorch/test

The tests are those of the torch source tree of the installed version. What fails runs once more alone, and then with
torch's own class: a test that fails there too says nothing about ours. Exits with 1 if any other test fails that is not
in EXCEPTIONS.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

SUITE = "test_dataloader"
LIMIT_S = 1800  # a test; test_proper_exit takes minutes on an idle machine
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
    """The usual result, with a time limit for each test."""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LIMIT_S)

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        signal.alarm(0)
        super().stopTest(test)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the test took more than {LIMIT_S} s")


def tests(wanted: list[str]) -> unittest.TestSuite:
    """Every test of the module, or those with these ids."""
    module = importlib.import_module(SUITE)
    module.JOIN_TIMEOUT = JOIN_S  # type: ignore[attr-defined]
    kinds = [
        one for one in vars(module).values() if isinstance(one, type) and issubclass(one, unittest.TestCase)
    ]
    found = unittest.TestSuite()
    for kind in kinds:
        if kind.__module__ == SUITE:
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(kind):
                if not wanted or any(one in test.id() for one in wanted):
                    found.addTest(test)
    return found


def again(failed: str, **environment: str) -> bool:
    """Whether that test passes alone, in a process of its own."""
    command = [sys.executable, __file__, "--once", failed]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True).returncode == 0


def main(arguments: list[str]) -> int:
    once, wanted = arguments[:1] == ["--once"], [one for one in arguments if one != "--once"]
    result: Any = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=Result).run(tests(wanted))
    bad = [test.id() for test, _ in [*result.failures, *result.errors]] + [
        test.id() for test in result.unexpectedSuccesses
    ]
    if once or not bad:
        return int(bool(bad))
    left = []
    for test in bad:
        if any(test.endswith(name) and excused() for name, excused in EXCEPTIONS.items()):
            print(f"{test}: a known exception")
        elif again(test):
            print(f"{test}: passes alone")
        elif not again(test, **{WITH_TORCHS_CLASS: "1"}):
            print(f"{test}: fails with torch's own class too")
        else:
            print(f"{test}: FAILS")
            left.append(test)
    print(f"{result.testsRun} tests, {len(result.skipped)} skipped, {len(left)} fail because of our class")
    return int(bool(left))


if __name__ == "__main__":
    if FOLDER not in os.environ:
        raise SystemExit(f"{FOLDER} is not set: run  make test-torch-suite TORCH_TESTS=path/to/pytorch/test")
    os.environ["PYTORCH_TEST_WITH_SLOW"] = "1"
    faulthandler.register(
        signal.SIGUSR1, all_threads=True
    )  # where a test that does not end stands: kill -USR1
    with tempfile.TemporaryDirectory(prefix="legroom-torch-suite-") as site:
        Path(site, "sitecustomize.py").write_text(SITE)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        raise SystemExit(main(sys.argv[1:]))

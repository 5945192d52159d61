"""What runs the tests: CI is set, so that a real test which is skipped where it could run fails; every path exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
RUN = REPO / ".ci" / "run"


@pytest.mark.parametrize(("before", "told"), [(None, "1"), ("", "1"), ("true", "true")])
def test_ci_is_set_for_the_tests(before: str | None, told: str, tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$CI $*"\n')
    make.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({} if before is None else {"CI": before})
    done = subprocess.run([RUN], env=environment, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == f"{told} test\n"


def test_every_test_file_that_the_makefile_names_exists() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "-B", "unit", "test-torch", "test-torch-suite", "gpu", "soak", "bench"],
        cwd=REPO, capture_output=True, text=True, check=True,
    )  # fmt: skip
    named = set(re.findall(r"(?<![\w/])(?:tests|bench|docs)/[\w/]+(?:\.(?:py|sh|ini)\b)?", shown.stdout))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (REPO / path).exists()] == []


def test_make_gpu_finds_the_helpers_of_its_tests() -> None:
    """It has a configuration of its own, and no test of it runs without a GPU."""
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu"], cwd=REPO, capture_output=True, text=True, check=True
    )
    words = shlex.split(shown.stdout.replace("\\\n", " "))
    flags = words[words.index("pytest") + 1 : words.index("-m", words.index("pytest"))]
    files = ["tests/gpu/test_gpu_docs.py", "tests/real/test_real_cache_kills.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "--collect-only", "-q", *files],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO / "src")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "test_real_cache_kills.py::" in done.stdout, done.stdout + done.stderr

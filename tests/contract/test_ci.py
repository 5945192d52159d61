"""What runs every test says that it does: a real test that is skipped where it could run fails then."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"


@pytest.mark.parametrize(("before", "told"), [(None, "1"), ("", "1"), ("true", "true")])
def test_ci_is_said_to_the_tests(before: str | None, told: str, tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$CI $*"\n')
    make.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({} if before is None else {"CI": before})
    done = subprocess.run([RUN], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{told} test\n"

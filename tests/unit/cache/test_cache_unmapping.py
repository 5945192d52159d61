"""A map may go away at any moment of its pre-fault: the thread that fills pages must never read what is unmapped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shared cache is Linux's")

CHURN = """
import random, sys, time, legroom
random.seed(0)
for number in range(400):
    data = legroom.open(sys.argv[1])
    if number % 3:
        time.sleep(random.random() * 0.006)
    del data  # in the middle of its pre-fault, most times
"""


def test_maps_that_go_while_they_are_filled(tmp_path: Path) -> None:
    source = tmp_path / "a.npy"
    np.save(source, np.zeros((96, 1 << 20), np.uint8))
    os.utime(source, (1e9, 1e9))
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    import tempfile

    with tempfile.TemporaryDirectory(prefix="legroom-test-", dir=memory) as shm:
        env = {**os.environ, "LEGROOM_SHM": shm, "LEGROOM_DIR": str(tmp_path)}
        command = [sys.executable, "-c", CHURN, str(source)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

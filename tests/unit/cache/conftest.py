"""Stores of the test's own: nothing here touches the user's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared-memory store's directory; the disk store is beside it."""
    for variable, name in (("LEGROOM_SHM", "shm"), ("LEGROOM_DIR", "disk")):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(folder))
    return tmp_path / "shm" / f"legroom-{os.geteuid()}"


@pytest.fixture
def disk(shm: Path, tmp_path: Path) -> Path:
    return tmp_path / "disk" / f"legroom-{os.geteuid()}"


@pytest.fixture
def npy(tmp_path: Path) -> Callable[..., Path]:
    """Writes an .npy file, old enough that its stamp is believed."""

    def write(name: str = "a.npy", array: Any = None) -> Path:
        path = tmp_path / name
        np.save(path, np.arange(5000, dtype=np.int32).reshape(500, 10) if array is None else array)
        return path

    return write


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stamps are believed at once, as those of files that have been quiet for a while are."""
    from legroom.cache import source_digest_records

    monkeypatch.setattr(source_digest_records, "QUIET_NS", 0)

"""Stores of the test's own, and nothing remembered of another test's servers."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.cache import source_digest_records
from legroom.remote import remote_errors_and_retries


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared-memory store's directory; the disk store is beside it. Retries do not wait long."""
    for variable, name in (("LEGROOM_SHM", "shm"), ("LEGROOM_DIR", "disk")):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr(source_digest_records, "_here", {})
    monkeypatch.setattr(remote_errors_and_retries, "_FIRST_PAUSE", 0.01)
    return tmp_path / "shm" / f"legroom-{os.geteuid()}"


@pytest.fixture
def npy() -> Callable[[Any], bytes]:
    """The bytes of an .npy file."""

    def encoded(array: Any) -> bytes:
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()

    return encoded

"""Where there are no file locks the data come all the same, without being shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import legroom
from legroom.cache import locks, mapped_files_and_checksums, source_stamps_and_digests


def test_without_locks_data_are_read_into_the_process(shm: Path, npy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SUPPORTED", False)
    path = npy()
    data = legroom.open(path)
    assert data.info.backing == "memory"
    assert (data["array"] == np.load(path)).all()
    assert not shm.exists()


def test_without_preadv_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)) * 5000)
    before = source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([path]), "md5")
    monkeypatch.delattr(mapped_files_and_checksums.os, "preadv", raising=False)
    assert source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([path]), "md5") == before

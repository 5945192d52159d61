"""What is remembered about sources, and when it is believed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

import legroom
from legroom.cache import source_digest_records, source_stamps_and_digests
from legroom.cache.store_directories import open_stores

pytestmark = pytest.mark.usefixtures("old_files")


def two(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for number, path in enumerate(paths):
        np.save(path, np.full(1000, number))
        legroom.open(path).close()
    return paths


def right(paths: list[Path]) -> bool:
    return all((legroom.open(path)["array"] == number).all() for number, path in enumerate(paths))


def record_of(shm: Path, path: Path) -> Path:
    return shm / "sources" / source_stamps_and_digests.stamp_source([path]).name


def test_two_records_that_were_swapped_are_not_believed(shm: Path, tmp_path: Path) -> None:
    paths = two(tmp_path)
    one, other = (record_of(shm, path) for path in paths)
    spare = one.with_name("spare")
    os.rename(one, spare)
    os.rename(other, one)
    os.rename(spare, other)
    assert right(paths)
    assert right(paths)


@pytest.mark.parametrize("call", ["close", "rename"])
def test_a_record_that_cannot_be_written_leaves_no_file(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    two(tmp_path)
    before = sorted(os.listdir(shm / "sources"))
    really = os.close

    def refuse(*given: int, **_: object) -> None:
        if call == "close":
            really(given[0])
        raise OSError(errno.ENOSPC, "full")

    with open_stores() as places:
        store = places.found[0]
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            with pytest.raises(OSError, match="full"):
                source_digest_records.replace_record(store, "x", b"x")
        assert sorted(os.listdir(shm / "sources")) == before


def test_a_record_copied_to_another_name_is_not_believed(shm: Path, tmp_path: Path) -> None:
    paths = two(tmp_path)
    one, other = (record_of(shm, path) for path in paths)
    other.write_bytes(one.read_bytes())
    assert right(paths)


def test_no_changed_byte_of_a_record_is_believed(shm: Path, tmp_path: Path) -> None:
    paths = two(tmp_path)
    source = source_stamps_and_digests.stamp_source([paths[0]])
    record = record_of(shm, paths[0])
    whole = record.read_bytes()
    with open_stores() as places:
        store = places.found[0]
        assert source_digest_records.read_record(store, source) is not None
        for at in range(len(whole)):
            record.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert source_digest_records.read_record(store, source) is None, at
            record.write_bytes(whole[:at])
            assert source_digest_records.read_record(store, source) is None, at
    assert right(paths)


def test_a_record_of_an_older_format_counts_as_none(shm: Path, tmp_path: Path) -> None:
    paths = two(tmp_path)
    digests = [json.loads(record_of(shm, path).read_bytes())["digests"] for path in paths]
    for path, digest in zip(paths, reversed(digests), strict=True):
        old = {"format": 1, "digests": digest, "hashed_ns": 1 << 62, "changed_ns": 0, "paths": [], "behind": []}
        record_of(shm, path).write_text(json.dumps(old))
    assert right(paths)


def test_a_fifo_instead_of_a_record_does_not_block(shm: Path, tmp_path: Path) -> None:
    paths = two(tmp_path)
    record = record_of(shm, paths[0])
    record.unlink()
    os.mkfifo(record)
    assert right(paths)

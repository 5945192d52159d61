"""Entries that an earlier version of a reader built are not used, and those of unchanged readers stay."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import legroom
from legroom.cache import drop_and_gc, find_or_build_entry, list_and_verify, manifest
from legroom.cache.manifest import Options, OtherReader
from legroom.cli.cache import entry_text

REVISIONS = dict(manifest.REVISIONS)


@pytest.fixture(autouse=True)
def some_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests do not depend on what was revised last."""
    monkeypatch.setattr(manifest, "REVISIONS", {"webdataset": 2, "torch": 2, "zarr": 2})


def keys(store: Path) -> set[str]:
    return {name for name in os.listdir(store) if manifest.is_key(name)}


def read(data: Any) -> list[int]:
    return list(np.asarray(data["a"]).reshape(-1))


@pytest.fixture
def path(shm: Path, tmp_path: Path) -> Path:
    """A file whose reader has not been revised."""
    np.savez(tmp_path / "x.npz", a=np.arange(3))
    return tmp_path / "x.npz"


def revise(monkeypatch: pytest.MonkeyPatch, format: str, revision: int) -> None:
    monkeypatch.setitem(manifest.REVISIONS, format, revision)


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("before", [1, 2])
def test_an_entry_of_an_earlier_revision_is_not_used_and_built_again(
    shm: Path, path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    revise(monkeypatch, "npz", before)
    old = legroom.open(path)
    (first,) = keys(shm)
    assert (first == old.info.digest) is (before == 1)
    revise(monkeypatch, "npz", before + 1)
    new = legroom.open(path)  # by the record of the earlier version
    assert new.info.key != first
    assert new.info.digest == old.info.digest
    assert read(old) == read(new) == [0, 1, 2]  # mapped pages stay
    assert legroom.open(path).info.key == new.info.key
    other = path.with_name("copy.npz")
    other.write_bytes(path.read_bytes())
    assert legroom.open(other).info.key == new.info.key
    revise(monkeypatch, "npz", before)  # the earlier version beside it has its own entry
    assert legroom.open(path).info.key == first
    revise(monkeypatch, "npz", before + 1)
    assert legroom.open(path).info.key == new.info.key


@pytest.mark.usefixtures("old_files")
def test_an_entry_of_a_reader_without_revision_is_found_by_a_copy_of_the_file_too_late(
    shm: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = legroom.open(path).info.key
    (shm / "sources").joinpath(*os.listdir(shm / "sources")).unlink()  # the file is hashed again
    revise(monkeypatch, "npz", 2)
    assert legroom.open(path).info.key != old


def test_a_pickled_entry_of_another_revision_is_not_attached(
    shm: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = legroom.open(path)
    sent = pickle.dumps(data)
    revise(monkeypatch, "npz", 2)
    assert pickle.loads(sent).info.key != data.info.key


def test_a_joined_entry_of_two_formats_names_both(
    shm: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(3)
    old = legroom.open([tmp_path / "a.h5", path])
    stored = json.loads((shm / old.info.key / "manifest.json").read_text())
    assert stored["source"]["formats"] == ["hdf5", "npz"]
    revise(monkeypatch, "npz", 2)
    assert legroom.open([tmp_path / "a.h5", path]).info.key != old.info.key


@pytest.mark.usefixtures("old_files")
def test_it_is_listed_with_the_reason_and_removed_as_stale(
    shm: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = legroom.open(path).info.key
    (entry,) = list_and_verify.entries()
    assert entry.outdated is None
    assert drop_and_gc.gc(stale=True).entries == ()
    revise(monkeypatch, "npz", 2)
    (entry,) = list_and_verify.entries(path)
    assert (entry.key, entry.format, entry.damaged) == (key, "npz", None)
    assert "an earlier version built it" in str(entry.outdated)
    assert "not used: an earlier version built it" in entry_text(entry)
    (checked,) = list_and_verify.verify(path)
    assert (checked.damaged, checked.source) == ((), "same")
    assert [one.key for one in drop_and_gc.gc(stale=True, dry_run=True).entries] == [key]
    assert keys(shm) == {key}
    assert [one.key for one in drop_and_gc.gc(stale=True).entries] == [key]
    assert keys(shm) == set()


def test_a_newer_revision_is_listed_and_left_alone(shm: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revise(monkeypatch, "npz", 3)
    key = legroom.open(path).info.key
    revise(monkeypatch, "npz", 2)
    (entry,) = list_and_verify.entries()
    assert "a newer version built it" in str(entry.outdated)
    assert drop_and_gc.gc(stale=True).entries == ()
    with list_and_verify.open_stores() as stores:
        (store,) = (one for one in stores.distinct if one.backing == "shm")
        assert find_or_build_entry.attach_usable(store, key) is None
        with pytest.raises(OtherReader, match="newer"):
            find_or_build_entry.attach(store, key)
    assert keys(shm) == {key}


def test_the_key_and_manifest_of_an_unchanged_reader_are_as_they_were(shm: Path, path: Path) -> None:
    data = legroom.open(path)
    assert data.info.key == data.info.digest
    stored = json.loads((shm / data.info.key / "manifest.json").read_text())
    assert stored["options"] == {"keys": None, "order": None, "version": None, "readers": None, "dtype": None}
    assert set(stored["source"]) == {"paths", "stamps", "bytes", "sample", "format"}
    assert Options(keys=("a",)).suffix == "-" + "65813c8131a4"


@pytest.mark.usefixtures("old_files")
def test_an_entry_of_a_tar_with_links_that_lost_samples_is_built_again(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        info = tarfile.TarInfo("a.jpg")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        archive.addfile(link)
    with monkeypatch.context() as earlier:
        earlier.setitem(manifest.REVISIONS, "webdataset", 1)
        earlier.setattr("legroom.formats.tar_reader.LINKS", ())  # links are skipped
        assert len(legroom.open(tmp_path / "x.tar")["jpg"]) == 1
    assert [bytes(row) for row in legroom.open(tmp_path / "x.tar")["jpg"]] == [b"x", b"x"]


@pytest.mark.usefixtures("old_files")
def test_files_that_an_earlier_version_joined_are_joined_again(
    shm: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, unit in (("m.h5", "m"), ("km.h5", "km")):
        with h5py.File(path.with_name(name), "w") as file:
            file["a"] = np.arange(3)
            file["a"].attrs["unit"] = unit
    both = [path.with_name("m.h5"), path.with_name("km.h5")]
    with monkeypatch.context() as earlier:
        earlier.setattr("legroom.cache.plan_entry_files._of_all", lambda attributes, kept=(): dict(attributes[0]))
        old = legroom.open(both)
    alone = legroom.open(both[0])
    assert old.info.arrays["a"].attributes == {"unit": "m"}
    revise(monkeypatch, "join", 2)
    (entry,) = (one for one in list_and_verify.entries() if one.outdated)
    assert entry.key == old.info.key
    assert legroom.open(both).info.arrays["a"].attributes == {}
    assert legroom.open(both[0]).info.key == alone.info.key  # one file is not joined


def test_every_revision_is_of_a_format_above_one_and_documented() -> None:
    from legroom.formats.detect import FORMATS

    page = (Path(__file__).parents[3] / "docs/cache-format.md").read_text()
    for format, revision in REVISIONS.items():
        assert f"\n| {format} | {revision} | " in page
    assert set(REVISIONS) <= {*(one.name for one in FORMATS), manifest.JOIN}
    assert all(one > 1 for one in REVISIONS.values())


def test_identities_of_packages_are_kept_apart() -> None:
    plugin = "points==1.0 webdataset legroom==0.1.0"
    assert manifest.split_own_readers(["legroom npz 7", plugin, "legroom zarr 1"]) == (["legroom zarr 2"], [plugin])
    assert manifest.reader_difference(["webdataset"], [plugin]) == 0
    assert manifest.reader_difference(["webdataset"], None) == -1
    assert manifest.reader_difference(["npz"], ["legroom npz 2"]) == 1

"""Stamps and digests."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.cache import source_stamps_and_digests
from legroom.cache.find_or_build_entry import OpenRequest, entry_options, row_order, source_paths
from legroom.errors import MissingPackage, SourceChanged, UnreadableSource, UsageError
from legroom.formats.base_reader import Lookup
from legroom.formats.file_reads_and_errors import absolute


def test_one_file_has_the_digest_that_md5sum_prints(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(5_000_000))
    source = source_stamps_and_digests.stamp_source([path])
    assert source_stamps_and_digests.digest_source(source, "md5") == hashlib.md5(path.read_bytes()).hexdigest()
    stats = path.stat()
    assert source.name == f"{stats.st_dev}-{stats.st_ino}-{stats.st_size}-{stats.st_mtime_ns}-{stats.st_ctime_ns}"


def test_files_are_hashed_without_threads_where_ulimit_leaves_no_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 1000)
    source = source_stamps_and_digests.stamp_source([tmp_path / name for name in "abc"])
    monkeypatch.setattr(source_stamps_and_digests, "usable_cpus", lambda: 3)
    threaded = source_stamps_and_digests.digest_source(source, "md5")
    monkeypatch.setattr(source_stamps_and_digests, "room_for_threads", lambda count: False)
    monkeypatch.delattr(source_stamps_and_digests, "ThreadPoolExecutor")
    assert source_stamps_and_digests.digest_source(source, "md5") == threaded


def test_an_empty_file_has_a_digest_too(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert (
        source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([tmp_path / "a"]), "md5")
        == "d41d8cd98f00b204e9800998ecf8427e"
    )


def _digest(path: Path, progress: Callable[[int], None] | None = None) -> str:
    return source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([path]), "md5", progress)


@pytest.fixture
def few_zeros(monkeypatch: pytest.MonkeyPatch) -> int:
    """From 8 MiB of zeros on they are counted, so that files of the tests are small."""
    monkeypatch.setattr(source_stamps_and_digests, "_ZEROS", 8 << 20)
    return 8 << 20


def _sparse(path: Path, data: bytes, size: int) -> Path:
    path.write_bytes(data)
    os.truncate(path, size)
    return path


def test_zeros_at_the_end_of_a_sparse_file_are_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An LMDB database with MDB_WRITEMAP is a file of its largest size: MD5 of 6 GiB took 30 s."""
    hashed = 0

    class Counting:
        def __init__(self) -> None:
            self._hash = hashlib.md5()

        def update(self, data: bytes) -> None:
            nonlocal hashed
            hashed += len(data)
            self._hash.update(data)

        def hexdigest(self) -> str:
            return self._hash.hexdigest()

    monkeypatch.setattr(source_stamps_and_digests, "new_hasher", lambda algorithm: Counting())
    done: list[int] = []
    path = _sparse(tmp_path / "a", b"data" * 1000, 3 << 30)
    assert len(_digest(path, done.append)) == 32
    assert hashed <= (1 << 20) + 100 and sum(done) == 3 << 30


@pytest.mark.parametrize("holes", [True, False])
def test_zeros_at_the_end_count_whether_they_are_stored_or_not(
    tmp_path: Path, few_zeros: int, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(3_000_000)
    size = len(data) + 2 * few_zeros
    sparse = _sparse(tmp_path / "sparse", data, size)
    (tmp_path / "stored").write_bytes(data + bytes(size - len(data)))
    (tmp_path / "mixed").write_bytes(data + bytes(few_zeros))
    os.truncate(tmp_path / "mixed", size)
    if not holes:

        def refused(*_: object) -> int:
            raise OSError(errno.EINVAL, "no such seek")

        monkeypatch.setattr(os, "lseek", refused)
    digests = {_digest(sparse), _digest(tmp_path / "stored"), _digest(tmp_path / "mixed")}
    assert len(digests) == 1 and digests != {hashlib.md5(sparse.read_bytes()).hexdigest()}


def test_files_that_differ_in_zeros_at_the_end_have_other_digests(tmp_path: Path, few_zeros: int) -> None:
    data = os.urandom(99) + b"d"  # not a zero, which would be one of those at the end
    found = [_digest(_sparse(tmp_path / "a", data, size * few_zeros)) for size in (1, 2, 3)]
    found += [_digest(_sparse(tmp_path / "a", data[:-1], 2 * few_zeros))]
    found += [_digest(_sparse(tmp_path / "a", b"", 2 * few_zeros))]  # nothing but zeros
    for at in (100, few_zeros - 1, 2 * few_zeros - 5000, 2 * few_zeros - 1):  # one byte in them
        path = _sparse(tmp_path / "a", data, 2 * few_zeros)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        found.append(_digest(path))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("zeros", [0, 1, 4096, (8 << 20) - 1])
def test_fewer_zeros_at_the_end_are_hashed_as_md5sum_does(tmp_path: Path, few_zeros: int, zeros: int) -> None:
    data = bytes(5 << 20) + os.urandom(1 << 20)
    path = _sparse(tmp_path / "a", data, len(data) + zeros)
    assert _digest(path) == hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("algorithm", ["blake3", "xxh3"])
def test_other_hashes_agree_with_their_packages(tmp_path: Path, algorithm: str) -> None:
    package = pytest.importorskip({"blake3": "blake3", "xxh3": "xxhash"}[algorithm])
    path = tmp_path / "a"
    path.write_bytes(os.urandom(3_000_000))
    function = package.blake3 if algorithm == "blake3" else package.xxh3_128
    found = source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([path]), algorithm)
    assert found == function(path.read_bytes()).hexdigest()
    assert len(found) == source_stamps_and_digests.DIGITS[algorithm]


@pytest.mark.parametrize("name", ["sha1", "version", "", 5, None])
def test_an_unknown_hash_is_refused(tmp_path: Path, name: Any) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    with pytest.raises(UsageError, match=f"hash must be one of md5, blake3, xxh3 .*{name!r}"):
        legroom.open(tmp_path / "a.npy", hash=name)


def test_a_hash_whose_package_is_missing_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(MissingPackage) as caught:
        legroom.open(tmp_path / "a.npy", hash="blake3")
    assert caught.value.fix == ("pip install blake3 xxhash", "use hash='md5', which needs no package")


def test_several_files_and_folders_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    first = tmp_path / "first"
    (first / "sub").mkdir(parents=True)
    (first / "a").write_bytes(b"1")
    (first / "sub" / "b").write_bytes(b"2")
    (first / "zarr.json").touch()  # of folders, Zarr stores alone are data
    second = tmp_path / "second"
    shutil.copytree(first, second)
    digests = {
        source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([folder]), "md5")
        for folder in (first, second)
    }
    assert len(digests) == 1
    (second / "sub" / "b").rename(second / "sub" / "c")
    assert (
        source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([second]), "md5") not in digests
    )
    lists = [[folder / "a", folder / "sub" / "b"] for folder in (first, tmp_path / "third")]
    shutil.copytree(first, tmp_path / "third")
    assert (
        len(
            {
                source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source(paths), "md5")
                for paths in lists
            }
        )
        == 1
    )


def test_the_order_of_shards_is_part_of_the_key_and_not_of_the_digest(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same").write_bytes(folder.encode())
    there = [tmp_path / "x" / "same", tmp_path / "y" / "same"]
    back = there[::-1]
    assert source_stamps_and_digests.digest_source(
        source_stamps_and_digests.stamp_source(there), "md5"
    ) == source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source(back), "md5")
    assert row_order(source_stamps_and_digests.stamp_source(there)) is None
    assert row_order(source_stamps_and_digests.stamp_source(back)) == (1, 0)
    options = [
        entry_options(OpenRequest(tuple(paths)), source_stamps_and_digests.stamp_source(paths))
        for paths in (there, back)
    ]
    assert options[0].suffix == ""
    assert options[0] != options[1]


def test_a_file_that_changes_under_the_hash_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(10_000_000))
    source = source_stamps_and_digests.stamp_source([path])

    def write(_: int) -> None:
        with path.open("r+b") as file:
            file.write(b"x")

    with pytest.raises(SourceChanged):
        source_stamps_and_digests.digest_source(source, "md5", write)
    assert not source_stamps_and_digests.is_unchanged(source)


@pytest.mark.parametrize("kind", ["missing", "dangling", "fifo"])
def test_what_is_no_file_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(UnreadableSource) as caught:
        source_stamps_and_digests.stamp_source([path])
    assert caught.value.why and caught.value.fix


def search(holder: Path, name: str, found: Path) -> Lookup:
    return Lookup("link", name, holder, found)


def test_files_behind_the_named_one_are_hashed_with_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    alone = source_stamps_and_digests.stamp_source([tmp_path / "a"])
    searches = [search(tmp_path / "a", name, tmp_path / name) for name in ("a", "b")]
    both = source_stamps_and_digests.with_referenced(alone, searches)
    assert [file.path.name for file in both.referenced] == ["b"]
    assert both.name == alone.name
    assert source_stamps_and_digests.digest_source(both, "md5") != source_stamps_and_digests.digest_source(alone, "md5")
    before = source_stamps_and_digests.digest_source(both, "md5")
    (tmp_path / "b").write_bytes(b"other")
    assert not source_stamps_and_digests.is_unchanged(both)
    assert (
        source_stamps_and_digests.digest_source(source_stamps_and_digests.with_referenced(alone, searches), "md5")
        != before
    )


def test_two_referenced_files_that_are_swapped_are_other_data(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part").write_bytes(folder.encode())

    def digest() -> str:
        searches = [search(tmp_path / "a", f"{name}/part", tmp_path / name / "part") for name in ("x", "y")]
        return source_stamps_and_digests.digest_source(
            source_stamps_and_digests.with_referenced(
                source_stamps_and_digests.stamp_source([tmp_path / "a"]), searches
            ),
            "md5",
        )

    before = digest()
    (tmp_path / "x").rename(tmp_path / "z")
    (tmp_path / "y").rename(tmp_path / "x")
    (tmp_path / "z").rename(tmp_path / "y")
    assert digest() != before


def test_a_renamed_file_with_files_behind_it_is_the_same(tmp_path: Path) -> None:
    for name in ("a", "part"):
        (tmp_path / name).write_bytes(name.encode())
    digests = []
    for name in ("a", "b"):
        searches = [search(tmp_path / name, "part", tmp_path / "part")]
        digests.append(
            source_stamps_and_digests.digest_source(
                source_stamps_and_digests.with_referenced(
                    source_stamps_and_digests.stamp_source([tmp_path / name]), searches
                ),
                "md5",
            )
        )
        if name == "a":
            (tmp_path / "a").rename(tmp_path / "b")
    assert digests[0] == digests[1]


def test_directories_behind_links_belong_to_a_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "own").mkdir(parents=True)
    (store / "zarr.json").touch()
    (store / "own" / "0").write_bytes(b"own")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0").write_bytes(b"before")
    (store / "linked").symlink_to(tmp_path / "other")
    source = source_stamps_and_digests.stamp_source([store])
    assert sorted(file.name for file in source.files) == ["linked/0", "own/0", "zarr.json"]
    source_stamps_and_digests.flush_source(source)  # before a file is read its clock has moved on
    before = source_stamps_and_digests.digest_source(source, "md5")
    (tmp_path / "other" / "0").write_bytes(b"behind")
    assert not source_stamps_and_digests.is_unchanged(source)
    assert source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([store]), "md5") != before


def test_a_file_that_comes_to_a_store_changes_it_even_if_it_goes_again(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "zarr.json").touch()
    source = source_stamps_and_digests.stamp_source([tmp_path])
    source_stamps_and_digests.flush_source(source)  # before files are read their clock has moved on
    (tmp_path / "sub" / "0").touch()
    assert not source_stamps_and_digests.is_unchanged(source)
    (tmp_path / "sub" / "0").unlink()
    assert not source_stamps_and_digests.is_unchanged(source)  # its directory tells


@pytest.mark.parametrize("kind", ["loop", "diamonds"])
def test_links_without_end_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "zarr.json").touch()
    if kind == "loop":
        (tmp_path / "self").symlink_to(tmp_path)
    else:
        for level in range(40):
            (tmp_path / f"level{level}").mkdir()
            for name in ("left", "right"):
                (tmp_path / f"level{level}" / name).symlink_to(tmp_path / f"level{level + 1}")
        (tmp_path / "level40").mkdir()
    with pytest.raises(UnreadableSource, match="link"):
        source_stamps_and_digests.stamp_source([tmp_path])


@pytest.mark.parametrize("name", ["link/../a", "link/..", "./a", "sub/../a", "link/deeper/../../a"])
def test_an_absolute_path_is_the_file_that_the_kernel_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "far" / "away" / "deeper").mkdir(parents=True)
    (tmp_path / "far" / "a").write_bytes(b"1")
    (tmp_path / "a").write_bytes(b"2")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("far/away")
    monkeypatch.chdir(tmp_path)
    assert os.path.samefile(absolute(name), name)
    assert os.path.samefile(source_paths(name)[0], name)
    assert ".." not in absolute(name).parts


def test_a_file_written_a_moment_ago_is_read_when_its_clock_has_moved_on(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    source = source_stamps_and_digests.stamp_source([tmp_path / "a"])
    source_stamps_and_digests.flush_source(source)
    assert time.time_ns() - source.files[0].stamp.ctime_ns >= 20_000_000
    (tmp_path / "a").write_bytes(b"2")  # from now on no write goes unseen
    assert not source_stamps_and_digests.is_unchanged(source)

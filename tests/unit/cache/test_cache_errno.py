"""System calls that fail: an error that proves nothing about an entry never costs the entry."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.cache import drop_and_gc, list_and_verify, mapped_files_and_checksums, source_digest_records
from legroom.cache.store_directories import open_stores
from legroom.cli.main import run
from legroom.errors import LegroomError, StoreError
from open_descriptors import open_descriptors, opened_since

PASSING = ("EMFILE", "ENFILE", "ENOMEM", "EACCES", "EINTR", "EIO")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Lets every open of a name ``part`` fail with that errno."""
    real = os.open

    def arrange(part: str, code: str) -> None:
        number = getattr(errno, code)

        def opens(path: Any, *arguments: Any, **more: Any) -> int:
            if part == os.fsdecode(path):
                raise OSError(number, os.strerror(number), path)
            return real(path, *arguments, **more)

        monkeypatch.setattr(os, "open", opens)

    return arrange


def loaded(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(1000))
    with legroom.open(path) as data:
        return path, data.info.key or ""


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("code", PASSING)
@pytest.mark.parametrize("part", ["array.npy", "manifest.json", "KEY"])
def test_what_proves_no_damage_is_an_error_and_the_entry_stays(
    shm: Path, tmp_path: Path, failing: Callable[[str, str], None], code: str, part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, key = loaded(tmp_path)
    inode = (shm / key / "array.npy").stat().st_ino
    failing(key if part == "KEY" else part, code)
    with pytest.raises(LegroomError) as caught:
        legroom.open(path)
    assert os.strerror(getattr(errno, code)) in caught.value.why and caught.value.fix
    monkeypatch.undo()
    assert (shm / key / "array.npy").stat().st_ino == inode
    assert not [name for name in os.listdir(shm / "work") if name.startswith("trash")]


@pytest.mark.usefixtures("old_files")
def test_an_entry_that_cannot_be_read_is_listed_as_such_and_not_as_damaged(
    shm: Path, tmp_path: Path, failing: Callable[[str, str], None]
) -> None:
    _, key = loaded(tmp_path)
    failing("manifest.json", "EIO")
    (entry,) = list_and_verify.entries()
    assert entry.damaged is None and "Input/output error" in (entry.unreadable or "")
    (found,) = list_and_verify.verify(source=False)
    assert not found.damaged and not found.whole and "Input/output error" in found.source_why
    assert [entry.key for entry in drop_and_gc.drop(key).entries] == [key]


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("code", ["EIO", "EACCES"])
def test_verify_goes_on_after_an_entry_that_cannot_be_read(
    shm: Path, tmp_path: Path, failing: Callable[[str, str], None], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", **{name: np.arange(1000)})
        legroom.open(tmp_path / f"{name}.npz").close()
    failing("a.npy", code)
    found = {result.entry.sources[0][-5]: result for result in list_and_verify.verify()}
    assert found["b"].whole and found["b"].source == "same"
    assert not found["a"].whole and not found["a"].damaged and found["a"].entry.unreadable
    assert run(["cache", "verify"]) == 1
    assert "cannot be read" in capsys.readouterr().out


@pytest.mark.usefixtures("old_files")
def test_data_that_cannot_be_read_is_not_called_damaged(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(tmp_path)

    def lost(fd: int, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(mapped_files_and_checksums, "file_crc32", lost)
    (found,) = list_and_verify.verify()
    assert not found.damaged and not found.whole and found.entry.unreadable == os.strerror(errno.EIO)


@pytest.mark.usefixtures("old_files")
def test_a_record_that_cannot_be_read_is_not_collected(
    shm: Path, tmp_path: Path, failing: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(tmp_path)
    (name,) = os.listdir(shm / "sources")
    failing(name, "EIO")
    drop_and_gc.gc()
    monkeypatch.undo()
    assert os.listdir(shm / "sources") == [name]


@pytest.mark.parametrize(
    ("code", "fix"), [("ENOSPC", "set TMPDIR to a directory with free space"), ("EMFILE", "close unused files, or")]
)
def test_without_the_cache_a_temporary_file_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, fix: str
) -> None:
    number = getattr(errno, code)

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    feather = pytest.importorskip("pyarrow.feather")
    table = pytest.importorskip("pyarrow").table({"x": [1, 2]})
    feather.write_feather(table, tmp_path / "a.arrow", compression="uncompressed")
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    monkeypatch.setenv("TMPDIR", "/full")
    monkeypatch.setattr("tempfile.mkdtemp", fails)
    with pytest.raises(StoreError, match="a temporary file in /full cannot be written") as caught:
        legroom.open(tmp_path / "a.arrow")
    assert os.strerror(number) in caught.value.why and caught.value.fix[0].startswith(fix)
    assert "cache list" not in " ".join(caught.value.fix) and "LEGROOM_DISABLE=1" not in " ".join(caught.value.fix)


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("how", ["missing", "link", "truncated"])
def test_what_proves_damage_is_built_anew(shm: Path, tmp_path: Path, how: str) -> None:
    path, key = loaded(tmp_path)
    file = shm / key / "array.npy"
    if how == "truncated":
        file.chmod(0o600)
        os.truncate(file, 100)
    else:
        file.unlink()
        if how == "link":
            file.symlink_to(path)
    with legroom.open(path) as data:
        assert (data["array"] == np.arange(1000)).all()


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], list[int]]]:
    """Takes descriptors until so many are left."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []

    def take(left: int) -> list[int]:
        gc.collect()  # what earlier tests left would be closed in the middle of the test, and make room
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            for fd in [held.pop() for _ in range(left)]:
                os.close(fd)
        return held

    yield take
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("old_files")
def test_with_any_number_of_descriptors_left_entries_stay(
    shm: Path, tmp_path: Path, few_descriptors: Callable[[int], list[int]]
) -> None:
    path, key = loaded(tmp_path)
    inode = (shm / key / "array.npy").stat().st_ino
    outcomes = set()
    held = few_descriptors(0)
    for _ in range(16):
        try:
            with legroom.open(path) as data:
                outcomes.add(int(data["array"][5]))
        except LegroomError as problem:
            assert "Too many open files" in problem.why
            outcomes.add("refused")
        try:
            assert len(list_and_verify.entries()) == 1
            drop_and_gc.gc()
        except LegroomError as problem:
            assert "Too many open files" in problem.why
        os.close(held.pop())
    for fd in held:
        os.close(fd)
    held.clear()
    assert outcomes == {"refused", 5}
    assert (shm / key / "array.npy").stat().st_ino == inode
    assert list_and_verify.info(path).key == key


@pytest.mark.usefixtures("old_files")
def test_any_number_of_data_on_one_entry_hold_one_descriptor(shm: Path, tmp_path: Path) -> None:
    path, key = loaded(tmp_path)
    before = open_descriptors()
    opened = [legroom.open(path) for _ in range(20)]
    assert len(opened_since(before, 1)) == 1
    array = opened[7]["array"]
    while opened:
        opened.pop().close()
    assert list_and_verify.info(key).in_use  # the array has it still
    del array
    assert not list_and_verify.info(key).in_use
    assert not opened_since(before)


@pytest.mark.usefixtures("old_files")
def test_a_shared_lease_outlives_a_fork_in_each_process(shm: Path, tmp_path: Path) -> None:
    path, key = loaded(tmp_path)
    one, two = legroom.open(path), legroom.open(path)
    pid = os.fork()
    if pid == 0:
        one.close()
        two.close()
        with legroom.open(path) as again:
            os._exit(0 if int(again["array"][3]) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list_and_verify.info(key).in_use
    one.close()
    assert list_and_verify.info(key).in_use
    two.close()
    assert not list_and_verify.info(key).in_use


@pytest.mark.usefixtures("old_files")
def test_after_a_forced_drop_the_old_and_the_new_entry_are_leased_each_for_itself(shm: Path, tmp_path: Path) -> None:
    path, key = loaded(tmp_path)
    old = legroom.open(path)
    drop_and_gc.drop(path, force=True)
    with legroom.open(path) as new:
        assert list_and_verify.info(key).in_use
        assert (new["array"] == old["array"]).all()
    assert not list_and_verify.info(key).in_use
    assert (old["array"] == np.arange(1000)).all()


def test_the_command_prints_an_error_and_no_traceback(shm: Path, tmp_path: Path) -> None:
    path, _ = loaded(tmp_path)
    code = (
        "import os, resource, sys; from legroom.cli.main import run\n"
        f"assert run(['cache', 'info', {str(path)!r}]) == 0 and run(['cache', 'info', '/nowhere']) == 1\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "try:\n"
        "    while True: os.open('/dev/null', 0)\n"
        "except OSError: pass\n"
        f"sys.exit(run(['cache', 'info', {str(path)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert "Too many open files" in done.stderr


def test_records_of_every_store_are_read_as_they_are(shm: Path, tmp_path: Path) -> None:
    loaded(tmp_path)
    with open_stores() as places:
        (name,) = os.listdir(places.found[0].sources)
        assert source_digest_records.read_record_named(places.found[0], name) is not None

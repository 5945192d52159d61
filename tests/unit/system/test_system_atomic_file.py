"""Files that are written as a whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from legroom.system.atomic_file import PRIVATE, create_file, replace_file

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs permission bits")


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 240 + ".json")
    replace_file(path, b"one")
    replace_file(str(path), "zwölf")
    assert path.read_text(encoding="utf-8") == "zwölf" and list(tmp_path.iterdir()) == [path]


def test_a_name_is_cut_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / ("数" * 80)  # 240 bytes, of 255 that a name may have
    replace_file(path, "one")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_a_name_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace_file("plain", "one")
    create_file("new", "two")
    assert Path("plain").read_text() == "one" and Path("new").read_text() == "two"


@POSIX
def test_permissions_follow_the_umask_unless_private(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        replace_file(tmp_path / "public", "")
        replace_file(tmp_path / "private", "", mode=PRIVATE)
    finally:
        os.umask(old)
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["replace", "write"])
def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "kept"
    path.write_text("old")

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        if call == "replace":
            patched.setattr(os, "replace", fail)
            with pytest.raises(OSError, match="full"):
                replace_file(path, "new")
        else:
            with pytest.raises(TypeError):
                replace_file(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("write", [replace_file, create_file])
@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_full_disk_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None], size: int
) -> None:
    """Every write to /dev/full fails with ENOSPC, also that of the buffer when the file is closed."""
    really = os.open

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        made = really(path, flags, mode)
        full = really("/dev/full", os.O_WRONLY)
        os.dup2(full, made)
        os.close(full)
        return made

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "report.json", b"x" * size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["fsync", "link", "rename"])
def test_no_failing_call_leaves_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    if call == "rename":
        monkeypatch.setattr(os, "link", fail)  # then it renames
    if call == "link":
        create_file(tmp_path / "new", b"data")
        assert [one.name for one in tmp_path.iterdir()] == ["new"]
        return
    with pytest.raises(OSError, match=os.strerror(number)):
        create_file(tmp_path / "new", b"data")
    assert list(tmp_path.iterdir()) == []


def test_create_never_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "there"
    create_file(path, b"first", mode=PRIVATE)
    with pytest.raises(FileExistsError):
        create_file(path, b"second")

    def no_links(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(FileExistsError):
        create_file(path, b"third")
    create_file(tmp_path / "other", b"fourth")
    assert path.read_bytes() == b"first" and (tmp_path / "other").read_bytes() == b"fourth"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other", "there"]

"""Writing what lies in several places as one run, and the groups it is written in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legroom.cache import write_entry_files
from legroom.system import file_writes


def _file(tmp_path: Path) -> int:
    return os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)


@pytest.mark.parametrize("most", [None, 0, 1, 5, 6, 11, 13])
def test_parts_are_written_whole_whatever_one_call_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    parts = [memoryview(part) for part in (b"hello", b"", b" wide", b" ", b"w")]
    if most is not None:  # a write that is cut short there
        monkeypatch.setattr(
            os, "pwritev", lambda fd, views, at: os.pwrite(fd, b"".join(views)[:most], at), raising=False
        )
    fd = _file(tmp_path)
    file_writes.write_parts(fd, parts, 3)
    os.close(fd)
    assert (tmp_path / "x").read_bytes() == b"\0\0\0hello wide w"


def test_without_pwritev_and_with_very_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = _file(tmp_path)
    file_writes.write_parts(fd, [memoryview(b"ab")] * (file_writes.MOST_PARTS + 1), 0)
    monkeypatch.delattr(os, "pwritev", raising=False)
    file_writes.write_parts(fd, [memoryview(b"cd"), memoryview(b"e")], 0)
    os.close(fd)
    assert (tmp_path / "x").read_bytes() == b"cdeb" + b"ab" * (file_writes.MOST_PARTS - 1)


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([400_000] * 5, [2, 2, 1]),
        ([2 << 20, 1, 1], [1, 2]),
        ([1] * (file_writes.MOST_PARTS + 2), [file_writes.MOST_PARTS, 2]),
    ],
)
def test_groups_of_about_a_buffer(sizes: list[int], groups: list[int]) -> None:
    parts = [memoryview(bytes(size)) for size in sizes]
    found = list(file_writes.grouped(iter(parts), write_entry_files._BUFFER))
    assert [len(group) for group in found] == groups
    assert [part for group in found for part in group] == parts

"""Writes at an offset, and writes through to the disk: no more waits for it than is stated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legroom.system import file_writes
from legroom.system.file_writes import WrittenThrough, write_through

MB = 1 << 20


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes waited for the disk each time that they were written back."""
    sizes, found = [0], list[int]()
    write_all, write_parts, write_back = file_writes.write_all, file_writes.write_parts, file_writes.write_back

    def counted(fd: int, data: memoryview, offset: int) -> None:
        sizes[0] += len(data)
        write_all(fd, data, offset)

    def counted_parts(fd: int, parts: list[memoryview], offset: int) -> None:
        sizes[0] += sum(map(len, parts))
        write_parts(fd, parts, offset)

    def back(fd: int, offset: int = 0, length: int = 0) -> None:
        found.append(sizes[0])
        sizes[0] -= length
        write_back(fd, offset, length)

    monkeypatch.setattr(file_writes, "write_all", counted)
    monkeypatch.setattr(file_writes, "write_parts", counted_parts)
    monkeypatch.setattr(file_writes, "write_back", back)
    return found


def test_no_more_than_a_megabyte_waits_for_the_disk(tmp_path: Path, waiting: list[int]) -> None:
    data = os.urandom(5 * MB + 3)
    with (tmp_path / "x").open("w+b") as file:
        write_through(file.fileno(), [memoryview(data)[:10], memoryview(b""), memoryview(data)[10:]], 7)
    assert (tmp_path / "x").read_bytes() == bytes(7) + data
    assert max(waiting) == MB and len(waiting) == 6


def test_small_buffers_go_to_the_disk_together(tmp_path: Path, waiting: list[int]) -> None:
    data = os.urandom(3 * MB)
    with (tmp_path / "x").open("w+b") as file:
        write_through(file.fileno(), [memoryview(data)[at : at + 8192] for at in range(0, len(data), 8192)], 0)
    assert (tmp_path / "x").read_bytes() == data and waiting == [MB] * 3


def test_arrow_writes_through(tmp_path: Path, waiting: list[int]) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"a": pa.array(range(1 << 18)), "b": ["text"] * (1 << 18)})
    for name, sink in (("there", pa.OSFile(str(tmp_path / "there"), "wb")),
                       ("through", pa.PythonFile(WrittenThrough(str(tmp_path / "through")), "w"))):  # fmt: skip
        with sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
            assert sink.tell() > 0, name
    assert (tmp_path / "there").read_bytes() == (tmp_path / "through").read_bytes()
    assert max(waiting) < 2 * MB and 2 <= len(waiting) <= 4


def test_a_full_disk_is_reported_by_what_arrow_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    sink = pa.PythonFile(WrittenThrough(str(tmp_path / "x")), "w")
    monkeypatch.setattr(file_writes, "write_back", full)
    with pytest.raises(OSError, match="No space left") as caught:
        sink.write(bytes(MB))
    assert caught.value.errno == 28
    sink.close()

"""npy and npz: what the headers may say, and what is refused."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.errors import DamagedSource, UnsupportedData
from legroom.formats.detect import open_source
from legroom.formats.npy_reader import read_header


def read(path: Path, name: str = "array") -> np.ndarray:
    with open_source(path) as reader:
        spec = next(item for item in reader.describe().items if item.name == name)
        out = np.ndarray(spec.shape, spec.dtype)
        reader.read_into(name, out)
    return out


def raw_npy(path: Path, header: str, data: bytes = b"", version: int = 1) -> Path:
    text = header.encode("utf-8" if version == 3 else "latin-1")
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + text + data)
    return path


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_is_read(tmp_path: Path, version: int) -> None:
    path = raw_npy(tmp_path / "x", "{'descr': '<i2', 'fortran_order': False, 'shape': (2,), }", b"\1\0\2\0", version)
    assert read(path).tolist() == [1, 2]


def test_a_shape_of_python_2_is_read(tmp_path: Path) -> None:
    path = raw_npy(tmp_path / "x", "{'descr': '<i2', 'fortran_order': False, 'shape': (2L, 1L), }", b"\1\0\2\0")
    assert read(path).tolist() == [[1], [2]]


def test_field_names_of_version_3_are_utf8(tmp_path: Path) -> None:
    array = np.zeros(2, [("大きさ", "<f4")])
    with pytest.warns(UserWarning):  # numpy's, about version 3
        np.save(tmp_path / "x.npy", array)
    assert read(tmp_path / "x.npy").dtype.names == ("大きさ",)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i2', 'fortran_order': False, 'shape': (2,)",
        "{'descr': '<i2', 'fortran_order': False}",
        "{'descr': '<i2', 'fortran_order': 1, 'shape': (2,)}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (2.0,)}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (True,)}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': [2]}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (9999999999999,)}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (1,) * 3}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': " + str((1,) * 40) + "}",
        "{'descr': 'a2', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<i3', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': 'i4,i4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': [('a',)], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': [('a', '<i2'), ('a', '<i2')], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': 7, 'fortran_order': False, 'shape': (1,)}",
        "__import__('os')",
        "(" * 3000,
        "-" * 9000 + "1",
        "",
    ],
)
def test_an_invalid_header_is_damage(tmp_path: Path, header: str) -> None:
    path = raw_npy(tmp_path / "x", header, bytes(8))
    with pytest.raises(DamagedSource), open_source(path) as reader:
        reader.describe()


def test_a_header_that_is_too_long_is_damage_before_memory_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x93NUMPY\x02\x00" + (1 << 31).to_bytes(4, "little") + b"{}")
    with pytest.raises(DamagedSource, match="2147483648"), open_source(path) as reader:
        reader.describe()


@pytest.mark.parametrize("array", [np.array([None, 1]), np.array([(1, "x")], [("a", "i4"), ("b", "O")])])
def test_objects_are_refused_without_being_unpickled(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(UnsupportedData, match="pickle"), open_source(tmp_path / "x.npy") as reader:
        reader.describe()
    np.savez(tmp_path / "y.npz", good=np.arange(3), bad=array)
    with pytest.raises(UnsupportedData, match="'bad'"), open_source(tmp_path / "y.npz") as reader:
        reader.describe()
    with open_source(tmp_path / "y.npz", keys="good") as reader:
        assert [item.name for item in reader.describe().items] == ["good"]


def test_a_fortran_array_with_long_columns_is_read_in_small_pieces(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(3_000_000, dtype=np.float64).reshape(1_500_000, 2))
    np.save(tmp_path / "x.npy", array)
    seen: list[int] = []
    with open_source(tmp_path / "x.npy") as reader:
        out = np.empty(array.shape, array.dtype)
        reader.read_into("array", out, seen.append)
    np.testing.assert_array_equal(out, array)
    assert len(seen) >= 4  # each column of 12 MB in two pieces


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_in_an_archive_is_detected(tmp_path: Path, save: object) -> None:
    array = np.random.default_rng(0).integers(0, 9, 5000)
    buffer = io.BytesIO()
    save(buffer, a=array)  # type: ignore[operator]
    data = bytearray(buffer.getvalue())
    data[len(data) // 2] ^= 4
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DamagedSource):
        read(tmp_path / "x", "a")


def test_members_that_are_not_arrays_are_ignored(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
    with open_source(tmp_path / "x.npz") as reader:
        assert [item.name for item in reader.describe().items] == ["a"]


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(UnsupportedData, match="encrypted"), open_source(tmp_path / "x.npz") as reader:
        reader.describe()


def test_an_unsupported_compression_method_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", buffer.getvalue())
    with pytest.raises(UnsupportedData, match="method is 12"), open_source(tmp_path / "x.npz") as reader:
        reader.describe()


def test_a_member_larger_than_its_array_is_damage(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", buffer.getvalue() + b"more")
    with pytest.raises(DamagedSource, match="the archive holds"), open_source(tmp_path / "x.npz") as reader:
        reader.describe()


def test_a_large_deflated_member_streams(tmp_path: Path) -> None:
    array = np.arange(3_000_000, dtype=np.int64) % 1000
    np.savez_compressed(tmp_path / "x.npz", a=array)
    seen: list[int] = []
    with open_source(tmp_path / "x.npz") as reader:
        out = np.empty(array.shape, array.dtype)
        reader.read_into("a", out, seen.append)
    np.testing.assert_array_equal(out, array)
    assert len(seen) == 3 and sum(seen) == array.nbytes


def test_reading_a_header_reads_nothing_else() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(1000))
    data = buffer.getvalue()
    asked: list[int] = []

    def give(offset: int, count: int) -> bytes:
        asked.append(offset + count)
        return data[offset : offset + count]

    header = read_header(give, Path("x"), "array")
    assert max(asked) == header.size == len(data) - 8000


@pytest.mark.parametrize("way", [np.asarray, np.asfortranarray])
@pytest.mark.parametrize(
    "array",
    [
        np.array(["", "", "ab"]).astype(">U3"),
        np.array([["", "abc"], ["d", ""]]).astype(">U9"),
        np.array([b"", b"x"], "S5"),
        np.zeros((2, 3), ">U0"),
    ],
)
def test_empty_strings_keep_their_width(
    tmp_path: Path, array: np.ndarray, way: Callable[[np.ndarray], np.ndarray]
) -> None:
    np.save(tmp_path / "x.npy", way(array))
    np.testing.assert_array_equal(read(tmp_path / "x.npy", "array"), array)


@pytest.mark.parametrize("shape", ["(0, 4611686018427387904, 4611686018427387904)", "(0, 0, 4611686018427387904)"])
def test_a_shape_too_large_for_numpy_is_refused(tmp_path: Path, shape: str) -> None:
    path = raw_npy(tmp_path / "x", f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}", b"")
    with pytest.raises(UnsupportedData, match="4611686018427387904"), open_source(path) as reader:
        reader.describe()


@pytest.mark.parametrize("error", [SystemError("AST constructor recursion depth mismatch"), RecursionError()])
def test_any_error_while_parsing_a_header_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(_: str) -> None:
        raise error

    np.save(tmp_path / "x.npy", np.arange(3))
    monkeypatch.setattr("legroom.formats.npy_reader.ast.literal_eval", broken)
    with pytest.raises(DamagedSource), open_source(tmp_path / "x.npy") as reader:
        reader.describe()


def test_members_that_are_not_read_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(3), b=np.arange(4))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "x")
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        starts = {info.filename: info.header_offset for info in archive.infolist()}
    for name in ("b.npy", "notes.txt"):
        path.write_bytes(data[: starts[name] + 30] + b"?" + data[starts[name] + 31 :])
        with np.load(path) as loaded, open_source(path, keys="a") as reader:
            out: Any = np.empty(3, loaded["a"].dtype)
            reader.read_into("a", out)
            np.testing.assert_array_equal(out, loaded["a"])


def test_members_have_the_names_by_which_numpy_finds_them(tmp_path: Path) -> None:
    names = ["x.npy", "x", "a/b.npy", "y.npy.npy", "y.npy", "only", "z.npy", "z"]
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for number, name in enumerate(names):
            buffer = io.BytesIO()
            np.save(buffer, np.full(3, number))
            archive.writestr(name, buffer.getvalue() if name != "z" else b"not an array")
    loaded = np.load(tmp_path / "x.npz")
    with open_source(tmp_path / "x.npz") as reader:
        found = [item.name for item in reader.describe().items]
    assert sorted(found) == ["a/b", "only", "x", "x.npy", "y", "y.npy.npy", "z"]
    values = {name: read(tmp_path / "x.npz", name)[0] for name in found}
    assert sorted(values.values()) == [0, 1, 2, 3, 4, 5, 6]
    assert values == {name: loaded[name][0] if name != "z" else 6 for name in found}

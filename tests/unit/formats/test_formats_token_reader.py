"""Flat token files and llm.c's: what is read, and what is refused although a dtype is given."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_samples import SAMPLES, Sample, llm_c

from legroom.errors import DamagedSource, LegroomError, UnknownFormat, UsageError
from legroom.formats.detect import open_source
from legroom.formats.token_reader import token_dtype

OTHERS = [sample for sample in SAMPLES if sample.format not in ("llm.c", "megatron", "tokens")]


def read(path: Path, dtype: str | None) -> np.ndarray[Any, Any]:
    with open_source(path, dtype=dtype) as reader:
        (spec,) = reader.describe().items
        out = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
        reader.read_into("tokens", out)
    return out


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">u2", "<i4", ">u4", "<i8", ">i8"])
def test_tokens_are_what_numpy_maps(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "train.bin"
    np.random.default_rng(1).integers(0, 127, 3001).astype(dtype).tofile(path)
    found = read(path, dtype)
    np.testing.assert_array_equal(found, np.memmap(path, dtype, "r"))
    assert found.dtype.isnative and found.dtype == np.dtype(dtype).newbyteorder("=")
    with open_source(path, dtype=dtype) as reader:
        assert (reader.extent("tokens") is None) == dtype.startswith(">")


@pytest.mark.parametrize("given", ["uint16", "<u2", np.uint16, np.dtype("uint16"), "H"])
def test_a_dtype_has_one_spelling(given: Any) -> None:
    assert token_dtype(given) == "<u2"


def test_a_dtype_of_torch_is_taken() -> None:
    torch = pytest.importorskip("torch")
    assert [token_dtype(one) for one in (torch.uint8, torch.int32, torch.int64)] == ["|u1", "<i4", "<i8"]
    for other in (torch.bfloat16, torch.float32, torch.bool):
        with pytest.raises(UsageError, match=f"dtype={other} is not a type of tokens"):
            token_dtype(other)


def test_a_dtype_is_little_endian_unless_it_says_otherwise() -> None:
    assert [token_dtype(one) for one in ("uint8", "int64", ">u2", np.dtype(">i4"))] == ["|u1", "<i8", ">u2", ">i4"]


@pytest.mark.parametrize(
    "given", ["float32", "bool", "uint17", "S4", "complex64", "M8[s]", object(), "2u2", "O", "u2,u2"]
)
def test_only_integers_are_tokens(given: Any) -> None:
    with pytest.raises(UsageError, match="dtype"):
        token_dtype(given)


def test_a_size_that_is_no_multiple_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x01\x02\x03\x04\x05\x06\x07")
    with pytest.raises(DamagedSource, match="7 bytes") as caught:
        read(path, "<u2")
    assert caught.value.what == f"dtype='uint16' does not divide the size of {path}"
    assert caught.value.why == "its 7 bytes are 3 tokens of 2 bytes, and 1 more"
    assert caught.value.fix[0] == "pass the dtype it was written with"
    with pytest.raises(DamagedSource, match="empty"):
        path.write_bytes(b"")
        read(path, "<u2")


def test_without_a_dtype_the_error_says_how_to_give_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for first in (1, 640):  # 640 is the first two bytes of a pickle
        np.array([first, 2, 3], np.uint16).tofile(path)
        with pytest.raises(UnknownFormat) as caught:
            open_source(path)
        assert any("dtype='uint16'" in step for step in caught.value.fix)


@pytest.mark.parametrize("sample", OTHERS, ids=str)
def test_every_other_format_is_refused(sample: Sample, tmp_path: Path) -> None:
    path = sample.write(tmp_path)
    for dtype in ("|u1", "<u2"):
        with pytest.raises(LegroomError):
            open_source(path, dtype=dtype)


def archive(**options: Any) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w", **options) as tar:
        member = tarfile.TarInfo("0.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"text"))
    return into.getvalue()


def old_tar() -> bytes:
    """A header of Unix version 7, without the word ustar: only its checksum says what it is."""
    data = bytearray(archive(format=tarfile.USTAR_FORMAT))
    data[257:512] = bytes(255)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def zip_archive() -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        archive.writestr("readme.txt", "text")
    return into.getvalue()


OBJECTS: dict[str, Any] = {
    "list": list(range(300)),
    "dict": {"tokens": [1, 2, 3], "name": "train"},
    "array": np.arange(1000, dtype=np.uint16),
    "bytes": bytes(range(256)) * 40,
    "number": 5,
    "nested": [{"a": [i, {"b": None}]} for i in range(50)],
}
TEXTS = ("json", "jsonl", "text", "csv")
FILES = {
    "gzip": gzip.compress(bytes(4000)),
    "zip": zip_archive(),
    "bzip2": bz2.compress(bytes(4000)),
    "xz": lzma.compress(bytes(4000)),
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(40),
    "lz4": b"\x04\x22\x4d\x18" + bytes(40),
    "json": json.dumps({"tokens": list(range(100))}).encode(),
    "jsonl": b'{"text": "a"}\n' * 1000,
    "text": "Zwölf Boxkämpfer jagen Viktor. 你好\n".encode() * 300,
    "csv": b"1,2,3\r\n4,5,6\r\n",
    "llm.c-weights": np.array([20240326, 3, *([0] * 300)], np.int32).tobytes(),
    "llm.c-evaluation": np.array([20240522, 1, *([0] * 300)], np.int32).tobytes(),
    "gguf": b"GGUF" + bytes(100),
    "netcdf": b"CDF\x01" + bytes(100),
    **{f"pickle-{name}-{n}": pickle.dumps(one, n) for name, one in OBJECTS.items() for n in range(6)},
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_recognizably_something_else_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(FILES[name])
    for dtype in ("<u2", "<i4") if name in TEXTS else ("|u1", "|i1"):
        with pytest.raises(UnknownFormat, match="unsupported file format"):
            open_source(path, dtype=dtype)


CHANCE = np.random.default_rng(3).integers(0, 256, 100_000, np.uint8).tobytes()
MARKS = {"gzip": b"\x1f\x8b\x08\x00", "gzip-name": b"\x1f\x8b\x08\x08", "zip": b"PK\x03\x04"}


@pytest.mark.parametrize("rest", [CHANCE, bytes(4000), b"", b"\3\1" * 3000], ids=["random", "zeros", "none", "two"])
@pytest.mark.parametrize("name", MARKS)
def test_tokens_may_begin_like_an_archive_by_chance(name: str, rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(MARKS[name] + rest)
    np.testing.assert_array_equal(read(path, "<u2"), np.fromfile(path, "<u2"))


@pytest.mark.parametrize("size", [0, 40_000, 3_000_000])
def test_a_compressed_file_that_is_cut_is_refused(size: int, tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    packed = gzip.compress(np.random.default_rng(1).integers(0, 50, size, np.uint8).tobytes())
    for content in (packed, packed[: max(30, len(packed) // 2)], packed + packed):
        path.write_bytes(content)
        if len(content) > 20 or size:
            with pytest.raises(UnknownFormat):
                open_source(path, dtype="|u1")


@pytest.mark.parametrize("kind", ["ustar", "gnu", "pax", "v7"])
def test_a_tar_archive_is_no_flat_file(kind: str, tmp_path: Path) -> None:
    formats = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
    path = tmp_path / "train.bin"
    path.write_bytes(archive(format=formats[kind]) if kind in formats else old_tar())
    with pytest.raises(UsageError, match="cannot be used"):
        open_source(path, dtype="|u1")


@pytest.mark.parametrize("name", TEXTS)
def test_the_bytes_of_a_text_are_tokens(name: str, tmp_path: Path) -> None:
    """Models of bytes are trained on text files."""
    path = tmp_path / "enwik8"
    path.write_bytes(FILES[name])
    with open_source(path, dtype="|u1") as reader:
        out = np.empty(len(FILES[name]), np.uint8)
        reader.read_into("tokens", out)
    assert out.tobytes() == FILES[name]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_pickle_cut_anywhere_is_refused(name: str, protocol: int, tmp_path: Path) -> None:
    whole = pickle.dumps(OBJECTS[name], protocol)
    for share in (0.3, 0.6, 0.99):
        (tmp_path / "x").write_bytes(whole[: max(3, int(len(whole) * share))])
        with pytest.raises(UnknownFormat):
            open_source(tmp_path / "x", dtype="|u1")


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8"])
def test_ordinary_tokens_are_not_taken_for_something_else(dtype: str, tmp_path: Path) -> None:
    """Tokens whose first bytes are those of other formats, and 2,000 random beginnings."""
    path, rng = tmp_path / "x", np.random.default_rng(3)
    width = np.dtype(dtype).itemsize
    firsts = [0x8B1F, 640, 896, 1152, 1408, 0x2E2E, 0x2E, 0x7B, 0x227B, 0x4B50, 0]
    for first in [*firsts, *rng.integers(0, 50_000, 2000)]:
        tokens = rng.integers(0, 50_000, 600).astype(dtype)
        tokens[0] = first
        if first == 0x7B:
            tokens[1 if width == 8 else 8 // width] = first
        path.write_bytes(tokens.tobytes())
        np.testing.assert_array_equal(read(path, dtype), tokens)
    for few in (np.zeros(5000), np.full(5000, 198), np.arange(65).repeat(100)):
        path.write_bytes(few.astype(dtype).tobytes())
        np.testing.assert_array_equal(read(path, dtype), few)


def test_the_header_of_llm_c_is_no_token(tmp_path: Path) -> None:
    for magic, dtype in ((20240520, "<u2"), (20240801, "<u4")):
        path = llm_c(tmp_path, magic=magic, count=77)
        for given in (None, dtype):
            assert read(path, given).tobytes() == path.read_bytes()[1024:]
        with pytest.raises(UsageError, match="dtype"):
            read(path, "<i8")


def test_a_cut_file_of_llm_c_is_never_read_as_tokens(tmp_path: Path) -> None:
    whole = llm_c(tmp_path, count=40).read_bytes()
    path = tmp_path / "cut"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        for dtype in ("<u2", "|u1", None):
            with pytest.raises(DamagedSource):
                read(path, dtype)
    path.write_bytes(whole + b"\0\0")
    with pytest.raises(DamagedSource, match="40 tokens"):
        read(path, None)


@pytest.mark.parametrize(("at", "value"), [(1, 2), (1, 7), (2, -1), (2, 39), (2, 2**31 - 1)])
def test_a_header_of_llm_c_that_is_not_right_is_refused(at: int, value: int, tmp_path: Path) -> None:
    data = np.frombuffer(llm_c(tmp_path, count=40).read_bytes(), np.int32).copy()
    data[at] = value
    data.tofile(tmp_path / "x")
    with pytest.raises(DamagedSource):
        read(tmp_path / "x", "<u2")

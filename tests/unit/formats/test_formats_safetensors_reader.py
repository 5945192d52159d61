"""safetensors: every rule of the format, and the types numpy does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.errors import DamagedSource, UnsupportedData
from legroom.formats.detect import open_source


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(kind: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("kind", "dtype"), [("BF16", np.uint16), ("F8_E4M3", np.uint8), ("F8_E5M2", np.uint8), ("F8_E8M0", np.uint8)]
)
def test_floats_without_a_numpy_type_are_read_as_bits(tmp_path: Path, kind: str, dtype: type) -> None:
    size = 3 * np.dtype(dtype).itemsize
    path = write(tmp_path / "x", {"w": tensor(kind, [3], 0, size)}, bytes(range(size)))
    with open_source(path) as reader:
        (spec,) = reader.describe().items
        assert spec.dtype == dtype  # type: ignore[union-attr]
        assert spec.attributes == {"safetensors_dtype": kind}
        out = np.empty(3, dtype)
        reader.read_into("w", out)
    assert out.tobytes() == bytes(range(size))


def test_torch_bfloat16_is_read_bit_for_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    weights = torch.randn(7, 5).to(torch.bfloat16)
    save_file({"w": weights}, tmp_path / "x")
    with open_source(tmp_path / "x") as reader:
        out = np.empty((7, 5), np.uint16)
        reader.read_into("w", out)
    assert torch.equal(torch.from_numpy(out).view(torch.bfloat16), weights)


@pytest.mark.parametrize(
    ("header", "data", "word"),
    [
        ({"a": tensor("U8", [4], 0, 4)}, b"123", "ends at byte"),
        ({"a": tensor("U8", [4], 0, 4)}, b"12345", "1 bytes after"),
        ({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, bytes(6), "starts at 2"),
        ({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 4, 6)}, bytes(6), "starts at 4"),
        ({"a": tensor("U8", [5], 0, 4)}, bytes(4), "has 4 bytes"),
        ({"a": tensor("U8", [-4], 0, 4)}, bytes(4), "shape"),
        ({"a": tensor("U8", [1 << 40, 1 << 40, 0], 0, 4)}, bytes(4), "has 4 bytes"),
        ({"a": tensor("U8", [4], 4, 0)}, bytes(4), "offsets"),
        ({"a": tensor("U8", [4], 0, True)}, bytes(4), "offsets"),  # type: ignore[arg-type]
        ({"a": tensor("Q9", [4], 0, 4)}, bytes(4), "unknown type"),
        ({"a": tensor(["U8"], [4], 0, 4)}, bytes(4), "unknown type"),  # type: ignore[arg-type]
        ({"a": {"dtype": "U8"}}, b"", "exactly dtype, shape"),
        ({"a": 5}, b"", "exactly dtype, shape"),
        ({"__metadata__": {"k": 1}}, b"", "__metadata__"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        (b"{" * 60, b"", "header"),
        (b'{"a\xff": 1}', b"", "header"),
        (b"[]", b"", "unsupported file format"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused(tmp_path: Path, header: Any, data: bytes, word: str) -> None:
    path = write(tmp_path / "x", header, data)
    with pytest.raises(Exception, match=word) as caught, open_source(path) as reader:
        reader.describe()
    assert caught.value.code == ("unknown-format" if header == b"[]" else "damaged-source")


def test_a_header_beyond_the_formats_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((100_000_001).to_bytes(8, "little") + b"{}")
    with pytest.raises(DamagedSource, match="100000001"), open_source(tmp_path / "x") as reader:
        reader.describe()


def test_types_narrower_than_a_byte_are_refused_by_name(tmp_path: Path) -> None:
    header = {"a": tensor("F4", [4], 0, 2), "b": tensor("U8", [1], 2, 3)}
    path = write(tmp_path / "x", header, bytes(3))
    with pytest.raises(UnsupportedData, match="'a'"), open_source(path) as reader:
        reader.describe()
    with open_source(path, keys=["b"]) as reader:
        assert reader.describe().nbytes == 1


def test_the_metadata_are_the_files_attributes(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"__metadata__": {"format": "pt"}})
    with open_source(path) as reader:
        assert reader.describe().attributes == {"format": "pt"}
        assert reader.describe().items == ()

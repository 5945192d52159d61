"""Megatron's .idx and .bin: every number in the index is checked against the tokens."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_samples import megatron, megatron_index, read_megatron

from legroom.errors import DamagedSource, LegroomError, UnreadableSource, UnsupportedData, UsageError
from legroom.formats.detect import open_source
from legroom.formats.megatron_reader import with_indexes

LENGTHS, DOCUMENTS = [5, 0, 20, 15], [0, 1, 4]
HEADER, POINTERS, INDICES = 34, 34 + 4 * 4, 34 + 12 * 4


def write(folder: Path, index: bytes | None = None, tokens: int = 40) -> Path:
    np.arange(tokens, dtype=np.uint16).tofile(folder / "x.bin")
    (folder / "x.idx").write_bytes(index or megatron_index(LENGTHS, DOCUMENTS))
    return folder / "x.idx"


def read(path: Path, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    with open_source(path, **options) as reader:
        for spec in reader.describe().items:
            found[spec.name] = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
            reader.read_into(spec.name, found[spec.name])
    return found


def changed(at: int, value: bytes) -> bytes:
    data = bytearray(megatron_index(LENGTHS, DOCUMENTS))
    data[at : at + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_type_is_read(dtype: str, tmp_path: Path) -> None:
    path = megatron(tmp_path, count=5000, dtype=dtype, modes=True)
    found, expected = read(path), read_megatron(path)
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


@pytest.mark.filterwarnings("ignore")  # of that library
def test_it_reads_what_megatron_core_wrote(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    for dtype, modal in ((np.uint16, False), (np.int32, True)):
        builder = indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype, multimodal=modal)
        rng = np.random.default_rng(2)
        for _ in range(40):
            lengths = rng.integers(0, 90, 3).tolist()
            tokens = torch.from_numpy(rng.integers(0, 60_000, sum(lengths)))
            builder.add_document(tokens, lengths, [0, 1, 2] if modal else None)
        builder.finalize(str(tmp_path / "m.idx"))
        theirs = indexed.IndexedDataset(str(tmp_path / "m"), multimodal=modal)
        ours = read(tmp_path / "m.idx")
        offsets = ours["sequences/offsets"]
        for row in range(len(theirs)):
            expected = theirs[row][0] if modal else theirs[row]
            np.testing.assert_array_equal(ours["sequences/values"][offsets[row] : offsets[row + 1]], expected)
        np.testing.assert_array_equal(ours["documents/offsets"], theirs.document_indices)
        np.testing.assert_array_equal(ours["documents/values"], theirs.sequence_lengths)
        assert ("modes" in ours) == modal


def test_both_files_belong_to_the_data(tmp_path: Path) -> None:
    path = write(tmp_path)
    with open_source(path) as reader:
        description = reader.describe()
        assert description.files == (path, path.with_suffix(".bin"))
        assert [lookup.found for lookup in description.lookups] == [path.with_suffix(".bin")]
        assert len(reader.descriptors()) == 2


def test_the_bin_is_found_beside_the_name_or_beside_the_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "other.idx").symlink_to(path)
    assert len(read(tmp_path / "links" / "other.idx")["sequences/values"]) == 40
    np.zeros(40, np.uint16).tofile(tmp_path / "links" / "other.bin")
    assert not read(tmp_path / "links" / "other.idx")["sequences/values"].any()


def test_a_missing_bin_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(UnreadableSource, match=r"the \.bin file of .*x\.idx is missing"):
        open_source(path)


def test_a_dtype_must_agree_with_the_index(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert len(read(path, dtype="<u2")["sequences/values"]) == 40
    with pytest.raises(UsageError, match="uint16"):
        open_source(path, dtype="<i4")


@pytest.mark.parametrize("tokens", [0, 39, 41, 80])
def test_an_index_of_another_bin_is_refused(tokens: int, tmp_path: Path) -> None:
    with (
        pytest.raises(DamagedSource, match="belongs to another"),
        open_source(write(tmp_path, tokens=tokens)) as reader,
    ):
        reader.describe()


@pytest.mark.parametrize(
    "index",
    {
        "version 2": changed(9, struct.pack("<Q", 2)),
        "unknown type": changed(17, b"\x09"),
        "more sequences": changed(18, struct.pack("<Q", 5)),
        "2**64 - 1 sequences": changed(18, b"\xff" * 8),
        "2**60 documents": changed(26, struct.pack("<Q", 1 << 60)),
        "fewer documents": changed(26, struct.pack("<Q", 2)),
        "negative length": changed(HEADER, struct.pack("<i", -5)),
        "another length": changed(HEADER, struct.pack("<i", 6)),
        "swapped lengths": changed(HEADER, struct.pack("<ii", 0, 5)),
        "pointer not at 0": changed(POINTERS, struct.pack("<q", 2)),
        "pointers overlap": changed(POINTERS + 16, struct.pack("<q", 8)),
        "pointers with a gap": changed(POINTERS + 24, struct.pack("<q", 52)),
        "pointer out of range": changed(POINTERS + 24, struct.pack("<q", 1 << 62)),
        "negative pointer": changed(POINTERS + 24, struct.pack("<q", -10)),
        "documents not from 0": changed(INDICES, struct.pack("<q", 1)),
        "documents fall": changed(INDICES + 8, struct.pack("<q", 5)),
        "negative document": changed(INDICES + 8, struct.pack("<q", -1)),
        "documents end early": changed(INDICES + 16, struct.pack("<q", 3)),
        "no documents": megatron_index(LENGTHS, []),
        "a byte more": megatron_index(LENGTHS, DOCUMENTS) + b"\0",
        "five modes": megatron_index(LENGTHS, DOCUMENTS, modes=[0] * 5),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_an_index_that_is_not_right_is_refused(index: tuple[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(DamagedSource), open_source(write(tmp_path, index[1])) as reader:
        reader.describe()


@pytest.mark.parametrize("code", [6, 7])
def test_floating_point_numbers_are_no_tokens(code: int, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedData, match="holds no tokens"):
        open_source(write(tmp_path, changed(17, bytes([code]))))


def test_an_index_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = megatron_index(LENGTHS, DOCUMENTS, modes=[0, 1, 0, 1])
    plain = len(whole) - 4  # without modes it is complete again
    for size in range(len(whole)):
        if size == plain:
            continue
        path = write(tmp_path)
        path.write_bytes(whole[:size])
        with pytest.raises(LegroomError), open_source(path) as reader:
            reader.describe()


def test_lengths_that_overflow_are_refused(tmp_path: Path) -> None:
    sizes = np.full(70_000, 2**31 - 1, np.int32)
    with pytest.raises(DamagedSource), open_source(write(tmp_path, megatron_index(sizes, [0, len(sizes)]))) as reader:
        reader.describe()


def test_many_sequences_are_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.formats.megatron_reader._AT_ONCE", 7)
    path = megatron(tmp_path, count=900)
    found = read(path)
    for name, array in read_megatron(path).items():
        np.testing.assert_array_equal(found[name], array)
    data = bytearray(path.read_bytes())
    data[34 + 4 * 61 + 8 * 30] ^= 2
    path.write_bytes(data)
    with pytest.raises(DamagedSource, match="sequence 30 "):
        read(path)


def test_a_pair_has_one_name(tmp_path: Path) -> None:
    index = write(tmp_path)
    tokens, alone = index.with_suffix(".bin"), tmp_path / "alone.bin"
    shutil.copy(tokens, alone)
    assert with_indexes([tokens]) == [index]
    assert with_indexes([tokens, index, alone]) == [index, alone]
    index.write_bytes(b"another format")
    assert with_indexes([tokens]) == [tokens]

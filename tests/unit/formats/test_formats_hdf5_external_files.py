"""HDF5 files whose data lie in other files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from legroom.errors import DamagedSource, SourceBeingWritten, UnreadableSource, UnsupportedData
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import arriving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two plain files to refer to."""
    for index in range(2):
        with h5py.File(tmp_path / f"part{index}.h5", "w") as file:
            file["data"] = np.arange(5, dtype=np.int32) + 10 * index
    return tmp_path


def files(path: Path, keys: Any = None) -> set[str]:
    with open_source(path, keys) as reader:
        found = reader.describe().files
    assert found[0] == path
    assert all(other.is_absolute() for other in found[1:])
    return {other.name for other in found[1:]}


def read(path: Path, name: str) -> list[int]:
    with open_source(path, keys=name) as reader:
        (spec,) = reader.describe().items
        out = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
        reader.read_into(name, out)
    return out.tolist()


def virtual(path: Path, sources: list[tuple[str, str]], name: str = "v") -> Path:
    layout = h5py.VirtualLayout((5 * len(sources),), np.int32)
    for index, (file_name, dataset) in enumerate(sources):
        layout[5 * index : 5 * index + 5] = h5py.VirtualSource(file_name, dataset, shape=(5,))
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset(name, layout)
    return path


def test_a_virtual_dataset_lists_all_its_files(folder: Path) -> None:
    path = virtual(folder / "x.h5", [("part0.h5", "data"), (str(folder / "part1.h5"), "data")])
    assert files(path) == {"part0.h5", "part1.h5"}
    assert read(path, "v") == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    with open_source(path) as reader:
        assert reader.extent("v") is None


def test_a_virtual_dataset_on_its_own_file_needs_no_other(folder: Path) -> None:
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(5, dtype=np.int32)
        layout = h5py.VirtualLayout((5,), np.int32)
        layout[:] = h5py.VirtualSource(file["data"])
        file.create_virtual_dataset("v", layout)
    assert files(path) == set()
    assert read(path, "v") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("way", ["itself", "another file", "another name"])
def test_virtual_datasets_that_lead_back_to_themselves_are_refused(folder: Path, way: str) -> None:
    """HDF5 follows them until its stack overflows, which ends the process."""
    path = folder / "x.h5"
    if way == "another file":
        virtual(folder / "y.h5", [("x.h5", "v")], "w")
        virtual(path, [("y.h5", "w")])
    elif way == "another name":
        (folder / "link.h5").symlink_to(path)
        virtual(path, [("link.h5", "alias")])
        with h5py.File(path, "a") as file:
            file["alias"] = file["v"]
    else:
        virtual(path, [(".", "v")])
    with pytest.raises(UnsupportedData, match="cannot be followed") as caught:
        files(path, "v")
    assert "leads back to itself" in caught.value.why


def test_a_long_chain_of_virtual_datasets_is_refused_and_not_called_a_missing_dataset(folder: Path) -> None:
    path = folder / "x.h5"
    virtual(path, [("part0.h5", "data")], "v400")
    for index in range(399, -1, -1):
        virtual(path, [(".", f"v{index + 1}")], f"v{index}")
    with pytest.raises(UnsupportedData, match="cannot be followed") as caught:
        files(path, "v0")
    assert "more than 100 virtual datasets" in caught.value.why
    assert read(path, "v350") == [0, 1, 2, 3, 4]


def test_a_virtual_dataset_of_virtual_datasets_lists_all_files(folder: Path) -> None:
    virtual(folder / "middle.h5", [("part0.h5", "data")])
    path = virtual(folder / "x.h5", [("middle.h5", "v")])
    assert files(path) == {"middle.h5", "part0.h5"}


def test_a_missing_source_is_named_and_not_filled_with_zeros(folder: Path) -> None:
    path = virtual(folder / "x.h5", [("part0.h5", "data"), ("gone.h5", "data")])
    with pytest.raises(UnreadableSource, match=r"gone\.h5"):
        files(path)
    path = virtual(folder / "y.h5", [("part0.h5", "other")])
    with pytest.raises(UnreadableSource, match="'other'"):
        files(path)


def test_what_is_not_selected_may_be_missing(folder: Path) -> None:
    path = virtual(folder / "x.h5", [("gone.h5", "data")])
    with h5py.File(path, "a") as file:
        file["good"] = np.arange(3)
        file["link"] = h5py.ExternalLink("nowhere.h5", "data")
    assert files(path, "good") == set()


def numbered(path: Path, file_name: bytes, dataset: bytes) -> Path:
    """A virtual dataset over blocks of five, one from each numbered source."""
    from h5py import h5d, h5p, h5s, h5t

    space = h5s.create_simple((10,), (h5s.UNLIMITED,))
    space.select_hyperslab((0,), (h5s.UNLIMITED,), stride=(5,), block=(5,))
    options = h5p.create(h5p.DATASET_CREATE)
    options.set_virtual(space, file_name, dataset, h5s.create_simple((5,)))
    with h5py.File(path, "w", libver="latest") as file:
        h5d.create(file.id, b"v", h5t.NATIVE_INT32, h5s.create_simple((10,), (h5s.UNLIMITED,)), options)
    return path


def test_numbered_files_are_counted(folder: Path) -> None:
    path = numbered(folder / "x.h5", b"part%b.h5", b"data")
    assert files(path) == {"part0.h5", "part1.h5"}
    assert read(path, "v") == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    path = numbered(folder / "y.h5", b"none%b.h5", b"data")
    with pytest.raises(UnreadableSource, match=r"none0\.h5"):
        files(path)
    path = numbered(folder / "z.h5", b"part0.h5", b"data%b")
    with pytest.raises(UnsupportedData, match="data%b"):
        files(path)


def test_a_source_that_is_being_written_is_refused(folder: Path) -> None:
    path = virtual(folder / "x.h5", [("part0.h5", "data")])
    with h5py.File(folder / "part0.h5", "a"), pytest.raises(SourceBeingWritten, match=r"part0\.h5"):
        files(path)


def test_an_external_link_lists_its_file(folder: Path) -> None:
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        file["linked"] = h5py.ExternalLink("part0.h5", "data")
        file["all"] = h5py.ExternalLink("part1.h5", "/")
    assert files(path) == {"part0.h5", "part1.h5"}
    assert files(path, "linked") == {"part0.h5"}
    assert read(path, "linked") == [0, 1, 2, 3, 4]
    assert read(path, "all/data") == [10, 11, 12, 13, 14]
    with open_source(path) as reader:
        extent = reader.extent("linked")
    assert extent is not None and extent.path.name == "part0.h5"


@pytest.mark.parametrize(("target", "inner", "word"), [("gone.h5", "data", "gone.h5"), ("part0.h5", "no", "'no'")])
def test_a_broken_external_link_is_named(folder: Path, target: str, inner: str, word: str) -> None:
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        file["linked"] = h5py.ExternalLink(target, inner)
    with pytest.raises(UnreadableSource) as caught:
        files(path)
    assert word in str(caught.value) and "'linked'" in str(caught.value)


def test_a_linked_file_that_is_being_written_is_refused(folder: Path) -> None:
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        file["linked"] = h5py.ExternalLink("part0.h5", "data")
    with h5py.File(folder / "part0.h5", "a"), pytest.raises(SourceBeingWritten, match=r"part0\.h5"):
        files(path)


def test_links_are_searched_where_hdf5_searches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "part0.h5").rename(folder / "elsewhere" / "part0.h5")
    path = virtual(folder / "x.h5", [("part0.h5", "data")])
    with h5py.File(path, "a") as file:
        file["linked"] = h5py.ExternalLink("part0.h5", "data")
    with pytest.raises(UnreadableSource):
        files(path)
    monkeypatch.chdir(folder / "elsewhere")
    assert files(path) == {"part0.h5"}
    assert read(path, "v") == read(path, "linked") == [0, 1, 2, 3, 4]


def test_external_storage_lists_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        pieces = [(str(folder / "a.raw"), 0, 12), ("b.raw", 4, 8)]
        file.create_dataset("x", (5,), np.int32, external=pieces)[...] = np.arange(5)
    assert files(path) == {"a.raw", "b.raw"}
    assert read(path, "x") == [0, 1, 2, 3, 4]
    with open_source(path) as reader:
        assert reader.extent("x") is None
    monkeypatch.chdir("/")
    with pytest.raises(UnreadableSource, match=r"b\.raw") as caught:
        files(path)
    assert any("HDF5_EXTFILE_PREFIX" in step for step in caught.value.fix)
    os.remove(folder / "a.raw")
    with pytest.raises(UnreadableSource, match=r"a\.raw"):
        files(path)


def test_a_link_whose_name_is_not_utf8_lists_its_file(folder: Path) -> None:
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        file.id.links.create_external(b"l\xff", b"part0.h5", b"data")
        file.id.links.create_soft(b"s\xff", b"/l\xff")
        file["hard"] = np.arange(3)
        file.id.links.create_hard(b"h\xff", file.id, b"hard")
    assert files(path) == {"part0.h5"}
    assert read(path, "l\\xff") == [0, 1, 2, 3, 4]
    assert read(path, "h\\xff") == [0, 1, 2]


class Downloaded:
    """Stands in for a download whose bytes are all there."""

    def wait(self, offset: int, count: int) -> None:
        pass


def test_a_virtual_dataset_of_its_own_file_is_read_while_the_file_is_downloaded(tmp_path: Path) -> None:
    path = tmp_path / "v.h5"
    layout = h5py.VirtualLayout((6,), "i4")
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(6, dtype="i4")
        layout[:] = h5py.VirtualSource(".", "data", (6,))
        file.create_virtual_dataset("v", layout)
    with arriving(path, Downloaded()):  # type: ignore[arg-type]
        assert read(path, "v") == [0, 1, 2, 3, 4, 5]


def test_an_error_in_a_file_that_is_downloaded_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1000), chunks=(100,), compression="gzip")
        file["words"] = ["a" * 5000, "b"]
        at = file["x"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[at : at + 8] = b"nonsense"
    data[data.index(b"GCOL")] = 0
    path.write_bytes(data)
    for name in ("x", "words/values"):
        with arriving(path, Downloaded()), pytest.raises(DamagedSource) as caught:  # type: ignore[arg-type]
            read(path, name)
        assert str(path) in str(caught.value) and "BufferedReader" not in str(caught.value)

"""HDF5: what is kept, what is refused and by which words, and files that are not finished."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from legroom.errors import DamagedSource, SourceBeingWritten, UnreadableSource, UnsupportedData
from legroom.formats import hdf5_find_datasets, hdf5_reader
from legroom.formats.base_reader import ArraySpec, Description
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.formats.hdf5_find_datasets import DatasetSearch
from legroom.formats.hdf5_types_and_vlen import GlobalHeaps


def describe(path: Path, keys: Any = None) -> Description:
    with open_source(path, keys) as reader:
        return reader.describe()


def names(path: Path, keys: Any = None) -> list[str]:
    return [item.name for item in describe(path, keys).items]


def read(path: Path, name: str) -> np.ndarray:
    with open_source(path, keys=name) as reader:
        spec = next(item for item in reader.describe().items if item.name == name)
        assert isinstance(spec, ArraySpec)
        out = np.empty(spec.shape, spec.dtype)
        reader.read_into(name, out)
    return out


# Attributes.


def test_attributes_are_converted_to_json(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.attrs["text"] = "grün"
        file.attrs["bytes"] = np.bytes_(b"ab")
        file.attrs["number"] = np.int16(7)
        file.attrs["list"] = np.arange(3.0)
        file.attrs["words"] = ["a", "b"]
        file.attrs["nothing"] = h5py.Empty("f4")
        file.attrs["infinite"] = np.inf
        file.attrs["large"] = np.zeros((40, 50))
        file.attrs["reference"] = file.ref
        file.attrs["record"] = np.array((1, 2.5), [("a", "i4"), ("b", "f8")])
        file["group/x"] = np.zeros(2)
        file["group"].attrs["split"] = "train"
        file["group/x"].attrs["unit"] = "mm"
    description = describe(path)
    kept = dict(description.attributes)
    assert kept.pop("reference")["omitted"] == "object"
    assert kept == {
        "text": "grün",
        "bytes": "ab",
        "number": 7,
        "list": [0.0, 1.0, 2.0],
        "words": ["a", "b"],
        "nothing": {"omitted": "Empty"},
        "infinite": "inf",
        "large": {"omitted": "array", "shape": [40, 50], "dtype": "float64"},
        "record": {"a": 1, "b": 2.5},
        "group/split": "train",
    }
    assert description.items[0].attributes == {"unit": "mm"}


def test_an_enumeration_keeps_its_names(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a", (2,), h5py.enum_dtype({"cat": 1, "dog": 2}, "i1"))[...] = [2, 1]
    (spec,) = describe(tmp_path / "x.h5").items
    assert spec.attributes["hdf5_enum"] == {"cat": 1, "dog": 2}
    assert read(tmp_path / "x.h5", "a").tolist() == [2, 1]


def test_rows_of_several_axes_keep_their_shape(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["grid"] = np.array([["a", "bc"], ["", "d"]], object)
        file["one"] = "alone"
    specs = {item.name: item for item in describe(tmp_path / "x.h5").items}
    assert specs["grid/values"].attributes["ragged_shape"] == [2, 2]
    assert specs["one/values"].attributes["ragged_shape"] == []
    spec = specs["grid/offsets"]
    assert isinstance(spec, ArraySpec) and spec.ragged == "grid" and spec.text
    assert read(tmp_path / "x.h5", "grid/offsets").tolist() == [0, 1, 3, 3, 4]
    assert read(tmp_path / "x.h5", "grid/values").tobytes() == b"abcd"


def test_strings_with_a_null_dataspace_have_no_rows(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("none", data=h5py.Empty(h5py.string_dtype()))
    assert read(tmp_path / "x.h5", "none/offsets").tolist() == [0]
    assert read(tmp_path / "x.h5", "none/values").tolist() == []


def test_rows_in_foreign_byte_order_are_converted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = file.create_dataset("a", (3,), h5py.vlen_dtype(np.dtype(">f4")), chunks=(2,), compression="gzip")
        rows[0] = np.array([1.0, 2.0], ">f4")
        rows[2] = np.array([-3.5], ">f4")
    assert read(tmp_path / "x.h5", "a/values").tolist() == [1.0, 2.0, -3.5]
    assert read(tmp_path / "x.h5", "a/offsets").tolist() == [0, 2, 2, 3]


def test_rows_that_h5py_would_misread_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = file.create_dataset("a", (3,), h5py.vlen_dtype(np.dtype(">f4")), chunks=(2,), compression="lzf")
        rows[0] = np.array([1.0, 2.0], ">f4")
    with pytest.raises(UnsupportedData, match="byte order"):
        describe(tmp_path / "x.h5")


# What cannot be an array.


def unsupported(file: h5py.File) -> None:
    file["good"] = np.arange(3)
    file["bad/reference"] = file["good"].ref
    file["bad/region"] = file["good"].regionref[:2]
    file["bad/opaque"] = np.void(b"abc")
    file.create_dataset("bad/record", (1,), [("a", "i4"), ("b", h5py.string_dtype())])
    file.create_dataset("bad/nested", (1,), h5py.vlen_dtype(h5py.vlen_dtype("i4")))
    file.create_dataset("bad/arrays", (1,), h5py.vlen_dtype(np.dtype(("i4", (2,)))))
    file["bad/nowhere"] = h5py.SoftLink("/not/there")
    kind = h5py.h5t.UNIX_D32LE
    h5py.h5d.create(file["bad"].id, b"time", kind, h5py.h5s.create_simple((2,)))


@pytest.mark.parametrize("name", ["reference", "region", "opaque", "record", "nested", "arrays", "time", "nowhere"])
def test_an_unsupported_dataset_is_refused_by_name_and_can_be_left_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        unsupported(file)
    with pytest.raises((UnsupportedData, UnreadableSource)) as caught:
        describe(path, f"bad/{name}")
    assert f"bad/{name}" in caught.value.what
    assert any("keys=" in step for step in caught.value.fix)
    assert names(path, "good") == ["good"]


def test_a_group_that_contains_itself_is_visited_once(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["a/x"] = np.zeros(1)
        file["a/self"] = file["a"]
        file["a/up"] = h5py.SoftLink("/")
        file["alias"] = file["a/x"]
        file["soft"] = h5py.SoftLink("/a")
    assert sorted(names(path)) == ["a/x", "alias", "soft/x"]


def test_a_named_type_is_not_an_array(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["kind"] = np.dtype("f4")
        file["x"] = np.zeros(1)
    assert names(tmp_path / "x.h5") == ["x"]


def test_a_name_that_is_not_utf8_is_readable(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file[b"caf\xe9"] = np.arange(3)
    assert names(tmp_path / "x.h5") == ["caf\\xe9"]
    assert read(tmp_path / "x.h5", "caf\\xe9").tolist() == [0, 1, 2]


# Damage.


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(1000)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DamagedSource, match="truncated"):
        open_source(path)


def chunked_file(path: Path, **filters: Any) -> list[tuple[int, int]]:
    """A chunked file, and where its chunks lie."""
    data = np.random.default_rng(0).integers(0, 9, (50,), np.int32)
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=data, chunks=(20,), **filters)
        found: list[tuple[int, int]] = []
        made.id.chunk_iter(lambda info: found.append((info.byte_offset, info.size)))
    return found


@pytest.mark.parametrize(
    "filters", [{"compression": "gzip"}, {"fletcher32": True}, {"compression": "gzip", "fletcher32": True}]
)
def test_a_damaged_chunk_is_detected(tmp_path: Path, filters: dict[str, Any]) -> None:
    path = tmp_path / "x.h5"
    offset, size = chunked_file(path, **filters)[1]
    data = bytearray(path.read_bytes())
    data[offset + size // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedSource, match=r"chunk at \(20,\)"):
        read(path, "x")


def test_hdf5_reads_an_edge_chunk_of_full_size(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=np.arange(50, dtype=np.int32), chunks=(20,), compression="gzip")
        made.id.write_direct_chunk((40,), np.full(20, 7, np.int32).tobytes(), 0)
    with pytest.raises(DamagedSource, match=r"chunk at \(40,\)"):
        read(path, "x")


def test_a_chunk_beyond_the_end_of_the_file_is_damage_not_an_allocation(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    _, size = chunked_file(path, compression="gzip")[0]
    data = path.read_bytes()
    entry = size.to_bytes(4, "little") + bytes(4)  # a chunk's size and filter mask in the B-tree
    assert data.count(entry) >= 1
    path.write_bytes(data.replace(entry, (0x7FFFFFFF).to_bytes(4, "little") + bytes(4), 1))
    with pytest.raises(DamagedSource, match="truncated"):
        read(path, "x")


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_longer_than_its_heap_is_damage_not_a_crash(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "x.h5"
    options = {"chunks": (2,)} if packed else {}
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=["abcdefg", "hi"], dtype=h5py.string_dtype(), **options)
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    at = data.index((7).to_bytes(4, "little") + heap.to_bytes(8, "little"))
    data[at : at + 4] = (900).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DamagedSource, match="900 bytes"):
        read(path, "x/values")
    data[at : at + 12] = (7).to_bytes(4, "little") + (64).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(DamagedSource, match="no heap"):
        read(path, "x/values")


@pytest.mark.parametrize("options", [{}, {"chunks": (2,)}, {"chunks": (2,), "compression": "gzip"}])
def test_texts_end_where_hdf5_ends_them_or_are_refused(tmp_path: Path, options: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=["", "ab#", "cdef#", "", "gh#"], dtype=h5py.string_dtype(), **options)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"#", b"\0"))  # as programs do that store the zero byte with each text
    with h5py.File(path) as file:
        assert b"".join(file["x"][:]) == b"abcdefgh"
    assert read(path, "x/values").tobytes() == b"abcdefgh"
    assert read(path, "x/offsets").tolist() == [0, 0, 2, 6, 6, 8]
    path.write_bytes(data.replace(b"cdef", b"c\0ef"))
    with pytest.raises(DamagedSource, match="row 2 of 'x' has a zero byte"):
        read(path, "x/values")


@pytest.mark.parametrize("options", [{}, {"libver": "latest"}, {"userblock_size": 512}])
def test_a_heap_that_would_hang_hdf5_is_detected_before_hdf5_reads_it(tmp_path: Path, options: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", **options) as file:
        file["x"] = np.arange(3)
        for index in range(6):
            file["x"].attrs[f"note{index}"] = f"text {index}"
        header = h5py.h5o.get_info(file["x"].id).addr
    base = options.get("userblock_size", 0)
    data = bytearray(path.read_bytes())
    with SourceFile(path) as source:
        GlobalHeaps(source, base, path).check_attributes(header)  # all is well
    heap = data.index(b"GCOL")
    data[heap + 64 : heap + 4096] = bytes(4096 - 64)  # as where a download stopped: zeros to the end
    path.write_bytes(data)
    with SourceFile(path) as source, pytest.raises(DamagedSource, match="object 0 of the heap"):
        GlobalHeaps(source, base, path).check_attributes(header)


# Filters.


def test_a_filter_of_hdf5plugin_is_used(tmp_path: Path) -> None:
    plugin = pytest.importorskip("hdf5plugin")
    data = np.arange(1000)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(100,), **plugin.Zstd())
    script = (
        "import sys, numpy as np\n"
        "from legroom.formats.detect import open_source\n"
        "reader = open_source(sys.argv[1])\n"
        "reader.describe()\n"
        "out = np.empty(1000, int)\n"
        "reader.read_into('x', out)\n"
        "print(out.sum(), 'hdf5plugin' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "x.h5"], capture_output=True, text=True)
    assert done.stdout.split() == [str(data.sum()), "True"], done.stderr


@pytest.mark.parametrize("installed", [False, True])
def test_an_unavailable_filter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (4,), "i4", chunks=(4,), compression="gzip")
        made[...] = 1
        file["good"] = np.arange(2)
    data = path.read_bytes()
    at = data.index(b"deflate\0")  # the filter's message: number, name length, flags, values, name
    data = data[: at - 8] + (31999).to_bytes(2, "little") + data[at - 6 :]
    path.write_bytes(data)
    if installed:
        pytest.importorskip("hdf5plugin")
    else:
        monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(UnsupportedData, match="31999") as caught:
        describe(path)
    assert ("pip install hdf5plugin" in caught.value.fix) is not installed
    assert names(path, "good") == ["good"]


@pytest.mark.parametrize("missing", [("deflate",), ("deflate", "isal")])
def test_inflate_falls_back_to_zlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]) -> None:
    from legroom.formats import decompress_deflate

    chunked_file(tmp_path / "x.h5", compression="gzip", shuffle=True)
    expected = read(tmp_path / "x.h5", "x")
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)

    def forget() -> None:
        decompress_deflate.zlib_module.cache_clear()
        decompress_deflate._whole.cache_clear()

    forget()
    try:
        assert decompress_deflate.zlib_module().__name__ == ("zlib" if "isal" in missing else "isal.isal_zlib")
        assert decompress_deflate._whole()[1] is decompress_deflate.zlib_module().error
        np.testing.assert_array_equal(read(tmp_path / "x.h5", "x"), expected)
        with pytest.raises(ValueError, match=r"instead of|expected"):
            decompress_deflate.inflate(b"rubbish", 5)
    finally:
        forget()


# Writers.


@pytest.mark.parametrize("swmr", [False, True])
def test_the_flags_of_a_writer_are_detected(tmp_path: Path, swmr: bool) -> None:
    path, copy = tmp_path / "x.h5", tmp_path / "copy.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=np.arange(3), maxshape=(None,))
        if swmr:
            file.swmr_mode = True
        file.flush()
        copy.write_bytes(path.read_bytes())  # as after a writer's death: no lock, the flags alone
    with pytest.raises(SourceBeingWritten) as caught:
        open_source(copy)
    assert ("single-writer" in caught.value.why) is swmr
    assert any("h5clear" in step for step in caught.value.fix)
    assert names(path) == ["x"]


def test_a_writer_in_this_process_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)
        file.flush()
        (tmp_path / "link.h5").symlink_to(path)
        with pytest.raises(SourceBeingWritten, match="this process"):
            open_source(tmp_path / "link.h5")
    assert names(path) == ["x"]


def test_a_writer_in_another_process_is_detected_by_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    script = (
        "import h5py, sys\n"
        "file = h5py.File(sys.argv[1], 'w')\n"
        "file['x'] = [1, 2, 3]\n"
        "file.flush()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(SourceBeingWritten, match="lock"):
            open_source(path)
        writer.communicate("")
    assert names(path) == ["x"]


@pytest.mark.parametrize("locking", [True, False, "best-effort", None])
def test_readers_of_this_process_may_use_different_locking(tmp_path: Path, locking: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)
    with h5py.File(path, "r", locking=locking):
        assert names(path) == ["x"]
        assert read(path, "x").tolist() == [0, 1, 2]


def test_a_filesystem_without_locks_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)
    real, tried = h5py.File, []

    def lockless(*args: Any, locking: Any = None, **options: Any) -> Any:
        tried.append(locking)
        if locking is not False:
            raise OSError(errno.ENOLCK, "Unable to open file (unable to lock file, errno = 37)")
        return real(*args, locking=locking, **options)

    monkeypatch.setattr(h5py, "File", lockless)
    with open_source(path):
        assert tried[-1] is False


def test_a_disk_error_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Unable to open file (file read failed)")

    monkeypatch.setattr(h5py, "File", broken)
    with pytest.raises(UnreadableSource, match="Input/output"):
        open_source(path)


def test_a_damaged_file_in_a_thread_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(100)
        file["y"] = h5py.SoftLink("/nowhere")
    caught: list[Exception] = []

    def look() -> None:
        for keys in ("y", None):
            try:
                describe(path, keys)
            except UnreadableSource as problem:
                caught.append(problem)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert len(caught) == 2
    assert capfd.readouterr() == ("", "")


def test_too_many_rows_for_memory_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (1 << 56,), h5py.string_dtype(), chunks=(1 << 20,))
    with pytest.raises(UnsupportedData, match="1 EB"):
        describe(tmp_path / "x.h5")


@pytest.mark.real("mount")
def test_a_file_on_a_read_only_filesystem_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with h5py.File(tmp_path / "disk" / "x.h5", "w") as file:
        file["x"] = np.arange(3)
    script = (
        "import sys\n"
        "from legroom.formats.detect import open_source\n"
        "print(open_source(sys.argv[1]).describe().items[0].name)"
    )
    folder = str(tmp_path / "disk")
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c",
         'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ! touch "$0/y" 2>/dev/null && exec "$@"',
         folder, sys.executable, "-c", script, folder + "/x.h5"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "x", done.stderr


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("bottom", [False, True])
def test_exponentially_many_names_are_refused(
    tmp_path: Path, soft: bool, bottom: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0
    follow = DatasetSearch._follow

    def counting(self: DatasetSearch, *arguments: Any) -> Any:
        nonlocal opened
        opened += 1
        return follow(self, *arguments)

    monkeypatch.setattr(DatasetSearch, "_follow", counting)
    monkeypatch.setattr(hdf5_find_datasets, "_MOST_REPEATED", 1000)
    with h5py.File(tmp_path / "x", "w", libver="latest") as file:
        file["top"] = np.arange(3)
        below = file.create_group("g22")
        if bottom:
            below["x"] = np.arange(3)
        for step in reversed(range(22)):
            group = file.create_group(f"g{step}")
            group["a"] = group["b"] = h5py.SoftLink(f"/{below.name}") if soft else below
            below = group
    with pytest.raises(UnsupportedData, match="names"):
        describe(tmp_path / "x")
    assert opened < 1200  # of the 2^22 names
    assert names(tmp_path / "x", keys="top") == ["top"]


def test_a_group_under_a_second_name_is_found_under_both(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x", "w") as file:
        for number in range(50):
            file[f"train/{number:02}"] = [number]
        file["again"] = h5py.SoftLink("/train")
    assert len(names(tmp_path / "x")) == 100


def test_too_many_levels_of_groups_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x", "w") as file:
        group = file
        for _ in range(1500):
            group = group.create_group("g")
        group["x"] = [1]
    with pytest.raises(UnsupportedData, match="levels of groups"):
        describe(tmp_path / "x")


@pytest.mark.parametrize("holder", ["/", "group", "x"])
def test_an_attribute_of_a_type_that_numpy_lacks_is_left_out(tmp_path: Path, holder: str) -> None:
    kind = h5py.h5t.IEEE_F64LE.copy()
    kind.set_ebias(200_000)  # no machine's float
    with h5py.File(tmp_path / "x", "w") as file:
        file["x"] = np.arange(3)
        file.create_group("group")
        h5py.h5a.create(file[holder].id, b"scale", kind, h5py.h5s.create(h5py.h5s.SCALAR))
    description = describe(tmp_path / "x")
    assert [item.name for item in description.items] == ["x"]
    kept = [*description.attributes.values(), *description.items[0].attributes.values()]
    assert kept == [{"omitted": "unknown type", "shape": []}]


def test_any_error_of_the_library_while_the_contents_are_listed_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("Can't decode datatype")

    with h5py.File(tmp_path / "x", "w") as file:
        file["x"] = np.arange(3)
    monkeypatch.setattr(hdf5_reader, "dataset_names", broken)
    with pytest.raises(DamagedSource, match="decode datatype"), open_source(tmp_path / "x", keys="x") as reader:
        reader.describe()

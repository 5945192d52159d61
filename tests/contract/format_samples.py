"""Files of every format, written by the reference library, and what that library reads back from them."""

from __future__ import annotations

import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from archive_samples import image_folder, mds, read_image_folder, read_mds, read_webdataset, webdataset
from lmdb_files import write_lmdb

from legroom.testing import Arrays
from legroom.testing import FormatSample as Sample


def common_arrays() -> Arrays:
    """One of each kind that every array format should hold as far as it can."""
    rng = np.random.default_rng(7)
    return {
        "images": rng.integers(0, 255, (170, 32, 32, 3), np.uint8),
        "labels": np.arange(170, dtype=np.int64),
        "group/deep/heatmaps": rng.normal(size=(23, 5, 7)).astype(np.float32),
        "group/flags": rng.random(33) > 0.5,
        "scalar": np.array(3.25, np.float32),
        "empty": np.zeros((0, 3), np.float64),
        "big_endian": np.arange(41, dtype=">f4").reshape(41, 1) * 1.5,
        "fortran": np.asfortranarray(np.arange(60, dtype=np.int16).reshape(3, 4, 5)),
        "wave": (np.arange(6) + 1j).astype(np.complex64),
        "words": np.array([b"one", b"seventy", b""], "S7"),
    }


# HDF5.


def _h5(folder: Path, fill: Callable[[Any], None], **options: Any) -> Path:
    import h5py

    path = folder / "data.h5"
    with h5py.File(path, "w", **options) as file:
        fill(file)
    return path


def h5_contiguous(folder: Path, **options: Any) -> Path:
    def fill(file: Any) -> None:
        for name, array in common_arrays().items():
            file[name] = array
        file.attrs["made by"] = "a test"
        file["images"].attrs["mean"] = np.array([0.5, 0.25, np.nan])
        file["group"].attrs["split"] = "train"

    return _h5(folder, fill, **options)


def h5_chunked(folder: Path, userblock: int = 0, **filters: Any) -> Path:
    """Chunks that do not divide the shape, some never written, other fill values than zero."""

    def fill(file: Any) -> None:
        for name, array in common_arrays().items():
            if array.ndim and array.size:
                chunks = tuple(max(1, n // 3 + 1) for n in array.shape)
                file.create_dataset(name, data=array, chunks=chunks, **filters)
        sparse = file.create_dataset("sparse", (100, 10), ">i4", chunks=(7, 4), fillvalue=-5, **filters)
        sparse[20:33, 2:5] = 9
        file.create_dataset("unwritten", (11,), "f8", chunks=(4,), fillvalue=2.5, **filters)
        if "compression" in filters and filters["compression"] == "gzip":
            odd = file.create_dataset("mask", (8,), "i4", chunks=(4,), **filters)
            odd[:] = np.arange(8)
            # One chunk stored without any of its filters, as a writer may choose to.
            every = (1 << odd.id.get_create_plist().get_nfilters()) - 1
            odd.id.write_direct_chunk((4,), np.arange(40, 44, dtype="<i4").tobytes(), every)
        record = np.dtype([("x", ">i4"), ("y", "<f4", (3,))])
        file.create_dataset("records", data=np.ones(10, record), chunks=(3,), **filters)
        file.create_dataset("inner", (5,), np.dtype(("<i2", (3,))), chunks=(2,), **filters)[...] = np.arange(
            15
        ).reshape(5, 3)

    return _h5(folder, fill, userblock_size=userblock)


def h5_types(folder: Path) -> Path:
    """Types that must be converted, in contiguous and compact storage."""
    import h5py

    def fill(file: Any) -> None:
        h5t, h5s, h5d, h5p = h5py.h5t, h5py.h5s, h5py.h5d, h5py.h5p
        kind = h5py.enum_dtype({"cat": 1, "dog": 300}, basetype=">i4")
        file.create_dataset("animals", (3,), kind)[...] = [1, 300, 1]
        file.create_dataset("utf8", (2,), h5py.string_dtype("utf-8", 6))[...] = ["añ", "b"]
        padded = h5t.C_S1.copy()
        padded.set_size(6)
        padded.set_strpad(h5t.STR_SPACEPAD)
        h5d.create(file.id, b"padded", padded, h5s.create_simple((2,)))
        file["padded"].id.write(h5s.ALL, h5s.ALL, np.array([b"ab    ", b"c     "], "S6"), padded)
        h5d.create(file.id, b"bits", h5t.STD_B16BE, h5s.create_simple((4,)))
        file["bits"].id.write(h5s.ALL, h5s.ALL, np.arange(4, dtype=np.uint16), h5t.NATIVE_B16)
        half = h5t.IEEE_F32LE.copy()
        half.set_fields(15, 7, 8, 0, 7)
        half.set_size(2)
        h5d.create(file.id, b"bfloat16", half, h5s.create_simple((5,)))
        file["bfloat16"][...] = np.arange(5, dtype=np.float32)
        compact = h5p.create(h5p.DATASET_CREATE)
        compact.set_layout(h5d.COMPACT)
        h5d.create(file.id, b"compact", h5t.STD_I32BE, h5s.create_simple((4,)), compact)
        file["compact"][...] = [1, 2, 3, 4]
        file["records"] = np.array([(1, 2.5, b"ab")], [("a", ">i8"), ("b", "<f4"), ("c", "S3")])
        file.create_dataset("inner", (4,), np.dtype((">i4", (3,))))[...] = np.arange(12).reshape(4, 3)
        file.create_dataset("null", data=h5py.Empty("f4"))
        file.create_dataset("unwritten", (3,), "i2", fillvalue=7)
        file["when"] = np.array(["2024-05-06"], "M8[s]").astype(h5py.opaque_dtype("M8[s]"))

    return _h5(folder, fill)


def h5_ragged(folder: Path, **options: Any) -> Path:
    import h5py

    captions = ["a cat", "", "zwölf Boxkämpfer", "x" * 5000] + [f"row {i}" for i in range(300)]
    rng = np.random.default_rng(3)

    def fill(file: Any) -> None:
        text = h5py.string_dtype()
        file["captions"] = captions
        file.create_dataset("chunked", data=captions, dtype=text, chunks=(50,), compression="gzip")
        file.create_dataset("grid", data=np.array(captions[:6], object).reshape(2, 3), dtype=text)
        file.create_dataset("one", data="alone", dtype=text)
        file.create_dataset("none", (0,), text)
        file.create_dataset("filled", (4,), text, chunks=(2,), fillvalue="gone")[:] = "here"
        for name, base, size in (("jpegs", "u1", 30_000), ("sounds", "<f4", 700), ("flags", "?", 10)):
            rows = file.create_dataset(name, (9,), h5py.vlen_dtype(np.dtype(base)))
            for index in range(0, 9, 2):
                rows[index] = rng.integers(0, 2, index * size).astype(base)
        file.create_dataset("lzf", data=captions, dtype=text, chunks=(50,), compression="lzf")

    return _h5(folder, fill, **options)


def read_h5(path: Path) -> Arrays:
    import h5py

    found: Arrays = {}

    def note(name: str, node: Any) -> None:
        if not isinstance(node, h5py.Dataset):
            return
        if node.shape is None:
            found[name] = np.zeros((0,), node.dtype)
        elif node.dtype.hasobject:
            found.update(_rows(name, node))
        else:
            found[name] = np.asarray(node[...])

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


def _rows(name: str, node: Any) -> Arrays:
    import h5py

    data = node[()]
    rows = [data] if node.shape == () else list(data.reshape(-1))
    if h5py.check_string_dtype(node.dtype):
        rows = [np.frombuffer(row, np.uint8) for row in rows]
        base = np.dtype(np.uint8)
    else:
        base = h5py.check_vlen_dtype(node.dtype)
    return {
        name + "/offsets": np.cumsum([0, *map(len, rows)]).astype(np.int64),
        name + "/values": np.concatenate([np.zeros(0, base), *rows]).astype(base.newbyteorder("=")),
    }


# numpy.


def npy(array: np.ndarray) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.save(folder / "data.npy", array)
        return folder / "data.npy"

    return write


def read_npy(path: Path) -> Arrays:
    return {"array": np.load(path)}


def npz(folder: Path, compressed: bool = False) -> Path:
    path = folder / "data.npz"
    (np.savez_compressed if compressed else np.savez)(path, **common_arrays())
    return path


def read_npz(path: Path) -> Arrays:
    with np.load(path) as archive:
        return dict(archive.items())


# safetensors.


def safetensors(folder: Path) -> Path:
    from safetensors.numpy import save_file

    path = folder / "data.safetensors"
    arrays = {name: np.ascontiguousarray(a).astype(a.dtype.newbyteorder("=")) for name, a in common_arrays().items()}
    arrays["scalar"] = np.array(3.25, np.float32)
    del arrays["words"]
    save_file(arrays, path, metadata={"made by": "a test"})
    return path


def read_safetensors(path: Path) -> Arrays:
    from safetensors.numpy import load_file

    return load_file(path)


# Token files, written and read from the description of their formats.

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def megatron_index(lengths: Any, documents: Any, dtype: str = "uint16", modes: Any = None) -> bytes:
    """An .idx of Megatron."""
    sizes = np.asarray(lengths, np.int32)
    ends = np.cumsum(sizes, dtype=np.int64) * np.dtype(dtype).itemsize
    pointers = ends - sizes.astype(np.int64) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(documents))
    tail = b"" if modes is None else np.asarray(modes, np.int8).tobytes()
    return head + sizes.tobytes() + pointers.tobytes() + np.asarray(documents, np.int64).tobytes() + tail


def megatron(
    folder: Path, name: str = "data.idx", count: int = 300_000, dtype: str = "uint16", modes: bool = False
) -> Path:
    rng = np.random.default_rng(11)
    borders = np.sort(rng.integers(0, count, 60))
    lengths = np.diff([0, *borders, count])
    documents = [0, *range(3, 61, 7), 61, 61]  # the last one has no sequences
    extra = rng.integers(0, 3, 61) if modes else None
    rng.integers(0, 120, count).astype(dtype).tofile((folder / name).with_suffix(".bin"))
    (folder / name).write_bytes(megatron_index(lengths, documents, dtype, extra))
    return folder / name


def read_megatron(path: Path) -> Arrays:
    """Each sequence from its own pointer."""
    data = path.read_bytes()
    magic, version, code, count, documents = struct.unpack("<9sQBQQ", data[:34])
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    kind = np.dtype({code: name for name, code in CODES.items()}[code])
    lengths = np.frombuffer(data, np.int32, count, 34)
    pointers = np.frombuffer(data, np.int64, count, 34 + 4 * count)
    indices = np.frombuffer(data, np.int64, documents, 34 + 12 * count)
    assert indices[-1] == count
    tokens = Path(os.path.realpath(path)).with_suffix(".bin").read_bytes()
    rows = [np.frombuffer(tokens, kind, n, at) for n, at in zip(lengths.tolist(), pointers.tolist(), strict=True)]
    found = {
        "sequences/offsets": np.cumsum([0, *map(len, rows)]).astype(np.int64),
        "sequences/values": np.concatenate([np.zeros(0, kind), *rows]),
        "documents/offsets": indices,
        "documents/values": lengths,
    }
    if len(data) > 34 + 12 * count + 8 * documents:
        found["modes"] = np.frombuffer(data, np.int8, count, 34 + 12 * count + 8 * documents)
    return found


def llm_c(folder: Path, name: str = "data.bin", magic: int = 20240520, count: int = 300_000) -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = magic, {20240520: 1, 20240801: 7}[magic], count
    tokens = np.random.default_rng(5).integers(0, 50_000, count).astype(_LLM_C[magic])
    (folder / name).write_bytes(header.tobytes() + tokens.tobytes())
    return folder / name


_LLM_C = {20240520: np.uint16, 20240801: np.uint32}


def read_llm_c(path: Path) -> Arrays:
    magic, version, count = np.fromfile(path, np.int32, 3).tolist()
    assert (magic, version) in ((20240520, 1), (20240801, 7))
    tokens = np.fromfile(path, _LLM_C[magic], count, offset=1024)
    assert len(tokens) == count >= 0
    return {"tokens": tokens}


# torch checkpoints.


def torch_checkpoint(folder: Path) -> Path:
    import pytest

    torch = pytest.importorskip("torch")

    path = folder / "data.pt"
    arrays = {name: torch.from_numpy(np.array(a)) for name, a in common_arrays().items() if _torch_has(a)}
    arrays["transposed"] = arrays["images"].transpose(0, 1)
    arrays["part"] = arrays["labels"][3:7]
    torch.save({"model": arrays, "epoch": 3}, path)
    return path


def _torch_has(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.isnative and array.dtype.kind in "biufc"


def read_torch(path: Path) -> Arrays:
    import torch

    found = torch.load(path, weights_only=True)["model"]
    return {f"model/{name}": tensor.contiguous().numpy() for name, tensor in found.items()}


# Zarr.


def zarr_store(folder: Path, version: int = 3, zipped: bool = False) -> Path:
    import zarr

    path = folder / ("data.zip" if zipped else "data.zarr")
    store = zarr.storage.ZipStore(path, mode="w") if zipped else zarr.storage.LocalStore(path)
    root = zarr.create_group(store=store, zarr_format=version, attributes={"made by": "a test"})
    for name, array in common_arrays().items():
        if array.dtype.kind == "S" and version == 3:
            continue  # the specification of fixed-length bytes is still moving
        chunks = tuple(max(1, n // 3 + 1) for n in array.shape)
        notes = {"mean": [0.5, 0.25]} if name == "images" else None
        made = root.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks, attributes=notes)
        if array.size:
            made[...] = array
    store.close()
    return path


def read_zarr(path: Path) -> Arrays:
    import zarr

    store = zarr.storage.LocalStore(path) if path.is_dir() else zarr.storage.ZipStore(path, mode="r")
    root = zarr.open_group(store=store, mode="r")
    arrays = [(name, node) for name, node in root.members(max_depth=None) if isinstance(node, zarr.Array)]
    found = {name: np.asarray(node[...]) for name, node in arrays}
    store.close()
    return found


# LMDB.


def lmdb_entries(value_bytes: int, rows: int = 170) -> dict[bytes, bytes]:
    rng = np.random.default_rng(5)
    made = {b"%08d" % row: rng.bytes(value_bytes + row % 7) for row in range(rows)}
    return made | {b"empty": b"", b"k" * 511: b"the longest key", b"\xff": rng.bytes(9000)}


def lmdb(entries: dict[bytes, bytes], directory: bool = False) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_lmdb(folder / "data.mdb", entries)
        (folder / "lock.mdb").touch()
        return folder if directory else folder / "data.mdb"

    return write


def ragged_pairs(entries: dict[bytes, bytes]) -> Arrays:
    """Keys and values in the order of the keys."""
    rows = sorted(entries.items())
    found: Arrays = {}
    for index, name in enumerate(("key", "value")):
        parts = [row[index] for row in rows]
        found[f"{name}/offsets"] = np.cumsum([0, *map(len, parts)]).astype(np.int64)
        found[f"{name}/values"] = np.frombuffer(b"".join(parts), np.uint8)
    return found


def read_lmdb(path: Path) -> Arrays:
    import lmdb

    with lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False) as env, env.begin() as transaction:
        return ragged_pairs({bytes(key): bytes(value) for key, value in transaction.cursor()})


# Tables.


def common_table() -> Any:
    import pyarrow as pa

    rows = 4000
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int32()),
            "text": ["the same long sentence, many times over " * 3 if i % 2 else f"row {i}" for i in range(rows)],
            "maybe": pa.array([None if i % 3 else i / 2 for i in range(rows)], pa.float64()),
            "tokens": pa.array([list(range(i % 7)) if i % 11 else None for i in range(rows)], pa.list_(pa.int16())),
            "pair": pa.array([{"a": i, "b": "x" * (i % 5)} if i % 5 else None for i in range(rows)]),
            "kind": pa.array(["cat", "dog"] * (rows // 2)).dictionary_encode(),
            "embedding": pa.array([[1.0, 2.0, 3.0] if i % 4 else None for i in range(rows)], pa.list_(pa.float32(), 3)),
            "ok": pa.array([i % 2 == 0 for i in range(rows)]),
            "jpeg": pa.array([b"\x01" * (i % 50) for i in range(rows)], pa.large_binary()),
            "when": pa.array([i * 1000 for i in range(rows)], pa.timestamp("ms", "UTC")),
        },
        metadata={"made by": "a test"},
    )


def parquet(folder: Path, **options: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, table = folder / "data.parquet", common_table()
    try:
        pq.write_table(table, path, row_group_size=900, **options)
    except (
        pa.ArrowNotImplementedError
    ):  # older releases read lists of a fixed size that are null, and do not write them
        pq.write_table(table.drop_columns("embedding"), path, row_group_size=900, **options)
    return path


def read_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    index = table.schema.get_field_index("kind")
    return table.set_column(index, "kind", table["kind"].cast("string"))


def arrow_ipc(folder: Path, stream: bool = False, compression: str | None = None, old: bool = False) -> Path:
    import pyarrow as pa

    path = folder / "data.arrow"
    table = common_table().unify_dictionaries()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_legacy_format=old)
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opener(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=700)
    return path


def read_ipc(path: Path) -> Any:
    import pyarrow as pa

    data = path.read_bytes()
    return (pa.ipc.open_file(data) if data.startswith(b"ARROW1") else pa.ipc.open_stream(data)).read_all()


def feather(folder: Path) -> Path:
    from pyarrow.feather import write_feather

    write_feather(common_table(), folder / "data.feather", compression="zstd", chunksize=1000)
    return folder / "data.feather"


# Hugging Face datasets.


def hf_features(table: Any) -> dict[str, Any]:
    """Features as ``datasets`` writes them."""
    return {part.name: _hf_feature(part.type) for part in table.schema}


def _hf_feature(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return {part.name: _hf_feature(part.type) for part in kind}
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        length = {"length": kind.list_size} if pa.types.is_fixed_size_list(kind) else {}
        return {"feature": _hf_feature(kind.value_type), **length, "_type": "List"}
    names = {"double": "float64", "float": "float32", "halffloat": "float16"}
    return {"dtype": names.get(str(kind), str(kind)), "_type": "Value"}


def hf_saved(folder: Path, table: Any, shards: int = 1, **state: Any) -> Path:
    """A directory as ``Dataset.save_to_disk`` writes it."""
    folder.mkdir(exist_ok=True)
    names = [f"data-{index:05d}-of-{shards:05d}.arrow" for index in range(shards)]
    rows = -(-table.num_rows // shards)
    for index, name in enumerate(names):
        hf_stream(folder / name, table.slice(index * rows, rows))
    value = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_format_columns": None}
    value |= {"_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None}
    (folder / "state.json").write_text(json.dumps(value | state))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": hf_features(table)}))
    return folder


def hf_stream(path: Path, table: Any) -> None:
    import pyarrow as pa

    notes = {"huggingface": json.dumps({"info": {"features": hf_features(table)}})}
    with pa.ipc.new_stream(str(path), table.schema.with_metadata(notes)) as writer:
        writer.write_table(table, max_chunksize=700)


def hf_table() -> Any:
    return common_table().drop_columns(["kind"])  # datasets has no dictionaries


def hf_downloaded(folder: Path) -> Path:
    """A directory as ``load_dataset`` caches it, with one split in two shards."""
    table = hf_table().drop_columns(["when"])
    lengths = [1500, table.num_rows - 1500]
    for index, start in enumerate((0, 1500)):
        hf_stream(folder / f"csv-train-{index:05d}-of-00002.arrow", table.slice(start, lengths[index]))
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"what map() has cached")
    split = {"name": "train", "num_examples": table.num_rows, "shard_lengths": lengths, "dataset_name": "csv"}
    info = {"features": hf_features(table), "builder_name": "csv", "splits": {"train": split}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def flat_tokens(folder: Path) -> Path:
    np.random.default_rng(5).integers(0, 50257, 300_000).astype("<u2").tofile(folder / "train.bin")
    return folder / "train.bin"


NOTES = {"made by": "a test"}  # attributes of the tables
RAW = frozenset({"images", "labels", "group/deep/heatmaps", "group/flags", "scalar", "wave", "words"})
MEGATRON = frozenset({"sequences/values", "documents/offsets", "documents/values"})

SAMPLES = [
    Sample("hdf5", "hdf5", h5_contiguous, read_h5, raw=RAW | {"fortran"}),
    Sample("hdf5-latest", "hdf5", lambda f: h5_contiguous(f, libver="latest"), read_h5, raw=RAW | {"fortran"}),
    Sample("hdf5-userblock", "hdf5", lambda f: h5_contiguous(f, userblock_size=1024), read_h5, raw=RAW),
    Sample("hdf5-chunked", "hdf5", h5_chunked, read_h5),
    Sample("hdf5-gzip", "hdf5", lambda f: h5_chunked(f, compression="gzip"), read_h5),
    Sample(
        "hdf5-gzip-shuffle", "hdf5", lambda f: h5_chunked(f, compression="gzip", shuffle=True, fletcher32=True), read_h5
    ),
    Sample("hdf5-gzip-userblock", "hdf5", lambda f: h5_chunked(f, userblock=512, compression="gzip"), read_h5),
    Sample("hdf5-shuffle", "hdf5", lambda f: h5_chunked(f, shuffle=True), read_h5),
    Sample("hdf5-fletcher32", "hdf5", lambda f: h5_chunked(f, fletcher32=True), read_h5),
    Sample("hdf5-lzf", "hdf5", lambda f: h5_chunked(f, compression="lzf"), read_h5),
    Sample("hdf5-types", "hdf5", h5_types, read_h5, raw=frozenset({"utf8"}), large=False),
    Sample("hdf5-ragged", "hdf5", h5_ragged, read_h5),
    Sample("hdf5-ragged-userblock", "hdf5", lambda f: h5_ragged(f, userblock_size=512), read_h5),
    *[
        Sample(f"npy-{name.replace('/', '-')}", "npy", npy(array), read_npy, raw=frozenset({"array"}) if raw else frozenset(), large=array.nbytes > 1 << 18)
        for name, array, raw in [
            *((n, a, n not in ("big_endian", "fortran")) for n, a in common_arrays().items()),
            ("records", np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8")]), True),
            ("mixed-records", np.array([(1, 2.0)] * 9, [("a", ">i4"), ("b", "<f8", (2,))]), False),
            ("unicode", np.array(["ä", "bc"]), True),
            ("when", np.array(["2020-01-01"], "M8[D]"), True),
            ("fortran-big-endian", np.asfortranarray(np.arange(30, dtype=">u2").reshape(5, 6)), False),
        ]
    ],
    Sample("npz", "npz", npz, read_npz, raw=RAW),
    Sample("npz-compressed", "npz", lambda f: npz(f, compressed=True), read_npz),
    Sample("safetensors", "safetensors", safetensors, read_safetensors, raw=(RAW | {"empty", "big_endian"}) - {"words"}),
    Sample("torch", "torch", torch_checkpoint, read_torch, raw=frozenset(f"model/{name}" for name in RAW - {"words"})),
    Sample("megatron", "megatron", megatron, read_megatron, raw=MEGATRON),
    Sample("megatron-modes", "megatron", lambda f: megatron(f, dtype="int32", modes=True), read_megatron, raw=MEGATRON | {"modes"}),
    Sample("llm.c", "llm.c", llm_c, read_llm_c, raw=frozenset({"tokens"})),
    Sample("llm.c-uint32", "llm.c", lambda f: llm_c(f, magic=20240801), read_llm_c, raw=frozenset({"tokens"})),
    # A flat file that is cut between two tokens is another flat file.
    Sample("tokens", "tokens", flat_tokens, lambda path: {"tokens": np.fromfile(path, "<u2")}, raw=frozenset({"tokens"}), dtype="<u2", cut_shows=False),
    Sample("zarr-3", "zarr", zarr_store, read_zarr),
    # zarr decodes what is there of a cut zstd frame of version 2, without an error.
    Sample("zarr-2", "zarr", lambda f: zarr_store(f, version=2), read_zarr, cut_shows=False),
    Sample("zarr-zip", "zarr", lambda f: zarr_store(f, zipped=True), read_zarr),
    Sample("lmdb", "lmdb", lmdb(lmdb_entries(5000)), lambda _: ragged_pairs(lmdb_entries(5000))),
    Sample("lmdb-directory", "lmdb", lmdb(lmdb_entries(5000), True), lambda _: ragged_pairs(lmdb_entries(5000))),
    Sample("lmdb-small", "lmdb", lmdb(lmdb_entries(9, 3000)), lambda _: ragged_pairs(lmdb_entries(9, 3000)), large=False),
    Sample("lmdb-empty", "lmdb", lmdb({}), lambda _: ragged_pairs({}), large=False),
    Sample("parquet", "parquet", parquet, table=read_parquet, attributes=NOTES),
    Sample("parquet-plain", "parquet", lambda f: parquet(f, use_dictionary=False, compression="none"), table=read_parquet, attributes=NOTES),
    Sample("arrow", "arrow", arrow_ipc, table=read_ipc, attributes=NOTES),
    Sample("arrow-zstd", "arrow", lambda f: arrow_ipc(f, compression="zstd"), table=read_ipc, attributes=NOTES),
    Sample("arrow-stream", "arrow-stream", lambda f: arrow_ipc(f, stream=True), table=read_ipc, attributes=NOTES),
    Sample(
        "arrow-stream-before-0.15", "arrow-stream", lambda f: arrow_ipc(f, stream=True, old=True), table=read_ipc,
        attributes=NOTES,
    ),
    Sample("hf-saved", "hf-datasets", lambda f: hf_saved(f, hf_table(), 3), table=lambda _: hf_table()),
    Sample("hf-downloaded", "hf-datasets", hf_downloaded, table=lambda _: hf_table().drop_columns(["when"])),
    Sample("feather", "arrow", feather, table=read_ipc, attributes=NOTES),
    Sample("webdataset", "webdataset", webdataset, read_webdataset),
    Sample("webdataset-gnu", "webdataset", lambda f: webdataset(f, format=tarfile.GNU_FORMAT), read_webdataset),
    Sample("mds", "mds", mds, read_mds),
    Sample("mds-gz", "mds", lambda f: mds(f, compression="gz"), read_mds, large=False),
    Sample("mds-zstd", "mds", lambda f: mds(f, compression="zstd:3", hashes=("sha1", "md5")), read_mds, large=False),
    Sample("imagefolder", "imagefolder", image_folder, read_image_folder, cut_shows=False),
]  # fmt: skip

"""Files of every format, written by the reference library, and what that library reads back from them."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from archive_samples import image_folder, mds, read_image_folder, read_mds, read_webdataset, webdataset

Arrays = dict[str, np.ndarray]


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


@dataclass(frozen=True)
class Sample:
    """How to write one file, and what a reader must find in it."""

    name: str
    format: str
    write: Callable[[Path], Path]  # into an empty folder
    arrays: Callable[[Path], Arrays] = lambda _: {}
    table: Callable[[Path], Any] | None = None
    raw: frozenset[str] = field(default_factory=frozenset)  # must have an extent
    large: bool = True  # large enough that reading the data would show

    def __str__(self) -> str:
        return self.name


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


# torch checkpoints.


def torch_checkpoint(folder: Path) -> Path:
    import torch

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
    import pyarrow.parquet as pq

    pq.write_table(common_table(), folder / "data.parquet", row_group_size=900, **options)
    return folder / "data.parquet"


def read_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    index = table.schema.get_field_index("kind")
    return table.set_column(index, "kind", table["kind"].cast("string"))


def arrow_ipc(folder: Path, stream: bool = False, compression: str | None = None) -> Path:
    import pyarrow as pa

    path = folder / "data.arrow"
    table = common_table().unify_dictionaries()
    options = pa.ipc.IpcWriteOptions(compression=compression)
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


RAW = frozenset({"images", "labels", "group/deep/heatmaps", "group/flags", "scalar", "wave", "words"})

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
    Sample("zarr-3", "zarr", zarr_store, read_zarr),
    Sample("zarr-2", "zarr", lambda f: zarr_store(f, version=2), read_zarr),
    Sample("zarr-zip", "zarr", lambda f: zarr_store(f, zipped=True), read_zarr),
    Sample("parquet", "parquet", parquet, table=read_parquet),
    Sample("parquet-plain", "parquet", lambda f: parquet(f, use_dictionary=False, compression="none"), table=read_parquet),
    Sample("arrow", "arrow", arrow_ipc, table=read_ipc),
    Sample("arrow-zstd", "arrow", lambda f: arrow_ipc(f, compression="zstd"), table=read_ipc),
    Sample("arrow-stream", "arrow-stream", lambda f: arrow_ipc(f, stream=True), table=read_ipc),
    Sample("feather", "arrow", feather, table=read_ipc),
    Sample("webdataset", "webdataset", webdataset, read_webdataset),
    Sample("webdataset-gnu", "webdataset", lambda f: webdataset(f, format=tarfile.GNU_FORMAT), read_webdataset),
    Sample("mds", "mds", mds, read_mds),
    Sample("mds-gz", "mds", lambda f: mds(f, compression="gz"), read_mds, large=False),
    Sample("mds-zstd", "mds", lambda f: mds(f, compression="zstd:3", hashes=("sha1", "md5")), read_mds, large=False),
    Sample("imagefolder", "imagefolder", image_folder, read_image_folder),
]  # fmt: skip

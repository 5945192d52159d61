"""Small files of every format to be damaged: small, so that most bytes matter."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from archive_samples import image_folder, mds, read_image_folder, read_mds, read_webdataset, webdataset, write_tar
from format_samples import (
    Sample,
    hf_saved,
    llm_c,
    megatron_index,
    ragged_pairs,
    read_h5,
    read_ipc,
    read_llm_c,
    read_lmdb,
    read_megatron,
    read_npy,
    read_npz,
    read_safetensors,
    read_zarr,
)
from lmdb_files import write_lmdb


def _h5(folder: Path, **options: Any) -> Path:
    import h5py

    with h5py.File(folder / "x", "w", **options) as file:
        file.attrs["count"] = 3
        file.attrs["title"] = "strings lie in a heap of their own"
        file["group/plain"] = np.arange(20, dtype=np.int32)
        file["group"].attrs["mean"] = [0.5, 0.25]
        file.create_dataset(
            "packed", data=np.arange(100, dtype="i2"), chunks=(30,), compression="gzip", shuffle=True, fletcher32=True
        )
        file["captions"] = ["a", "bc", ""]
        rows = file.create_dataset("rows", (3,), h5py.vlen_dtype("i4"))
        rows[0] = [1, 2]
        file["records"] = np.zeros(2, [("x", ">i4"), ("y", "f4", (3,))])
    return folder / "x"


def _npy(folder: Path) -> Path:
    with open(folder / "x", "wb") as file:
        np.save(file, np.asfortranarray(np.arange(24, dtype=">i4").reshape(4, 6)))
    return folder / "x"


def _npz(folder: Path, compressed: bool = False) -> Path:
    with open(folder / "x", "wb") as file:
        (np.savez_compressed if compressed else np.savez)(file, a=np.arange(30), b=np.zeros((2, 3), "S4"))
    return folder / "x"


def _safetensors(folder: Path) -> Path:
    from safetensors.numpy import save_file

    save_file({"a": np.arange(6.0), "b/c": np.zeros((2, 2), np.int8)}, folder / "x", metadata={"k": "v"})
    return folder / "x"


def _megatron(folder: Path, dtype: str = "uint16", modes: bool = False) -> Path:
    np.arange(40, dtype=dtype).tofile(folder / "x.bin")
    (folder / "damaged.bin").unlink(missing_ok=True)
    (folder / "damaged.bin").symlink_to("x.bin")
    lengths = [5, 0, 20, 15]
    (folder / "x").write_bytes(megatron_index(lengths, [0, 1, 4], dtype, [0, 1, 0, 1] if modes else None))
    return folder / "x"


def _tokens(folder: Path) -> Path:
    np.arange(500, 700, dtype=">u2").tofile(folder / "x")
    return folder / "x"


def _zarr(folder: Path, version: int) -> Path:
    import zarr

    store = zarr.storage.ZipStore(folder / "x", mode="w")
    root = zarr.create_group(store=store, zarr_format=version, attributes={"k": [1, 2]})
    made = root.create_array("group/a", shape=(20,), dtype="i4", chunks=(7,))
    made[...] = np.arange(20)
    store.close()
    return folder / "x"


def _table() -> Any:
    import pyarrow as pa

    return pa.table(
        {
            "id": pa.array(range(30), pa.int32()),
            "text": [None if i % 7 == 0 else "abc" * (i % 3) for i in range(30)],
            "list": [[i, i + 1] if i % 3 else None for i in range(30)],
            "pair": [{"a": i, "b": "x"} for i in range(30)],
        }
    )


def _parquet(folder: Path, **options: Any) -> Path:
    import pyarrow.parquet as pq

    # With checksums: without them no reader can tell a damaged level from a good one.
    pq.write_table(_table(), folder / "x", row_group_size=17, store_schema=False, write_page_checksum=True, **options)
    return folder / "x"


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(path, use_threads=False, page_checksum_verification=True)


def _torch(folder: Path) -> Path:
    import torch

    base = torch.arange(12.0).view(3, 4)
    torch.save({"model": {"a": base, "b": base[1:].t(), "c": torch.arange(5)}, "epoch": 3}, folder / "x")
    return folder / "x"


def _read_torch(path: Path) -> Any:
    import torch

    found = torch.load(path, weights_only=True)["model"]
    return {f"model/{name}": tensor.contiguous().numpy() for name, tensor in found.items()}


def _ipc(folder: Path, stream: bool = False, compression: str | None = None) -> Path:
    import pyarrow as pa

    table = _table()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(folder / "x"), table.schema, options=options) as to:
        to.write_table(table, max_chunksize=17)
    return folder / "x"


_ENTRIES = {b"%03d" % row: b"v" * (row % 5 * 11) for row in range(40)} | {
    b"big": bytes(range(256)) * 3,
    b"wide": b"w" * 700,
}


def _lmdb(folder: Path) -> Path:
    return write_lmdb(folder / "x", _ENTRIES, page=512)  # the smallest page: little of the file is padding


def _read_lmdb(path: Path) -> Any:
    if path.name == "x":  # not damaged: what was written is known without the library
        return ragged_pairs(_ENTRIES)
    return read_lmdb(path)


def _hf(folder: Path) -> Path:
    return hf_saved(folder / "x", _table(), 2, _format_columns=["id", "text", "list", "pair"])


def _read_hf(path: Path) -> Any:
    import pyarrow as pa

    if path.name == "x":  # not damaged: what was written is known without the library
        files = sorted(path.glob("*.arrow"))
        return pa.concat_tables([pa.ipc.open_stream(file.read_bytes()).read_all() for file in files])
    from datasets import load_from_disk

    dataset = load_from_disk(str(path), keep_in_memory=True)
    table, columns = dataset.data.table, dataset._format_columns
    if columns is None or dataset._output_all_columns:
        return table
    return table.select([name for name in table.column_names if name in columns])


def _long_names(folder: Path, format: int = tarfile.GNU_FORMAT) -> Path:
    names = [f"{'directory/' * 12}{number}" for number in range(2)]
    files = [
        (f"{name}.{kind}", name.encode()[-number - 5 :]) for number, name in enumerate(names) for kind in ("a", "b.c")
    ]
    return write_tar(folder / "x", files, format)


def _links(folder: Path) -> Path:
    def write(archive: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = b"0", target: str = "") -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, target, len(data)
        archive.addfile(info, io.BytesIO(data))

    with tarfile.open(folder / "x", "w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(3):
            write(archive, f"{number}.a", b"%d" % number * 20)
        write(archive, "4.a", kind=tarfile.LNKTYPE, target="0.a")
        write(archive, "s/5.a", kind=tarfile.SYMTYPE, target="../1.a")
        write(archive, "6.a", kind=tarfile.LNKTYPE, target="s/5.a")
        write(archive, "7.a", kind=tarfile.SYMTYPE, target="d/" * 60 + "8.a")
        write(archive, "d/" * 60 + "8.a", b"eight")
        end = archive.offset
    os.truncate(folder / "x", end + 1024)
    return folder / "x"


TINY = [
    Sample("hdf5", "hdf5", _h5, read_h5),
    Sample("hdf5-latest", "hdf5", lambda f: _h5(f, libver="latest"), read_h5),
    Sample("npy", "npy", _npy, read_npy),
    Sample("npz", "npz", _npz, read_npz),
    Sample("npz-compressed", "npz", lambda f: _npz(f, compressed=True), read_npz),
    Sample("safetensors", "safetensors", _safetensors, read_safetensors),
    Sample("torch", "torch", _torch, _read_torch),
    Sample("megatron", "megatron", _megatron, read_megatron),
    Sample("megatron-modes", "megatron", lambda f: _megatron(f, "int64", modes=True), read_megatron),
    Sample("llm.c", "llm.c", lambda f: llm_c(f, "x", count=30), read_llm_c),
    Sample("tokens", "tokens", _tokens, lambda path: {"tokens": np.fromfile(path, ">u2")}, dtype=">u2"),
    Sample("zarr-2", "zarr", lambda f: _zarr(f, 2), read_zarr),
    Sample("zarr-3", "zarr", lambda f: _zarr(f, 3), read_zarr),
    Sample("lmdb", "lmdb", _lmdb, _read_lmdb),
    Sample("parquet", "parquet", _parquet, table=_read_parquet),
    Sample("parquet-plain", "parquet", lambda f: _parquet(f, use_dictionary=False), table=_read_parquet),
    Sample("arrow", "arrow", _ipc, table=read_ipc),
    Sample("arrow-stream", "arrow-stream", lambda f: _ipc(f, stream=True), table=read_ipc),
    Sample("hf-datasets", "hf-datasets", _hf, table=_read_hf),
    Sample("arrow-zstd", "arrow", lambda f: _ipc(f, compression="zstd"), table=read_ipc),
    Sample("webdataset", "webdataset", lambda f: webdataset(f, 4, 300), read_webdataset),
    Sample("webdataset-gnu", "webdataset", _long_names, read_webdataset),
    Sample("webdataset-pax", "webdataset", lambda f: _long_names(f, tarfile.PAX_FORMAT), read_webdataset),
    Sample("webdataset-links", "webdataset", _links, read_webdataset),
    # Without hashes: with them, almost every damage would be found by these alone.
    Sample("mds", "mds", lambda f: mds(f, 6, 60, hashes=()), read_mds),
    Sample("mds-gz", "mds", lambda f: mds(f, 6, 60, hashes=(), compression="gz"), read_mds),
    Sample("mds-zstd", "mds", lambda f: mds(f, 6, 60, compression="zstd"), read_mds),
    Sample("imagefolder", "imagefolder", lambda f: image_folder(f, 40), read_image_folder),
]

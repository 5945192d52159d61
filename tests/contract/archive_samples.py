"""Archives of samples, written and read here without the code under test: WebDataset tar, MDS, folders of images.

The readers follow the documentation of the package that each format belongs to, sample by sample.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import struct
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def ragged(name: str, rows: Sequence[bytes]) -> Arrays:
    return {
        f"{name}/offsets": np.cumsum([0, *map(len, rows)]).astype(np.int64),
        f"{name}/values": np.frombuffer(b"".join(rows), np.uint8),
    }


# WebDataset.


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    # Only the two blocks of zeros that end it, without those that fill the last record of a tape.
    os.truncate(path, end + 1024)
    return path


def samples(count: int, size: int) -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(5)
    found = []
    for number in range(count):
        found.append((f"train/{number:05d}.jpg", rng.bytes(int(rng.integers(0, size)))))
        found.append((f"train/{number:05d}.cls", str(number % 10).encode()))
        found.append((f"train/{number:05d}.seg.png", rng.bytes(number % 7)))
    return found


def webdataset(folder: Path, count: int = 40, size: int = 60_000, format: int = tarfile.PAX_FORMAT) -> Path:
    return write_tar(folder / "x", samples(count, size), format)


def read_webdataset(path: Path) -> Arrays:
    found: list[dict[str, bytes]] = []
    keys: list[str] = []
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            last = member.name.rpartition("/")[2]
            if (
                not (member.isreg() or member.issym() or member.islnk())
                or "." not in last
                or last.startswith(".")
                or member.name.startswith("__")
            ):
                continue
            key = member.name[: len(member.name) - len(last)] + last.partition(".")[0]
            if not keys or key != keys[-1]:
                keys.append(key)
                found.append({})
            opened = archive.extractfile(member)
            assert opened is not None
            column = last.partition(".")[2].lower()
            assert column not in found[-1]
            found[-1][column] = opened.read()
    assert all(one.keys() == found[0].keys() for one in found)
    arrays = ragged("__key__", [key.encode() for key in keys])
    for column in found[0]:
        arrays.update(ragged(column, [one[column] for one in found]))
    return arrays


# MosaicML MDS.

SIZES = {"int": 8, "int32": 4, "float32": 4, "ndarray:float32:2,3": 24, "uint8": 1}
DTYPES = {"int": ("<i8", ()), "int32": ("<i4", ()), "float32": ("<f4", ()), "ndarray:float32:2,3": ("<f4", (2, 3)), "uint8": ("u1", ())}  # fmt: skip
COLUMNS = {"caption": "str", "image": "jpeg", "label": "int", "mask": "ndarray:float32:2,3", "meta": "json"}


def mds_sample(number: int, size: int) -> dict[str, bytes]:
    rng = np.random.default_rng(number)
    return {
        "caption": f"größe {number}".encode() if number % 3 else b"",
        "image": rng.bytes(int(rng.integers(0, size))),
        "label": struct.pack("<q", -number),
        "mask": rng.normal(size=6).astype("<f4").tobytes(),
        "meta": json.dumps({"n": number}).encode(),
    }


def mds_shard(rows: Sequence[dict[str, bytes]], columns: dict[str, str]) -> bytes:
    """A shard as the documentation of MDS describes it."""
    encoded = []
    for row in rows:
        lengths = [len(row[name]) for name in columns if columns[name] not in SIZES]
        encoded.append(np.array(lengths, "<u4").tobytes() + b"".join(row[name] for name in columns))
    config = json.dumps({"columns": columns}).encode()
    first = 4 + 4 * (len(rows) + 1) + len(config)
    positions = np.cumsum([first, *map(len, encoded)]).astype("<u4")
    return struct.pack("<I", len(rows)) + positions.tobytes() + config + b"".join(encoded)


def write_mds(
    folder: Path,
    shards: Sequence[Sequence[dict[str, bytes]]],
    columns: dict[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] = ("sha1",),
) -> Path:
    columns = dict(sorted((columns or COLUMNS).items()))
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for number, rows in enumerate(shards):
        data, name = mds_shard(rows, columns), f"shard.{number:05d}.mds"

        def about(name: str, data: bytes) -> dict[str, Any]:
            return {
                "basename": name,
                "bytes": len(data),
                "hashes": {one: hashlib.new(one, data).hexdigest() for one in hashes},
            }

        packed = None
        if compression is None:
            (folder / name).write_bytes(data)
        else:
            body = compress(compression, data)
            kind = compression.partition(":")[0]
            packed = about(f"{name}.{kind}", body)
            (folder / f"{name}.{kind}").write_bytes(body)
        index.append(
            {
                "format": "mds", "version": 2, "samples": len(rows), "compression": compression, "hashes": list(hashes),
                "column_names": list(columns), "column_encodings": list(columns.values()),
                "column_sizes": [SIZES.get(kind) for kind in columns.values()], "size_limit": 1 << 26,
                "raw_data": about(name, data), "zip_data": packed,
            }
        )  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"shards": index, "version": 2}, sort_keys=True))
    return folder


def compress(kind: str, data: bytes) -> bytes:
    if kind.startswith("gz"):
        return gzip.compress(data)
    import pyarrow as pa

    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


def mds(folder: Path, count: int = 45, size: int = 30_000, **options: Any) -> Path:
    rows = [mds_sample(number, size) for number in range(count)]
    cut = count // 3
    return write_mds(folder / "x", [rows[:cut], rows[cut:]], **options)


def read_mds(path: Path) -> Arrays:
    index = json.loads((path / "index.json").read_text())
    rows: list[dict[str, bytes]] = []
    columns: dict[str, str] = {}
    for shard in index["shards"]:
        columns = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        if shard["zip_data"]:
            data = (path / shard["zip_data"]["basename"]).read_bytes()
            if shard["compression"].startswith("gz"):
                data = gzip.decompress(data)
            else:
                import pyarrow as pa

                data = pa.Codec("zstd").decompress(data, shard["raw_data"]["bytes"], asbytes=True)
        else:
            data = (path / shard["raw_data"]["basename"]).read_bytes()
        for number in range(shard["samples"]):
            begin, end = struct.unpack_from("<II", data, 4 * (1 + number))
            rows.append(_mds_row(data[begin:end], shard))
    arrays: Arrays = {}
    for name, encoding in columns.items():
        values = [row[name] for row in rows]
        if encoding in DTYPES:
            dtype, shape = DTYPES[encoding]
            arrays[name] = np.frombuffer(b"".join(values), dtype).reshape(len(rows), *shape)
        else:
            arrays.update(ragged(name, values))
    return arrays


def _mds_row(data: bytes, shard: dict[str, Any]) -> dict[str, bytes]:
    at, sizes, row = 0, [], {}
    for size in shard["column_sizes"]:
        if size:
            sizes.append(size)
        else:
            sizes.append(struct.unpack_from("<I", data, at)[0])
            at += 4
    for name, size in zip(shard["column_names"], sizes, strict=True):
        row[name] = data[at : at + size]
        at += size
    return row


# Folders of images.

TORCHVISION_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGE_FILES = (
    "cat/1.jpg", "cat/10.JPG", "cat/2.jpeg", "cat/notes.txt", "cat/a/x.png", "cat/a-b/x.png", "cat/a/b/y.webp",
    "Dog/z.tiff", "Dog/.hidden.bmp", "bird/deep/er/p.pgm", "bird/p.ppm", "bird/empty.png",
)  # fmt: skip


def image_folder(folder: Path, size: int = 90_000) -> Path:
    rng = np.random.default_rng(9)
    root = folder / "x"
    for name in IMAGE_FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"" if "empty" in name else rng.bytes(int(rng.integers(1, size))))
    return root


def torchvision_samples(root: Path) -> list[tuple[str, int]]:
    """The samples of ImageFolder, as its documentation and source describe them."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    found = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(TORCHVISION_EXTENSIONS):
                    found.append((os.path.join(folder, file), label))
    return found


def read_image_folder(root: Path) -> Arrays:
    found = torchvision_samples(root)
    return {
        **ragged("image", [Path(path).read_bytes() for path, _ in found]),
        "label": np.array([label for _, label in found], np.int64),
        **ragged("path", [os.path.relpath(path, root).encode() for path, _ in found]),
    }

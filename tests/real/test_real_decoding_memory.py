"""Loads of 96 MB with large chunks, batches and pages in small memory cgroups: each works or is refused, none is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
import rigs

MB = 1 << 20
ROWS, WIDTH = 96, MB // 4

OPEN = """
import json, sys
import legroom
try:
    data = legroom.open(sys.argv[1], backing=sys.argv[2])
except legroom.LegroomError as problem:
    print(json.dumps({"code": problem.code, "text": str(problem)}))
else:
    if "array" in data:
        total = sum(int(row.sum()) for row in data["array"])
    else:
        import pyarrow.compute as pc
        parts = data["table"].to_batches()
        total = sum(pc.sum(pc.utf8_length(column) if str(column.type) == "string" else column).as_py()
                    for part in parts for column in part.columns)
    print(json.dumps({"backing": data.info.backing, "sum": total}))
"""


@cache
def numbers() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 200, (ROWS, WIDTH), np.int32)


def hdf5(**options: object) -> Callable[[Path], int]:
    def write(path: Path) -> int:
        with h5py.File(path, "w") as file:
            file.create_dataset("array", data=numbers(), **options)
        return int(numbers().sum())

    return write


def virtual(parts: int, chunk: int, **options: object) -> Callable[[Path], int]:
    """A virtual dataset of so many source datasets, with chunks of so many rows."""

    def write(path: Path) -> int:
        layout = h5py.VirtualLayout((ROWS, WIDTH), "int32")
        for index, part in enumerate(np.split(numbers(), parts)):
            with h5py.File(path.with_suffix(f".{index}.source"), "w") as file:
                made = file.create_dataset("part", data=part, chunks=(chunk, WIDTH), **options)
                layout[index * len(part) : (index + 1) * len(part)] = h5py.VirtualSource(made)
        with h5py.File(path, "w") as file:
            file.create_virtual_dataset("array", layout)
        return int(numbers().sum())

    return write


def tiny_chunks(path: Path) -> int:
    """400,000 chunks: what is known of each takes more memory than its 256 bytes of data."""
    flat = numbers().reshape(-1, 64)[: ROWS * WIDTH // 64]
    with h5py.File(path, "w", libver="latest") as file:
        made = file.create_dataset("array", flat.shape, flat.dtype, chunks=(1, 64))
        made[...] = flat
    return int(numbers().sum())


def zarr(chunks: tuple[int, int], **options: object) -> Callable[[Path], int]:
    def write(path: Path) -> int:
        module = pytest.importorskip("zarr")
        group = module.open_group(path, mode="w")
        group.create_array("array", shape=(ROWS, WIDTH), dtype="int32", chunks=chunks, **options)[...] = numbers()
        return int(numbers().sum())

    return write


def columns() -> object:
    import pyarrow as pa

    return pa.table({f"c{index}": part.reshape(-1) for index, part in enumerate(np.split(numbers(), 8))})


def arrow(compression: str) -> Callable[[Path], int]:
    def write(path: Path) -> int:
        feather = pytest.importorskip("pyarrow.feather")
        feather.write_feather(columns(), path, compression=compression, chunksize=1 << 30)
        return int(numbers().sum())

    return write


def parquet(path: Path) -> int:
    module = pytest.importorskip("pyarrow.parquet")
    module.write_table(columns(), path, row_group_size=1 << 30)
    return int(numbers().sum())


def dictionary(path: Path) -> int:
    """Strings that are all different, in one dictionary page of 75 MB."""
    module, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = pa.table({"s": pa.array([f"{number:08d}" * 16 for number in range(600_000)])})
    module.write_table(table, path, row_group_size=1 << 30, dictionary_pagesize_limit=1 << 30)
    return 600_000 * 128


SOURCES: dict[str, Callable[[Path], int]] = {
    "chunks-24.h5": hdf5(chunks=(24, WIDTH), compression="gzip", compression_opts=1, shuffle=True),
    "chunks-48.h5": hdf5(chunks=(48, WIDTH), compression="gzip", compression_opts=1, shuffle=True),
    "chunk-96.h5": hdf5(chunks=(96, WIDTH), compression="gzip", compression_opts=1),
    "columns-24.h5": hdf5(chunks=(96, WIDTH // 4), compression="gzip", compression_opts=1, shuffle=True),
    "lzf-96.h5": hdf5(chunks=(96, WIDTH), compression="lzf"),
    "chunks-8.h5": hdf5(chunks=(8, WIDTH), compression="gzip", compression_opts=1, shuffle=True),
    "virtual-96.h5": virtual(1, 96, compression="gzip", compression_opts=1, shuffle=True),
    "virtual-48.h5": virtual(2, 48, compression="gzip", compression_opts=1, shuffle=True),
    "virtual-1.h5": virtual(96, 1, compression="gzip", compression_opts=1),
    "tiny-chunks.h5": tiny_chunks,
    "chunk.zarr": zarr((96, WIDTH)),
    "shards.zarr": zarr((4, WIDTH), shards=(48, WIDTH)),
    "batch.arrow": arrow("uncompressed"),
    "batch-zstd.arrow": arrow("zstd"),
    "group.parquet": parquet,
    "dictionary.parquet": dictionary,
}

# Of a kind that another file shows, too.
SELDOM = {"chunks-24.h5", "columns-24.h5", "chunks-8.h5", "virtual-48.h5"}
NAMES = [pytest.param(name, marks=pytest.mark.soak) if name in SELDOM else name for name in SOURCES]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, int]]]:
    folder, made = tmp_path_factory.mktemp("sources"), {}

    def source(name: str) -> tuple[Path, int]:
        if name not in made:
            made[name] = (folder / name, SOURCES[name](folder / name))
        return made[name]

    yield source
    numbers.cache_clear()
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    shm = Path(f"/dev/shm/legroom-test-{os.getpid()}-decoding")
    shm.mkdir(mode=0o700)
    (tmp_path / "disk").mkdir()
    yield {**os.environ, "LEGROOM_SHM": str(shm), "LEGROOM_DIR": str(tmp_path / "disk")}
    subprocess.run(["rm", "-rf", str(shm), str(tmp_path / "disk")], check=True)


def load(path: Path, limit: int, backing: str, env: dict[str, str]) -> dict[str, object]:
    with rigs.memory_cgroup(limit * MB) as group:
        command = group.command([sys.executable, "-c", OPEN, str(path), backing])
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert group.oom_kills() == 0, (path.name, limit, backing)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.real("cgroup")
@pytest.mark.parametrize("limit", [200, pytest.param(300, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", NAMES)
def test_a_load_works_or_is_refused_and_is_never_killed(
    sources: Callable[[str], tuple[Path, int]], env: dict[str, str], name: str, limit: int
) -> None:
    path, total = sources(name)
    result = load(path, limit, "auto", env)
    if "code" in result:
        assert result["code"] == "no-room"
        assert ("missing" in str(result["text"]) or "more needed" in str(result["text"])) and "memory cgroup" in str(
            result["text"]
        )
        assert "decoding needs" in str(result["text"]) or "it takes" in str(result["text"])
    else:
        assert result["sum"] == total


@pytest.mark.real("cgroup")
def test_the_bound_holds_without_the_faster_libraries(
    sources: Callable[[str], tuple[Path, int]], env: dict[str, str], tmp_path: Path
) -> None:
    """Python's zlib needs no more memory than the libraries that are installed with Legroom."""
    for library in ("deflate", "isal"):
        (tmp_path / f"{library}.py").write_text("raise ImportError\n")
    path, total = sources("chunk-96.h5")
    slower = {**env, "PYTHONPATH": os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])}
    for limit in (200, 300):
        result = load(path, limit, "auto", slower)
        assert result.get("code") == "no-room" or result["sum"] == total, result


@pytest.mark.real("cgroup")
@pytest.mark.parametrize("name", NAMES)
def test_a_load_with_room_to_decode_is_not_refused(
    sources: Callable[[str], tuple[Path, int]], env: dict[str, str], name: str
) -> None:
    path, total = sources(name)
    assert load(path, 520, "shm", env) == {"backing": "shm", "sum": total}


@pytest.mark.real("cgroup")
def test_rows_that_were_never_written_are_counted_before_they_are_made(tmp_path: Path, env: dict[str, str]) -> None:
    """A file of some hundred bytes that says it has 2^28 strings."""
    path = tmp_path / "hole.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("array", (1 << 28,), h5py.string_dtype(), chunks=(1 << 20,))
    assert path.stat().st_size < 10_000
    result = load(path, 1024, "auto", env)
    assert result["code"] == "no-room" and "memory cgroup" in str(result["text"]), result

"""Loading compressed HDF5: Legroom's reader and h5py's own, side by side.

Covers: image-like data in gzip chunks, with and without shuffle, and plain contiguous data; both fill the
same kind of buffer from a file in the page cache. Does not cover: cold disks, where the disk decides.

    python bench/formats.py [--mb 295] [--rounds 5] [--only gzip] [--results FOLDER]

The two take turns, so that whatever else the machine does falls on both; the best of the rounds counts. Only
ratios travel from machine to machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from legroom.formats.base_reader import ArraySpec
from legroom.formats.detect import open_source
from legroom.formats.fill_output_arrays import threads
from measure import RESULTS, Row, alternate, as_json, best, in_words, machine, save, show, spreads, timed

CASES: dict[str, dict[str, object]] = {
    "gzip, a chunk an image": {"chunks": True, "compression": "gzip"},
    "gzip, shuffle": {"chunks": True, "compression": "gzip", "shuffle": True},
    "gzip, shuffle, float32": {"chunks": True, "compression": "gzip", "shuffle": True, "dtype": "f4"},
    "gzip, fletcher32": {"chunks": True, "compression": "gzip", "fletcher32": True},
    "chunked, not compressed": {"chunks": True},
    "contiguous": {},
}


def images(count: int, noise: float = 3) -> np.ndarray:
    """Smooth shapes and sensor noise: compresses about as photographs do, which is little; without noise, well."""
    rng = np.random.default_rng(0)
    made = np.empty((count, 256, 256, 3), np.uint8)
    for image in made:
        coarse = rng.integers(0, 255, (16, 16, 3)).astype(np.float32)
        smooth = np.kron(coarse, np.ones((16, 16, 1), np.float32))
        image[...] = np.clip(smooth + rng.normal(0, noise, smooth.shape), 0, 255)
    return made


def write(path: Path, data: np.ndarray, options: dict[str, object]) -> None:
    options = dict(options)
    data = data.astype(str(options.pop("dtype", "u1")))
    if options.pop("chunks", False):
        options["chunks"] = (1, *data.shape[1:])
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=data, **options)


def by_h5py(path: Path) -> np.ndarray:
    with h5py.File(path, "r") as file:
        found: np.ndarray = file["images"][:]
        return found


def by_legroom(path: Path) -> np.ndarray:
    with open_source(path) as reader:
        (spec,) = reader.describe().items
        assert isinstance(spec, ArraySpec)
        out = np.empty(spec.shape, spec.dtype)
        reader.read_into("images", out)
    return out


def measure(path: Path, rounds: int) -> dict[str, list[float]]:
    """The seconds of each, taking turns; the arrays are compared first, which also warms the page cache."""
    np.testing.assert_array_equal(by_legroom(path), by_h5py(path))
    readers = {"h5py": by_h5py, "legroom": by_legroom}
    return alternate({name: partial(timed, partial(read, path)) for name, read in readers.items()}, rounds)


def row(name: str, seconds: dict[str, float]) -> Row:
    """How many times as fast as h5py."""
    note = f"h5py {seconds['h5py']:.3f} s, legroom {seconds['legroom']:.3f} s"
    return Row(name, seconds["h5py"] / seconds["legroom"], "×", at_least=True, note=note)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--mb", type=int, default=295, help="megabytes of data (10**6), uncompressed")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", default="", help="measure only the cases whose names contain this; not kept")
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args()
    where = machine("numpy", "h5py")
    print(in_words(where))
    rows, raw = [], {}
    with tempfile.TemporaryDirectory(prefix="legroom-bench-") as folder:
        whole = images(given.mb * 10**6 // (256 * 256 * 3))
        for name, case in CASES.items():
            if given.only not in name:
                continue
            path = Path(folder) / "data.h5"
            data = whole[: len(whole) // 4] if case.get("dtype") == "f4" else whole
            write(path, data, case)
            figures = measure(path, given.rounds)
            rows.append(row(name, best(figures)))
            raw[name] = {"seconds": spreads(figures), "file_bytes": os.path.getsize(path), "threads": threads()}
            path.unlink()
    print(show(rows))
    if given.only:
        return
    kept = {"machine": where, "megabytes": given.mb, "rounds": given.rounds, "rows": as_json(rows), "raw": raw}
    print(f"kept in {save('formats', kept, given.results)}")


if __name__ == "__main__":
    main()

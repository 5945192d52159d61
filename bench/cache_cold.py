"""Making an entry: cold loads side by side with what they cannot avoid, and many processes at once.

Covers: contiguous and compressed sources, 48 processes on one cold file. Does not cover: entries that are there
already (cache.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py

from cache_rig import CHILD, ROW, Bench, Measured, preload
from formats import by_legroom, images, write
from legroom.cache.mapped_files_and_checksums import HugePages
from legroom.formats.decompress_deflate import inflate
from legroom.system.processes_and_threads import usable_cpus
from measure import Row, alternate, best, settle, spreads, timed, warm


def cold(bench: Bench) -> Measured:
    """A first open of contiguous data against the two things it cannot avoid: hashing and copying."""
    path, copy = bench.file(368, "cold"), bench.memory / "copy"

    def command(*words: object) -> float:
        copy.unlink(missing_ok=True)
        seconds = timed(lambda: subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL))
        copy.unlink(missing_ok=True)
        return seconds

    figures = alternate(
        {
            "md5sum": lambda: command("md5sum", path),
            "cp": lambda: command("cp", path, copy),
            "legroom, md5": bench.cold(path),
            "legroom, xxh3": bench.cold(path, hash="xxh3"),
            "h5py": lambda: timed(lambda: preload(path)),
        },
        bench.rounds,
    )
    least = best(figures)
    size = bench.size(368)
    longer = max(least["md5sum"], least["cp"])
    rows = [Row(f"{name}, {size} contiguous", 1e3 * seconds, "ms") for name, seconds in least.items()]
    rows.append(Row("cold load with md5 / longer of md5sum, cp", least["legroom, md5"] / longer, "×", 1.15))
    rows.append(Row("cold load with xxh3 / cp", least["legroom, xxh3"] / least["cp"], "×", 1.5))
    return rows, spreads(figures)


def gzip(bench: Bench) -> Measured:
    """A first open of compressed chunks against reading them with h5py."""
    rows: list[Row] = []
    figures: dict[str, object] = {}
    for kind, noise in (("like photographs", 3.0), ("like masks and heatmaps", 0.0)):
        more, measured = _gzip(bench, kind, noise)
        rows += more
        figures[kind] = measured
    return rows, figures


def _gzip(bench: Bench, kind: str, noise: float) -> Measured:
    path = bench.disk / f"gzip-{noise}.h5"
    write(path, images(max(64, int(295e6 * bench.scale) // ROW), noise), {"chunks": True, "compression": "gzip"})
    os.sync()
    warm(path)
    settle(path)
    figures = alternate(
        {
            "h5py": lambda: timed(lambda: preload(path)),
            "legroom, md5": bench.cold(path),
            "legroom, xxh3": bench.cold(path, hash="xxh3"),
            "legroom's reader alone": lambda: timed(lambda: by_legroom(path)),
        },
        bench.rounds,
    )
    least = best(figures)
    size = f"{path.stat().st_size / 1e6:.0f} MB"
    rows = [Row(f"h5py[:], {bench.size(295)} {kind}", 1e3 * least["h5py"], "ms", note=f"{size} in the file")]
    for name, seconds in least.items():
        if name != "h5py":
            note = f"and hashes {size}" if "," in name else "no hash"
            rows.append(Row(f"  {name}, faster", least["h5py"] / seconds, "×", 2.3, True, note))
    needs = _processor_seconds(path, bench.memory / "written")
    # Hashing is one thread's work, and threads that write to one file of tmpfs take turns.
    bound = least["h5py"] / max(sum(needs.values()) / usable_cpus(), needs["md5"], needs["write to tmpfs"])
    parts = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in needs.items())
    rows.append(Row("  highest possible ratio on these cores with md5", bound, "×", note=f"ms of one core: {parts}"))
    path.unlink()
    return rows, spreads(figures)


def _processor_seconds(path: Path, there: Path) -> dict[str, float]:
    """What a load cannot do without, each by one core alone: the best of three."""
    with h5py.File(path, "r") as file:
        chunks = file["images"].id
        stored = [
            chunks.read_direct_chunk(chunks.get_chunk_info(n).chunk_offset)[1] for n in range(len(file["images"]))
        ]
    whole, plain = path.read_bytes(), inflate(stored[0], ROW)

    def unpack() -> None:
        for chunk in stored:
            inflate(chunk, ROW)

    def put() -> None:
        with there.open("w+b", buffering=0) as out:
            out.truncate(ROW * len(stored))
            HugePages().take(out.fileno(), 0, ROW * len(stored))
            for _ in stored:
                out.write(plain)

    buffer = bytearray(1 << 20)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    works: dict[str, Callable[[], object]] = {
        "read": read,
        "inflate": unpack,
        "md5": lambda: hashlib.md5(whole).digest(),
        "write to tmpfs": put,
    }
    seconds = best(alternate({name: partial(timed, work) for name, work in works.items()}, 3))
    there.unlink()
    return seconds


def storm(bench: Bench, processes: int = 48) -> Measured:
    """Many processes at once on a cold file."""
    path = bench.file(200, "storm")
    alone = min(bench.cold(path)() for _ in range(max(2, bench.rounds // 2)))
    stage = bench.disk / "stage"
    stage.mkdir()
    command = [sys.executable, str(CHILD), "storm", str(path), str(stage)]
    started = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE) for n in range(processes)]
    try:
        _gather(stage, "started-*", processes, started)
        bench.clear()
        time.sleep(0.5)
        begun = time.monotonic()
        for signal, answer in (("go", "opened-*"), ("measure", "measured-*")):
            (stage / signal).touch()
            _gather(stage, answer, processes, started)
    finally:
        (stage / "end").touch()
        printed = [process.communicate(timeout=60)[0] for process in started]
    found = [json.loads(text) for text in printed]
    if len({one["row"] for one in found}) != 1:
        raise SystemExit("the processes do not see the same data")
    size = sum(file.stat().st_size for file in bench.memory.glob("legroom-*/*/*.npy"))
    times = sorted(one["opened"] - begun for one in found)
    read = sum(one["read"] for one in found) / path.stat().st_size
    rows = [
        Row(f"{processes} processes, cold {bench.size(200)}: all have the data after", 1e3 * times[-1], "ms"),
        Row("  one process alone", 1e3 * alone, "ms"),
        Row("  processes that read the file", sum(one["read"] > size / 2 for one in found), "", 1),
        Row("  bytes read by all of them / file", read, "×", note="one process hashes and copies at the same time"),
        Row("  loads started", sum(one["loads"] for one in found), "", 1),
        Row("  PSS of all mappings / entry", sum(one["pss"] for one in found) / size, "×", 1.02),
    ]
    return rows, {"seconds": times, "alone": alone, "processes": processes}


def _gather(stage: Path, pattern: str, count: int, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 180
    while sum(1 for _ in stage.glob(pattern)) < count:
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            raise SystemExit(f"{pattern}: some of {count} processes failed or took too long")
        time.sleep(0.005)

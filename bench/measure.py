"""What the benchmarks share: taking turns, places of their own, the machine in words, tables, results.

Covers: how a measurement is taken and kept. Does not cover: what is measured.

Contenders take turns, so that whatever else the machine does falls on all of them; the best of the rounds counts,
because noise only ever adds time. Only ratios travel from machine to machine. Only the standard library is imported:
this also runs in interpreters that have a peer installed and nothing of ours.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
SOURCES = BENCH.parent / "src"
QUIET_S = 2.1  # a file younger than this is hashed again at every open, by design


@dataclass(frozen=True)
class Row:
    """One figure, with the target it is held against."""

    what: str
    value: float | None  # None where there is none; the note says why
    unit: str
    target: float | None = None
    at_least: bool = False  # the target is a floor; else it is a ceiling
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.target is None or self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes; what it returns dies before the clock of anybody else starts."""
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def alternate(
    contenders: Mapping[str, Callable[[], float]], rounds: int, limit: float = math.inf
) -> dict[str, list[float]]:
    """Every contender's figures, one a round; each measures itself, so that preparing is not counted.

    No round begins after ``limit`` seconds, except the first.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for number in range(rounds):
        if number and time.perf_counter() - start > limit:
            break
        names = list(contenders)
        # Nobody always comes after the same neighbour.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            figures[name].append(contenders[name]())
    return figures


def best(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The least of each."""
    return {name: min(found) for name, found in figures.items()}


def spreads(figures: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Best, middle and worst of each, for the record."""
    return {
        name: {"best": min(found), "median": median(found), "worst": max(found), "count": len(found)}
        for name, found in figures.items()
    }


_GIB = 1 << 30
_KEPT_FREE, _MOST_WRITTEN, _MOST_SECONDS = 2 * _GIB, 16 * _GIB, 60.0
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


@cache
def write_free_memory() -> None:
    """Have free memory written once, as it has been on a machine that is in use.

    A virtual machine that has just started gets its memory from the host at the first write: up to 3 s per GB. Whatever
    is measured first would pay for that, and huge pages look expensive to Legroom there, so entries would be without.
    """
    if sys.platform != "linux":
        return
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    start, held = time.perf_counter(), []
    with suppress(OSError):  # an old kernel, or a limit that is not the machine's
        for _ in range(max(0, min(available - _KEPT_FREE, _MOST_WRITTEN)) // _GIB):
            if time.perf_counter() - start > _MOST_SECONDS:
                break
            held.append(mmap.mmap(-1, _GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            held[-1].madvise(_MADV_HUGEPAGE)
            held[-1].madvise(_MADV_POPULATE_WRITE)
    for block in held:
        block.close()


@contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """A directory in shared memory and one on disk, named to Legroom, and removed whatever happens."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    write_free_memory()
    memory = Path(tempfile.mkdtemp(prefix="legroom-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="legroom-bench-", dir="/var/tmp"))
    before = {name: os.environ.get(name) for name in ("LEGROOM_SHM", "LEGROOM_DIR")}
    os.environ.update(LEGROOM_SHM=str(memory), LEGROOM_DIR=str(disk))
    try:
        yield memory, disk
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def warm(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while file.readinto(buffer):
            pass


def settle(*paths: Path) -> None:
    """Wait until the files are old enough for Legroom to believe their times."""
    youngest = max(path.stat().st_ctime for path in paths)
    time.sleep(max(0.0, youngest + QUIET_S - time.time()))


def machine(*packages: str) -> dict[str, Any]:
    """Where this was measured, and how busy it was then."""
    cpu = platform.processor()
    memory = None
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
        memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in packages if (found := installed(name)) is not None},
        "load": os.getloadavg()[0],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def in_words(where: Mapping[str, Any]) -> str:
    """The machine in one line, with a warning where it was not quiet."""
    packages = ", ".join(f"{name} {found}" for name, found in where["packages"].items())
    line = f"{where['cpus']} × {where['cpu']}, {where['system']}, Python {where['python']}, {packages}"
    if where["load"] > 0.5:
        line += f"\nnot quiet: load {where['load']:.1f} when it began; take the figures with care"
    return line


def gpu_machine(*packages: str) -> dict[str, Any]:
    """The machine and its GPU, which are printed; ends the program where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA here: nothing to measure")
    where = {**machine("torch", "numpy", *packages), "gpu": torch.cuda.get_device_name()}
    print(in_words(where), where["gpu"], sep="\n", flush=True)
    return where


def show(rows: Sequence[Row]) -> str:
    """The rows as text, the target and whether it holds beside each."""
    cells = []
    for row in rows:
        bound = "" if row.target is None else f"{'≥' if row.at_least else '≤'} {row.target:g}"
        verdict = {None: "", True: "holds", False: "MISSED"}[row.holds]
        value = "" if row.value is None else number(row.value)
        cells.append((row.what, value, row.unit, bound, verdict, row.note))
    return table(("", "measured", "", "target", "", ""), cells, right=(1,))


def number(value: float) -> str:
    """Three figures, without an exponent; nothing for what is not a number: it was not measured."""
    if value != value:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = []
    for line in (head, *cells):
        parts = [
            text.rjust(width) if at in right else text.ljust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def save(name: str, body: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Keep a result as ``<folder>/<name>.json``, replaced as a whole; the folder is $OUT where that is set."""
    folder = folder or Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({"schema": f"legroom.bench.{name}/1", **body}, indent=1) + "\n")
    scratch.replace(path)
    return path


def kept(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What was kept under that name; nothing where it cannot be read."""
    try:
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for a result file."""
    return [{**asdict(row), "holds": row.holds} for row in rows]

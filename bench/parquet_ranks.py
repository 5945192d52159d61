"""Three ranks on one Parquet file: what they hold together, and whether a small box keeps its speed.

Covers: PSS of three ranks against one copy, with ``read_table`` in each and with the shared copy; steps a second in a
cgroup with swap, against ``read_table`` with plenty of memory. Needs root for the cgroup and the swap file.

    python bench/parquet_ranks.py [--size 2GB] [--limit 1.5GB] [--steps 60] [--rounds 3] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import legroom
from legroom.units import format_size, parse_size
from measure import BENCH, RESULTS, Row, as_json, in_words, machine, places, save, settle, show
from parquet_rank import write_chats

sys.path.insert(0, str(BENCH.parent / "tests"))
import rigs

CHILD = BENCH / "parquet_rank.py"
RANKS = 3
_SWAP = 512 << 20  # enough to see it used, little enough to end soon
_PATIENCE = 60  # seconds for ranks that thrash: it is seen by then


def held(how: str, path: Path) -> tuple[float, int]:
    """Copies of the data that the ranks hold together, and the bytes of one."""
    with tempfile.TemporaryDirectory(prefix="legroom-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        ranks = [
            subprocess.Popen([sys.executable, str(CHILD), "hold", how, str(path), name, str(number)])
            for number in range(RANKS)
        ]
        try:
            for reached, then in (("started", "load"), ("held", "measure"), ("measured", "end")):
                _wait(folder, reached, ranks)
                if then == "end":
                    found = [json.loads((folder / f"measured-{number}").read_text()) for number in range(RANKS)]
                (folder / then).touch()
        finally:
            (folder / "end").touch()
            for rank in ranks:
                rank.wait(60)
    assert len({one["touched"] for one in found}) == 1, "the ranks read different data"
    return sum(one["pss"] for one in found) / found[0]["bytes"], found[0]["bytes"]


def _wait(folder: Path, reached: str, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 600
    while len([one for one in folder.glob(f"{reached}-*") if one.suffix != ".part"]) < RANKS:
        if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
            raise RuntimeError(f"a rank ended before it had {reached}")
        time.sleep(0.02)


def trained(
    how: str,
    path: Path,
    steps: int,
    group: rigs.Cgroup | None = None,
    patience: float = 600,
    enough_swap: float = float("inf"),
) -> dict[str, Any]:
    """How the ranks ended, their mean rate, and the most that lay in swap of the group meanwhile.

    A box that thrashes may take hours, and all that is on it with it: after ``patience`` seconds, or once
    ``enough_swap`` bytes lay in swap, its ranks are ended.
    """
    before = group.oom_kills() if group else 0
    with _swap_of(group) as swapped, tempfile.TemporaryDirectory(prefix="legroom-bench-", dir="/var/tmp") as folder:
        command = [sys.executable, str(CHILD), "train", how, str(path), folder]
        words = [[*command, str(rank), str(RANKS), str(steps)] for rank in range(RANKS)]
        ranks = [
            subprocess.Popen(group.command(one) if group else one, stdout=subprocess.PIPE, text=True) for one in words
        ]
        deadline = time.monotonic() + patience
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline or max(swapped, default=0) > enough_swap:
                break
            time.sleep(0.05)
        late = [rank for rank in ranks if rank.poll() is None]
        for rank in late:
            rank.kill()
        outputs = [rank.communicate()[0] for rank in ranks]
    ended = [rank.returncode for rank in ranks]
    found = [json.loads(text) for text, code in zip(outputs, ended, strict=True) if code == 0]
    return {
        "ended": ended,
        "given_up": len(late),  # ranks that had not finished in time
        "oom_kills": group.oom_kills() - before if group else 0,
        "rate": sum(one["rate"] for one in found) / len(found) if found else None,
        "cpu": sum(one["cpu"] for one in found) / len(found) if found else None,
        "swap": max(swapped, default=0),
        "peak": max((one["peak"] for one in found), default=None),
        "why": found[0]["why"] if found else None,
    }


@contextlib.contextmanager
def _swap_of(group: rigs.Cgroup | None) -> Iterator[list[int]]:
    """Bytes of the group in swap, every tenth of a second."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while group is not None and not over.wait(0.1):
            seen.append(swap_used(group))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def swap_used(group: rigs.Cgroup) -> int:
    if group.version == "v2":
        return int((group.path / "memory.swap.current").read_text())
    rows = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
    return int(rows["swap"])


def forget(path: Path) -> None:
    """Out of the page cache: its pages are then charged to the process that reads it next."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_words_of(run: dict[str, Any]) -> str:
    rate = "no rank finished" if run["rate"] is None else f"{run['rate']:.2f} steps/s"
    return f"{rate}, swap {format_size(run['swap'])}, {run['oom_kills']} OOM kills, {run['given_up']} given up"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--size", type=parse_size, default=2 << 30)
    options.add_argument("--limit", type=parse_size, default=3 << 29)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args()
    needed = 8 * given.size  # read_table peaks at more than twice the file, in each rank
    free = legroom.snapshot().pool("ram")
    if free is None or free.free is None or free.free < needed:
        sys.exit(f"{format_size(needed)} of free RAM are needed to compare with read_table; give a smaller --size")
    where = machine("pyarrow", "torch", "legroom")
    print(in_words(where), flush=True)
    runs: dict[str, list[dict[str, Any]]] = {"plenty": [], "legroom": [], "read_table": []}
    with places() as (_, disk):
        path = disk / "chats.parquet"
        write_chats(path, given.size)
        settle(path)
        naive, one_copy = held("read_table", path)
        ours, _ = held("legroom", path)
        print(f"{RANKS} ranks, {format_size(one_copy)}: read_table {naive:.2f} copies, shared {ours:.2f}", flush=True)
        subprocess.run([sys.executable, "-m", "legroom", "cache", "drop", str(path)], check=True, capture_output=True)
        with rigs.swap_file(_SWAP):
            for number in range(given.rounds):
                runs["plenty"].append(trained("read_table", path, given.steps))
                for how in ("legroom", "read_table"):
                    if how == "read_table" and number:
                        continue  # once is enough to see it die or crawl
                    forget(path)
                    with rigs.memory_cgroup(given.limit, swap=_SWAP) as group:
                        patience = _PATIENCE if how == "read_table" else 600
                        runs[how].append(trained(how, path, given.steps, group, patience))
                    print(f"{how}: {in_words_of(runs[how][-1])}", flush=True)
    plenty = max(run["rate"] for run in runs["plenty"])
    best = max((run["rate"] or 0.0) for run in runs["legroom"])
    work = min(run["cpu"] for run in runs["legroom"]) / min(run["cpu"] for run in runs["plenty"])
    swapped = max(run["swap"] for run in runs["legroom"])
    crushed = runs["read_table"][0]
    rows = [
        Row("copies held by three ranks, read_table", naive, "×", 3, at_least=True),
        Row("copies held by three ranks, shared", ours, "×", 1.1),
        Row("limited memory, legroom: peak swap", swapped / (1 << 20), "MB", 0, note=runs["legroom"][0]["why"]),
        Row("limited memory, legroom: OOM kills", sum(run["oom_kills"] for run in runs["legroom"]), "", 0),
        Row("limited memory, legroom: steps/s over read_table with plenty", best / plenty, "×", 0.85, at_least=True),
        Row("limited memory, legroom: CPU time per step over the same", work, "×", note="excludes other processes"),
        Row("limited memory, read_table: steps/s over plenty", (crushed["rate"] or 0.0) / plenty, "×",
            note=in_words_of(crushed)),
    ]  # fmt: skip
    print(show(rows))
    save("parquet_ranks", {"machine": where, "size": given.size, "limit": given.limit, "one_copy": one_copy,
                           "rows": as_json(rows), "runs": runs}, given.results)  # fmt: skip


if __name__ == "__main__":
    main()

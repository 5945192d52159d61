"""What a watch costs: 100 processes at 1 Hz, as a share of one core; its memory.

    python bench/watch.py [--processes 100] [--seconds 30]

The watch is a process of its own, as `legroom watch --json` is, and what counts is the CPU time the kernel has
charged it for, start-up taken off. The targets: 2 % of one core, and a memory that does not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import RESULTS, Row, as_json, in_words, machine, save, show

SLEEPER = (
    "import os, sys, time\n"
    "for _ in range(int(sys.argv[1]) - 1):\n"
    "    if os.fork() == 0: break\n"
    "area = bytearray(8 << 20)\n"
    "end = time.monotonic() + float(sys.argv[2])\n"
    "while time.monotonic() < end:\n"
    "    time.sleep(1); area.extend(bytes(64 << 10))\n"  # every process's figures change at every sample
)
TICKS = os.sysconf("SC_CLK_TCK")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def watching(processes: int, seconds: float) -> dict[str, float]:
    """The share of one core over ``seconds``, and the watch's memory at the end."""
    job = subprocess.Popen([sys.executable, "-c", SLEEPER, str(processes), str(seconds + 60)])
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        command = [sys.executable, "-m", "legroom", "watch", "--json", "--pid", str(job.pid)]
        time.sleep(1)
        with log.open("wb") as out:
            watch = subprocess.Popen(command, stdout=out)
        try:
            time.sleep(8)  # started, everybody seen, the first PSS of each read
            before, began = _cpu(watch.pid), time.monotonic()
            time.sleep(seconds)
            share = (_cpu(watch.pid) - before) / (time.monotonic() - began)
            rss = _rss(watch.pid)
        finally:
            for one in (watch, job):
                one.kill()
                one.wait()
        lines = [json.loads(line) for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    seen = [len(line["processes"]) for line in lines]
    ages = [
        line["clock"] - row["pss_at"] for line in lines[-5:] for row in line["processes"] if row["pss_at"] is not None
    ]
    return {
        "processes": max(seen),
        "samples": len(lines),
        "share_of_a_core": share,
        "sampling_ms": 1000 * sum(line["cost"] for line in lines[5:]) / len(lines[5:]),
        "oldest_pss_s": max(ages),
        "rss_mb": rss / (1 << 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    where = machine("psutil")
    print(in_words(where))
    found = watching(options.processes, options.seconds)
    note = f"{found['sampling_ms']:.1f} ms per sample"
    rows = [
        Row(f"{found['processes']} processes at 1 Hz", 100 * found["share_of_a_core"], "% of one core", 2, note=note),
        Row("oldest PSS shown", found["oldest_pss_s"], "s old"),
        Row("memory of the watch", found["rss_mb"], "MB"),
    ]
    print(show(rows))
    print(f"kept in {save('watch', {'machine': where, 'rows': as_json(rows), 'raw': found}, options.results)}")


if __name__ == "__main__":
    main()

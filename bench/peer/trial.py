"""Everything that is measured of one contender, in a place of its own.

    python -m peer.trial NAME SOURCE FOLDER MEMORY '{"attach": 5, "memory": [1, 4, 16], "kills": 4}'

Prints one JSON object. Nothing of it is left when it ends: processes, files, shared memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from peer.processes import Gone, Missing, Remote, adopt, descendants, end_all, start_daemon, weigh
from peer.protocol import Place

OTHERS = 2  # who want the data while their loader is killed
HUNG_S = 60


class Trial:
    """One contender, its source and its directories."""

    def __init__(self, name: str, source: Path, folder: Path, memory: Path) -> None:
        self.name, self.source, self.folder, self.memory = name, source, folder, memory
        self.about: dict[str, Any] = {}

    @contextmanager
    def place(self, tag: str) -> Iterator[Place]:
        """A fresh place with the daemon running, and nothing of it afterwards."""
        place = Place(self.source, self.folder / tag, self.memory / tag)
        place.marks.mkdir(parents=True)
        place.memory.mkdir(parents=True)
        try:
            with self.clients(place, 1) as (client,):
                self.about = client.ask("about")
            if self.about["command"] is not None:
                start_daemon(self.about["command"], self.about["awaited"], self.folder / "daemon.log")
            yield place
        finally:
            end_all()
            shutil.rmtree(place.folder, ignore_errors=True)
            shutil.rmtree(place.memory, ignore_errors=True)

    @contextmanager
    def clients(self, place: Place, count: int) -> Iterator[list[Remote]]:
        """Clients with their imports done, not connected yet; four at a time, or slow ones time out."""
        with ExitStack() as stack:
            found: list[Remote] = []
            for at in range(0, count, 4):
                some = [Remote(self.name, place, self.folder / "client.log") for _ in range(min(4, count - at))]
                for client in some:
                    stack.callback(client.end)
                    client.answer()
                found += some
            yield found

    def using(self, place: Place, attaches: int) -> dict[str, Any]:
        """Load once; then attach from fresh processes, and gather."""
        with self.clients(place, 1) as (loader,):
            result: dict[str, Any] = {"load_ms": loader.ask("connect", "get")["get_ms"]}
            begun, done = (_wait_for(place.marks, f"{word}-*") for word in ("loading", "loaded"))
            result["load_cpu_s"] = float(done.read_text()) - float(begun.read_text())
            result["held"] = loader.ask("held")["held"]
        attached = []
        for number in range(attaches):
            with self.clients(place, 1) as (client,):
                attached.append(client.ask("connect", "attach"))
                if number == attaches - 1:
                    result["gather"] = client.ask("touch", "gather")
        result["attach"] = attached
        return result

    def memory_of(self, place: Place, count: int) -> dict[str, Any]:
        """All processes and daemons, every page of the data used by each; bare interpreters apart."""
        with self.clients(place, count) as clients:
            pids = [client.process.pid for client in clients]
            bare = weigh(pids)
            for client in clients:
                client.ask("connect", "attach", "touch")
            time.sleep(0.2)
            rest = [pid for pid in descendants() if pid not in pids]
            return {"bare": bare, "clients": weigh(pids), "daemons": weigh(rest)}

    def killed_in_time(self, tag: str, fraction: float, *about: Any) -> dict[str, Any]:
        """A kill that came while it loaded; a load that was quicker than the first is killed sooner."""
        for attempt in range(4):
            found = self.killed(f"{tag}{attempt}", fraction / 3**attempt, *about)
            if not found["late"]:
                break
        return found

    def killed(self, tag: str, fraction: float, load_cpu_s: float, whole: int, crc: int) -> dict[str, Any]:
        """SIGKILL whoever loads, that far into it, while others want the same data."""
        with self.place(tag) as place:
            with self.clients(place, 1 + OTHERS) as clients:
                for client in clients:
                    client.ask("connect")
                clients[0].tell("get")
                loader = _wait_for(place.marks, "loading-*")
                for other in clients[1:]:
                    other.tell("get")
                pid = int(loader.name.partition("-")[2])
                done = place.marks / f"loaded-{pid}"
                # By the loader's own processor time: how far it is, however many others are at work.
                due = float(loader.read_text()) + fraction * load_cpu_s
                while _cpu_seconds(pid) < due and not done.exists():
                    time.sleep(0.001)
                os.kill(pid, signal.SIGKILL)
                late = done.exists()
                problems = []
                for other in clients[1:]:
                    try:
                        other.answer(HUNG_S)
                        if other.ask("touch")["crc"] != crc:
                            problems.append("wrong data")
                    except Gone as gone:
                        problems.append(str(gone))
            with self.clients(place, 1) as (after,):
                held = after.ask("connect", "held")["held"]
                tidied = after.ask("tidy")["held"]
            loads = len(list(place.marks.glob("loading-*")))
        left = {"left": held - whole, "left_tidied": tidied - whole}
        return {"fraction": fraction, "late": late, "problems": problems, "loads": loads, **left}


def _wait_for(folder: Path, pattern: str) -> Path:
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline:
        for found in folder.glob(pattern):
            return found
        time.sleep(0.001)
    raise Gone(f"nobody began to load ({pattern})")


def _cpu_seconds(pid: int) -> float:
    """What clock_getcpuclockid(3) would name: the processor time of all threads of a process."""
    return time.clock_gettime(~pid << 3 | 2)


def run(trial: Trial, asked: dict[str, Any]) -> dict[str, Any]:
    """All that was asked for."""
    with trial.place("a") as place:
        result = {name: trial.about[name] for name in ("title", "version", "elects")}
        result |= trial.using(place, asked["attach"])
        result["memory"] = {str(count): trial.memory_of(place, count) for count in asked["memory"]}
    kills = asked["kills"]
    crc = result["gather"].pop("crc")
    result["kills"] = [
        trial.killed_in_time(f"k{number}", (number + 0.5) / kills, result["load_cpu_s"], result["held"], crc)
        for number in range(kills)
    ]
    return result


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name, source, folder, memory, asked = sys.argv[1:]
    adopt()
    trial = Trial(name, Path(source), Path(folder), Path(memory))
    try:
        result = run(trial, json.loads(asked))
    except Missing as problem:
        result = {"missing": f"not installed: {problem}"}
    except Gone as problem:
        result = {"failed": str(problem)}
    finally:
        end_all()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

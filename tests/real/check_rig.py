"""Random settings of both loaders, held against what ``legroom check`` says of them.

For each setting the loop of `check_player` runs once with room, which gives its peaks. Then a memory cgroup, a
``/dev/shm`` and a descriptor limit are drawn near those peaks, check is asked in there, and the loop runs in there. The truth is
whether that loop survives. The settings were drawn up without regard to how check predicts.

As a script: ``python3 tests/real/check_rig.py --seed N --count N [--jobs N] [--out FILE]``, as root, with any Python that
imports legroom and torch. The last line of its output is the summary as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from rigs import memory_cgroup, small_shm, why_not_cgroup, why_not_mount

PLAYER = Path(__file__).with_name("check_player.py")
ROOM = 3 << 30  # of the run with room
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
_PATIENCE = 180.0
_CHECK_S, _CHECK_LOOPS = 60.0, 6  # --timeout: its default, or this many times a loop takes here, with room
_CHECK_MORE = 60.0  # for the start and the end of check
_stopping = threading.Event()
_MOST = 700 << 20  # bytes of samples that a setting may have about at once
_EPOCH = 2 << 30  # bytes of samples in an epoch
KB, MB = 1 << 10, 1 << 20


def draw(rng: random.Random) -> dict[str, Any]:
    """One setting, of a size this machine can run."""
    while True:
        setting = _draw(rng)
        if _affordable(setting):
            return setting


def _draw(rng: random.Random) -> dict[str, Any]:
    workers = rng.choice([0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6])
    batch = round(2 ** rng.uniform(0, 9))
    prefetch = rng.choice([1, 2, 2, 2, 3, 4, 8])
    sample = round(2 ** rng.uniform(10, 25))
    source = rng.choice(["made", "made", "made", "records", "memory", "stream"])
    kind = (
        rng.choice(["numpy", "torch"])
        if source == "memory"
        else rng.choice(["numpy", "torch", "bytes", "image", "parts"])
    )
    ragged = source != "memory" and kind in ("numpy", "torch", "image") and rng.random() < 0.25
    if ragged and kind != "image":
        collate = rng.choice(["padded", "list"])
    elif kind == "image":
        collate = rng.choice(["pictures", "list"])
    else:
        collate = rng.choice(["default", "default", "default", "list"])
    batches = rng.randint(1, 2 * workers * prefetch + 8)
    return {
        "loader": rng.choice(["torch", "legroom"]),
        "workers": workers,
        "batch": batch,
        "prefetch": prefetch,
        "persistent": rng.random() < 0.4,
        "start_method": rng.choice(["fork", "fork", "fork", "spawn"]),
        "sample_bytes": sample,
        "samples": max(1, batch * batches - rng.choice([0, 0, batch // 2])),
        "source": source,
        "kind": kind,
        "tensors": rng.choice([2, 3, 8, 40]) if kind == "parts" else 1,
        "temporaries": rng.choice([0, 1, 1, 3]),
        "ragged": ragged,
        "records": round(2 ** rng.uniform(10, 18)) if source == "records" else 0,
        "collate": collate,
        "shuffle": rng.random() < 0.6,
        "nofile": rng.choice([256, 1024, 1024, 4096, FILES]),
    }


def _affordable(setting: dict[str, Any]) -> bool:
    one = setting["sample_bytes"] * min(setting["batch"], setting["samples"])
    held = one * (setting["workers"] * setting["prefetch"] + 2) + one * 3 * max(1, setting["workers"])
    if setting["source"] == "memory":
        stored = setting["sample_bytes"] * setting["samples"]
        held += stored * (1 + (setting["workers"] * 2 if setting["start_method"] == "spawn" else 0))
    if setting["workers"] > 3 and setting["start_method"] == "spawn":
        return False  # half a minute of importing torch
    return held <= _MOST and setting["sample_bytes"] * setting["samples"] <= _EPOCH


@dataclass
class Ran:
    """One run of a command in its rig."""

    status: int | None  # None: it hung, and was ended
    output: str
    errors: str
    peak_ram: int
    peak_shm: int
    peak_files: int
    oom_kills: int
    seconds: float


def run(
    command: Sequence[str],
    setting: dict[str, Any],
    ram: int,
    shm: int,
    nofile: int,
    patience: float = _PATIENCE,
    *,
    to_the_first_kill: bool = False,
) -> Ran:
    """The command in a memory cgroup, with a /dev/shm and a descriptor limit of its own.

    ``to_the_first_kill``: an OOM kill is the end; torch may take minutes to notice that a worker is gone.
    """
    began = time.monotonic()
    limited = ["sh", "-c", f'ulimit -n {nofile} && exec "$@"', "sh", *command]
    with memory_cgroup(ram) as group:
        process = subprocess.Popen(
            group.command(small_shm(limited, str(shm))),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(setting),
            start_new_session=True,
            cwd=PLAYER.parent,
        )
        watch = _Watch(process.pid)
        status: int | None = None
        while True:
            try:
                output, errors = process.communicate(timeout=0.5)
                status = process.returncode
                break
            except subprocess.TimeoutExpired:
                killed = to_the_first_kill and group.oom_kills()
                if killed or _stopping.is_set() or time.monotonic() > began + patience:
                    _end_group(group.path)
                    output, errors = process.communicate()
                    break
        watch.end()
        if _stopping.is_set():
            raise InterruptedError("the rig was told to stop")
        name = "memory.max_usage_in_bytes" if group.version == "v1" else "memory.peak"
        peak = int((group.path / name).read_text())
        kills = group.oom_kills()
    # The loop itself knows how much lay there while it paused, also where this process got no core in that time.
    told = [int(line.rpartition(":")[2]) for line in output.splitlines() if line.startswith("survived ")]
    shm_peak = max([watch.shm, *told])
    return Ran(status, output, errors, peak, shm_peak, watch.files, kills, time.monotonic() - began)


def environment(setting: dict[str, Any]) -> dict[str, str]:
    """This process's, with the player importable beside whatever the caller has made importable."""
    given = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    path = os.pathsep.join([str(PLAYER.parent), *given])
    return {**os.environ, "LEGROOM_SETTING": json.dumps(setting), "PYTHONPATH": path, "LANG": "C"}


def _end_group(path: Path) -> None:
    for pid in (path / "cgroup.procs").read_text().split():
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            continue


class _Watch:
    """The most that a process held in its /dev/shm, and of descriptors."""

    def __init__(self, pid: int) -> None:
        self.pid, self.shm, self.files, self._stop = pid, 0, 0, False
        self._own = os.stat("/dev/shm").st_dev
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop:
            try:
                if os.stat(f"/proc/{self.pid}/root/dev/shm").st_dev != self._own:
                    room = os.statvfs(f"/proc/{self.pid}/root/dev/shm")
                    self.shm = max(self.shm, (room.f_blocks - room.f_bfree) * room.f_frsize)
                self.files = max(self.files, len(os.listdir(f"/proc/{self.pid}/fd")))
            except OSError:
                pass
            time.sleep(0.01)

    def end(self) -> None:
        self._stop = True
        self._thread.join()


def check_command(setting: dict[str, Any], timeout: float = _CHECK_S) -> list[str]:
    """The question, as a user puts it; on a busy machine with more time."""
    command = [sys.executable, "-m", "legroom", "check", "--json", "--dataset", "check_player:dataset"]
    command += ["--batch", str(setting["batch"]), "--workers", str(setting["workers"])]
    command += ["--loader", setting["loader"], "--timeout", f"{timeout:.0f}s"]
    if setting["workers"]:
        command += ["--prefetch", str(setting["prefetch"]), "--start-method", setting["start_method"]]
    if setting["collate"] != "default":
        command += ["--collate", "check_player:collate"]
    if setting["persistent"] and setting["workers"]:
        command += ["--persistent-workers"]
    return command


@dataclass
class Case:
    """A setting in its limits: what check said and what happened."""

    setting: dict[str, Any]
    peaks: dict[str, int]
    limits: dict[str, int]
    verdict: str
    survived: bool
    off: float = 0.0  # of a wrong no: how far above the true peak the prediction lies
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        if self.verdict == "unknown":
            return "not covered"
        if self.verdict == "fits":
            return "right yes" if self.survived else "WRONG YES"
        if self.verdict == "too-big":
            return "wrong no" if self.survived else "right no"
        return "CHECK FAILED"


def limits(rng: random.Random, setting: dict[str, Any], peaks: dict[str, int]) -> dict[str, int]:
    """Limits between 0.7 and 1.5 times the true peak, in RAM, in /dev/shm, or in both."""
    pool = rng.choice(["ram", "ram", "shm", "both"]) if setting["workers"] else "ram"
    ram, shm = ROOM, ROOM
    if pool in ("ram", "both"):
        ram = int(peaks["ram"] * rng.uniform(0.7, 1.5))
    if pool in ("shm", "both"):
        shm = max(64 * KB, int(peaks["shm"] * rng.uniform(0.7, 1.5)))
    return {"ram": ram, "shm": shm, "fds": setting["nofile"]}


def one(rng: random.Random) -> Case:
    """Draw one setting and put it to the test."""
    while True:
        setting = draw(rng)
        loop = [sys.executable, str(PLAYER)]
        roomy = run(loop, setting, ROOM, ROOM, FILES)
        if roomy.status == 0:
            break
        print(f"  dies with room too, drawn again: {setting} {roomy.errors[-300:]}", file=sys.stderr)
    peaks = {"ram": roomy.peak_ram, "shm": roomy.peak_shm, "fds": roomy.peak_files}
    bound = limits(rng, setting, peaks)
    timeout = max(_CHECK_S, _CHECK_LOOPS * roomy.seconds)
    question = check_command(setting, timeout)
    asked = run(question, setting, bound["ram"], bound["shm"], bound["fds"], timeout + _CHECK_MORE)
    patience = 15 + 3 * roomy.seconds
    truth = run(loop, setting, bound["ram"], bound["shm"], bound["fds"], patience, to_the_first_kill=True)
    try:
        said = json.loads(asked.output)
        assert "verdict" in said
    except (ValueError, AssertionError):
        said = {
            "verdict": f"failed: status {asked.status}, {asked.oom_kills} OOM kills: {asked.output[-300:]} {asked.errors[-500:]}"
        }
    case = Case(setting, peaks, bound, said["verdict"], truth.status == 0)
    case.detail = {
        "problems": [
            {key: problem[key] for key in ("pool", "need", "free", "missing")} for problem in said.get("problems", [])
        ],
        "need": said.get("need"),
        "check_oom_kills": asked.oom_kills,
        "died": truth.errors[-300:] if truth.status else "",
        "oom_kills": truth.oom_kills,
        "seconds": [round(part.seconds, 1) for part in (roomy, asked, truth)],
        "notes": said.get("notes"),
        "codes": said.get("codes"),
        "unknown": said.get("unknown"),
    }
    if case.outcome == "wrong no":
        case.off = max((_off(case, problem, loop, patience) for problem in said["problems"]), default=1.0)
    return case


def _off(case: Case, problem: dict[str, Any], loop: Sequence[str], patience: float) -> float:
    """How far what check asks for lies above the least that the loop survives in.

    The peak is not that least: the kernel takes back what it can, and legroom's loader adapts to what there is, or refuses.
    """
    pool = problem["pool"]
    step = 0.98 if pool == "ram" else 0.95
    least = case.limits[pool]
    for _ in range(12):
        lower = {**case.limits, pool: int(least * step)}
        ran = run(loop, case.setting, lower["ram"], lower["shm"], lower["fds"], patience, to_the_first_kill=True)
        if ran.status != 0:
            break
        least = lower[pool]
    case.detail["least"] = least
    return float((case.limits[pool] + problem["missing"]) / least - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random settings of both loaders against `legroom check`.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--count", type=int, default=20, help="settings  [default: 20]")
    parser.add_argument("--first", type=int, default=0, help="number of the first setting  [default: 0]")
    parser.add_argument("--jobs", type=int, default=1, help="settings at the same time  [default: 1]")
    parser.add_argument("--out", type=Path, help="append each case to this file, one JSON object a line")
    parser.add_argument("--lock", type=Path, help="a file to hold locked while a case runs")
    given = parser.parse_args()
    if reason := why_not_cgroup() or why_not_mount():
        print(reason, file=sys.stderr)
        return 2
    print(f"seed {given.seed}, {given.count} settings, {given.jobs} at a time", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the rigs are cleaned up on the way out
    cases: list[Case] = []
    failed: list[int] = []
    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        numbers = {
            pool.submit(_numbered, given.seed, number, given.lock): number
            for number in range(given.first, given.first + given.count)
        }
        try:
            for done in as_completed(numbers):
                number = numbers[done]
                progress = f"[{len(cases) + len(failed) + 1}/{given.count} {time.monotonic() - began:.0f} s]"
                try:
                    case = done.result()
                except Exception:  # of the rig itself: the other settings are tried all the same
                    failed.append(number)
                    print(progress, number, "RIG FAILED", traceback.format_exc(), flush=True)
                    continue
                cases.append(case)
                print(progress, number, describe(case), flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        record = {"outcome": case.outcome, "number": number, "seed": given.seed}
                        file.write(json.dumps({**case.__dict__, **record}) + "\n")
        except BaseException:
            _stopping.set()
            pool.shutdown(cancel_futures=True)
            raise
    found = summary(cases, seed=given.seed, rig_failed=failed)
    print(table(found))
    print(json.dumps(found))
    return int(not found["holds"])


def _numbered(seed: int, number: int, lock: Path | None) -> Case:
    with _locked(lock):
        return one(random.Random(f"{seed}-{number}"))


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("a") as file:
        while not _stopping.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def describe(case: Case) -> str:
    of = case.setting
    return (
        f"{case.outcome:11s} {of['loader']:7s} w{of['workers']} b{of['batch']} p{of['prefetch']} {of['sample_bytes'] / KB:.0f}kB "
        f"n{of['samples']} {of['source']}/{of['kind']}x{of['tensors']}/{of['collate']} t{of['temporaries']} {of['start_method']} "
        f"{'pers ' if of['persistent'] else ''}{'ragged ' if of['ragged'] else ''}| peak ram {case.peaks['ram'] / MB:.0f} shm {case.peaks['shm'] / MB:.1f} fd {case.peaks['fds']} "
        f"| limits {case.limits['ram'] / MB:.0f} {case.limits['shm'] / MB:.1f} {case.limits['fds']} | {case.verdict[:300]} "
        f"{'survived' if case.survived else 'died'} off {case.off:.0%} {case.detail['problems']} kills {case.detail['check_oom_kills']} {case.detail['seconds']}"
    )


OUTCOMES = ("right yes", "right no", "WRONG YES", "wrong no", "not covered", "CHECK FAILED")


def summary(cases: Sequence[Case], **about: Any) -> dict[str, Any]:
    """The counts, and whether what the project promises of check holds in them."""
    counts = Counter(case.outcome for case in cases)
    shares = {name: counts[name] / max(1, len(cases)) for name in OUTCOMES}
    offs = sorted((round(case.off, 3) for case in cases if case.outcome == "wrong no"), reverse=True)
    checks = sorted(case.detail["seconds"][1] for case in cases)
    return {
        **about,
        "cases": len(cases),
        "outcomes": {name: counts[name] for name in OUTCOMES},
        "wrong_no_off": offs,
        "loaders": dict(Counter(case.setting["loader"] for case in cases)),
        "workers_0": sum(case.setting["workers"] == 0 for case in cases),
        "small_shm": sum(case.limits["shm"] < ROOM for case in cases),
        "check_oom_kills": sum(case.detail["check_oom_kills"] for case in cases),
        "check_seconds": {
            "median": checks[len(checks) // 2] if checks else None,
            "most": checks[-1] if checks else None,
        },
        "holds": not about.get("rig_failed")
        and not counts["WRONG YES"]
        and not counts["CHECK FAILED"]
        and shares["wrong no"] <= 0.05
        and shares["not covered"] <= 0.05
        and all(off <= 0.10 for off in offs),
    }


def table(found: dict[str, Any]) -> str:
    """The summary for people."""
    total = max(1, found["cases"])
    lines = [f"{name:14s}{count:5d}{count / total:8.1%}" for name, count in found["outcomes"].items()]
    offs = ", ".join(f"{off:.1%}" for off in found["wrong_no_off"]) or "none"
    return "\n".join(
        [
            f"{'cases':14s}{found['cases']:5d}",
            *lines,
            f"wrong no is off by: {offs}",
            f"holds: {'yes' if found['holds'] else 'NO'}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

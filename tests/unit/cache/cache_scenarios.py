"""Scenes with many processes and sudden deaths, played by forking one prepared process.

Run as a script with a scene's name and its arguments as JSON; prints the outcome as JSON. One interpreter is
started for a whole series of scenes: its children are forks, which cost milliseconds.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py  # noqa: F401  (so that no child has to import it)
import numpy as np

import legroom
from legroom.cache import drop_and_gc, elect_builder_and_publish, list_and_verify, open_without_cache  # noqa: F401
from legroom.cache import store_directories as store_module
from legroom.cache.store_directories import open_stores

Result = dict[str, Any]


def checksum(data: Any) -> int:
    total = 0
    for name in sorted(data):
        total = zlib.crc32(np.ascontiguousarray(data[name]).view(np.uint8), zlib.crc32(name.encode(), total))
    return total


def child(work: Callable[[], Result]) -> tuple[int, int]:
    """Fork; the child does the work and writes its result into a pipe."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    os.close(ours)
    try:
        result = work()
    except BaseException as problem:
        result = {"error": type(problem).__name__, "text": str(problem), "trace": traceback.format_exc()}
    os.write(theirs, json.dumps(result).encode())
    os._exit(0)


def finish(pid: int, pipe: int, timeout: float = 200) -> Result:
    """The child's result; {"signal": n} where it was killed."""
    text = b""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if select.select([pipe], [], [], 0.05)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                break
            text += part
            if text.endswith(b"}"):
                break  # a grandchild may hold the pipe open
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
        return {"error": "timeout", "text": "did not finish"}
        # a grandchild of a killed child holds the pipe: its status tells
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else json.loads(text)


def killed(pid: int, pipe: int, timeout: float = 60) -> int:
    """Wait for a child that is to die; the signal, 0 where it ended by itself."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            os.close(pipe)
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        time.sleep(0.002)
    raise TimeoutError(pid)


def reader(path: str, log: str, **options: Any) -> Callable[[], Result]:
    """A child that opens the file and says what it got."""

    def work() -> Result:
        store_module.step_hook = logged(log)
        with legroom.open(path, **options) as data:
            return {"crc": checksum(data), "backing": data.info.backing, "key": data.info.key}

    return work


def logged(log: str) -> Callable[[str], None]:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return lambda name: void(os.write(fd, f"{os.getpid()} {name}\n".encode()))


def void(_: object) -> None:
    return None


def dying_builder(path: str, log: str, at: str, ready: Path, go: Path, forks: int) -> Callable[[], Result]:
    """A child that reaches a step, forks workers, waits to be watched, and is killed there."""

    def work() -> Result:
        note = logged(log)

        def trace(name: str) -> None:
            note(name)
            if name == "elected":
                fork_sleepers(log, forks)
            if name == at:
                fork_sleepers(log, forks)
                ready.touch()
                wait_for(go.exists)
                os.kill(os.getpid(), signal.SIGKILL)

        store_module.step_hook = trace
        with legroom.open(path) as data:
            return {"crc": checksum(data)}

    return work


def fork_sleepers(log: str, count: int) -> None:
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            time.sleep(120)
            os._exit(0)
        with Path(log + ".sleepers").open("a") as file:
            file.write(f"{pid}\n")


def end_sleepers(log: str) -> None:
    try:
        pids = Path(log + ".sleepers").read_text().split()
    except FileNotFoundError:
        return
    for pid in pids:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") and _state(pid) not in "ZX" for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError(pids)
        time.sleep(0.002)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "X"


def wait_for(condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.001)


def left_behind() -> list[str]:
    """Everything in the stores but the directories themselves and their one lock."""
    found = []
    with open_stores() as places:
        for store in places.found:
            for folder, folders, names in os.walk(store.root):
                found += [os.path.join(folder, name) for name in (*folders, *names)]
            for name in ("locks", "samples", "sources", "work", "locks/store.lock", "work/used"):
                if f"{store.root}/{name}" in found:
                    found.remove(f"{store.root}/{name}")
    return found


def clean(log: str) -> Result:
    """gc, then what is stray; then drop everything, at once, and what is left."""
    end_sleepers(log)
    drop_and_gc.gc()
    with open_stores() as places:
        strays = [
            name
            for store in places.found
            for name in (*os.listdir(store.fd), *os.listdir(store.locks), *os.listdir(store.work))
            if name.startswith((".", "building-", "trash-", "src-"))
        ]
    whole = all(found.whole for found in list_and_verify.verify())
    dropped = drop_and_gc.drop()
    drop_and_gc.gc()
    return {
        "strays": strays,
        "whole": whole,
        "kept": len(dropped.kept),
        "dropped": len(dropped.entries),
        "left": left_behind(),
    }


def scene_kill_at(path: str, at: str, waiters: int, forks: int, work: str) -> Result:
    """Kill the builder at one step, with others waiting and forked children alive."""
    log, ready, go = f"{work}/log", Path(work, "ready"), Path(work, "go")
    for file in Path(work).iterdir():
        file.unlink()
    victim = child(dying_builder(path, log, at, ready, go, forks))
    wait_for(ready.exists)
    others = [child(reader(path, log)) for _ in range(waiters)]
    time.sleep(0.03)
    go.touch()
    signal_number = killed(*victim)
    results = [finish(*other) for other in others]
    return {"signal": signal_number, "results": results, "steps": Path(log).read_text(), **clean(log)}


def scene_kill_randomly(path: str, seed: int, rounds: int, waiters: int, longest: float, work: str) -> Result:
    """Kill builders at random moments, round after round; stops at the first round that went wrong."""
    chance = random.Random(seed)
    signals = []
    for count in range(rounds):
        for file in Path(work).iterdir():
            file.unlink()
        log = f"{work}/log"
        first = child(reader(path, log))
        others = [child(reader(path, log)) for _ in range(waiters)]
        moment = chance.random() * longest
        time.sleep(moment)
        try:
            os.kill(first[0], signal.SIGKILL)
        except ProcessLookupError:
            pass
        signals.append(finish(*first).get("signal", 0))
        results = [finish(*other) for other in others]
        cleaned = clean(log)
        good = {result.get("crc") for result in results}
        if len(good) != 1 or None in good or cleaned["strays"] or cleaned["left"] or not cleaned["whole"]:
            return {"round": count, "moment": moment, "results": results, "signals": signals, **cleaned}
    return {"crc": good.pop(), "signals": signals, "rounds": rounds}


def scene_users_die(path: str, forks: int, work: str) -> Result:
    """A user (with forked workers, or without) is killed: drop is refused before and works at once after."""
    log, ready = f"{work}/log", Path(work, "ready")
    for file in Path(work).iterdir():
        file.unlink()

    def use() -> Result:
        data = legroom.open(path)
        data[next(iter(data))].sum()
        fork_sleepers(log, forks)
        ready.touch()
        time.sleep(120)
        return {}

    user = child(use)
    wait_for(ready.exists)
    refused = [_try_drop(path)]
    os.kill(user[0], signal.SIGKILL)
    killed(*user)
    if forks:
        refused.append(_try_drop(path))  # the workers still use it
        end_sleepers(log)
    return {"refused": refused, "at_once": _try_drop(path), **clean(log)}


def _try_drop(path: str) -> str:
    try:
        drop_and_gc.drop(path)
    except legroom.LegroomError as problem:
        return problem.code
    return "dropped"


def scene_churn(path: str, seed: int, seconds: float, users: int, droppers: int, work: str, least: int = 0) -> Result:
    """Some open, check and close without end; others drop, by force or not, and collect: no process sees wrong data.

    It takes so many seconds, and longer (a minute at most) until each has opened or dropped ``least`` times: on a busy
    machine that is not a matter of seconds.
    """
    log = f"{work}/log"
    for file in Path(work).iterdir():
        file.unlink()
    until = time.monotonic() + seconds
    counts = np.frombuffer(mmap.mmap(-1, 8 * (users + droppers)), np.int64)  # shared with every child

    def more() -> bool:
        now = time.monotonic()
        return now < until or (now < until + 60 and int(counts.min()) < least)

    def use(number: int) -> Callable[[], Result]:
        def work() -> Result:
            crcs = set()
            while more():
                with legroom.open(path) as data:
                    crcs.add(checksum(data))
                counts[number] += 1
            return {"crcs": sorted(crcs), "count": int(counts[number])}

        return work

    def remove(number: int) -> Callable[[], Result]:
        def work() -> Result:
            chance = random.Random(seed + number)
            while more():
                counts[users + number] += len(drop_and_gc.drop(force=chance.random() < 0.5).entries)
                if chance.random() < 0.3:
                    drop_and_gc.gc()
                time.sleep(chance.random() * 0.01)
            return {"dropped": int(counts[users + number])}

        return work

    started = [child(use(number)) for number in range(users)]
    removing = [child(remove(number)) for number in range(droppers)]
    results = [finish(*one) for one in started]
    removed = [finish(*one) for one in removing]
    return {"results": results, "removed": removed, **{f"clean_{k}": v for k, v in clean(log).items()}}


SCENES = {name.removeprefix("scene_"): scene for name, scene in globals().items() if name.startswith("scene_")}


def main() -> None:
    """One scene a line on stdin, its outcome a line on stdout."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            result = SCENES[name](**arguments)
        except BaseException:
            result = {"error": "scene", "trace": traceback.format_exc()}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""Processes that share weights on a GPU, killed at random times; one JSON object with what they reported.

shared_storm.py PATH KILLS SEED

This process imports everything and uses no CUDA. Its forked children make a context each, take the weights, check every
byte, report in one line and wait. Children are killed while they start, while they copy, and while they hold the copy.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time

import torch

import legroom
from legroom.loader import shared_model_weights  # noqa: F401  (imported before the forks)

ALIVE = 6


def child(path: str, report: int, alive: int) -> None:
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    found = legroom.weights(path, "cuda", shared=True)
    host = legroom.weights(path)
    right = all(bool(torch.equal(found[name].view(torch.uint8), host[name].cuda().view(torch.uint8))) for name in host)
    kind = "made" if "here for all" in found.why else "got" if "with other" in found.why else found.why
    os.write(report, (json.dumps({"pid": os.getpid(), "right": right, "kind": kind}) + "\n").encode())
    os.read(alive, 1)  # until it is killed, or the parent is gone


def main() -> None:
    path, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dice = random.Random(seed)
    reading, writing = os.pipe()
    alive, held_by_parent = os.pipe()
    answered: dict[int, dict[str, object]] = {}
    running: list[int] = []
    killed = {"before it answered": 0, "holder": 0}
    rest = b""

    def listen(seconds: float) -> None:
        nonlocal rest
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
            *lines, rest = (rest + os.read(reading, 1 << 16)).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                answered[answer["pid"]] = answer

    def kill(pid: int) -> None:
        listen(0.001)
        killed["holder" if pid in answered else "before it answered"] += 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        running.remove(pid)

    begun = time.monotonic()
    try:
        while sum(killed.values()) < kills:
            while len(running) < ALIVE:
                pid = os.fork()
                if pid == 0:
                    try:
                        os.close(held_by_parent)
                        child(path, writing, alive)
                    finally:
                        os._exit(1)
                running.append(pid)
            # Now and then long enough for all to have it. Then all are killed, and the next one makes it again.
            everyone = dice.random() < 1 / 16
            listen(2.5 if everyone else dice.uniform(0, 0.25))
            for pid in running:
                ended, status = os.waitpid(pid, os.WNOHANG)
                assert ended == 0, f"a child ended with {status}"
            for pid in dice.sample(running, len(running) if everyone else 1):
                kill(pid)
            print(f"{time.monotonic() - begun:.1f} s: {killed}, {len(answered)} answers", file=sys.stderr, flush=True)
        end = time.monotonic() + 60
        while not all(pid in answered for pid in running) and time.monotonic() < end:
            listen(0.2)
        left = [pid for pid in running if pid not in answered]
        while running:
            kill(running[0])
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    reports = list(answered.values())
    kinds = {kind: sum(one["kind"] == kind for one in reports) for kind in {str(one["kind"]) for one in reports}}
    wrong = [one for one in reports if not one["right"]]
    print(json.dumps({"killed": killed, "answers": kinds, "wrong": wrong, "silent": len(left)}))


if __name__ == "__main__":
    main()

"""Ways to give several processes the same data: Legroom and its peers, one after the other in one run.

Covers: time for another process to attach, memory of 1, 4 and 16 processes, rate of random gathers, and what a
loader killed in the middle leaves. Does not cover: cold loads against the file system (cache.py), training.

    python bench/peers.py [--python /path/to/python] [--mb 300] [--rounds 2] [--only legroom,ray] [--kills 4]

Each contender runs in child interpreters of ``--python`` (or $LEGROOM_PEERS_PYTHON, or this one), which needs the
peers' packages; one that does not import is shown as not installed. As root each gets a /dev/shm and process ids of
its own, so that nothing it leaves can be missed, or stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import BENCH, RESULTS, SOURCES, in_words, machine, places, save, settle, warm
from peer import PEERS
from peer.summary import merge, show, summary

IMAGE = (256, 256, 3)


def make_source(path: Path, megabytes: int) -> None:
    """Contiguous random images of 196 kB, in the page cache."""
    import h5py
    import numpy as np

    count = max(128, megabytes * 10**6 // (256 * 256 * 3))
    with h5py.File(path, "w") as file:
        made = file.create_dataset("images", (count, *IMAGE), "u1")
        for at in range(count):
            made[at] = np.frombuffer(np.random.default_rng(at).bytes(made[at].nbytes), "u1").reshape(IMAGE)
    os.sync()
    warm(path)
    settle(path)


def apart(command: list[str]) -> list[str]:
    """The command with a /dev/shm and process ids of its own, where that may be had."""
    script = 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm && "$@"; exit $?'  # sh stays, to bury what is orphaned
    namespace = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    whole = [*namespace, "sh", "-c", script, "sh"]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return command
    return [*whole, *command] if subprocess.run([*whole, "true"], capture_output=True).returncode == 0 else command


def trial(python: str, name: str, source: Path, memory: Path, disk: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """One contender's figures, or why there are none."""
    folder = disk / "t"  # short: sockets live below it
    folder.mkdir()
    paths = [str(path) for path in (source, folder, memory / "t")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCES), str(BENCH)))}
    env |= {"TMPDIR": str(folder), "GLOG_log_dir": str(folder)}  # what they leave there goes with it
    env |= {"HF_HOME": str(folder / "hf_home"), "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0"}
    command = apart([python, "-m", "peer.trial", name, *paths, json.dumps(asked)])
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=900)
        if process.returncode == 0:
            found: dict[str, Any] = json.loads(printed.splitlines()[-1])
            return found
        return {"failed": errors.strip()[-800:]}
    except subprocess.TimeoutExpired:
        return {"failed": "not done within 15 minutes"}
    finally:
        _end(process, apart=command[0] == "unshare")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory / "t", ignore_errors=True)


def _end(process: subprocess.Popen[str], *, apart: bool) -> None:
    """A namespace ends with its first process; without one the trial must be let to end its daemons."""
    if process.poll() is None and not apart:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            pass
    if process.poll() is None:
        process.kill()
    process.communicate()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--python", default=os.environ.get("LEGROOM_PEERS_PYTHON") or sys.executable)
    options.add_argument("--mb", type=int, default=300)
    options.add_argument("--rounds", type=int, default=2, help="of attaching and gathering")
    options.add_argument("--attaches", type=int, default=3, help="fresh processes a round")
    options.add_argument("--processes", default="1,4,16")
    options.add_argument("--kills", type=int, default=4, help="at moments spread over the load")
    options.add_argument("--only", default=",".join(PEERS))
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args()
    counts = given.processes.split(",")
    where = machine("numpy", "h5py")
    print(in_words(where), flush=True)
    results: dict[str, dict[str, Any]] = {}
    with places() as (memory, disk):
        source = disk / "source.h5"
        make_source(source, given.mb)
        for turn in range(given.rounds):
            for name in given.only.split(","):
                first = turn == 0
                asked = {
                    "attach": given.attaches,
                    "memory": [int(count) for count in counts] if first else [],
                    "kills": given.kills if first else 0,
                }
                print(f"round {turn + 1}: {name}", file=sys.stderr, flush=True)
                found = trial(given.python, name, source, memory, disk, asked)
                results[name] = found if first else merge(results[name], found)
        megabytes = source.stat().st_size / 1e6
    for found in results.values():
        if "attach" in found:
            found["summary"] = summary(found)
    print(f"\n{megabytes:.0f} MB; memory is PSS of clients and daemons beyond bare interpreters with the same imports")
    print(show(results, counts))
    body = {
        "machine": where,
        "megabytes": megabytes,
        "processes": counts,
        "rounds": given.rounds,
        "isolated": apart([]) != [],
        "peers": results,
    }
    whole = set(results) == set(PEERS)
    print(f"\nkept in {save('peers' if whole else 'peers-partial', body, given.results)}")
    if whole:
        draw(given.python, given.results)


def draw(python: str, results: Path) -> None:
    """The picture, by whichever interpreter has matplotlib."""
    for one in dict.fromkeys((sys.executable, python)):
        command = [one, str(BENCH / "plots.py"), "--results", str(results)]
        drawn = subprocess.run(command, capture_output=True, text=True)
        if drawn.returncode == 0:
            break
    print((drawn.stdout + drawn.stderr).strip())


if __name__ == "__main__":
    main()

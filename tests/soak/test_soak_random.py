"""Random kills, damage, changing sources, damaged files and failing system calls, for as long as is given.

The invariant: the right data of one version of the source, or an error with a code. No hang, nothing left behind.
``LEGROOM_SOAK_SECONDS`` says how long all parts take together (60), ``LEGROOM_SOAK_SEED`` repeats a run: every part
prints its seed, and a failure names it.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cache_faults import OPERATIONS, Sweep, cases
from cache_scenario_process import ScenarioProcess, small_file
from fuzz_damage import Child, Damages, random_damage
from fuzz_samples import TINY
from test_cache_fuzz import ARRAYS, damage, entry, rewrite
from test_cache_fuzz import cut as cut_off
from test_cache_fuzz import flip as flip_bits

import legroom
from legroom.cache import drop_and_gc, find_or_build_entry, list_and_verify, source_digest_records
from legroom.cache.manifest import is_key
from legroom.errors import LegroomError
from open_descriptors import open_descriptors

PARTS = 6
SECONDS = float(os.environ.get("LEGROOM_SOAK_SECONDS", "60")) / PARTS
SEED = int(os.environ.get("LEGROOM_SOAK_SEED") or random.SystemRandom().randrange(1 << 31))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(20 * SECONDS + 300)]


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Iterator[Callable[[], Iterator[random.Random]]]:
    """Generators of random numbers, one a round, until the time is over; the seed of a round that fails is told."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print(f"\n{request.node.name}: LEGROOM_SOAK_SEED={SEED}", flush=True)
    done = 0

    def each() -> Iterator[random.Random]:
        nonlocal done
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or done == 0:
            yield random.Random(f"{SEED} {request.node.name} {done}")
            done += 1

    yield each
    with capture.global_and_fixture_disabled():
        print(f" {done} rounds", end="", flush=True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A store of its own in shared memory, which must be empty of leftovers at the end."""
    memory = Path(tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm"))
    monkeypatch.setenv("LEGROOM_SHM", str(memory))
    (tmp_path / "disk").mkdir(mode=0o700)
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / "disk"))
    logging.disable(logging.CRITICAL)
    open_before = open_descriptors()
    root = memory / f"legroom-{os.geteuid()}"
    try:
        yield root
        gc.collect()
        assert not open_descriptors() - open_before, "descriptors were left open"
        drop_and_gc.gc()
        drop_and_gc.drop()
        drop_and_gc.gc()
        kept = {"locks", "samples", "sources", "work"}
        left = [name for name in os.listdir(root) if name not in kept] if root.exists() else []
        if (root / "work").exists():
            left += [name for name in os.listdir(root / "work") if name != "used"]
        assert not left, left
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(memory)


def test_kill_storms(rounds: Callable[[], Iterator[random.Random]], tmp_path: Path) -> None:
    path, crc = small_file(tmp_path)
    scenarios = ScenarioProcess(tmp_path)
    try:
        for chance in rounds():
            seed = chance.randrange(1 << 31)
            if chance.random() < 0.8:
                result = scenarios.play(
                    "kill_randomly", path=str(path), seed=seed, rounds=10, waiters=chance.randrange(1, 5),
                    longest=chance.choice((0.02, 0.05, 0.2)),
                )  # fmt: skip
                assert result.get("crc") == crc, (seed, result)
            else:
                result = scenarios.play("churn", path=str(path), seed=seed, seconds=3, users=3, droppers=2)
                assert all(one.get("crcs") == [crc] for one in result["results"]), (seed, result)
                assert result["clean_strays"] == [] and result["clean_left"] == [], (seed, result)
    finally:
        scenarios.close()


def _damage_records(folder: Path, chance: random.Random) -> str:
    files = sorted(folder.iterdir())
    if not files:
        return "no record"
    file, kind = chance.choice(files), chance.randrange(5)
    if kind < 2:
        rewrite(file, chance.choice((flip_bits, cut_off)), chance)
    elif kind == 2 and len(files) > 1:
        other = chance.choice([one for one in files if one != file])
        one, two = file.read_bytes(), other.read_bytes()
        file.write_bytes(two)
        other.write_bytes(one)
    else:
        file.unlink()
        if kind == 3:
            os.mkfifo(file)
    return f"record {kind}"


def test_damaged_entries_and_records(
    rounds: Callable[[], Iterator[random.Random]], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_digest_records, "QUIET_NS", 0)
    monkeypatch.setattr(find_or_build_entry.log, "warning", lambda *_: None)
    path, second = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(path, **ARRAYS)
    np.savez(second, **{name: array + 1 for name, array in ARRAYS.items()})
    for chance in rounds():
        try:
            legroom.open(second).close()
            drop_and_gc.drop(second)
            legroom.open(path).close()
            what = damage(entry(store), chance)
            legroom.open(second).close()
            what += ", " + _damage_records(store / "sources", chance)
            for file, more in ((path, 0), (second, 1)):
                with legroom.open(file) as data:
                    for name, array in ARRAYS.items():
                        assert np.array_equal(data[name], array + more), what
            list_and_verify.verify()
        except LegroomError as problem:
            assert problem.code != "error" and str(problem)
        for folder in store.iterdir():
            if is_key(folder.name):
                shutil.rmtree(folder)


CHANGER = """
import os, random, sys, numpy as np
folder, seed = sys.argv[1], sys.argv[2]
chance, version = random.Random(seed), 1
path = os.path.join(folder, "a.npy")
def written(name):
    global version
    version += 1
    with open(os.path.join(folder, name), "wb") as file:
        np.save(file, np.full(200_000, version, np.int32))
    return os.path.join(folder, name)
while os.getppid() == int(sys.argv[3]):
    how = chance.randrange(4)
    if how == 0:
        os.replace(written("new.npy"), path)
    elif how == 1:  # in its place, in pieces
        version += 1
        with open(path, "r+b") as file:
            file.seek(128)
            part = np.full(20_000, version, np.int32).tobytes()
            for _ in range(10):
                file.write(part)
                file.flush()
    elif how == 2:  # a link between two versions
        names = [written("one.npy"), written("two.npy")]
        for name in names:
            link = os.path.join(folder, "link")
            os.symlink(name, link)
            os.replace(link, path)
    else:  # cut, and whole again
        os.truncate(path, chance.randrange(800_000))
        os.replace(written("new.npy"), path)
    os.sched_yield()
"""


def test_sources_that_change_while_they_are_loaded(
    rounds: Callable[[], Iterator[random.Random]], store: Path, tmp_path: Path
) -> None:
    """Writers that change times: what is written through a map while it is read is a limit that the docs state."""
    outcomes: Counter[str] = Counter()
    for chance in rounds():
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        path = folder / "a.npy"
        np.save(path, np.full(200_000, 1, np.int32))
        arguments = [str(folder), str(chance.randrange(1 << 31)), str(os.getpid())]
        writer = subprocess.Popen([sys.executable, "-c", CHANGER, *arguments])
        try:
            for _ in range(20):
                time.sleep(chance.random() * 0.01)
                try:
                    with legroom.open(path, backing=chance.choice(("auto", "disk"))) as data:
                        found = np.unique(data["array"])
                        assert found.size == 1 and data["array"].shape == (200_000,), found[:5]
                        outcomes["data"] += 1
                except LegroomError as problem:
                    outcomes[problem.code] += 1
        finally:
            writer.kill()
            writer.wait()
        drop_and_gc.drop()
        shutil.rmtree(folder)
    assert outcomes["data"], outcomes


def test_sources_written_through_a_map_between_loads(
    rounds: Callable[[], Iterator[random.Random]], store: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.npy"
    for chance in rounds():
        version = chance.randrange(1, 1 << 30)
        np.save(path, np.full(50_000, version, np.int32))
        legroom.open(path).close()
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[128:] = np.full(50_000, version + 1, np.int32).tobytes()
            mapped.flush()
        with legroom.open(path) as data:
            assert np.unique(data["array"]).tolist() in ([version], [version + 1])
        drop_and_gc.drop()


def test_damaged_files_of_every_format(rounds: Callable[[], Iterator[random.Random]], tmp_path: Path) -> None:
    children = {mode: Child(mode) for mode in ("ours", "reference")}
    written: dict[str, Damages] = {}
    try:
        for chance in rounds():
            sample = chance.choice(TINY)
            if sample.name not in written:
                (tmp_path / sample.name).mkdir()
                written[sample.name] = Damages(sample, tmp_path / sample.name, children)
            written[sample.name].check(random_damage(chance))
    finally:
        for child in children.values():
            child.close()


def test_system_calls_that_fail(rounds: Callable[[], Iterator[random.Random]], store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "faults"
    folder.mkdir()
    with Sweep(folder).alone() as sweep:
        calls = {operation: sweep.calls(operation) for operation in OPERATIONS}
        for chance in rounds():
            operation = chance.choice(OPERATIONS)
            (faults,) = cases(calls[operation], chance, 1)
            case = (operation, faults.name, faults.at, errno.errorcode[faults.number], faults.lasting)
            try:
                sweep.attempt(operation, faults)
            except Exception as problem:
                raise AssertionError(json.dumps(case)) from problem

"""`legroom check` against what really happens: random settings in memory cgroups and small /dev/shm."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import check_rig
from rigs import small_shm

pytestmark = [pytest.mark.real("mount", "cgroup"), pytest.mark.timeout(900)]
SEED = int(os.environ.get("LEGROOM_SEED") or random.SystemRandom().randrange(1 << 30))
SAMPLE_SEED = int(os.environ.get("LEGROOM_SEED") or 1)
PLAIN: dict[str, Any] = {
    "loader": "torch", "workers": 0, "batch": 4, "prefetch": 2, "persistent": False, "start_method": "fork",
    "sample_bytes": 1 << 20, "samples": 64, "source": "made", "kind": "numpy", "tensors": 1, "temporaries": 1,
    "ragged": False, "records": 0, "collate": "default", "shuffle": True, "nofile": 1024,
}  # fmt: skip


def _judge(cases: list[check_rig.Case]) -> None:
    told = "\n".join(map(check_rig.describe, cases))
    counts = {name: sum(case.outcome == name for case in cases) for name in ("wrong no", "not covered")}
    assert not any(case.outcome in ("WRONG YES", "CHECK FAILED") for case in cases), told
    assert all(case.off <= 0.10 for case in cases), told
    assert all(count <= max(1, 0.05 * len(cases)) for count in counts.values()), (counts, told)


def test_a_few_random_settings() -> None:
    print(f"LEGROOM_SEED={SAMPLE_SEED}")
    cases, began = [], time.monotonic()
    while not cases or (len(cases) < 4 and time.monotonic() < began + 12):
        cases.append(check_rig.one(random.Random(f"{SAMPLE_SEED}-{len(cases)}")))
    _judge(cases)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_random_settings() -> None:
    print(f"LEGROOM_SEED={SEED}")
    cases = []
    for number in range(200):
        cases.append(check_rig.one(random.Random(f"{SEED}-{number}")))
        print(number, check_rig.describe(cases[-1]), flush=True)
    print(check_rig.summary(cases))
    _judge(cases)


@pytest.mark.parametrize("setting", [{}, {"batch": 4096, "samples": 8192}, {"workers": 2, "batch": 64}])
def test_check_answers_no_in_little_memory_and_is_not_killed(setting: dict[str, Any]) -> None:
    asked = {**PLAIN, **setting}
    ran = check_rig.run(check_rig.check_command(asked), asked, 120 << 20, 1 << 30, 1024)
    assert ran.status == 1 and '"too-big"' in ran.output, ran


def test_check_answers_yes_with_the_size_that_it_advised() -> None:
    """2 workers need 7 batches of 8 MB. In 16 MB the trial run is refused the second or third one."""
    line = [sys.executable, "-m", "legroom", "check", "--sample-bytes", "256KB", "--batch", "32", "--workers", "2"]
    line += ["--json"]  # with the usual time limit: with a short one the loop does not wait for workers without a core
    first = subprocess.run(small_shm(line, "16m"), capture_output=True, text=True, timeout=240)
    found = json.loads(first.stdout)
    need = found["need"]["shm"]
    assert first.returncode == 1 and 7 * (8 << 20) <= need < 8 * (8 << 20) and "shm" not in found["at_least"], found
    (advised,) = set(re.findall(r"(?:remount,|shm-)size=(\w+)", "\n".join(found["problems"][0]["fix"])))
    again = subprocess.run(small_shm(line, advised), capture_output=True, text=True, timeout=240)
    assert again.returncode == 0 and json.loads(again.stdout)["verdict"] == "fits", (advised, again)


def test_a_loop_that_hangs_for_want_of_shared_memory_is_a_no() -> None:
    asked = {**PLAIN, "workers": 2, "collate": "padded", "persistent": True}
    # Not by its time limit: that is longer than the rig waits.
    ran = check_rig.run(check_rig.check_command(asked, 600), asked, 2 << 30, 6 << 20, 1024)
    assert ran.status == 1 and '"pool": "shm"' in ran.output, ran


def test_a_stream_that_loses_a_refused_batch_and_ends_well_is_a_no() -> None:
    """Each worker has one batch of 4 MB for 9 MB: two fit, the third is dropped, and torch ends the epoch without it."""
    asked = {**PLAIN, "workers": 3, "source": "stream", "kind": "torch", "collate": "padded", "samples": 12}
    loop = check_rig.run([sys.executable, str(check_rig.PLAYER)], asked, 2 << 30, 9 << 20, 1024)
    assert "unable to allocate shared memory" in loop.errors and "8 of 12 samples" in loop.errors, loop
    ran = check_rig.run(check_rig.check_command(asked), asked, 2 << 30, 9 << 20, 1024, 90)
    assert ran.status == 1 and '"pool": "shm"' in ran.output, ran


def test_a_worker_that_runs_out_of_descriptors_is_a_no() -> None:
    """The loop sees only a connection that was closed; the worker's own output has the reason."""
    asked = {**PLAIN, "workers": 1, "batch": 1, "prefetch": 5, "kind": "parts", "tensors": 40, "collate": "list"}
    asked = {**asked, "sample_bytes": 4096}
    ran = check_rig.run(check_rig.check_command(asked), asked, 2 << 30, 1 << 30, 256, 90)
    assert ran.status == 1 and '"pool": "fds"' in ran.output, ran


def test_a_short_stream_does_not_need_full_queues() -> None:
    asked = {**PLAIN, "workers": 4, "batch": 2, "prefetch": 8, "source": "stream", "samples": 12}
    asked = {**asked, "sample_bytes": 64 << 10, "kind": "torch"}
    loop = check_rig.run([sys.executable, str(check_rig.PLAYER)], asked, 2 << 30, 1 << 30, 1024)
    ran = check_rig.run(check_rig.check_command(asked), asked, 2 << 30, 1 << 30, 1024, 90)
    found = json.loads(ran.output)
    assert found["verdict"] == "fits", found
    assert found["need"]["shm"] <= loop.peak_shm + 2 * (128 << 10) < 33 * (128 << 10), (found, loop)


def test_the_last_batches_of_a_stream_are_not_counted_as_full_ones() -> None:
    """4 workers with 71 + 27 samples each: their queues are never full, and 8 batches of 71 would be 45 % more."""
    asked = {**PLAIN, "workers": 4, "batch": 71, "prefetch": 4, "source": "stream", "samples": 4 * 98, "kind": "torch"}
    asked = {**asked, "sample_bytes": 64 << 10}
    ran = check_rig.run(check_rig.check_command(asked), asked, 2 << 30, 1 << 30, 1024, 90)
    assert json.loads(ran.output)["need"]["shm"] < 0.9 * 8 * 71 * (64 << 10), ran


def test_semaphores_that_may_overlap_between_epochs_are_not_a_yes() -> None:
    """3 workers have 17 semaphores, a page each; those of the epoch before may still be there."""
    asked = {**PLAIN, "workers": 3, "collate": "list", "sample_bytes": 1024}
    for persistent, said in ((True, '"fits"'), (False, '"epoch-overlap"')):
        asked["persistent"] = persistent
        ran = check_rig.run(check_rig.check_command(asked), asked, 2 << 30, 18 * 4096, 1024, 90)
        assert ran.status == 0 and said in ran.output, ran


def test_a_dataset_object_is_tried_in_a_fork_and_the_asking_process_lives(tmp_path: Path) -> None:
    """Python's own check, in a cgroup that the loop does not fit into: the guard or the OOM killer ends the fork alone."""
    script = tmp_path / "ask.py"
    script.write_text(
        "import legroom, numpy\n"
        "class Data:\n"
        "    def __len__(self): return 4096\n"
        "    def __getitem__(self, index): return numpy.ones(1 << 18, dtype=numpy.float32)\n"
        "for workers, batch in ((0, 512), (2, 4), (2, 64)):\n"
        "    plan = legroom.check(Data(), batch_size=batch, num_workers=workers)\n"
        "    print(plan.verdict, *[problem.pool for problem in plan.problems], flush=True)\n"
    )
    ran = check_rig.run([sys.executable, str(script)], PLAIN, 400 << 20, 1 << 30, 1024, 120)
    assert ran.output.splitlines() == ["too-big ram", "fits", "too-big ram"] and ran.status == 0, ran


def test_what_runs_beside_it_is_not_killed(tmp_path: Path) -> None:
    """A process of the user in the same cgroup outlives the check."""
    asked = {**PLAIN, "batch": 4096, "samples": 8192}
    line = 'sleep 600 & sleeper=$!; "$@" > /dev/null 2>&1; kill $sleeper && echo alive'
    command = ["sh", "-c", line, "sh", *check_rig.check_command(asked)]
    ran = check_rig.run(command, asked, 220 << 20, 1 << 30, 1024)
    assert "alive" in ran.output, ran


@pytest.mark.soak  # test_loader_trial_garbage_collections.py has the rule
def test_the_need_of_a_yes_has_the_full_garbage_collection_of_a_long_run() -> None:
    """A forked worker copies the pages of all objects it inherited, once its batches have more than 700 objects."""
    asked = {**PLAIN, "workers": 3, "batch": 512, "samples": 512 * 30, "sample_bytes": 1024, "kind": "image"}
    needs = {}
    for batch, samples in ((512, 512 * 40), (16, 16 * 40)):
        setting = {**asked, "batch": batch, "samples": samples, "collate": "list"}
        ran = check_rig.run(check_rig.check_command(setting), setting, 2 << 30, 1 << 30, 1024, 90)
        needs[batch] = json.loads(ran.output)["need"]["ram"]
    assert needs[512] - needs[16] > 3 * (25 << 20), needs


@pytest.mark.soak
def test_what_check_reads_beside_the_loop_costs_no_memory_of_the_loop() -> None:
    """Imports after the fork ran a full garbage collection, which copied 35 MB that workers and process had shared."""
    asked = {
        **PLAIN,
        "workers": 2,
        "batch": 28,
        "samples": 406,
        "sample_bytes": 10 << 10,
        "kind": "parts",
        "tensors": 8,
    }
    loop = check_rig.run([sys.executable, str(check_rig.PLAYER)], asked, 2 << 30, 1 << 30, 1024)
    ran = check_rig.run(check_rig.check_command(asked), asked, 2 << 30, 1 << 30, 1024, 90)
    need = json.loads(ran.output)["need"]["ram"]
    assert loop.peak_ram <= need <= loop.peak_ram + (20 << 20), (need, loop)


def test_an_epoch_of_one_batch_needs_no_shared_memory_for_a_third() -> None:
    """The loop holds the batch of the epoch before and the new one."""
    asked = {**PLAIN, "workers": 2, "batch": 8, "samples": 8, "sample_bytes": 256 << 10, "persistent": True}
    ran = check_rig.run(check_rig.check_command(asked), asked, 2 << 30, 1 << 30, 1024, 90)
    need = json.loads(ran.output)["need"]["shm"]
    assert 2 * (2 << 20) <= need < 3 * (2 << 20), need

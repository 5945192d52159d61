"""Verdicts on evidence: counters before texts before signals; unknown is not zero; 137 alone proves nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.records.failure import MEMORY_CAUSES, UNKNOWN, Evidence, LogFacts, OomCount, Reading, Sign, Victim
from legroom.records.machine import Level
from legroom.rescue.find_failures_in_log import facts_of
from legroom.rescue.verdict import LOG_ALONE, classify
from legroom.system.processes_and_threads import ExitStatus

KILLED = ExitStatus(signal=9)
MB = 1 << 20
NONE = OomCount(0, True, "own")
BUG = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n"
CUDA = "Traceback (most recent call last):\n  File 'a'\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n"


def _verdict(**known: Any) -> tuple[str, float]:
    if "text" in known:
        known["log"] = facts_of(known.pop("text").encode())
    verdict = classify(Evidence(**known))
    assert verdict.evidence and verdict.summary
    return verdict.cause, verdict.confidence


def test_sigkill_is_judged_by_the_counter() -> None:
    assert _verdict(ending=KILLED, oom=OomCount(1, True, "own", 0.2)) == ("ram-oom-kill", 0.99)
    assert _verdict(ending=KILLED, oom=NONE)[0] == "killed"
    assert _verdict(ending=KILLED) == ("unknown", UNKNOWN)  # no counter could be read
    assert [one.cause for one in classify(Evidence(ending=KILLED)).likely] == ["ram-oom-kill", "killed"]


@pytest.mark.parametrize(
    ("text", "status", "cause"),
    [
        (CUDA + "step 1 loss 0.5\nstep 2 loss 0.5\nrun.sh: line 3: 7 Killed   python\n", 137, "killed"),
        (CUDA + "step 1 loss 0.5\nrun.sh: line 3: 7 Terminated   python\n", 143, "killed"),
        (CUDA + "step 1 loss 0.5\nrun.sh: line 3: 7 Segmentation fault   python\n", 139, "not-memory"),
        (CUDA + "step 1 loss 0.5\n", 1, "gpu-oom"),  # written out at the end
        (CUDA, 137, "gpu-oom"),
    ],
)
def test_a_signal_that_a_shell_reports_ends_what_the_program_had_handled(text: str, status: int, cause: str) -> None:
    """An exception does not exit with 128 + a signal: that status was measured, and the text is of before."""
    assert _verdict(ending=ExitStatus(status), oom=NONE, text=text)[0] == cause


def test_a_log_with_a_shortage_a_step_and_another_end_names_both() -> None:
    verdict = classify(Evidence(log=facts_of((CUDA + "step 1 loss 0.5\nKilled\n").encode())))
    assert (verdict.cause, [one.cause for one in verdict.likely]) == ("unknown", ["gpu-oom", "ram-oom-kill", "killed"])


def test_a_shared_counter_counts_for_the_job_when_the_job_lost_a_process() -> None:
    lost = OomCount(1, False, "shared", 0.5, ours=1, victims=(Victim(7, "python train.py", 900 * MB),))
    assert _verdict(ending=KILLED, oom=lost) == ("ram-oom-kill", 0.9)
    assert _verdict(ending=ExitStatus(1), oom=lost, text=BUG) == ("ram-oom-kill", 0.85)
    line = "Memory cgroup out of memory: Killed process 7 (python)"
    assert _verdict(ending=KILLED, oom=lost, kernel=(line,)) == ("ram-oom-kill", 0.99)
    another = OomCount(1, False, "shared", None, others=1)
    assert _verdict(ending=KILLED, oom=another) == ("killed", 0.93)
    assert _verdict(ending=ExitStatus(1), oom=another, text=BUG) == ("not-memory", 0.93)


def test_a_kill_that_cannot_be_attributed_is_unsure_and_reported() -> None:
    shared = OomCount(1, False, "shared", 0.5)
    cause, sure = _verdict(ending=KILLED, oom=shared)
    assert cause == "ram-oom-kill" and sure < 0.7
    said = classify(Evidence(ending=ExitStatus(1), oom=shared, log=facts_of(BUG.encode())))
    assert said.cause == "not-memory" and any("which process was killed is unknown" in line for line in said.evidence)


@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.DistBackendError: NCCL watchdog: collective operation timeout",
        "RuntimeError: [rank0]: Gloo: Timed out waiting 1800000ms for recv operation to complete",
        "TimeoutError: rank 1 did not answer",
        "RuntimeError: worker 3 is gone",
    ],
)
def test_a_kill_long_before_the_end_ended_a_job_that_waited_for_it(text: str) -> None:
    """Collective timeouts take 10 to 30 minutes."""
    long_ago = OomCount(1, True, "own", 1800.0)
    text = f"Traceback (most recent call last):\n  File 'a'\n{text}\n"
    cause, sure = _verdict(ending=ExitStatus(1), oom=long_ago, text=text)
    assert cause == "ram-oom-kill" and sure >= 0.85


def test_an_oom_kill_that_was_survived_is_not_the_cause_and_is_reported() -> None:
    survived = OomCount(1, True, "own", 600.0, went_on=True)
    said = classify(Evidence(ending=ExitStatus(1), oom=survived, log=facts_of(BUG.encode())))
    assert said.cause == "not-memory" and any("oom_kill rose by 1" in line for line in said.evidence)


def test_sigkill_or_a_time_limit_long_after_an_oom_kill_is_unsure() -> None:
    long_ago = OomCount(1, True, "own", 1800.0)
    for number in (9, 15):
        assert _verdict(ending=ExitStatus(signal=number), oom=long_ago)[1] < 0.7


def test_a_kernel_line_in_the_output_is_unsure_where_the_counter_counts_none() -> None:
    """A prolog prints the end of dmesg; the kill in it was another job's."""
    text = "Memory cgroup out of memory: Killed process 7 (python)\n"
    assert _verdict(ending=ExitStatus(1), oom=NONE, text=text)[1] < 0.7
    assert _verdict(ending=ExitStatus(1), text=text) == ("ram-oom-kill", 0.95)  # no counter to hold against it


def test_an_oom_kill_behind_exit_0_is_reported() -> None:
    victim = Victim(7, "python train.py", 900 * MB, "worker")
    said = classify(Evidence(ending=ExitStatus(0), oom=OomCount(1, True, "own", 0.5, victims=(victim,))))
    assert said.cause == "ram-oom-kill" and "exited with 0" in said.summary
    assert said.victim == victim and any("pid 7 (python train.py)" in line for line in said.evidence)


def test_137_without_a_signal_is_the_program_s_own() -> None:
    assert _verdict(ending=ExitStatus(137), oom=NONE)[0] == "not-memory"
    assert _verdict(ending=ExitStatus(137), oom=NONE, text="bash: line 1: 77 Killed   python x")[0] == "killed"
    assert _verdict(ending=ExitStatus(137), oom=OomCount(1, True, "own", 0.1))[0] == "ram-oom-kill"


def test_a_bus_error_is_judged_by_the_level_of_dev_shm() -> None:
    bus = ExitStatus(signal=7)
    assert _verdict(ending=bus, peaks={"shm": Level(63 * MB, 64 * MB)}) == ("shm-full", 0.97)
    assert _verdict(ending=bus, peaks={"shm": Level(40 * MB, 64 * MB)}) == ("shm-full", 0.8)
    empty, disk = {"shm": Level(1 * MB, 64 * MB)}, {"/data": Level(1, 100)}
    assert _verdict(ending=bus, peaks=empty, disks=disk)[0] == "not-memory"
    assert _verdict(ending=bus, peaks=empty)[0] == "unknown"  # no disk was read: one may be full
    assert _verdict(ending=bus, shm_at_end=Level(64 * MB, 64 * MB))[0] == "shm-full"
    unread = classify(Evidence(ending=bus))  # the level could not be read
    assert unread.cause == "unknown" and unread.likely[0].cause == "shm-full"


def test_texts_do_not_count_for_deaths_they_do_not_lead_to() -> None:
    assert _verdict(ending=ExitStatus(1), text=CUDA)[0] == "gpu-oom"
    assert _verdict(ending=KILLED, oom=NONE, text=CUDA)[0] == "killed"
    assert _verdict(ending=ExitStatus(signal=11), text=CUDA)[0] == "not-memory"


@pytest.mark.parametrize(
    ("number", "words"),
    [(11, "the program itself crashed"), (13, "read its output had ended"), (10, "says nothing of memory")],
)
def test_a_signal_that_is_no_crash_is_not_called_one(number: int, words: str) -> None:
    verdict = classify(Evidence(ending=ExitStatus(signal=number)))
    assert verdict.cause == "not-memory" and any(words in line for line in verdict.evidence)


def test_the_pin_thread_s_cuda_error_is_pinned_memory() -> None:
    bare = "Traceback (most recent call last):\n  File 'a'\n{}RuntimeError: CUDA error: out of memory\n"
    assert _verdict(ending=ExitStatus(1), text=bare.format(""))[0] == "gpu-oom"
    assert _verdict(ending=ExitStatus(1), text=bare.format("    return data.pin_memory()\n"))[0] == "pinned-exhausted"


def test_no_space_left_is_the_disk_or_dev_shm_by_which_is_full() -> None:
    text = "Traceback (most recent call last):\n  File 'a'\nOSError: [Errno 28] No space left on device\n"
    full, empty = Level(100, 100), Level(1, 100)
    assert _verdict(ending=ExitStatus(1), text=text, disks={"/d": full})[0] == "disk-full"
    assert _verdict(ending=ExitStatus(1), text=text, disks={"/d": empty}, peaks={"shm": full})[0] == "shm-full"
    assert _verdict(ending=ExitStatus(1), text=text)[0] == "disk-full"


GB = 1 << 30
REFUSED = (
    "Traceback (most recent call last):\n  File 'a'\n"
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)\n"
)
NCCL = "a1:812:840 [0] misc/shmutils.cc:72 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-9qPzWZ (size {}), No space left on device\n"


@pytest.mark.parametrize(
    ("text", "used", "size", "sure"),
    [
        (REFUSED, 60 * MB, 64 * MB, 0.97),
        (REFUSED, 0, 64 * MB, 0.93),  # one batch of more than 64 MB: refused without the level rising
        (REFUSED, 0, 4 * GB, 0.75),
        (REFUSED, 811 * MB, 23 * GB, 0.6),
        (NCCL.format(9637888), 60 * MB, 128 * MB, 0.93),
        (NCCL.format(9637888), 120 * MB, 4 * GB, 0.6),  # it prints the size: 9 MB fit into that
        (NCCL.format(9637888000), 120 * MB, 4 * GB, 0.97),
    ],
)
def test_a_measured_level_that_contradicts_a_full_dev_shm_lowers_the_confidence(
    text: str, used: int, size: int, sure: float
) -> None:
    peaks = {"shm": Level(used, size)}
    said = classify(Evidence(log=facts_of(text.encode()), ending=ExitStatus(1), peaks=peaks))
    assert (said.cause, said.confidence) == ("shm-full", sure)
    assert any("was free at its peak" in line for line in said.evidence) is (sure < 0.9)


def test_a_bare_cuda_error_is_no_surer_where_no_gpu_was_seen_full() -> None:
    """Page-locked memory gives the same message; that the job was watched is no evidence for either."""
    bare = "CUDA error: out of memory\n"
    free, full = {"gpu0": Level(1, 100)}, {"gpu0": Level(95, 100)}
    assert _verdict(text=bare)[0] == _verdict(text=bare, ending=ExitStatus(1), peaks=free)[0] == "unknown"
    assert _verdict(text=bare, ending=ExitStatus(1), peaks=full) == ("gpu-oom", 0.6)  # only a line: it is often full
    raised = f"Traceback (most recent call last):\n  File 'a'\nRuntimeError: {bare}"
    assert _verdict(text=raised, ending=ExitStatus(1), peaks=full) == ("gpu-oom", 0.9)


def test_what_counts_here_says_nothing_of_processes_elsewhere() -> None:
    """`docker run` and ssh: the killed process is in another cgroup, with another /dev/shm."""
    there: dict[str, Any] = {"oom": NONE, "elsewhere": "docker"}
    for text in ("Killed\n", "", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"):
        said = classify(Evidence(ending=ExitStatus(137), log=facts_of(text.encode()), **there))
        assert (said.cause, said.likely[0].cause) == ("unknown", "ram-oom-kill"), text
        assert any("docker starts processes elsewhere" in line for line in said.evidence)
    assert _verdict(ending=ExitStatus(1), text="State: OOMKilled\n", **there)[1] == 0.95
    low = {"shm": Level(0, 23 * GB)}
    assert _verdict(ending=ExitStatus(1), text=REFUSED, peaks=low, **there) == ("shm-full", 0.93)
    assert _verdict(ending=ExitStatus(135), text=WORKER_BUS, peaks=low, disks=ROOMY, **there) == ("shm-full", 0.7)
    assert _verdict(ending=KILLED, **there) == ("killed", 0.93), "the client itself is counted here"


# torch.save to a full disk, with torch 2.4 to 2.13: no path, no error number.
TORCH_SAVE = """\
Traceback (most recent call last):
  File "torch/serialization.py", line 1312, in _save
    zip_file.write_record(name, storage, num_bytes)
RuntimeError: basic_ios::clear: iostream error

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "<string>", line 1, in <module>
RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534
"""
ROOMY = {"/work": Level(1, 100)}


def test_space_on_the_disks_that_were_read_says_nothing_of_another_disk() -> None:
    ended: dict[str, Any] = {"ending": ExitStatus(1), "disks": ROOMY}
    said = classify(Evidence(log=facts_of(TORCH_SAVE.encode()), **ended))
    assert (said.cause, said.likely[0].cause) == ("disk-full", "disk-full")
    assert said.confidence < 0.7, "a little less than from the text alone"
    assert any("/work had free space; the file may be on another disk" in line for line in said.evidence)
    before = classify(Evidence(log=facts_of(TORCH_SAVE.encode()), full_before={"/t": Level(9, 9)}, **ended))
    assert (before.cause, before.confidence) == ("disk-full", 0.7)
    assert any(line.startswith("/t, already before the start") for line in before.evidence)
    broken = "Traceback (most recent call last):\n  File 'a'\nOSError: [Errno 5] Input/output error\n"
    assert _verdict(text=broken, **ended)[0] == _verdict(text=broken)[0] == "unknown"
    bus = _verdict(ending=ExitStatus(signal=7), peaks={"shm": Level(1, 64 * MB)}, disks=ROOMY)
    assert bus[1] < 0.7, "a truncated file is a guess"


def test_a_path_that_is_not_in_dev_shm_is_not_judged_by_dev_shm() -> None:
    full = {"ending": ExitStatus(1), "peaks": {"shm": Level(100, 100)}, "disks": ROOMY}
    text = "Traceback (most recent call last):\n  File 'a'\nOSError: [Errno 28] No space left on device{}\n"
    assert _verdict(text=text.format(": '/scratch/c.pt'"), **full)[0] == "disk-full"
    cause, sure = _verdict(text=text.format(""), **full)
    assert cause == "shm-full" and sure < 0.8, "the file may be on a disk that was not read"


def test_swap_needs_to_move_and_something_to_have_lost_patience() -> None:
    moving = {"swapped_back": 20e6, "stalled": 60.0}
    text = "watchdog: no progress for 30 s"
    assert _verdict(ending=ExitStatus(signal=6), text=text, **moving) == ("swap-thrash", 0.9)
    assert _verdict(ending=ExitStatus(signal=6), text=text, swapped_back=0.0, stalled=0.0)[0] == "not-memory"
    # On a busy disk thrashing moves little: that it is something else is then not certain either.
    for ending in (ExitStatus(signal=6), ExitStatus(134), ExitStatus(1)):
        slow = classify(Evidence(ending=ending, log=facts_of(text.encode()), swapped_back=0.2e6, stalled=3.0, oom=NONE))
        assert slow.cause == "unknown" and slow.likely[0].cause == "swap-thrash"
    assert _verdict(ending=KILLED, oom=NONE, swapped_back=0.2e6)[0] == "killed"
    bug = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n"
    assert _verdict(ending=ExitStatus(1), text=bug, **moving)[0] == "not-memory"


def test_daemons_that_kill_for_memory() -> None:
    trace = ('earlyoom[1]: sending SIGTERM to process 7 "python": badness 900',)
    assert _verdict(ending=ExitStatus(signal=15), killers=trace, oom=NONE)[0] == "ram-oom-kill"
    assert _verdict(ending=ExitStatus(3), killers=trace, oom=NONE)[0] == "not-memory"


# As torch 2.13 with Python 3.11 wrote it, less some frames: a worker's feeder thread, whose batch is lost.
LOST_BATCH = """\
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 244, in _feed
    obj = _ForkingPickler.dumps(obj)
          ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/site-packages/torch/multiprocessing/reductions.py", line 614, in reduce_storage
    df = multiprocessing.reduction.DupFd(fd)
         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 607, in __init__
    self._socket.bind(address)
OSError: AF_UNIX path too long
"""
LATER = "epoch 1: waiting for the first batch\nTraceback (most recent call last):\n  File 'a'\n"


@pytest.mark.parametrize(
    "known",
    [
        {"text": LOST_BATCH},  # forkserver: the workers do not start
        {"text": LOST_BATCH, "ending": ExitStatus(1)},
        {"text": LOST_BATCH * 3 + LATER + "KeyboardInterrupt\n"},
        {"text": LOST_BATCH + LATER + "RuntimeError: DataLoader timed out after 30 seconds\n"},
        {"text": LOST_BATCH, "ending": ExitStatus(signal=15)},
        {"text": LOST_BATCH, "ending": KILLED, "oom": NONE},
    ],
)
def test_a_path_too_long_for_a_socket_however_the_wait_ended(known: dict[str, Any]) -> None:
    assert _verdict(**known)[0] == "tmpdir-too-long"


def test_a_socket_that_could_not_be_made_and_was_survived() -> None:
    assert _verdict(text=LOST_BATCH + LATER + "ValueError: no such class\n")[0] == "not-memory"


def test_a_closed_pipe_is_not_blamed_for_another_failure() -> None:
    broken = "Traceback (most recent call last):\n  File 'a'\nBrokenPipeError: [Errno 32] Broken pipe\n"
    other = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'lr'\n"
    assert _verdict(ending=ExitStatus(1), text=broken, reader_closed=True) == ("not-memory", 0.95)
    assert _verdict(ending=ExitStatus(signal=13), reader_closed=True) == ("not-memory", 0.95)
    assert _verdict(ending=ExitStatus(1), reader_closed=True) == ("not-memory", 0.75)
    for text, closed in ((other, True), (broken, False)):
        told = classify(Evidence(ending=ExitStatus(1), log=facts_of(text.encode()), reader_closed=closed))
        assert "closed the pipe" not in told.summary


def test_asked_to_stop_and_stalled() -> None:
    assert _verdict(ending=ExitStatus(signal=15), asked_to_stop=15) == ("killed", 1.0)
    assert _verdict(ending=ExitStatus(signal=15), stalled_on="shm")[0] == "shm-full"


@pytest.mark.parametrize("text", ["", "Killed\n", CUDA, "Bus error\n", "MemoryError\n"])
def test_a_log_alone_is_never_surer_than_its_bound(text: str) -> None:
    assert _verdict(text=text)[1] <= LOG_ALONE


codes = st.sampled_from(["killed", "timeout", "crash", "terminated", "worker-gone", "child-killed", "swap-hint"])
signs = st.lists(st.builds(Sign, codes, st.text(max_size=20), st.integers(1, 500)), max_size=5).map(tuple)


@settings(deadline=None)  # a starved machine is no failure
@given(
    st.builds(
        Evidence,
        ending=st.builds(ExitStatus, status=st.integers(0, 255)) | st.builds(ExitStatus, status=st.none(), signal=st.integers(1, 64)),
        log=st.builds(LogFacts, signs=signs),
        oom=st.none() | st.just(NONE),
        kernel=st.none() | st.just(()),
        peaks=st.dictionaries(st.sampled_from(["ram", "fds", "gpu0"]), st.builds(Level, st.integers(0, 90), st.just(100))),
    )
)  # fmt: skip
def test_nothing_that_points_to_memory_gives_no_memory_verdict(evidence: Evidence) -> None:
    verdict = classify(evidence)
    assert 0 < verdict.confidence <= 1
    bus = evidence.ending is not None and 7 in (evidence.ending.signal, (evidence.ending.status or 0) - 128)
    assert verdict.cause not in MEMORY_CAUSES or bus


def test_an_oom_kill_shows_the_kernel_s_peak_or_when_it_was_last_looked() -> None:
    known: dict[str, Any] = {
        "ending": KILLED,
        "oom": OomCount(1, True, "own", 0.2),
        "peaks": {"ram": Level(18 * MB, 120 * MB)},
        "ram_unseen": 0.9,
    }
    seen = " | ".join(classify(Evidence(**known)).evidence)
    assert "18 MB of 120 MB (15%)" in seen and "last read 900 ms before the end" in seen
    by_kernel = " | ".join(classify(Evidence(**known, ram_peak=Level(119 * MB, 120 * MB))).evidence)
    assert "recorded by the kernel: 119 MB of 120 MB (99%)" in by_kernel and "18 MB" not in by_kernel
    full = {**known, "peaks": {"ram": Level(119 * MB, 120 * MB)}}
    assert not any("last read" in line for line in classify(Evidence(**full)).evidence)


WORKER_BUS = (
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    "Traceback (most recent call last):\n  File 'a'\n"
    "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.\n"
)


def test_what_torch_supposes_of_a_bus_error_does_not_outweigh_what_was_measured() -> None:
    empty, full = Level(0, 64 * MB), Level(64 * MB, 64 * MB)
    ended = {"ending": ExitStatus(1), "text": WORKER_BUS}
    assert _verdict(**ended, peaks={"shm": full}) == ("shm-full", 0.97)
    assert _verdict(**ended, peaks={"shm": empty}, disks={"/data": Level(1, 100)})[0] == "not-memory"
    assert _verdict(**ended, peaks={"shm": empty}, disks={"/data": Level(100, 100)})[0] == "disk-full"
    assert _verdict(text=WORKER_BUS)[0] == "shm-full"  # from the log alone it is the likely cause
    assert _verdict(text=WORKER_BUS)[1] < 0.8


def test_a_level_that_was_not_read_for_a_while_does_not_outweigh_a_bus_error() -> None:
    known = {"peaks": {"shm": Level(0, 64 * MB)}, "disks": {"/data": Level(1, 100)}}
    for unread, cause in ((0.1, "not-memory"), (0.8, "shm-full")):
        found = _verdict(ending=ExitStatus(1), text=WORKER_BUS, **known, shm_unread=unread)
        assert found[0] == cause and found[1] < 0.8
    alone = classify(Evidence(ending=ExitStatus(signal=7), **known, shm_unread=0.8))
    assert alone.cause == "unknown" and alone.likely[0].cause == "shm-full"
    assert any("not read for 800 ms" in line for line in alone.evidence)
    full = {**known, "disks": {"/data": Level(100, 100)}}
    assert _verdict(ending=ExitStatus(1), text=WORKER_BUS, **full, shm_unread=0.8)[0] == "disk-full"


def test_a_full_dev_shm_that_was_freed_long_before_a_bus_error_makes_it_unsure() -> None:
    empty, full = Level(0, 64 * MB), Level(64 * MB, 64 * MB)
    readings = (Reading(1.0, {"shm": full}), Reading(500.0, {"shm": empty}))
    known = {"ending": ExitStatus(signal=7), "peaks": {"shm": full}, "shm_at_end": empty}
    assert _verdict(**known, readings=readings)[1] < 0.8
    assert _verdict(**known, readings=readings, disks={"/data": Level(100, 100)})[0] == "disk-full"
    assert _verdict(**known, readings=readings[:1])[1] == 0.97


def test_a_refusal_is_no_supposition() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'a'\n"
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)\n"
    )
    assert _verdict(ending=ExitStatus(1), text=text, peaks={"shm": Level(0, 64 * MB)})[0] == "shm-full"


def test_a_library_that_cannot_be_mapped_is_address_space_unless_it_may_not_be_executed() -> None:
    text = "Traceback (most recent call last):\n  File 'a'\nImportError: libtorch_cpu.so: failed to map segment from shared object{}\n"
    assert _verdict(ending=ExitStatus(1), oom=NONE, text=text.format(""))[0] == "ram-allocation"
    assert _verdict(ending=ExitStatus(1), oom=NONE, text=text.format(": Operation not permitted"))[0] == "not-memory"


def test_a_spawned_process_that_sigkill_ended_was_killed_where_no_oom_kill_was_counted() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'a'\n"
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL\n"
    )
    assert _verdict(ending=ExitStatus(1), oom=NONE, text=text) == ("killed", 0.9)
    assert _verdict(ending=ExitStatus(1), text=text)[0] == "unknown"
    assert _verdict(ending=ExitStatus(1), oom=OomCount(1, True, "own", 0.1), text=text)[0] == "ram-oom-kill"


def test_an_oom_kill_names_who_held_how_much() -> None:
    kernel = (
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/a,task_memcg=/a/b,task=python,pid=7770,uid=0",
        "Memory cgroup out of memory: Killed process 7770 (python) total-vm:999kB, anon-rss:909312kB, file-rss:0kB",
        "Memory cgroup out of memory: Killed process 8888 (python) total-vm:999kB, anon-rss:1024kB, file-rss:0kB",
    )
    victim = Victim(7770, "python train.py " + "--flag " * 30, 888 * MB, "main", 1)
    count = OomCount(
        2, True, "own", 0.2, victims=(victim,), beside=(Victim(7769, "python train.py", 210 * MB, "main", 0),)
    )
    found = classify(Evidence(ending=KILLED, oom=count, kernel=kernel, ram_peak=Level(1200 * MB, 1200 * MB)))
    lines = "\n".join(found.evidence)
    assert "killed: rank 1, pid 7770 (python train.py --flag" in lines and "which used 888 MB of 1.17 GB" in lines
    assert "other processes of the job at that time: rank 0, pid 7769 (python train.py): 210 MB" in lines
    assert "kernel log: killed process 8888, which used 1 MB" in lines  # the other is named already
    assert max(map(len, found.evidence)) < 200

"""Flags found and rewritten; one step at a time; the effective batch kept; when to stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import UsageError
from legroom.records.failure import Cause, Evidence, Level, Likely, OomCount, Reading, Role, Verdict, Victim
from legroom.records.loader_settings_and_flags import LoaderSettings
from legroom.rescue.find_failures_in_log import facts_of
from legroom.rescue.retry_settings import (
    CommandSettings,
    NamedFlag,
    RetryStep,
    command_settings,
    describe_changes,
    lowered_in_environment,
    next_step,
    parse_named,
    settings_without,
    step_without,
    with_resume,
    with_settings,
    within_limits,
)
from legroom.rescue.verdict import classify
from legroom.system.processes_and_threads import ExitStatus

ACC = "--gradient_accumulation_steps"


def _v(cause: Cause) -> Verdict:
    return Verdict(cause, 0.9, "")


@pytest.mark.parametrize(
    ("command", "values", "wanted"),
    [
        ("python t.py --batch 32 --num_workers 4", {"num_workers": 2}, "python t.py --batch 32 --num_workers 2"),
        ("python t.py --batch-size=32", {"batch_size": 16}, "python t.py --batch-size=16"),
        ("python t.py -b32 -j 4", {"batch_size": 16, "num_workers": 0}, "python t.py -b16 -j 0"),
        ("python t.py data.batch_size=32", {"batch_size": 8}, "python t.py data.batch_size=8"),
        ("torchrun --nproc_per_node 8 t.py --workers 8", {"num_workers": 4}, "torchrun --nproc_per_node 8 t.py --workers 4"),
        ("accelerate launch --num_processes 2 t.py --per_device_train_batch_size 8 " + ACC + " 2", {"batch_size": 4, "accumulation": 4},
         "accelerate launch --num_processes 2 t.py --per_device_train_batch_size 4 " + ACC + " 4"),
        ("python t.py --dataloader_num_workers 4 --prefetch_factor 4", {"prefetch_factor": 1}, "python t.py --dataloader_num_workers 4 --prefetch_factor 1"),
        ("python t.py --pin_memory --epochs 3", {"pin_memory": False}, "python t.py --epochs 3"),
        ("python t.py --pin_memory True", {"pin_memory": False}, "python t.py --pin_memory False"),
        ("python t.py --epochs 3", {"batch_size": 4}, "python t.py --epochs 3"),
    ],
)  # fmt: skip
def test_only_what_is_there_is_rewritten(command: str, values: dict[str, int | bool], wanted: str) -> None:
    assert with_settings(command.split(), LoaderSettings(**values)) == wanted.split()


def test_named_flags_are_found_or_added() -> None:
    named = (NamedFlag("batch_size", "--my-batch"), NamedFlag("accumulation", "--acc", "4"))
    words = ["python", "t.py", "--my-batch=32"]
    found = command_settings(words, named)
    assert (found.batch_size, found.accumulation) == (32, 4)
    assert with_settings(words, LoaderSettings(batch_size=16, accumulation=8), named) == [
        "python",
        "t.py",
        "--my-batch=16",
        "--acc",
        "8",
    ]
    assert parse_named("accumulation=--acc=4") == NamedFlag("accumulation", "--acc", "4")
    assert parse_named("batch=--b") == parse_named("batch_size=--b") == NamedFlag("batch_size", "--b")
    for text in ("batch", "nonsense=--x", "batch="):
        with pytest.raises(UsageError, match="is not NAME=FLAG"):
            parse_named(text)


@pytest.mark.parametrize(
    ("command", "flag", "wanted"),
    [
        ("t.py --x 1", "--resume", "t.py --x 1 --resume c.pt"),
        ("t.py --resume old.pt --x", "--resume", "t.py --resume c.pt --x"),
        ("t.py --resume=old.pt", "--resume=", "t.py --resume=c.pt"),
        ("t.py", "--resume=", "t.py --resume=c.pt"),
        ("t.py", "resume_from={}", "t.py resume_from=c.pt"),
        ("t.py", "--resume auto", "t.py --resume auto"),
        ("t.py --resume --x", "--resume", "t.py --resume c.pt --x"),
    ],
)
def test_resuming(command: str, flag: str, wanted: str) -> None:
    assert with_resume(["python", *command.split()], flag, "c.pt") == ["python", *wanted.split()]


def _walk(command: str, cause: Cause, named: tuple[NamedFlag, ...] = ()) -> list[str]:
    """The commands of one attempt after another until nothing is left to lower."""
    words, seen = command.split(), []
    for _ in range(30):
        step = next_step(_v(cause), command_settings(words, named), descriptors_raised=True)
        if step.stop:
            return seen
        words = with_settings(words, step.changes, named)
        seen.append(" ".join(words))
    raise AssertionError("it never stops")


def test_the_order_is_prefetch_workers_then_batch() -> None:
    walked = _walk("python t.py --batch 4 --num_workers 4 --prefetch_factor 2 --accum_iter 1", "shm-full")
    assert walked == [
        "python t.py --batch 4 --num_workers 4 --prefetch_factor 1 --accum_iter 1",
        "python t.py --batch 4 --num_workers 2 --prefetch_factor 1 --accum_iter 1",
        "python t.py --batch 4 --num_workers 1 --prefetch_factor 1 --accum_iter 1",
        "python t.py --batch 2 --num_workers 1 --prefetch_factor 1 --accum_iter 2",
        "python t.py --batch 1 --num_workers 1 --prefetch_factor 1 --accum_iter 4",
    ]


@pytest.mark.parametrize(
    ("more", "last"),
    [
        ("--prefetch_factor 2", 1),
        ("--persistent_workers", 1),
        ("--dataloader-persistent-workers=true", 1),
        ("data.persistent_workers=True", 1),
        ("--persistent_workers false", 0),
        ("--no-persistent-workers", 0),
        ("--prefetch_factor None", 0),
        ("", 0),
    ],
)
@pytest.mark.parametrize("cause", ["shm-full", "ram-oom-kill", "fds-exhausted", "processes-exhausted"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_torch_refuses_no_combination(cause: Cause, more: str, last: int, workers: int) -> None:
    """prefetch_factor and persistent_workers need a worker."""
    command = f"python t.py --num_workers {workers} {more}"
    seen = [command_settings(line.split()).num_workers for line in _walk(command, cause)]
    assert min([workers, *(count for count in seen if count is not None)]) == last


def test_a_prefetch_flag_that_the_ladder_added_keeps_a_worker() -> None:
    walked = _walk("python t.py --num_workers 2", "shm-full", (NamedFlag("prefetch_factor", "--pf"),))
    assert walked == ["python t.py --num_workers 2 --pf 1", "python t.py --num_workers 1 --pf 1"]


def test_the_last_step_in_a_small_dev_shm_is_another_loader() -> None:
    found = command_settings(["python", "t.py", "--batch_size", "32", "--num_workers", "1", "--prefetch_factor", "1"])
    may = replace(found, replaces_loader=True)
    step = next_step(_v("shm-full"), may)
    assert step.changes == LoaderSettings(loader_kind="legroom") and "/dev/shm" in step.why
    assert next_step(_v("shm-full"), found).stop  # --loader was given, or it is in use already
    assert next_step(_v("ram-oom-kill"), may).stop  # it does not use less RAM
    assert (
        "num_workers" in next_step(_v("shm-full"), replace(may, num_workers=2)).changes.given()
    )  # settings come first


def test_where_settings_reach_no_flag_the_loader_comes_first() -> None:
    found = replace(
        command_settings(["bash", "train.sh"]),
        changeable=frozenset({"num_workers", "prefetch_factor"}), only_environment=True, replaces_loader=True,
    )  # fmt: skip
    assert next_step(_v("shm-full"), found).changes == LoaderSettings(loader_kind="legroom")
    assert next_step(_v("shm-full"), replace(found, replaces_loader=False)).changes.prefetch_factor == 1
    assert next_step(_v("ram-oom-kill"), found).changes.prefetch_factor == 1


@pytest.mark.parametrize("words", ["bash train.sh", "t --batch auto --accum_iter 1", "yolo train batch=-1"])
def test_a_batch_size_that_is_not_known_is_told_apart_from_one_that_cannot_fall(words: str) -> None:
    step = next_step(_v("gpu-oom"), command_settings(words.split()))
    assert step.stop and "no batch size was recognized" in step.why and "--flag batch=--ITS-FLAG=16" in step.why
    named = command_settings(words.split(), (NamedFlag("batch_size", "--b"),))  # without its value
    assert "no batch size was recognized" in next_step(_v("gpu-oom"), named).why
    known = command_settings(["t", "--batch", "1", "--accum_iter", "4"])
    assert next_step(_v("gpu-oom"), known).why == "nothing is left to lower"


def test_the_ladder_begins_with_what_the_killed_process_held() -> None:
    found = command_settings(
        ["python", "t.py", "--batch", "32", "--num_workers", "4", "--prefetch_factor", "2", "--accum_iter", "1"]
    )
    for role, wanted in (("main", "batch_size"), ("worker", "prefetch_factor"), (None, "prefetch_factor")):
        victim = Victim(7, "python t.py", 1 << 30, role)  # type: ignore[arg-type]
        step = next_step(Verdict("ram-oom-kill", 0.9, "", victim=victim), found)
        assert wanted in step.changes.given(), role
    # Without a flag that keeps the effective batch, what is left to try is tried.
    bare = command_settings(["python", "t.py", "--batch", "32", "--num_workers", "4"])
    step = next_step(Verdict("ram-oom-kill", 0.9, "", victim=Victim(7, "python t.py", None, "main")), bare)
    assert step.changes == LoaderSettings(num_workers=2)


def test_the_gpu_s_memory_is_only_helped_by_the_batch() -> None:
    walked = _walk("python t.py --batch 6 --num_workers 4 --accum_iter 2", "gpu-oom")
    assert walked[0] == "python t.py --batch 3 --num_workers 4 --accum_iter 4"
    assert walked[1] == "python t.py --batch 1 --num_workers 4 --accum_iter 12"
    assert len(walked) == 2


def test_without_accumulation_the_batch_is_kept_and_the_reason_is_given() -> None:
    step = next_step(_v("gpu-oom"), command_settings(["python", "t.py", "--batch", "8"]))
    assert step.stop and "accumulation" in step.why


def test_a_script_that_takes_the_whole_batch_accumulates_by_itself() -> None:
    walked = _walk("python t.py --micro-batch-size 4 --global-batch-size 64", "gpu-oom")
    assert walked[0] == "python t.py --micro-batch-size 2 --global-batch-size 64"


def test_the_batch_is_global_ranks_stays_divisible() -> None:
    walked = _walk("torchrun --nproc_per_node 8 t.py --global_batch_size 32 --accum_iter 16", "gpu-oom")
    assert walked[-1] == "torchrun --nproc_per_node 8 t.py --global_batch_size 8 --accum_iter 64"


@pytest.mark.parametrize("cause", ["killed", "not-memory", "disk-full"])
def test_what_no_setting_helps_is_not_started_again(cause: Cause) -> None:
    assert next_step(_v(cause), command_settings(["t", "--workers", "4"])).stop


def test_another_error_right_after_a_change_may_come_from_the_change() -> None:
    step = next_step(_v("not-memory"), command_settings(["t", "--workers", "0"]), last_change="workers 2 → 0")
    assert step.stop and "workers 2 → 0" in step.why and "may have caused" in step.why
    assert "would not help" in next_step(_v("not-memory"), command_settings(["t", "--workers", "0"])).why


def test_a_change_that_the_job_refused_is_undone_and_something_else_is_lowered() -> None:
    """persistent_workers=True in the script's code: torch refuses 0 workers, and 1 is left to try."""
    found = command_settings(["t", "--workers", "2", "--batch", "8", "--accum_iter", "1"])
    none = LoaderSettings(num_workers=0)
    step = step_without(none, "num_workers 2 → 0", _v("shm-full"), found)
    assert step.changes == LoaderSettings(num_workers=1) and step.undo == none and not step.stop
    assert "num_workers 2 → 0" in step.why and "undone" in step.why
    batch = LoaderSettings(batch_size=4, accumulation=2)
    assert settings_without(found, batch).changeable == {"num_workers"}
    after = step_without(batch, "batch_size 8 → 4", _v("gpu-oom"), found)
    assert after.stop and "batch_size 8 → 4" in after.why and "may have caused" in after.why


def test_an_unknown_cause_is_treated_as_the_most_likely_one_and_reported_as_unknown() -> None:
    found = command_settings(["t", "--workers", "4"])
    ram, bug = Likely("ram-oom-kill", ""), Likely("not-memory", "")
    step = next_step(replace(_v("unknown"), likely=(ram, bug)), found)
    assert step.changes == LoaderSettings(num_workers=2) and "cause unknown" in step.why and "ram-oom-kill" in step.why
    assert next_step(replace(_v("unknown"), likely=(bug, ram)), found).stop
    assert next_step(_v("unknown"), found).stop


def test_processes_and_mappings_are_saved_with_fewer_workers() -> None:
    found = command_settings(["t", "--workers", "4"])
    assert next_step(_v("processes-exhausted"), found).changes == LoaderSettings(num_workers=2)
    assert next_step(_v("map-count"), found).changes == LoaderSettings(num_workers=2)


def test_a_killed_worker_is_tried_once_more_unchanged_and_descriptors_are_raised_first() -> None:
    found = command_settings(["t", "--workers", "4"])
    assert next_step(_v("worker-killed"), found).changes == LoaderSettings()
    assert next_step(_v("worker-killed"), found, repeated=True).stop
    assert next_step(_v("fds-exhausted"), found).raise_descriptors
    assert next_step(_v("fds-exhausted"), found, descriptors_raised=True).changes == LoaderSettings(num_workers=2)


def test_a_setting_without_influence_is_not_lowered() -> None:
    of_workers = frozenset({"num_workers", "prefetch_factor"})
    killed = replace(_v("ram-oom-kill"), without_effect=of_workers)
    alone = next_step(killed, command_settings(["t", "--workers", "4"]))
    assert alone.stop and "no influence" in alone.why
    both = next_step(killed, command_settings(["t", "--workers", "4", "--batch_size", "8", "--accum_iter", "1"]))
    assert both.changes == LoaderSettings(batch_size=4, accumulation=2)
    opened = replace(_v("fds-exhausted"), without_effect=of_workers)
    assert next_step(opened, command_settings(["t", "--workers", "4"])).raise_descriptors
    assert next_step(opened, command_settings(["t", "--workers", "4"]), descriptors_raised=True).stop
    without = classify(Evidence(ending=ExitStatus(signal=9), oom=OomCount(1, True, "own"), workers=False))
    assert (without.without_effect, without.of_threads) == (frozenset(), of_workers)
    readings = tuple(Reading(float(n), {"ram": Level(1 + 7 * n, 64)}) for n in range(9))
    leak = Evidence(ending=ExitStatus(signal=9), oom=OomCount(1, True, "own"), workers=False, readings=readings)
    assert (classify(leak).without_effect, classify(leak).of_threads) == (of_workers, frozenset())
    refused = (  # before it starts them
        'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    next(it)\n'
        "legroom.errors.BudgetTooSmall: workers have no memory [budget-too-small]\n"
    )
    before = Evidence(ending=ExitStatus(1), workers=False, log=facts_of(refused.encode()))
    assert classify(before).without_effect == frozenset()
    unsure = classify(Evidence(ending=ExitStatus(signal=9), workers=False))  # unknown, most likely an OOM kill
    assert unsure.cause == "unknown" and unsure.of_threads == of_workers
    unseen = classify(Evidence(ending=ExitStatus(signal=9), oom=OomCount(1, True, "own")))
    assert unseen.without_effect == unseen.of_threads == frozenset()


def test_what_may_be_a_number_of_threads_is_lowered_when_nothing_else_is_left() -> None:
    killed = classify(Evidence(ending=ExitStatus(signal=9), oom=OomCount(1, True, "own"), workers=False))

    def after(*words: str) -> RetryStep:
        return next_step(killed, command_settings(["t", *words]))

    step = after("--workers", "8")
    assert step.changes == LoaderSettings(num_workers=4) and "only if it sets threads" in step.why
    assert after("--workers", "8", "--prefetch_factor", "4").changes == LoaderSettings(prefetch_factor=1)
    assert after("--workers", "8", "--prefetch_factor", "1").changes == LoaderSettings(num_workers=4)
    both = after("--workers", "8", "--batch_size", "8", "--accum_iter", "1")
    assert both.changes == LoaderSettings(batch_size=4, accumulation=2) and "threads" not in both.why
    assert after("--workers", "8", "--batch_size", "1", "--accum_iter", "1").changes == LoaderSettings(num_workers=4)
    for words in ([], ["--workers", "0"]):
        assert after(*words).stop
    named = [NamedFlag("num_workers", "--mine")]  # not on the command line: its number is not known
    assert next_step(killed, command_settings(["t"], named)).stop


@settings(deadline=None)  # a starved machine is no failure
@given(
    st.integers(1, 4096), st.integers(1, 64), st.integers(0, 64), st.sampled_from(["shm-full", "ram-oom-kill", "gpu-oom"])
)  # fmt: skip
def test_every_walk_ends_and_keeps_the_effective_batch(batch: int, steps: int, workers: int, cause: Cause) -> None:
    command = f"python t.py --batch {batch} --accum_iter {steps} --num_workers {workers}"
    for line in _walk(command, cause):
        found = command_settings(line.split())
        assert found.batch_size is not None and found.accumulation is not None
        assert found.batch_size * found.accumulation == batch * steps
        assert found.num_workers is not None and found.num_workers <= workers


def test_no_recognised_flag_explains_how_to_name_one() -> None:
    step = next_step(_v("ram-oom-kill"), CommandSettings())
    assert step.stop and "--flag" in step.why


@pytest.mark.parametrize(
    ("refused", "first"), [("main", "batch_size"), ("worker", "prefetch_factor"), (None, "prefetch_factor")]
)
def test_an_allocation_that_failed_in_the_training_process_lowers_the_batch_first(
    refused: Role | None, first: str
) -> None:
    found = command_settings(["train.py", "--batch", "8", "--accumulation", "1", "--workers", "4", "--prefetch", "4"])
    step = next_step(replace(_v("ram-allocation"), refused=refused), found)
    assert first in step.changes.given()


_SCRIPT = b'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    step()\n'
_FED = b'Traceback (most recent call last):\n  File "/lib/python3.12/multiprocessing/queues.py", line 264, in _feed\n'
_SPAWNED = b'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
_FAILED = b"MemoryError: Unable to allocate 8.00 GiB\n"


@pytest.mark.parametrize(
    ("log", "who"),
    [
        (_SCRIPT + _FAILED, "main"),
        (b"[rank1]: " + (_SCRIPT + _FAILED).replace(b"\n", b"\n[rank1]: "), "main"),
        (_SCRIPT + b"MemoryError: Caught MemoryError in DataLoader worker process 0.\nOriginal " + _FED, "worker"),
        (
            _SCRIPT + b"legroom.errors.BudgetTooSmall: the memory that is left does not hold one batch for each of 4 "
            b"workers [budget-too-small]\n",
            "worker",
        ),
        (_FED + _FAILED, None),  # a thread, of whichever process
        (_SPAWNED + _FAILED, None),
        (b"Process SpawnProcess-1:\n" + _FED + _FAILED, None),
        (_FAILED, None),  # no traceback
        (b"step 1\n" + _FAILED + b"step 2\n", None),
        (
            b'multiprocessing.pool.RemoteTraceback: \n"""\n' + _FED + _FAILED + b'"""\n\nThe above exception was the '
            b"direct cause of the following exception:\n\n" + _SCRIPT + _FAILED,
            None,
        ),
    ],
)  # fmt: skip
def test_the_process_that_an_allocation_failed_in_is_read_from_the_traceback(log: bytes, who: Role | None) -> None:
    verdict = classify(Evidence(ending=ExitStatus(1), log=facts_of(log)))
    assert (verdict.cause, verdict.refused) == ("ram-allocation", who)


B8 = {"batch_size": 8, "accumulation": 2}
FROM16 = {"batch_size": 16, "accumulation": 1, "num_workers": 4}
W0 = {"num_workers": 0}
FROM32 = {"batch_size": 32, "num_workers": 2}
ACCUM = ("accumulation=--acc",)
ACCUM16 = ("accumulation=--acc=16",)


@pytest.mark.parametrize(
    ("command", "flags", "limits", "then", "wanted"),
    [
        # The batch: a limit of 8, and the accumulation that follows from what is asked for now.
        ("--batch_size 16 --accum_iter 1", (), B8, FROM16, {"batch_size": 8, "accumulation": 2}),
        ("--batch_size 32 --accum_iter 2", (), B8, FROM16, {"batch_size": 8, "accumulation": 8}),
        ("--batch_size 4 --accum_iter 1", (), B8, FROM16, {}),
        ("--batch_size 8 --accum_iter 1", (), B8, FROM16, {}),
        ("--batch_size 8 --accum_iter 5", (), B8, FROM16, {}),
        ("--batch_size 12 --accum_iter 1", (), B8, FROM16, {"batch_size": 6, "accumulation": 2}),
        ("--batch_size 11 --accum_iter 1", (), B8, FROM16, {}),  # 1 x 11 would be far below the limit
        ("--batch_size 9 --accum_iter 1", (), B8, FROM16, {}),
        ("--batch_size 7 --accum_iter 3", (), {"batch_size": 2}, FROM16, {"batch_size": 1, "accumulation": 21}),
        # Accumulation: not known, named, named with the script's default, not a number, derived by the script.
        ("--batch_size 16", (), B8, FROM16, {}),
        ("--batch_size 32", ACCUM, B8, FROM16, {"batch_size": 8, "accumulation": 4}),
        ("--batch_size 32", ACCUM16, B8, FROM16, {"batch_size": 8, "accumulation": 64}),
        ("--batch_size 32 --acc 2", ACCUM16, B8, FROM16, {"batch_size": 8, "accumulation": 8}),
        ("--batch_size 16 --accum_iter auto", (), B8, FROM16, {}),
        ("--micro_batch_size 32 --global_batch_size 64", (), B8, FROM16, {"batch_size": 8}),
        ("--batch_size auto --accum_iter 1", (), B8, FROM16, {}),
        ("--accum_iter 1", ("batch=--bs",), B8, FROM16, {}),  # the script's default is not known
        ("--accum_iter 1", ("batch=--bs=32",), B8, FROM16, {"batch_size": 8, "accumulation": 4}),
        # Workers and prefetch: never more than asked for.
        ("--batch_size 32 --num_workers 2", (), W0, FROM32, {"num_workers": 0}),
        ("--batch_size 64 --num_workers 2", (), W0, FROM32, {"num_workers": 0}),
        ("--batch_size 2 --num_workers 2", (), W0, FROM32, {}),  # a smaller batch may fit with them
        ("--num_workers 2", (), W0, {"num_workers": 4}, {"num_workers": 0}),
        ("--num_workers 1", (), {"num_workers": 2}, {"num_workers": 8}, {}),
        ("--num_workers 2", (), {"num_workers": 2}, {"num_workers": 8}, {}),
        ("--num_workers 3", (), {"num_workers": 2}, {"num_workers": 8}, {"num_workers": 2}),
        ("--num_workers auto", (), W0, {"num_workers": 8}, {}),
        ("--num_workers auto", (), W0, {}, {}),  # not a number then, not a number now: it cannot be changed
        ("--epochs 3", (), {**W0, "pin_memory": False, "low_memory": True}, {}, {}),  # no flag to change
        ("--num_workers 2 --persistent_workers", (), W0, {"num_workers": 8}, {"num_workers": 1}),
        ("--num_workers 1 --persistent_workers", (), W0, {"num_workers": 8}, {}),
        ("--epochs 3", ("workers=--nw",), W0, {}, {"num_workers": 0}),  # not given then, not given now
        ("--epochs 3", ("workers=--nw",), {"num_workers": 4}, {"num_workers": 8}, {}),
        ("--num_workers 4 --prefetch_factor 8", (), {"prefetch_factor": 1}, {"prefetch_factor": 4}, {"prefetch_factor": 1}),
        ("--num_workers 4 --prefetch_factor 1", (), {"prefetch_factor": 2}, {"prefetch_factor": 4}, {}),
        ("--num_workers 0", ("prefetch=--pf",), {"prefetch_factor": 1}, {}, {}),  # torch refuses it without workers
        # Switches.
        ("--pin_memory", (), {"pin_memory": False}, {"pin_memory": True}, {"pin_memory": False}),
        ("--no-pin-memory", (), {"pin_memory": True}, {}, {}),
        ("--epochs 3", ("low_memory=--stream",), {"low_memory": True}, {}, {"low_memory": True}),
        ("--stream --epochs 3", ("low_memory=--stream",), {"low_memory": True}, {}, {}),
        # Limits of several settings at once; a limit that cannot be kept does not stop the others.
        ("--batch_size 32 --accum_iter 2 --num_workers 8", (), {**B8, **W0}, FROM16, {"batch_size": 8, "accumulation": 8, "num_workers": 0}),
        ("--batch_size 32 --num_workers 8", (), {**B8, **W0}, FROM16, {"num_workers": 0}),
        # What is asked for then is not known: the file is from an earlier version.
        ("--batch_size 32 --num_workers 8", (), W0, {}, {"num_workers": 0}),
        ("--batch_size 4 --num_workers 8", (), {**B8, **W0}, {}, {}),
    ],
)  # fmt: skip
def test_limits_of_an_earlier_run(
    command: str, flags: tuple[str, ...], limits: dict[str, Any], then: dict[str, Any], wanted: dict[str, Any]
) -> None:
    named = [parse_named(flag) for flag in flags]
    asked = command_settings(["python", "t.py", *command.split()], named)
    assert within_limits(asked, LoaderSettings(**limits), LoaderSettings(**then)).given() == wanted


def test_a_batch_for_all_ranks_stays_divisible_among_them() -> None:
    words = ["torchrun", "--nproc_per_node", "4", "t.py", "--global_batch_size", "24", "--accum_iter", "1"]
    found = within_limits(command_settings(words), LoaderSettings(batch_size=16), LoaderSettings(batch_size=32))
    assert found.given() == {"batch_size": 12, "accumulation": 2}
    found = within_limits(command_settings(words), LoaderSettings(batch_size=11), LoaderSettings(batch_size=32))
    assert found.given() == {"batch_size": 8, "accumulation": 3}


def test_the_loader_is_replaced_only_where_that_is_allowed() -> None:
    limits = LoaderSettings(loader_kind="legroom")
    asked = command_settings(["t.py", "--num_workers", "4"])
    assert within_limits(asked, limits, LoaderSettings()) == LoaderSettings()
    assert within_limits(replace(asked, replaces_loader=True), limits, LoaderSettings()) == limits


_some = st.none() | st.integers(1, 64)
_workers = st.none() | st.integers(0, 16)


@given(
    asked=st.builds(LoaderSettings, batch_size=_some, accumulation=_some, num_workers=_workers, prefetch_factor=_some),
    limits=st.builds(LoaderSettings, batch_size=_some, accumulation=_some, num_workers=_workers, prefetch_factor=_some),
    then=st.builds(LoaderSettings, batch_size=_some, accumulation=_some, num_workers=_workers, prefetch_factor=_some),
    ranks=st.integers(1, 4),
    whole=st.booleans(),
)
@settings(max_examples=300)
def test_limits_raise_nothing_and_keep_the_effective_batch(
    asked: LoaderSettings, limits: LoaderSettings, then: LoaderSettings, ranks: int, whole: bool
) -> None:
    words = [f"--nproc_per_node={ranks}", "t.py"]
    spelled = {"batch_size": "--global_batch_size" if whole else "--batch_size", "accumulation": "--accum_iter"}
    for name, value in asked.given().items():
        words += [spelled.get(name, f"--{name}"), str(value)]
    command = ["torchrun", *words]
    before = command_settings(command)
    after = command_settings(with_settings(command, within_limits(before, limits, then)))
    assert (after.batch_size or 1) * (after.accumulation or 1) == (before.batch_size or 1) * (before.accumulation or 1)
    for name in ("batch_size", "num_workers", "prefetch_factor"):
        old, new = getattr(before, name), getattr(after, name)
        assert (old is None) == (new is None) and (old is None or new <= old)
    if whole and before.batch_size is not None and before.batch_size % ranks == 0:
        assert after.batch_size is not None and after.batch_size % ranks == 0


def test_changes_are_described_with_what_was_asked_for() -> None:
    asked = command_settings(
        ["t.py", *["--batch_size", "32", "--accum_iter", "2", "--num_workers", "4", "--pin_memory"]]
    )
    changes = LoaderSettings(batch_size=8, accumulation=8, num_workers=0, pin_memory=False, loader_kind="legroom")
    assert describe_changes(asked, changes) == (
        "num_workers 4 → 0, pin_memory off, loader legroom, "
        "batch_size 32 → 8, accumulation 2 → 8: the effective batch stays 64"
    )
    assert describe_changes(command_settings(["t.py"]), LoaderSettings(num_workers=0)) == "num_workers unset → 0"


@pytest.mark.parametrize("words", ["--stream --epochs 3", "--epochs 3 --stream", "--stream true --epochs 3"])
def test_a_named_switch_that_is_on_stays_on(words: str) -> None:
    named = (NamedFlag("low_memory", "--stream"),)
    command = ["t.py", *words.split()]
    found = command_settings(command, named)
    assert found.low_memory is True
    assert with_settings(command, LoaderSettings(low_memory=True), named) == command
    assert next_step(_v("ram-oom-kill"), found).changes.low_memory is None


def test_a_named_switch_that_turns_pinning_off_is_off() -> None:
    named = (NamedFlag("pin_memory", "--no-pin"),)
    assert command_settings(["t.py", "--no-pin"], named).pin_memory is False
    assert next_step(_v("pinned-exhausted"), command_settings(["t.py", "--no-pin"], named)).stop


@pytest.mark.parametrize(
    ("given", "lowered", "wanted"),
    [
        ({}, {"num_workers": 2}, {"num_workers": 2}),
        ({"threads": 3}, {**B8, "num_workers": 2}, {**B8, "num_workers": 2, "threads": 3}),
        ({"num_workers": 1, "prefetch_factor": 4}, {"num_workers": 2, "prefetch_factor": 1}, {"num_workers": 1, "prefetch_factor": 1}),
        ({"batch_size": 4}, B8, {"batch_size": 4}),
        ({"accumulation": 4}, B8, {"accumulation": 4}),
        ({"pin_memory": True}, {"pin_memory": False, "low_memory": True}, {"pin_memory": False, "low_memory": True}),
    ],
)  # fmt: skip
def test_settings_that_the_user_put_into_the_environment_do_not_rise(
    given: dict[str, Any], lowered: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert lowered_in_environment(LoaderSettings(**given), LoaderSettings(**lowered)).given() == wanted


def test_a_default_that_is_no_number_is_refused() -> None:
    assert parse_named("accumulation=--acc=16").value == "16" and parse_named("pin_memory=--pin=yes").value == "yes"
    with pytest.raises(UsageError, match=r"--flag accumulation must be an integer >= 1 \(got 'x'\)"):
        parse_named("accumulation=--acc=x")

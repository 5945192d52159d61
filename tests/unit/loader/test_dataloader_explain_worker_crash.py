"""The reason for a worker's crash, from exit codes and counters alone."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from legroom.errors import BatchLost, WorkerDied
from legroom.loader.dataloader import dataloader, explain_start_failure, explain_worker_crash
from legroom.loader.dataloader.dataloader import DataLoader
from legroom.loader.dataloader.worker_shutdown import IMPORTED_MAIN
from legroom.records.machine import Memory, MemoryEvents, Pool


def memory(kills: int | None, scope: str = "cgroup") -> Memory:
    events = MemoryEvents(kills, None, None, scope, "memory.events.local")
    return Memory(8 << 30, 1 << 30, "v2", (), None, events, None, "/proc/meminfo")


@pytest.mark.parametrize(
    ("code", "before", "now", "said"),
    [
        (-signal.SIGKILL, 0, 1, "OOM killer: oom_kill in memory.events.local rose from 0 to 1. 1 GB of 8 GB"),
        (-signal.SIGKILL, 3, 3, "It was not the kernel's OOM killer: oom_kill in memory.events.local is still 3"),
        (-signal.SIGKILL, None, None, "is unknown"),
        (-signal.SIGBUS, 0, 0, "SIGBUS: it used a page"),
        (-signal.SIGSEGV, 0, 0, "SIGSEGV"),
        (-250, 0, 0, "signal 250"),
        (3, 0, 0, "status 3"),
    ],
)
def test_every_exit_code_has_a_reason_and_a_fix(code: int, before: Any, now: Any, said: str) -> None:
    why, fix = explain_worker_crash.explain(code, memory(before), memory(now), 4)
    assert said in why and fix and all(fix)
    if now != before:
        assert any("num_workers=2" in line for line in fix)


@pytest.mark.parametrize(
    ("code", "method", "said", "do"),
    [
        (IMPORTED_MAIN, "spawn", "the script does not check __name__", "if __name__ =="),
        (IMPORTED_MAIN, "fork", "status 78", "num_workers=0"),
        (1, "forkserver", "it failed while it was starting", "the worker's own error above"),
        (1, "fork", "status 1", "num_workers=0"),
    ],
)
def test_a_worker_that_is_not_forked_may_fail_before_it_uses_the_dataset(
    code: int, method: str, said: str, do: str
) -> None:
    why, fix = explain_worker_crash.explain(code, memory(0), memory(0), 4, method)
    assert said in why and do in fix[0]


def test_a_script_from_standard_input_has_no_file_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="<stdin>", __spec__=None))
    why, fix = explain_worker_crash.explain(1, memory(0), memory(0), 4, "spawn")
    assert "is not a file: <stdin>" in why and "save the script in a file" in fix[0]
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=__file__, __spec__=None))
    assert "not a file" not in explain_worker_crash.explain(1, memory(0), memory(0), 4, "spawn")[0]


def test_a_worker_that_ends_before_it_has_received_a_large_dataset() -> None:
    died = explain_worker_crash.explain_start(BrokenPipeError(32, "Broken pipe"), "forkserver")
    assert isinstance(died, WorkerDied) and "if __name__ ==" in died.fix[0]
    assert explain_worker_crash.explain_start(BrokenPipeError(32, "Broken pipe"), "fork") is None
    assert explain_worker_crash.explain_start(ValueError("no"), "spawn") is None


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_does_not_check_its_name(method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import legroom\n"
        f"for batch in legroom.DataLoader([1, 2], num_workers=1, multiprocessing_context={method!r}):\n"
        "    print(batch)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "bootstrapping" not in done.stderr
    last = done.stderr.rpartition("legroom.errors.WorkerDied: ")[2]
    assert "the script does not check __name__" in last and 'if __name__ == "__main__":' in last
    assert "num_workers=0" not in last


def group(*codes: int | None) -> explain_worker_crash.WorkerGroup:
    return explain_worker_crash.WorkerGroup(
        [SimpleNamespace(pid=100 + i, exitcode=code) for i, code in enumerate(codes)]
    )  # type: ignore[misc]


def test_only_crashes_of_its_own_workers_are_explained() -> None:
    said = RuntimeError("DataLoader worker (pid(s) 101) exited unexpectedly")
    assert group(None, 0).explain(said) is None
    assert group(None, -9).explain(RuntimeError("Caught RuntimeError in DataLoader worker process 0.")) is None
    died = group(None, -9).explain(said)
    assert isinstance(died, WorkerDied) and "DataLoader worker (pid 101) is killed by signal: Killed (SIGKILL)" in str(
        died
    )
    assert "exited unexpectedly with exit code 4" in str(group(4).explain(BatchLost("gone")))


def test_torchs_signal_handler_is_kept_and_its_error_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    calls: list[int] = []

    def torchs(number: int, frame: Any) -> None:
        calls.append(number)
        if len(calls) > 1:
            raise RuntimeError(f"DataLoader worker (pid {98 + len(calls)}) is killed by signal: Killed. ")

    monkeypatch.setattr(signal, "getsignal", lambda number: handlers.get(number, torchs))
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    explain_worker_crash.explain_sigchld()
    ours = handlers[signal.SIGCHLD]
    explain_worker_crash.explain_sigchld()
    assert handlers[signal.SIGCHLD] is ours  # not once more around itself
    ours(17, None)
    dead = group(-9)
    with pytest.raises(WorkerDied, match="pid 100") as caught:
        ours(17, None)
    assert "killed by signal: Killed" in str(caught.value.__cause__)
    assert dead.pids == {100}
    with pytest.raises(RuntimeError) as plain:  # not ours: as torch said it
        ours(17, None)
    assert not isinstance(plain.value, WorkerDied)


@pytest.mark.parametrize("moment", ["torch's start", "after it"])
def test_a_worker_that_is_killed_while_the_epoch_starts(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's signal handler raises as soon as it knows the workers; the Epoch does not exist yet."""
    go, gone = os.pipe()

    def killed(worker: int) -> None:
        if worker == 0:
            os.read(go, 1)
            os.kill(os.getpid(), signal.SIGKILL)

    def end_one() -> None:
        os.write(gone, b".")
        for _ in range(600):
            time.sleep(0.1)  # torch's handler raises here

    if moment == "after it":
        target, name = dataloader, "workers"
    else:
        target, name = _MultiProcessingDataLoaderIter, "_try_put_index"  # torch is about to return the iterator
    function, calls = getattr(target, name), list[Any]()

    def slowly(*given: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            end_one()
        return function(*given)

    monkeypatch.setattr(target, name, slowly)
    before = set(multiprocessing.active_children())
    loader = DataLoader([1, 2, 3], num_workers=2, worker_init_fn=killed, multiprocessing_context="fork")
    try:
        gc.disable()
        try:
            iter(loader)
        except WorkerDied as died:
            said, why, fix = str(died), died.why, died.fix
        assert "killed by signal: Killed (SIGKILL)" in said and "SIGKILL" in why and fix
        assert set(multiprocessing.active_children()) == before  # no collection is needed to end the other worker
    finally:
        gc.enable()
        os.close(go)
        os.close(gone)


def test_a_kill_by_the_kernel_right_after_the_start_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_worker_crash, "memory", lambda host: memory(1))
    workers: Any = [SimpleNamespace(pid=100, exitcode=-9)]
    died = explain_worker_crash.WorkerGroup(workers, "fork", memory(0)).explain(BatchLost("gone"))
    assert died is not None and "rose from 0 to 1" in died.why


def test_semaphores_without_space_in_shm_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    full = Pool("shm", 20 << 20, 20 << 20, 0, "statvfs")
    monkeypatch.setattr(explain_start_failure, "shm_space", lambda *_: full)
    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        next(iter(DataLoader(list(range(4)), num_workers=1)))
    note = "\n".join(caught.value.__notes__)
    assert note.startswith("legroom: /dev/shm has 0 B of 20 MB free") and "df -h /dev/shm" in note
    monkeypatch.setattr(explain_start_failure, "shm_space", lambda *_: replace(full, free=20 << 20))
    with pytest.raises(OSError, match="No space left") as caught:
        next(iter(DataLoader(list(range(4)), num_workers=1)))
    assert not hasattr(caught.value, "__notes__")

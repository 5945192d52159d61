"""The end of a log: signs, the exception that ended it, bounded memory, unreadable files."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest

from legroom.errors import UnreadableSource
from legroom.rescue.failure_message_patterns import code_of
from legroom.rescue.find_failures_in_log import KEEP, LogTail, facts_of
from legroom.rescue.read_log_file import MOST, read_log

TEXTS = {
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_12_99_0>: Resource temporarily unavailable (11)": "shm",
    "RuntimeError: DataLoader worker (pid 12902) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.": "worker-bus",
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).": "worker-bus",
    "OSError: [Errno 28] No space left on device: '/psm_0a1b2c3d'": "shm",
    "misc/shmutils.cc:72 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-aB12Cd (size 9637888)": "shm-likely",
    "RuntimeError: unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)": "fds",
    "RuntimeError: received 0 items of ancdata": "fds",
    "OSError: [Errno 24] Too many open files: 'a.jpg'": "fds",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.": "gpu-oom",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB": "gpu-oom",
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB": "gpu-oom",
    "RuntimeError: cuda runtime error (2) : out of memory at THCStorage.cu:58": "gpu-oom",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "gpu-library",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "gpu-library",
    "RuntimeError: CUDA error: out of memory": "cuda-oom-bare",
    "cudaHostAlloc failed: out of memory": "pinned",
    "OSError: [Errno 28] No space left on device": "disk",
    "OSError: [Errno 122] Disk quota exceeded": "disk-quota",
    "sqlite3.OperationalError: database or disk is full": "disk-quota",
    "OSError: [Errno 12] Cannot allocate memory": "ram-likely",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.": "ram",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2.00 PiB for an array with shape (1,)": "ram",
    "MemoryError": "ram",
    "terminate called after throwing an instance of 'std::bad_alloc'": "ram-likely",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ": "worker-killed",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault. ": "worker-crash",
    "RuntimeError: DataLoader worker (pid(s) 7, 9) exited unexpectedly": "worker-gone",
    "subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.": "child-killed",
    "  exitcode  : -9 (pid: 816)": "child-killed",
    "train.sh: line 3: 12345 Killed                  python train.py": "killed",
    "Killed": "killed",
    "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***": "ended-by",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=812.batch.": "oom-kill",
    "Memory cgroup out of memory: Killed process 12902 (python) total-vm:22010212kB": "oom-kill",
    "Out of memory: Kill process 12902 (python) score 123 or sacrifice child": "oom-kill",
    "Completed <exit>; TERM_MEMLIMIT": "oom-kill",
    "Exited: TERM_SWAP": "oom-kill",
    "=>> PBS: job killed: mem 17000000kb exceeded limit": "oom-kill",
    "=>> PBS: job killed: mem job total 2206640 kb exceeded limit 1048576 kb": "oom-kill",
    "Job 812: vmem 17000000kb exceeded limit 16777216kb": "oom-kill",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.": "oom-daemon",
    "ray.exceptions.OutOfMemoryError": "oom-daemon",
    "ray.exceptions.RayTaskError(RayOutOfMemoryError): ray::RolloutWorker.par_iter_next()": "oom-daemon",
    "1 Workers (tasks / actors) killed due to memory pressure (OOM)": "oom-daemon",
    "hipErrorOutOfMemory": "gpu-likely",
    "RuntimeError: unable to write to file </torch_123_456>": "shm",
    "OSError: [WinError 1455] The paging file is too small": "ram",
    "OSError: [WinError 1455] Plik stronicowania jest za mały": "ram",
    "ImportError: DLL load failed: The paging file is too small for this operation to complete.": "ram",
    "earlyoom[812]: sending SIGTERM to process 4711 uid 1000 \"python\": badness 912": "oom-daemon",
}  # fmt: skip
NOTHING = [
    "memory: 3.1 GB of 8 GB",
    "loading workers",
    "step 100 loss 0.12",
    "Killed 3 duplicate rows",
    "exit code: 0",
    "bus route 12 loaded",
    "saved memory_bank.pt",
    "shm: 3 MB used",
]


@pytest.mark.parametrize(("line", "code"), TEXTS.items())
def test_known_texts(line: str, code: str) -> None:
    assert code_of(line) == code


@pytest.mark.parametrize("line", NOTHING[:3] + NOTHING[4:])
def test_ordinary_lines_are_no_evidence(line: str) -> None:
    assert code_of(line) is None


def test_the_exception_that_ended_it_and_how_far_its_tracebacks_reach() -> None:
    text = "\n".join(
        [
            "Traceback (most recent call last):", '  File "a", line 1, in f', "MemoryError",
            "skipped the batch", "step 2",
            "Traceback (most recent call last):", '  File "a", line 2, in g', "KeyError: 'x'",
            "", "During handling of the above exception, another exception occurred:", "",
            "Traceback (most recent call last):", '  File "a", line 3, in h', "ValueError: bad",
        ]
    )  # fmt: skip
    facts = facts_of(text.encode())
    assert facts.last_error is not None and facts.last_error.line == "ValueError: bad"
    assert facts.chain_from == 7  # both linked tracebacks, and not the one that was survived
    assert [sign.code for sign in facts.signs] == ["ram"] and facts.signs[0].number > facts.chain_from


def test_a_worker_s_traceback_inside_its_parent_s() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'a'\n"
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n  File 'b'\n"
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: x\n"
    )
    facts = facts_of(text.encode())
    assert facts.last_error is not None and facts.last_error.code == "shm"
    assert facts.chain_from == facts.lines


def test_what_python_could_not_raise_while_it_ended_is_not_the_end() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'a'\nRuntimeError: received 0 items of ancdata\n"
        "Exception ignored in atexit callback: <bound method Run.save of <Run>>\n"
        "Traceback (most recent call last):\n  File 'b'\ntracker.errors.DataError: cannot open its file\n"
    )
    facts = facts_of(text.encode())
    assert facts.last_error is not None and facts.last_error.code == "fds"


def test_a_tail_keeps_the_end_and_counts_the_rest() -> None:
    tail = LogTail(keep=10)
    for _ in range(100):
        tail.feed(b"abcde")
    assert tail.bytes().endswith(b"abcde") and 10 <= len(tail.bytes()) < 20
    assert tail.passed + len(tail.bytes()) == 500


def test_a_log_of_two_gigabytes_is_read_in_bounded_memory(tmp_path: Path) -> None:
    log = tmp_path / "huge.log"
    with log.open("wb") as file:
        file.truncate(2 << 30)  # sparse: two gigabytes of zeros, then the end
        file.seek(0, 2)
        file.write(b"\nTraceback (most recent call last):\n  File 'a'\nMemoryError\n")
    tracemalloc.start()
    try:
        facts = read_log(str(log))
        assert tracemalloc.get_traced_memory()[1] < 8 * KEEP
    finally:
        tracemalloc.stop()
    assert facts.last_error is not None and facts.last_error.code == "ram"
    assert facts.skipped > (2 << 30) - KEEP


def test_standard_input_is_read_in_bounded_memory() -> None:
    class Endless(io.RawIOBase):
        left = 64

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            if not self.left:
                return 0
            self.left -= 1
            data = (b"x" * 79 + b"\n") * (len(buffer) // 80)
            buffer[: len(data)] = data
            return len(data)

    facts = read_log("-", Endless())  # type: ignore[arg-type]
    assert facts.skipped > 0 and facts.lines <= MOST // 80 + 2 * (1 << 20) // 80


@pytest.mark.parametrize("make", ["missing", "directory", "nul"])
def test_an_unreadable_log_is_a_clear_error(make: str, tmp_path: Path) -> None:
    path = {"missing": str(tmp_path / "no.log"), "directory": str(tmp_path), "nul": "a\0b"}[make]
    with pytest.raises(UnreadableSource, match="cannot read the log") as caught:
        read_log(path)
    assert caught.value.exit_status == 2 and caught.value.why


def test_nonsense_bytes_and_empty_logs() -> None:
    assert facts_of(b"").lines == 0
    assert facts_of(bytes(range(256)) * 50).last_error is None
    assert len(facts_of(b"x" * (3 << 20)).signs) == 0

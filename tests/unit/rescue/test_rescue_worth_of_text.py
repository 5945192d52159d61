"""What the words in a log are worth: by where they stand, whose they are, and what follows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from legroom.records.failure import Evidence, OomCount, Verdict
from legroom.records.machine import Level
from legroom.rescue.find_failures_in_log import facts_of
from legroom.rescue.retry_settings import CommandSettings, next_step
from legroom.rescue.verdict import classify
from legroom.system.processes_and_threads import ExitStatus

_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB."
)
_STEPS = "epoch 1 loss 0.91\nepoch 2 loss 0.71\nepoch 3 loss 0.64\n"
_CLOCK = "2026-01-01T00:00:00Z "
_HANDLING = "During handling of the above exception, another exception occurred:"
_CAUSED = "The above exception was the direct cause of the following exception:"


def _trace(error: str, prefix: str = "", function: str = "<module>") -> str:
    lines = [
        "Traceback (most recent call last):", f'  File "t.py", line 9, in {function}', "    step()", *error.split("\n"),
    ]  # fmt: skip
    return "".join(f"{prefix}{line}\n" for line in lines)


def _chain(first: str, link: str, last: str, prefix: str = "") -> str:
    between = "".join(f"{prefix}{line}\n" for line in ("", link, ""))
    return _trace(first, prefix, "fit") + between + _trace(last, prefix)


def _verdict(text: str, status: int | None = None) -> Verdict:
    ending = None if status is None else ExitStatus(status)
    return classify(Evidence(log=facts_of(text.encode()), ending=ending))


@pytest.mark.parametrize(
    "error",
    [
        'requests.HTTPError: 500 Server Error for http://vllm:8000 body={"detail": "CUDA out of memory. Tried to"}',
        "AssertionError: expected 'No space left on device' in stderr, got ''",
        "ValueError: 无法解析回答：“运行时报错 CUDA out of memory，请减小批量大小”",
        "ValueError: ラベルが不正です: 「No space left on device と表示されます」",
        "mlflow.RestException: INTERNAL_ERROR: {'error_code': 'X', 'message': 'No space left on device'}",
        'RuntimeError: the judge answered: "Too many open files in the system"',
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank1]: ", _CLOCK])
def test_the_message_of_another_error_that_quotes_one(error: str, prefix: str) -> None:
    assert _verdict(_trace(error, prefix)).cause == "not-memory"


@pytest.mark.parametrize(
    "text",
    [
        "tests/test_a.py:9: AssertionError\n------ Captured stderr call ------\n"
        f"{_OOM}\n------ Captured log call ------\nNo space left on device\n===== 1 failed in 2.1s =====\n",
        "usage: t.py [-h] --data D\n\noptions:\n  --bs B   batch size; lower it on\n"
        "                        MemoryError: too large\nt.py: error: the following arguments are required: --data\n",
        "sample 1: 'The phone says No space left on device'\nsample 2: 'Killed'\n" + _trace("IndexError: 3"),
        "样本 12：手机提示 No space left on device 怎么办\n" + _trace("KeyError: '标签'"),
        "原文: x 訳文: CUDA out of memory と表示\n" + _trace("KeyError: 'ref'", "[rank0]: "),
        '  restart_on:\n    - "CUDA out of memory"\n    - "OOMKilled"\n' + _trace("FileNotFoundError: [Errno 2] 'a.tsv'"),
        "[13/200] pred=OSError: [Errno 28] No space left on device\n" + _trace("IndexError: list index out of range"),
    ],
)  # fmt: skip
def test_printed_text_that_quotes_one_before_another_error(text: str) -> None:
    verdict = _verdict(text)
    assert verdict.cause == "not-memory"
    assert "handled" not in verdict.summary


@pytest.mark.parametrize(
    "text",
    [
        "INFO generated: RuntimeError: CUDA out of memory. Tried to allocate 1 GiB\n",
        "| 3 | prompt | RuntimeError: CUDA out of memory. | 0.2 |\n",
        "User: I get OSError: [Errno 24] Too many open files\nAssistant: Raise ulimit -n.\n",
        "bs  64  torch.OutOfMemoryError: CUDA out of memory.\nbs 128  torch.OutOfMemoryError: CUDA out of memory.\n",
        "retrieved[0]: OSError: [Errno 28] No space left on device usually means\nanswer score 0.4\n",
        "ERROR: CUDA out of memory. Exiting.\n",
        "Ticket 88: the training was OOMKilled on node 3\nexported 2 tickets\n",
        "  ✓ handles OOMKilled (2 ms)\n",
        "训练脚本检测到显存不足 (CUDA out of memory)\n",
    ],
)
def test_words_that_are_no_message_of_an_exception_or_of_the_system_are_a_guess(text: str) -> None:
    verdict = _verdict(text)
    assert verdict.cause == "unknown" or verdict.confidence <= 0.6
    assert len(verdict.likely) > 1


@pytest.mark.parametrize(
    "text",
    [
        _trace("ZeroDivisionError: division by zero") + "JobID State ExitCode\n8811 OUT_OF_ME+ 0:125\n8812 FAILED 1:0\n",
        "JobID|JobName|State\n900_1|fold|OUT_OF_MEMORY|0:125\n900_2|fold|FAILED|1:0\n",
        "NAME     READY   STATUS      AGE\nredis-0   0/1     OOMKilled   9d\ntrain-3   0/1     Error       1m\n",
        "  trainer:\n    State:  Terminated\n      Reason:  Error\n      Exit Code:  1\n  shipper:\n"
        "    Last State:  Terminated\n      Reason:  OOMKilled\n      Exit Code:  137\n",
        '  "name": "a", "terminated": {\n  "reason": "OOMKilled"\n  "name": "b", "terminated": {\n  "reason": "Error"\n',
        _trace("AssertionError") + "$ dmesg | tail -1\n[9.1] Memory cgroup out of memory: Killed process 99 (java) total-vm:1kB\n",
        "3h Warning OOMKilling node/n2 Memory cgroup out of memory: Killed process 12 (mysqld)\n"
        "1m Warning BackOff pod/train-1 Back-off pulling image\n",
        "== 起動前の dmesg ==\n[  3.1] Out of memory: Killed process 77 (mysqld) total-vm:1kB, anon-rss:9kB\n"
        "エポック 1/3 損失 0.9\nエポック 2/3 損失 0.8\nエポック 3/3 損失 0.7\n学習が完了しました\n",
    ],
)  # fmt: skip
def test_a_record_of_another_job_or_process(text: str) -> None:
    assert _verdict(text).cause in ("unknown", "not-memory")


def test_an_oom_kill_after_which_the_job_ran_on_is_a_guess() -> None:
    verdict = _verdict(f"[3.1] Out of memory: Killed process 1881 (chrome) total-vm:1kB\n{_STEPS}Terminated\n")
    assert verdict.confidence <= 0.6 and "killed" in [one.cause for one in verdict.likely]


def test_an_oom_kill_beside_an_error_of_the_program_is_a_guess() -> None:
    verdict = _verdict(_trace("ValueError: x") + "seff 8810: State: OUT_OF_MEMORY (exit code 0)\n")
    assert verdict.confidence <= 0.6 and [one.cause for one in verdict.likely] == ["ram-oom-kill", "not-memory"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("WARNING: cannot write /dev/shm/c: [Errno 28] No space left on device, using /tmp instead\n"
         f"{_STEPS}^C\n{_trace('KeyboardInterrupt')}", "killed"),
        ("警告：显存不足 (CUDA out of memory)，跳过该批次\n第 3 轮 损失: 0.5\n" + _trace("KeyboardInterrupt"), "killed"),
        ("[10:00] メモリ不足: CUDA out of memory。再試行します\n[10:01] エポック 2/9 損失 1.0\n"
         "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n", "killed"),
        ("2026-01-01 10:00:00 WARNING load failed: MemoryError: Unable to allocate 4 GiB -- loading in parts\n"
         "2026-01-01 10:00:01 INFO part 1/8\n2026-01-01 10:00:03 INFO part 2/8\n" + _trace("ValueError: bad"), "not-memory"),
        ("OSError: [Errno 24] Too many open files: 'a'\n已回退到 num_workers=0\n第 1 轮 损失 0.9\n第 2 轮 损失 0.8\n第 3 轮 损失 0.7\n"
         + _trace("AssertionError: 维度不匹配"), "not-memory"),
        ("[2026-01-01 23:58] OSError: [Errno 28] No space left on device: '/c/a.tmp'\n[2026-01-02 08:30] resuming from /c/b.pt\n"
         + _trace("RuntimeError: failed finding central directory"), "not-memory"),
        (_trace(_OOM) + "===== run 2 =====\n" + _trace("FileNotFoundError: [Errno 2] 'last.pt'"), "not-memory"),
        ("--- Logging error ---\n" + _trace("OSError: [Errno 28] No space left on device") + "Call stack:\nMessage: 'step 1'\n"
         "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n", "killed"),
        (_trace("MemoryError", function="trace_task") + "Task fold[ac] received\nTask fold[ac] succeeded in 719.2s\n", "unknown"),
        (_trace(_OOM, function="execute") + "got prompt\nPrompt executed in 25.11 seconds\n", "unknown"),
        (_trace(_OOM, function="call") + "200 OK\nKeyboard interruption in main thread... closing server.\n", "unknown"),
        (_trace(_OOM) + "trying bs 32\n=== attempt 2 ===\n" + _trace("FileNotFoundError: [Errno 2] 'last.pt'"), "not-memory"),
        ("bs 64  torch.OutOfMemoryError: CUDA out of memory.\nbest: 32\nscores saved to r.json\n", "unknown"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.\n"
         f"index skipped\n{_STEPS}all done\n", "unknown"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n改用较小批次\nepoch 1\n训练完成，模型已保存到 out/\n", "unknown"),
    ],
)  # fmt: skip
def test_what_the_program_survived_did_not_end_it(text: str, cause: str) -> None:
    assert _verdict(text).cause == cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_chain(_OOM, _HANDLING, "UnboundLocalError: local variable 'loss' referenced before assignment"), "gpu-oom"),
        (_chain(_OOM, _HANDLING, "AttributeError: 'T' object has no attribute 'shrink'", "[rank1]: "), "gpu-oom"),
        (_chain("MemoryError", _HANDLING, "KeyError: '批量'"), "ram-allocation"),
        (_chain(_OOM, _HANDLING, "KeyError: 'CUDA out of memory'"), "gpu-oom"),  # its own type counts, not what it quotes
        (_chain("OSError: [Errno 28] No space left on device: '/c/a'", _HANDLING, "NameError: name 'log' is not defined", _CLOCK),
         "disk-full"),
    ],
)  # fmt: skip
def test_an_error_in_the_code_that_handles_a_shortage_leaves_both_possible(text: str, cause: str) -> None:
    verdict = _verdict(text)
    assert verdict.confidence < 0.8 and [one.cause for one in verdict.likely] == [cause, "not-memory"]
    assert "handled" in verdict.summary


@pytest.mark.parametrize(
    "last", ["KeyError: 'x'", "FileNotFoundError: [Errno 2] 没有那个文件: '/数据/a'", "IndexError: 添字が範囲外です"]
)
def test_the_end_of_the_other_ranks_does_not_hide_the_first_error(last: str) -> None:
    after = (
        "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\n"
        "W1 9 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 1 closing signal SIGTERM\n"
    )
    failed = "E1 9 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -6) local_rank: 0 (pid: 2)\n"
    summary = _trace("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\nt.py FAILED\n"
                     "Root Cause (first observed failure):\n  exitcode : -6 (pid: 4)\n  traceback : Signal 6 (SIGABRT)")  # fmt: skip
    for text in (after + failed, after + summary):
        verdict = _verdict(_trace(last, "[rank3]: ") + text)
        assert verdict.cause == "not-memory" and last[:8] in verdict.evidence[0]
        assert _verdict(_trace(_OOM, "[rank3]: ") + text).cause == "gpu-oom"


def test_a_tuner_passes_on_the_error_of_its_trial() -> None:
    trial = _trace(
        f'ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=1)\n  File "t.py", line 3, in f\n{_OOM}'
    )
    tuner = _trace("ray.tune.error.TuneError: ('Trials did not complete', ['f_1'])")
    assert _verdict(f"{trial}Number of trials: 1/1 (1 ERROR)\n{tuner}").cause == "gpu-oom"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_STEPS + _trace(_OOM, _CLOCK), "gpu-oom"),
        (_trace(_OOM, "[1,0]<stderr>:"), "gpu-oom"),
        (f"8%|8 | 15/190 [09:12<1:44:31,  3.59s/it]{_trace(_OOM)}", "gpu-oom"),
        (f"[rank1]: {_OOM}\n", "gpu-oom"),
        (_trace("ValueError: No available memory for the cache blocks. Try increasing", "(EngineCore_0 pid=12) "), "gpu-oom"),
        (_chain(_OOM, _CAUSED, "RuntimeError: training failed"), "gpu-oom"),
        (_trace("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled cuda error\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"), "gpu-oom"),
        ("terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  what():  CUDA out of memory. Tried\n"
         "Aborted (core dumped)\n", "gpu-oom"),
        (_trace("MemoryError: Unable to allocate 4 GiB for an array", "2026-01-01 10:00:00,1 - __main__ - ERROR - "), "ram-allocation"),
        (_trace("OSError: [Errno 28] Can't write data (errno = 28, error message = 'No space left on device')"), "disk-full"),
        ("cp: 写入 '/数据/a' 时出错: 设备上没有空间\n", "disk-full"),
        ("Jan  3 10:00:00 gpu3 kernel: [99.1] Out of memory: Killed process 4411 (python) total-vm:1kB\n", "ram-oom-kill"),
        (f"{_STEPS}slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.\nsrun: error: n1: task 0: Out Of Memory\n",
         "ram-oom-kill"),
        ("JobID State\n8811 OUT_OF_ME+ 0:125\n8811.batch OUT_OF_ME+ 0:125\n8811.extern COMPLETED 0:0\n", "ram-oom-kill"),
        ("    Reason:  Completed\n    Exit Code:  0\n    Reason:  OOMKilled\n    Exit Code:  137\n", "ram-oom-kill"),
        ("Mar 11 03:41:33 box systemd[1]: t.service: A process of this unit has been killed by the OOM killer.\n", "ram-oom-kill"),
        ("Message:  Pod ephemeral local storage usage exceeds the total limit of containers 20Gi.\n", "disk-full"),
        (f"node-3: [default5]:[rank29]: {_OOM}\nnode-1: srun: Complete job step 0 received\n"
         "node-1: slurmstepd: error: *** STEP 4411.0 ON node-1 CANCELLED AT 2026-01-20T20:20:25 ***\n", "gpu-oom"),
        (_trace("xgboost.core.XGBoostError: [10:00:04] /a.cuh:431: Memory allocation error on worker 0: bad_alloc: cudaErrorMemoryAllocation: "
                "out of memory"), "gpu-oom"),
        (f"97%|9 | 29/30 [00:12<00:00]{_trace(_OOM)}97%|9 | 29/30 [00:12<00:00]\n", "gpu-oom"),
        ("Error out of memory at line 383 in file /b/csrc/pythonInterface.c\nThis could lead to a segmentation fault at exit\n",
         "gpu-oom"),
        ("Allocator (GPU_0_bfc) ran out of memory trying to allocate 16.00GiB\n"
         + _trace("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."), "gpu-oom"),
        ("saving failed, no space left on device, going on\nslurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-01-01T00:00:00 "
         "DUE TO PREEMPTION ***\n", "killed"),
        ("      Reason:       OOMKilled\n      Exit Code:    137\n", "ram-oom-kill"),
    ],
)  # fmt: skip
def test_the_message_that_ended_the_job_is_no_guess(text: str, cause: str) -> None:
    verdict = _verdict(text)
    assert verdict.cause == cause and verdict.confidence >= (0.75 if cause == "disk-full" else 0.8)


def test_an_error_without_a_traceback_below_the_end_of_the_run_may_be_printed_text() -> None:
    verdict = _verdict("{'train_runtime': 1421.2, 'epoch': 1.0}\nanswer: It died with\n" + _OOM + "\nso use less.\n")
    assert verdict.confidence <= 0.7 and verdict.likely


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (_trace("google.api_core.exceptions.ResourceExhausted: 429 Quota exceeded for quota metric 'Requests'"), "not-memory"),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory\n", "not-memory"),
        (_trace('RuntimeError: r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":838'), "unknown"),
        ("ray.exceptions.OutOfDiskError: Local disk is full\nthe local object store is full and the local disk's use is "
         "over capacity.\n", "disk-full"),
        ("Normal  Preempted  61s  default-scheduler  Preempted by pod 8d1e on node 4\n", "killed"),
        ("012 (1182.000.000) Job was evicted.\n   Memory (MB) : 2210 16384\n", "killed"),
        ("WARNING:xla_bridge: no GPU found. Falling back to cpu.\n" + _trace(
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 640000000000 bytes."),
         "ram-allocation"),
        ("systemd[1]: t.service: Main process exited, code=killed, status=15/TERM\n", "killed"),
    ],
)  # fmt: skip
def test_what_the_words_stand_for(text: str, cause: str) -> None:
    assert _verdict(text).cause == cause


_NO_KILL = OomCount(0, True, "own")


@pytest.mark.parametrize("status", [1, 17])
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("ERROR: CUDA out of memory. Exiting.\n", "gpu-oom"),
        ("sample 3: the answer is CUDA out of memory. Tried to allocate 2.00 GiB\nscore 0.31\n", "gpu-oom"),
        ("request 17 -> 500: CUDA out of memory\nrequest 18 -> 200 in 0.31 s\n", "gpu-oom"),
        ("pred=MemoryError gold=KeyError\nexact match 0.5\n", "ram-allocation"),
        ("row 88: My phone shows No space left on device\n", "disk-full"),
        ("intent=linux text=why Too many open files after reboot\n", "fds-exhausted"),
        ("ticket: pod was OOMKilled\n" + _STEPS, "ram-oom-kill"),
    ],
)
def test_a_job_that_was_watched_and_only_contains_the_words(text: str, cause: str, status: int) -> None:
    """That it failed does not show that the words are about it."""
    verdict = _verdict(text, status)
    assert (verdict.cause, verdict.confidence) == (cause, 0.6)
    assert [one.cause for one in verdict.likely] == [cause, "not-memory"]


def test_words_beside_an_exception_of_another_kind_in_a_job_that_was_watched() -> None:
    verdict = _verdict(_trace("ValueError: score") + "sample 3: the answer is CUDA out of memory\n", 1)
    assert (verdict.cause, verdict.confidence) == ("not-memory", 0.93)


def test_words_about_an_oom_kill_that_the_counter_does_not_show_lower_no_setting() -> None:
    evidence = Evidence(
        log=facts_of(f"ticket: pod was OOMKilled\n{_STEPS}".encode()), ending=ExitStatus(1), oom=_NO_KILL
    )
    verdict = classify(evidence)
    assert (verdict.cause, [one.cause for one in verdict.likely]) == ("unknown", ["not-memory", "ram-oom-kill"])
    assert next_step(verdict, CommandSettings(num_workers=4, changeable=frozenset({"num_workers"}))).stop
    killed = classify(replace(evidence, ending=ExitStatus(signal=9)))
    assert (killed.cause, killed.confidence) == ("killed", 0.93)


def test_a_level_that_was_read_stands_behind_the_words() -> None:
    def sure(text: str, **levels: Any) -> float:
        return classify(Evidence(log=facts_of(text.encode()), ending=ExitStatus(1), **levels)).confidence

    full, free = Level(99, 100), Level(1, 100)
    opened, saved = "ERROR: cannot open a: Too many open files\n", "ERROR: cannot save: No space left on device\n"
    assert sure(opened, peaks={"fds": full}) > 0.9 and sure(opened, peaks={"fds": free}) == 0.6
    assert sure(saved, disks={"/d": full}) > 0.9 and sure(saved, disks={"/d": free}) == 0.6
    lost = "ERROR: worker: unable to write to file </torch_8_3>: No space left on device (28)\n"
    assert sure(lost, peaks={"shm": full}) > 0.9 and sure(lost, peaks={"shm": Level(1, 1 << 30)}) == 0.6


@pytest.mark.parametrize("status", [None, 1])
@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Request failed: 500 CUDA out of memory. Tried to allocate 2.00 GiB (server)",
        "RuntimeError: API error 503: CUDA out of memory. Tried to allocate 2.00 GiB",
        "MemoryError: user limit of 3 conversations reached",
    ],
)
def test_an_exception_of_another_machine_or_with_a_text_of_its_own(error: str, status: int | None) -> None:
    verdict = _verdict(_trace(error), status)
    assert verdict.confidence == 0.6 and verdict.likely[-1].cause == "not-memory"


@pytest.mark.parametrize(
    "text", ["", ": Unable to allocate 8 GiB", ": std::bad_alloc", ": 内存不足", ": (12, 'ENOMEM')"]
)
def test_a_memory_error_of_an_allocator(text: str) -> None:
    verdict = _verdict(_trace(f"MemoryError{text}"))
    assert (verdict.cause, verdict.confidence) == ("ram-allocation", 0.85)


def test_requests_that_a_server_answers_after_an_error() -> None:
    answered = 'INFO:     10.0.0.4:55121 - "POST /generate HTTP/1.1" 200 OK\n'
    text = _trace(_OOM, function="generate")
    assert _verdict(f"{text}{answered * 3}Received SIGTERM, shutting down\n").cause == "killed"
    assert _verdict(f"{text}{answered.replace('POST', 'GET') * 3}").cause == "gpu-oom"  # a health check


def test_the_code_that_handles_a_shortage_fails_in_a_job_that_was_watched() -> None:
    text = _chain(_OOM, _HANDLING, "UnboundLocalError: local variable 'loss' referenced before assignment")
    assert _verdict(text, status=1).cause == "gpu-oom"


def test_a_message_without_a_space_is_read_in_time_in_proportion_to_it() -> None:
    """Where that fails it takes hours."""
    assert _verdict(_trace("torch.Failure: " + "Error" * 1600 + " CUDA out of memory")).confidence == 0.6

"""Text that quotes a failure message: source lines, printed arguments, help texts, tips. And errors that a program survived."""

from __future__ import annotations

import pytest

from legroom.records.failure import Evidence, Verdict
from legroom.rescue.find_failures_in_log import facts_of
from legroom.rescue.log_lines_without_failure import code_lines, without_quotations
from legroom.rescue.verdict import classify
from legroom.system.processes_and_threads import ExitStatus


def _verdict(text: str, status: int | None = None) -> Verdict:
    ending = None if status is None else ExitStatus(status)
    return classify(Evidence(log=facts_of(text.encode()), ending=ending))


_SOURCE = 'if "CUDA out of memory" in str(error) or lower: raise MemoryError("[Errno 28] No space left on device")'
_PREFIXES = ["", "[rank3]: ", "2026-03-01T10:11:12.5Z stderr F ", "trainer-1  | ", "(pid=12, ip=10.0.0.3) "]


@pytest.mark.parametrize("prefix", _PREFIXES)
@pytest.mark.parametrize("marker", [[], ["         ~~~~~^^^^^^"], ["    [Previous line repeated 3 more times]"]])
@pytest.mark.parametrize("status", [None, 1])
def test_a_source_line_of_a_traceback_is_no_message(prefix: str, marker: list[str], status: int | None) -> None:
    frame = ['  File "/w/train.py", line 7, in step', f"    {_SOURCE}", *marker]
    lines = [
        "Traceback (most recent call last):", *frame, "ValueError: shapes", "",
        "During handling of the above exception, another exception occurred:", "",
        "Traceback (most recent call last):", *frame, *frame, "NameError: name 'lower' is not defined",
    ]  # fmt: skip
    text = "".join(f"{prefix}{line}\n" for line in lines)
    verdict = _verdict(text, status)
    assert verdict.cause == "not-memory", verdict.evidence
    assert "NameError" in verdict.evidence[0]


@pytest.mark.parametrize(
    "text",
    [
        f'Traceback (most recent call last):\nFile "/w/t.py", line 7, in step\n{_SOURCE}\nNameError: no\n',  # pasted
        f"Cell In[3], line 2\n      1 try: fit()\n----> 2 {_SOURCE}\n      3 MemoryError: x\n\nNameError: no\n",
        f"╭── Traceback (most recent call last) ──╮\n│ /w/t.py:7 in step │\n│ ❱ 7 │ {_SOURCE} │\n╰──────╯\nNameError: no\n",
        f"+--- Traceback (most recent call last) ---+\n| > 7 | {_SOURCE} |\n+------+\nNameError: no\n",
        "Traceback (most recent call last):\n\n> File \"/w/t.py\", line 7, in <module>\n    main(cfg)\n"
        "    │    └ {'note': 'Too many open files'}\n    └ 'CUDA out of memory'\n\nNameError: no\n",
    ],
)  # fmt: skip
def test_nor_in_the_frames_of_notebooks_rich_and_loguru(text: str) -> None:
    assert _verdict(text).cause == "not-memory"


def test_nor_in_a_group_of_exceptions() -> None:
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        f'  |   File "/w/t.py", line 9, in <module>\n  |     {_SOURCE}\n  | ExceptionGroup: several (1 sub-exception)\n'
        "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
        f'    |   File "/w/t.py", line 7, in step\n    |     {_SOURCE}\n    | NameError: no\n    +-----------\n'
    )
    assert _verdict(text).cause in ("not-memory", "unknown")
    assert all(sign.code.startswith("frame-") for sign in facts_of(text.encode()).signs)


def test_what_a_source_line_calls_still_shows_where_the_error_is_from() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/usr/lib/python3.10/multiprocessing/queues.py", line 9, in __init__\n'
        "    sl = self._semlock = _multiprocessing.SemLock(\nOSError: [Errno 28] No space left on device\n"
    )
    assert _verdict(text).cause == "shm-full"


@pytest.mark.parametrize(
    "line",
    [
        "start Namespace(mode='exit137', note='CUDA out of memory', out='exit code 137')",
        "args: {'mode': 'Killed', 'note': 'CUDA out of memory'}",
        "sys.argv: ['train.py', '--note', 'Too many open files']",
        "saving to runs/exit137/exit-code-137/log.txt",
        "+ python train.py --note 'CUDA out of memory'",
        "# num_workers: 0 # Bus error, Too many open files",
        "tests/test_a.py::test_out[CUDA out of memory] PASSED",
        "HEAD is now at 3f2a1c9 Fix CUDA out of memory",
        "tip: if you see Too many open files, raise ulimit -n",
        "  --bs N      smaller against CUDA out of memory",
        "- `RuntimeError: CUDA out of memory` on small cards: pass --fp16",
        'loaded 3 alert rules: OOMKilled>0, exit code 137, "No space left on device"',
        "/w/a.py:3: UserWarning: careful\n  warnings.warn('CUDA out of memory')",
    ],
)
@pytest.mark.parametrize("status", [None, 1])
def test_a_mention_is_no_message(line: str, status: int | None) -> None:
    assert _verdict(f"loading\n{line}\n", status).cause == "unknown"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("['/usr/bin/python', '-u', 'train.py'] exits with return code = -9", "ram-oom-kill"),
        ("subprocess.CalledProcessError: Command '['python', 'x']' died with <Signals.SIGKILL: 9>.", "ram-oom-kill"),
        ("container exited with exit code 137", "ram-oom-kill"),
        ("{'terminated': {'exit_code': 137, 'reason': 'OOMKilled'}}", "ram-oom-kill"),
        ("ERROR failed to fetch it: OSError: [Errno 24] Too many open files", "fds-exhausted"),
        ("# There is insufficient memory for the Java Runtime Environment to continue.", "ram-allocation"),
        ("{'error': 'CUDA out of memory. Tried to allocate 2 GiB'}", "gpu-oom"),
    ],
)
def test_what_stands_around_a_report_does_not_hide_it(line: str, cause: str) -> None:
    verdict = _verdict(f"{line}\n")
    assert cause in (verdict.cause, *(one.cause for one in verdict.likely))
    assert verdict.cause == cause or verdict.likely[0].cause == cause


def test_blanking_keeps_the_length() -> None:
    for line in ("x Namespace(a='b(', c=[1]) y", "Namespace(a=('1, 2", "a ['b', 'c'] {'d': 'e'}", "“a” can't 「b"):
        assert len(without_quotations(line)) == len(line)


_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
_UNCAUGHT = f'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    step()\n{_OOM}\n'
_LOGGED = f'Traceback (most recent call last):\n  File "t.py", line 9, in fit\n    step()\n{_OOM}\n'


@pytest.mark.parametrize(
    ("text", "cause", "most"),
    [
        (f"{_UNCAUGHT}Training complete\nstep 9 loss 1\n", "unknown", 0.1),
        (f"{_LOGGED}Training complete\n", "unknown", 0.1),
        (f"{_LOGGED}epoch 4\nepoch 5\nepoch 6\n", "unknown", 0.1),
        (f"{_LOGGED.replace(_OOM, 'KeyError: 1')}all done\n", "unknown", 0.1),
        (f"fetch: {_OOM.replace('torch.', '')}\nstep 4\n", "unknown", 0.1),  # printed, without a traceback
        (f"{_UNCAUGHT}done\n", "gpu-oom", 0.7),  # the last line of a batch script, or the program went on
        (f"{_UNCAUGHT}step 1 loss 1\nstep 2 loss 1\n", "gpu-oom", 0.7),  # held-back output
        (f"{_UNCAUGHT}wandb: Run summary:\nwandb: loss 5.1\n", "gpu-oom", 0.85),
        (f"3%| | 15/500 [00:01]\n{_UNCAUGHT}3%| | 15/500 [00:02]\n", "gpu-oom", 0.85),  # the bar is drawn once more
        (f"{_UNCAUGHT}Job 7 finished at Mon Feb  3 10:04:10 UTC 2025\n", "gpu-oom", 0.85),
        (f"epoch 1 done\nSaved model\n{_UNCAUGHT}", "gpu-oom", 0.85),
        ("ERROR: CUDA out of memory. Exiting.\n", "gpu-oom", 0.6),  # printed, not raised
        ("WARNING: CUDA out of memory, retrying with batch 8\n", "unknown", 0.1),
        ("OSError: [Errno 24] Too many open files: 'a'\nstep 4\nstep 5\nall done\n", "unknown", 0.1),
    ],
)
def test_a_log_shows_whether_the_program_went_on(text: str, cause: str, most: float) -> None:
    verdict = _verdict(text)
    assert (verdict.cause, verdict.confidence) == (cause, most)


def test_a_run_that_finished_is_said_to_have_finished() -> None:
    verdict = _verdict("WARNING: CUDA out of memory, retrying with batch 8\nepoch 1 done\nSaved model\n")
    assert "no failure" in verdict.summary
    assert any("Saved model" in line for line in verdict.evidence)


def test_a_program_that_is_known_to_have_failed_did_not_finish() -> None:
    assert _verdict("ERROR: CUDA out of memory\nSaved model\n", status=1).cause == "gpu-oom"
    tried = _verdict("WARNING: CUDA out of memory, retrying with batch 8\n", status=1)
    assert (tried.cause, tried.likely[0].cause) == ("unknown", "gpu-oom")


def test_many_lines_take_little_time() -> None:
    frame = '  File "/w/t.py", line 7, in f\n    g()\n'
    lines = (frame * 50_000 + "+ a\n" * 50_000 + "----> 3 x\n" * 20_000).splitlines()
    assert len(code_lines(lines)) == 50_000 * 2 + 20_000

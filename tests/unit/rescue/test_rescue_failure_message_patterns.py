"""Verdicts from texts alone: the corpus of public threads with its bars, and other wordings of the same kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import score
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.records.failure import Evidence, Verdict
from legroom.rescue.failure_message_patterns import SIGNATURES
from legroom.rescue.find_failures_in_log import facts_of
from legroom.rescue.verdict import LOG_ALONE, classify

WORDINGS: list[dict[str, str]] = json.loads((Path(__file__).parent / "wordings.json").read_text("utf-8"))
LEAST_RIGHT = {"open": 0.9, "later": 0.8}  # of the decidable texts; a part that the rules were not written with: 0.85
LEAST_UNKNOWN = {"open": 0.8, "aside": 0.75, "written": 0.9, "unseen": 0.9, "later": 0.75}  # of the others


def _verdict(text: str | bytes) -> Verdict:
    return classify(Evidence(log=facts_of(text if isinstance(text, bytes) else text.encode())))


@pytest.mark.parametrize("path", score.files(), ids=lambda path: path.stem)
def test_the_corpus_holds_its_bars(path: Path) -> None:
    scored = score.score(path)
    sure_and_wrong = [one.name for one in scored if one.result == "wrong" and one.sure]
    assert sure_and_wrong == []
    decidable = [one for one in scored if one.decidable]
    right = score.count(scored, decidable=True, result="right")
    assert right / len(decidable) >= LEAST_RIGHT.get(path.stem, 0.85)
    others = [one for one in scored if not one.decidable]
    # Of a text that does not tell, `unknown` is right; a verdict below 0.8 is a guess that says it is one.
    assert score.count(scored, decidable=False, result="right") / len(others) >= LEAST_UNKNOWN[path.stem]
    for one in scored:
        assert bool(one.verdict.likely) or one.verdict.cause != "unknown", one.name


def test_every_text_of_the_corpus_has_its_source() -> None:
    rows: list[dict[str, Any]] = [row for path in score.files() for row in json.loads(path.read_text("utf-8"))]
    assert len(rows) >= 60 and len({row["id"] for row in rows}) == len(rows)
    assert all(row["text"].strip() and (row.get("url") or "https://").startswith("https://") for row in rows)
    assert all(row.get("url") or row["kind"] for row in rows)  # written by hand: what it is a case of


@pytest.mark.parametrize("row", WORDINGS, ids=lambda row: row["text"].strip()[-60:])
def test_other_wordings_of_the_same_kinds(row: dict[str, str]) -> None:
    assert _verdict(row["text"]).cause == row["verdict"]


def test_no_pattern_takes_a_time_that_grows_with_the_square_of_a_line() -> None:
    assert not any(".*" in pattern.pattern or ".+" in pattern.pattern for _, pattern in SIGNATURES)


_LINES = [line for row in WORDINGS for line in row["text"].splitlines()]


@settings(deadline=None, max_examples=200)  # a starved machine is no failure
@given(st.lists(st.sampled_from(_LINES) | st.text(max_size=80), max_size=25))
def test_any_mixture_of_lines_has_a_verdict_within_its_bounds(lines: list[str]) -> None:
    verdict = _verdict("\n".join(lines).encode("utf-8", "replace"))
    assert 0 < verdict.confidence <= LOG_ALONE and verdict.evidence and verdict.summary
    assert verdict.likely or verdict.cause != "unknown"


DRESSED = {
    "windows line ends": lambda text: text.replace("\n", "\r\n").encode(),
    "colours": lambda text: "".join(f"\x1b[31m{line}\x1b[0m\n" for line in text.splitlines()).encode(),
    "a rank before each line": lambda text: "".join(f"[rank7]: {line}\n" for line in text.splitlines()).encode(),
    "a container before each line": lambda text: "".join(
        f"trainer-1  | {line}\n" for line in text.splitlines()
    ).encode(),
    "a clock before each line": lambda text: "".join(
        f"2026-03-01T10:11:{number % 60:02d}.123456Z stderr F {line}\n" for number, line in enumerate(text.splitlines())
    ).encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "a progress bar above": lambda text: (
        "\r".join(f"{done}%|#### | {done}/100 [00:01<00:09,  9.1it/s]" for done in range(60)) + "\n" + text
    ).encode(),
    "one line of JSON": lambda text: json.dumps({"level": "error", "message": text}).encode() + b"\n",
    "two thousand lines of other ranks below": lambda text: (
        text + "".join(f"node1:12:{n} [0] NCCL INFO comm 0x{n:x} rank 0\n" for n in range(2000))
    ).encode(),
}
_TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    step()\n'
PLAIN = {
    "gpu-oom": _TRACE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23.64 GiB of which 101.00 MiB is free.\n",
    "ram-allocation": _TRACE
    + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 48.0 GiB for an array with "
    "shape (80000, 80000) and data type float64\n",
    "fds-exhausted": _TRACE + "OSError: [Errno 24] Too many open files: 'a.jpg'\n",
    "not-memory": _TRACE + "KeyError: 'label'\n",
}


@pytest.mark.parametrize("dress", DRESSED)
@pytest.mark.parametrize("cause", PLAIN)
def test_what_stands_around_a_traceback_does_not_change_the_verdict(cause: str, dress: str) -> None:
    assert _verdict(DRESSED[dress](PLAIN[cause])).cause == cause


def test_a_windows_code_page_is_read() -> None:
    text = "OSError: [WinError 1455] 页面文件太小，无法完成操作。\n"
    assert _verdict(text.encode("gb18030")).cause == "ram-allocation"
    assert (
        _verdict("train.sh: 第 3 行:  93 已杀死               python train.py\n".encode("gb18030")).cause == "unknown"
    )


OOM = _TRACE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
STEPS = "".join(f"step {number} loss 0.5\n" for number in range(30))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OOM, "gpu-oom"),
        (OOM + STEPS + "Killed\n", "unknown"),
        (OOM + "step 1 loss 0.5\nstep 2 loss 0.5\nKilled\n", "unknown"),  # of this rank or of another one
        (OOM + "step 1 loss 0.5\nSegmentation fault (core dumped)\n", "unknown"),
        (OOM + STEPS + "Segmentation fault (core dumped)\n", "not-memory"),
        (OOM + STEPS + "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n", "killed"),
        (OOM + STEPS + _TRACE + "KeyError: 'label'\n", "not-memory"),
        (OOM + STEPS + _TRACE + "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n", "unknown"),
        ("CUDA out of memory, retrying with half the batch\nKilled\n", "unknown"),  # no step between them
        ("WARNING: CUDA out of memory. Skipping batch\nrun.sh: line 3: 7 Killed   python\n", "unknown"),
        ("WARNING: CUDA out of memory. Skipping batch\nBus error (core dumped)\n", "unknown"),
        ("WARNING: CUDA out of memory. Skipping batch\nTerminated\n", "killed"),
        (OOM + "Killed\n", "gpu-oom"),  # it ended with that exception
        (OOM + STEPS, "gpu-oom"),  # standard output is written out at the end
        (OOM + "skipping the batch\n" + _TRACE + "AttributeError: 'NoneType' object has no attribute 'data'\n", "unknown"),
    ],
)  # fmt: skip
def test_an_out_of_memory_that_was_handled_is_not_the_cause_of_a_later_death(text: str, cause: str) -> None:
    verdict = _verdict(text)
    assert verdict.cause == cause
    assert verdict.cause != "gpu-oom" or text.startswith(OOM + STEPS) or verdict.confidence >= 0.8


def test_the_exception_is_found_far_from_the_end_and_far_into_a_line() -> None:
    noise = "".join(f"[rank{n % 8}]:[W socket.cpp:{n}] waiting for the peer\n" for n in range(5000))
    assert _verdict(OOM + noise).cause == "gpu-oom"
    bar = "#" * 3000 + " "
    assert (
        _verdict(bar + "terminate called after throwing: CUDA out of memory. Tried to allocate 2 GiB\n").cause
        == "gpu-oom"
    )
    (line, *_) = _verdict(bar + "CUDA out of memory. Tried to allocate 2 GiB\n").evidence
    assert "CUDA out of memory" in line  # the words are shown, not the bar
    long = _TRACE + "RuntimeError: " + "x" * 5000 + " CUDA out of memory. Tried to allocate 2.00 GiB\n"
    assert _verdict(long).cause == "gpu-oom"


def test_more_of_a_file_is_read_where_its_end_names_nothing(tmp_path: Path) -> None:
    from legroom.rescue.find_failures_in_log import KEEP
    from legroom.rescue.read_log_file import read_log

    log = tmp_path / "train.log"
    log.write_text(OOM + "waiting for the other ranks\n" * (2 * KEEP // 28))
    facts = read_log(str(log))
    assert facts.last_error is not None and facts.last_error.code == "gpu-oom" and facts.skipped == 0
    with log.open("rb") as pipe:
        assert read_log("-", pipe).last_error == facts.last_error

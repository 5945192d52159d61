"""Plays the chat example: one training in this process, or a server that forks one for each line of JSON it reads.

    chat_t5_player.py serve                            {"flags": [...], "folder": DIR, "die": "7-during"} a line
    chat_t5_player.py seen FOLDER FLAGS [-- FLAGS]     trainings one after another; what each saw is in FOLDER

Covers: dying before, during or after the save that follows a step; noting which rows a rank collates.
Does not cover: judging. The server imports torch and transformers once; each training is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "chat_t5"))
# ruff: noqa: E402 - what follows must find no DeepSpeed: on a CPU it compiles for minutes at its first start.
sys.modules["deepspeed"] = None  # type: ignore[assignment]

import pyarrow.parquet  # noqa: F401
import torch
import torch._dynamo  # which the first optimizer imports: a second in every training otherwise
import train_low_mem
import training

import legroom.loader.batches.legroom_open
import legroom.loader.stream.stream_dataset  # noqa: F401
from legroom.integrations import checkpoint


def die_at(moment: str) -> None:
    """Be killed at the ``N-before``, ``N-during`` or ``N-after`` of the N-th save."""
    saves, honest = 0, checkpoint.save

    def save(*given: Any, **parts: Any) -> None:
        nonlocal saves
        saves += 1
        if moment == f"{saves}-before":
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == f"{saves}-during":
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        honest(*given, **parts)
        if moment == f"{saves}-after":
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save = save


def play(asked: dict[str, Any]) -> None:
    """One training, its words in ``said`` of its folder."""
    os.chdir(asked["folder"])
    said = os.open("said", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    die_at(asked.get("die", ""))
    os.environ |= asked.get("environment", {})
    train_low_mem.main(asked["flags"])


def serve() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                play(json.loads(line))
                status = 0
            except SystemExit as ending:
                status = ending.code if isinstance(ending.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)  # taking all of torch apart takes a second


def seen(folder: Path, *flags: str) -> None:
    """Train as each group of flags says, and note the rows that were trained on."""
    groups: list[list[str]] = [[]]
    for flag in flags:
        groups.append([]) if flag == "--" else groups[-1].append(flag)
    noted: list[str] = []
    honest = training.Batch

    class Noting(honest):  # type: ignore[misc, valid-type]
        def __call__(self, rows: list[dict[str, str]]) -> Any:
            noted.extend(row["prompt"] for row in rows)
            return super().__call__(rows)

    training.Batch = Noting
    with contextlib.suppress(AttributeError):  # one process group for all of them
        training.Accelerator.end_training = lambda _: None
    for number, group in enumerate(groups):
        noted.clear()
        train_low_mem.main(group)
        (folder / f"{number}-{os.environ['RANK']}.json").write_text(json.dumps(noted))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        torch.set_num_threads(1)
        serve()
    else:
        seen(Path(sys.argv[2]), *sys.argv[3:])

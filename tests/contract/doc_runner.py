"""Runs the Python of a page: one process that has torch imported, and a fork of it for each script.

Covers: the scripts of a page (blocks that continue each other are one script, with the page's own line numbers), and the
process that runs them; other tests use it for scripts of their own. Does not cover: what is in the folder they run in
(doc_folder.py).

Importing torch takes longer than most blocks; a fork has it already, and is otherwise a process of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from doc_pages import BadMark, Block

TIMEOUT = 240


def scripts(blocks: list[Block], cuda: bool) -> list[tuple[str, str]]:
    """What a page's Python amounts to: a name and a text for each block that begins anew."""
    found: list[tuple[str, str]] = []
    mine = [block for block in blocks if block.language == "python" and "file" not in block.marks]
    for last, block in zip([None, *mine], mine, strict=False):
        if not runs(block, cuda):
            continue
        text = block.text
        if block.marks.get("elsewhere") == "cpu" and not cuda:
            text = text.replace('"cuda"', '"cpu"')
        if "after" in block.marks:
            if last is None or not runs(last, cuda):
                raise BadMark(f"{block}: goes on from a block that is not run")
            name, before = found.pop()
        else:
            name, before = f"{Path(block.page).stem}_{block.line}.py", ""
        if given := block.marks.get("given"):
            before += f"from doc_given import {given}"
        gap = block.line - 1 - before.count("\n")
        found.append((name, before + "\n" * gap + text))
    return found


def runs(block: Block, cuda: bool) -> bool:
    """Whether a block is run here, as far as its marks go."""
    return "no" not in block.marks and (cuda or "needs" not in block.marks)


@dataclass(frozen=True)
class Started:
    """A script that runs; what it prints can be read while it does."""

    pid: int
    stdout: TextIO
    wait: Callable[[], int]  # for its exit status; until then its number is not another process's


class Runner:
    """The process, which has imported these modules; ``run`` gives a script's exit status and what it wrote."""

    def __init__(self, *modules: str) -> None:
        # The first optimizer of a process imports torch._dynamo, which takes as long as torch itself.
        command = [sys.executable, __file__, *(modules or ("h5py", "torch", "torch._dynamo"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, script: Path, folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
        status, output = self._ask("run", str(script), str(folder), environment, list(arguments))
        return int(status), str(output)

    def start(self, script: Path, folder: Path, environment: dict[str, str], *arguments: str) -> Started:
        """Do not wait for it. The script has a session of its own, and the variables in its own memory alone."""
        pipe = folder / f"output-{uuid.uuid4().hex}"
        os.mkfifo(pipe)
        pid = self._ask("start", str(script), str(folder), environment, list(arguments), str(pipe))
        return Started(pid, pipe.open(encoding="utf-8"), lambda: self._ask("wait", pid))

    def _ask(self, *order: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def _start(script: str, folder: str, environment: dict[str, str], arguments: list[str], output: str) -> int:
    child = os.fork()
    if child == 0:
        os.setsid()
        _end(_play(script, folder, environment, arguments, Path(output)))
    return child


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _in_fork(script: str, folder: str, environment: dict[str, str], arguments: list[str]) -> tuple[int, str]:
    output = Path(folder, ".output")
    child = os.fork()
    if child == 0:
        _end(_play(script, folder, environment, arguments, output))
    patience = time.monotonic() + TIMEOUT
    said = ""
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > patience:
            said, patience = f"ended after {TIMEOUT} s\n", float("inf")
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]), said + output.read_text(encoding="utf-8", errors="replace")


def _play(script: str, folder: str, environment: dict[str, str], arguments: list[str], output: Path) -> object:
    """In the child: be that script's process; its exit status."""
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: object) -> None:
    """Leave as an interpreter does, but for taking torch's modules apart, which takes longer than most blocks."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    """Do what is asked for, a line at a time."""
    gc.disable()  # importing makes objects that stay
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # so that a collection in a fork does not copy all of torch's pages
    gc.enable()
    sys.path.append(str(Path(__file__).parents[1]))
    from huge_pages import use_huge_pages

    use_huge_pages()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        answers.write(json.dumps({"run": _in_fork, "start": _start, "wait": _wait}[verb](*rest)) + "\n")
        answers.flush()
    _end(0)


if __name__ == "__main__":
    main()

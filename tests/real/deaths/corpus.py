"""The death corpus: every case brought about for real, judged live and from its log alone.

Covers: the rig of each case, one run of it under `legroom run`, `legroom explain` on what it wrote. Does not cover:
what the verdicts should be (manifest.json), printing them (table.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import rigs  # noqa: E402

# As a training is mostly started: from a script that reports its end.
_SHELL = ["bash", "-c", '"$@"\nexit $?', "train.sh"]


@dataclass(frozen=True)
class Case:
    """One death: a script that dies, or the log of one that did."""

    name: str
    truth: str
    rig: dict[str, Any] = field(default_factory=dict)
    shell: bool = False  # below a shell, which writes its own word about a signal
    log: str | None = None
    written: bool = (
        False  # the log was written after the texts that such a death leaves, and not recorded from one
    )

    @property
    def needs(self) -> list[str]:
        """The rigs without which it cannot be brought about."""
        wants = {"shm": "mount", "disk": "mount", "limit": "cgroup", "swap": "swap"}
        return sorted({wants[name] for name in self.rig})

    @property
    def what(self) -> str:
        """Its cause in words."""
        if self.log is not None:
            kind = "a log written after such a death's texts" if self.written else "a recorded log"
            return f"{kind}: {self.name.replace('_', ' ')}"
        return (HERE / f"{self.name}.py").read_text().split('"""')[1].strip()


@dataclass(frozen=True)
class Judged:
    """What was said about a case."""

    case: Case
    live: dict[str, Any] | None  # None: there is only a log
    log: dict[str, Any]
    text: str


def cases() -> list[Case]:
    """All of them."""
    return [Case(**row) for row in json.loads((HERE / "manifest.json").read_text())]


def judge(case: Case) -> Judged:
    """Bring it about, and ask."""
    if case.log is not None:
        text = (HERE / case.log).read_text()
        return Judged(case, None, explain(text), text)
    with tempfile.TemporaryDirectory(prefix="legroom-death-", dir="/var/tmp") as folder:
        live, text = _run(case, Path(folder))
    return Judged(case, live, explain(text), text)


def _run(case: Case, folder: Path) -> tuple[dict[str, Any], str]:
    command = [sys.executable, str(HERE / f"{case.name}.py")]
    if case.shell:
        command = [*_SHELL, *command]
    # Not measured: a coverage file that cannot be written would be the death that is judged.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment = {**inherited, "DEATH_DISK": str(folder), "TMPDIR": "/tmp", "LC_ALL": "C"}
    asked = ["--checkpoint", f"{folder}/*.pt"] if "disk" in case.rig else []
    whole = [sys.executable, "-m", "legroom", "run", "--json", "--quiet", *asked, "--", *command]
    with _rig(case, whole, folder) as started:
        done = subprocess.run(
            started, capture_output=True, text=True, timeout=120, env=environment, cwd=folder, check=False
        )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise AssertionError(f"{case.name}: no report: {done.stdout} {done.stderr}") from None
    report["returned"] = done.returncode
    return report, done.stderr


@contextlib.contextmanager
def _rig(case: Case, command: list[str], folder: Path) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        if size := case.rig.get("shm"):
            command = rigs.small_shm(command, size)
        if size := case.rig.get("disk"):
            script = f'mount -t tmpfs -o size={size} tmpfs "$0" && cd "$0" && exec "$@"'
            command = [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                script,
                str(folder),
                *command,
            ]
        swap = case.rig.get("swap")
        if swap:
            stack.enter_context(rigs.swap_file(swap))
        if limit := case.rig.get("limit"):
            group = stack.enter_context(rigs.memory_cgroup(limit, swap=swap or 0))
            command = group.command(command)
        yield command


def explain(text: str) -> dict[str, Any]:
    """What `legroom explain` says about that log."""
    from legroom.model.death import Evidence
    from legroom.rescue.classify import classify
    from legroom.rescue.log_reader import facts_of
    from legroom.rescue.report import verdict_object

    return verdict_object(classify(Evidence(log=facts_of(text.encode()))))

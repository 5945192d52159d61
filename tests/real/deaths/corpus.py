"""The death corpus: every case brought about for real, diagnosed live in four places and from its log alone.

Covers: the rig of each case and place, one run under `legroom run`, `legroom explain` on what it wrote. Does not
cover: what the verdicts should be (manifest.json), printing them (table.py).
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

# Where a job is diagnosed. All but the first are read-only cgroups, as docker has them: the OOM counter is shared
# with everything else in the container.
PLACES = {
    "own": "root, own cgroup",
    "readonly": "read-only cgroup",
    "pidns": "read-only cgroup, PID namespace",
    "podman": "podman container",
}
_AMPLE = 3 << 30  # where a case sets no limit, the shared cgroup has this one
SURE = 0.7  # a verdict below is given as unsure

# As a training run is mostly started: from a script that reports its end.
_SHELL = ["bash", "-c", '"$@"\nexit $?', "train.sh"]
# Beside another program in the same cgroup and mounts, which is not part of the job.
_BESIDE = ["bash", "-c", '"$0" "$1" & beside=$!\nshift\n"$@"\nstatus=$?\nkill -9 $beside\nexit $status']


@dataclass(frozen=True)
class Case:
    """One death: a script that dies, or the log of one that did."""

    name: str
    truth: str  # "none": nothing is wrong, and nothing may be ended or claimed
    rig: dict[str, Any] = field(default_factory=dict)
    shell: bool = False  # below a shell, which writes its own word about a signal
    log: str | None = None
    written: bool = False  # the log was written after the texts that such a death leaves, and not recorded from one
    silent: bool = False  # what it writes does not tell its cause: a signal, or a guess
    exit: int | None = None  # the status that the job ends with; None: any but 0
    options: list[str] = field(default_factory=list)  # of `legroom run`
    places: list[str] = field(default_factory=lambda: list(PLACES))  # where it can be brought about
    ci: list[str] = field(default_factory=lambda: ["own"])  # where it is in every run of the tests

    @property
    def path(self) -> Path:
        """Its script."""
        return next(path for path in (HERE / f"{self.name}.py", HERE / f"{self.name}.sh") if path.exists())

    def needs(self, place: str = "own") -> list[str]:
        """The rigs without which it cannot be brought about."""
        wants = {"shm": "mount", "disk": "mount", "limit": "cgroup", "inner": "inner_cgroup", "swap": "swap"}
        needed = {wants[name] for name in self.rig if name in wants}
        if place == "podman":
            return sorted({"container"} | needed & {"swap"})
        return sorted(needed if place == "own" else needed | {"mount", "cgroup"})

    @property
    def what(self) -> str:
        """Its cause in words."""
        if self.log is not None:
            kind = "a log written by hand" if self.written else "a recorded log"
            return f"{kind}: {self.name.replace('_', ' ')}"
        text = self.path.read_text()
        return text.split('"""')[1].strip() if self.path.suffix == ".py" else text.splitlines()[0].lstrip("# ")

    def right(self, said: dict[str, Any]) -> bool:
        """Whether that is the verdict on it."""
        return (said["verdict"] or "none") == self.truth


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


def judge(case: Case, place: str = "own") -> Judged:
    """Bring it about there, and ask."""
    if case.log is not None:
        text = (HERE / case.log).read_text()
        return Judged(case, None, explain(text), text)
    with tempfile.TemporaryDirectory(prefix="legroom-death-", dir="/var/tmp") as folder:
        live, text = _run(case, place, Path(folder))
    return Judged(case, live, explain(text), text)


def _run(case: Case, place: str, folder: Path) -> tuple[dict[str, Any], str]:
    command = ["bash" if case.path.suffix == ".sh" else sys.executable, str(case.path)]
    if case.shell:
        command = [*_SHELL, *command]
    # Not measured: a coverage file that cannot be written would be the death that is judged.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment = {**inherited, "DEATH_DISK": str(folder), "PYTHON": sys.executable, "TMPDIR": "/tmp", "LC_ALL": "C"}
    asked = ["--checkpoint", f"{folder}/*.pt"] if "disk" in case.rig else []
    whole = [sys.executable, "-m", "legroom", "run", "--json", "--quiet"]
    whole += [*asked, *case.options, "--", *command]
    if neighbour := case.rig.get("neighbour"):
        interpreter = "bash" if neighbour.endswith(".sh") else sys.executable
        whole = [*_BESIDE, interpreter, str(HERE / "neighbours" / neighbour), *whole]
    with _rig(case, place, whole, folder) as started:
        done = subprocess.run(
            started, capture_output=True, text=True, timeout=150, env=environment, cwd=folder, check=False
        )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise AssertionError(f"{case.name}: no report: {done.stdout} {done.stderr}") from None
    report["returned"] = done.returncode
    return report, done.stderr


@contextlib.contextmanager
def _rig(case: Case, place: str, command: list[str], folder: Path) -> Iterator[list[str]]:
    limit, swap = case.rig.get("limit"), case.rig.get("swap")
    shm, disk = case.rig.get("shm"), case.rig.get("disk")
    with contextlib.ExitStack() as stack:
        if swap:
            stack.enter_context(rigs.swap_file(swap))
        if place == "podman":
            box = stack.enter_context(rigs.container())
            tmpfs = [f"{folder}:rw,size={disk},mode=1777"] if disk else []
            yield box.command(command, cwd=folder, memory=limit or _AMPLE, swap=swap or 0, shm=shm, tmpfs=tmpfs)
            return
        if shm:
            command = rigs.small_shm(command, shm)
        if disk:
            script = f'mount -t tmpfs -o size={disk} tmpfs "$0" && cd "$0" && exec "$@"'
            private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(folder)]
            command = [*private, *command]
        if place == "pidns":
            command = rigs.own_pids(command)
        if place != "own":
            group = stack.enter_context(rigs.memory_cgroup(limit or _AMPLE, swap=swap or 0))
            command = rigs.read_only_cgroup(command, group)
        elif limit:
            group = stack.enter_context(rigs.memory_cgroup(limit, swap=swap or 0))
            command = group.command(command)
        yield command


def explain(text: str) -> dict[str, Any]:
    """What `legroom explain` says about that log."""
    from legroom.records.failure import Evidence
    from legroom.rescue.find_failures_in_log import facts_of
    from legroom.rescue.verdict import classify, verdict_object

    return verdict_object(classify(Evidence(log=facts_of(text.encode()))))

"""What is to be typed can be pasted: a command stands whole and alone on a line, at every width, in every language."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from machines import GB, MB, healthy, with_pool

import legroom
from legroom import messages
from legroom.advice import fix_commands
from legroom.advice.fit_on_machine import relieve
from legroom.charts.html_page import bullets
from legroom.cli.text_layout import steps
from legroom.errors import LegroomError
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.failure import Attempt, Evidence, Verdict
from legroom.records.machine import Level, RuntimeEnvironment
from legroom.rescue.job_attempt import RunOptions
from legroom.rescue.supervisor import Supervisor
from legroom.rescue.verdict import with_fixes
from legroom.system.processes_and_threads import ExitStatus

SOURCE = Path(legroom.__file__).parent
KINDS = ("bare", "docker", "podman", "kubernetes", "slurm", "wsl", "container")
CAUSES = ("shm-full", "ram-oom-kill", "swap-thrash", "gpu-oom", "pinned-exhausted", "fds-exhausted", "disk-full")
# What a shell would run, wherever it stands in a sentence: its first word and what comes after it.
COMMAND = re.compile(
    r"(?<![\w./\[-])(?:\{sudo\}|sudo )?(?:rm|mount -o|swapoff -|swapon -|chmod \d|ulimit -n|df -h|ps -e|ls -|du -|cat /|cat \{"
    r"|grep |dmesg \||vmstat \d|printf|kubectl \w|sbatch -|loginctl \w|nvidia-smi|free -h|wsl --|h5clear|export \w+=|mkdir"
    r"|docker run|\{tool\} run|pip install|python -X|legroom (?:run -- |run --loader|doctor|cache \w|demo -|explain -))"
)  # fmt: skip


@pytest.fixture(params=messages.LANGUAGES)
def language(request: pytest.FixtureRequest) -> Iterator[str]:
    before = messages.language()
    messages.speak(request.param)
    yield request.param
    messages.speak(before)


def _places() -> Iterator[RuntimeEnvironment]:
    for kind in KINDS:
        for rights in (
            {"root": True, "may_mount": True},
            {"root": False, "may_mount": False, "sudo": True},
            {"root": False, "may_mount": False, "sudo": False},
        ):
            made = {"kind": kind, "how": "", "platform": "linux", "sudo": False, "rights_how": "", **rights}
            yield RuntimeEnvironment(**made)


def _every_fix() -> Iterator[tuple[str, ...]]:
    machine = healthy()
    yield fix_commands.remove_leftovers(("torch_1", "a name", *(f"torch_{n:040}" for n in range(3))), 40 * MB)
    yield fix_commands.remove_leftovers(tuple(f"torch_{n:040}" for n in range(9)), 40 * MB)
    yield fix_commands.stop_spilling()
    yield fix_commands.shorten_temporary("TMPDIR", 107)
    for pool in ("shm", "ram", "fds", "disk", "gpu0"):
        yield relieve(machine, pool, 40 * GB)
    small = with_pool(replace(machine, limits=replace(machine.limits, nofile_soft=1024)), "ram", 16 * GB, None, None)
    small = replace(small, shm=replace(machine.shm, size=64 * MB))
    evidence = Evidence(peaks={"shm": Level(64 * MB, 64 * MB)})
    for runtime in _places():
        yield fix_commands.enlarge_shm(runtime, 8 * GB)
        yield fix_commands.settle_swap(runtime, moving=True, used=GB, free=8 * GB)
        for cause in CAUSES:
            yield with_fixes(Verdict(cause, 1.0, ""), evidence, replace(small, runtime=runtime)).fix


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_no_newline_splits_a_command(language: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    checked = 0
    for fix in _every_fix():
        shown = "\n".join(steps(fix)).splitlines()
        for step in fix:
            sentence, *commands = step.splitlines()
            assert COMMAND.search(sentence) is None, sentence
            for command in commands:
                checked += 1
                assert command in [line.strip() for line in shown]
    assert checked > 200


def test_the_largest_are_removed_by_one_line_and_nothing_after_it() -> None:
    step = fix_commands.remove_leftovers(("a", "b"), 0)[0]
    assert step.splitlines()[1:] == ["rm /dev/shm/a /dev/shm/b"]
    assert "9" in fix_commands.remove_leftovers(tuple("abcdefghi"), MB)[0].splitlines()[0]


def _templates() -> Iterator[tuple[str, str]]:
    """Every step that is written down in the source: what is given as a fix, and what the fix_commands are made of."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        whole = path.name in ("remedy.py", "fixes.py", "deaths.py") or path.name.startswith("rules_")
        roots = [tree] if whole else [n.value for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "fix"]
        for root in roots:
            for call in ast.walk(root):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "say":
                    for part in ast.walk(call.args[0]):
                        if isinstance(part, ast.Constant) and isinstance(part.value, str):
                            yield path.relative_to(SOURCE).as_posix(), part.value


def test_every_step_in_the_source_has_its_commands_on_lines_of_their_own() -> None:
    found = list(_templates())
    assert len(found) > 200
    wrong = [
        (where, template)
        for where, template in found
        for line in template.splitlines()
        if (command := COMMAND.search(line)) is not None and command.start() > 0
    ]
    assert wrong == []


def test_translations_have_the_same_commands() -> None:
    before = messages.language()
    try:
        messages.speak("zh")
        different = [
            (template, said)
            for _, template in _templates()
            if "\n" in template and (said := messages.say(template)).splitlines()[1:] != template.splitlines()[1:]
        ]
    finally:
        messages.speak(before)
    assert different == []


def test_run_prints_a_command_on_a_line_without_its_own_name() -> None:
    told: list[str] = []
    supervisor = Supervisor(RunOptions(("true",)), healthy(), told.append, Host())
    verdict = Verdict("shm-full", 0.9, "full", fix=("now:\nmount -o remount,size=8G /dev/shm",))
    supervisor._print_verdict([Attempt(1, ("true",), {}, ExitStatus(status=1), 1.0, verdict=verdict)])
    lines = "\n".join(f"legroom: {line}" for line in told).splitlines()
    assert "mount -o remount,size=8G /dev/shm" in [line.strip() for line in lines]


def test_an_error_and_a_page_show_it_alone_too() -> None:
    error = LegroomError("what", fix=("see <them>:\nls -l /a && ls /b",))
    assert str(error).splitlines()[1:] == ["  do:  see <them>:", "       ls -l /a && ls /b"]
    assert bullets(error.fix) == "<ul><li>see &lt;them&gt;:<pre>ls -l /a &amp;&amp; ls /b</pre></li></ul>"

"""The commands of a page: taken apart, looked at, and those that do no harm run.

Covers: lines of sh and console blocks; verbs and flags of `legroom` against its own parser, flags of scripts against
their source, targets of make, extras of pip; which lines are run, and why others are not. Does not cover: Python blocks.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
from doc_pages import REPO, Block

from legroom.cli.main import cli

# Programs of other projects that pages mention: their options are not checked, and they are not run.
OTHERS = {
    *("accelerate", "torchrun", "docker", "kubectl", "sbatch", "srun", "ssh", "git", "nvidia-smi"),
    *("cd", "eval", "exec", "export", "sh", "sleep", "source", "ulimit", "cat", "ls", "mkdir", "df", "free", "dmesg"),
    *("mount", "umount", "unshare", "swapoff", "swapon"),
}
NOT_RUN = [
    (r"--web\b|--prometheus\b", "opens a port that somebody may have"),
    (r"--webhook\b", "speaks to another machine"),
    (r"--on-alarm\b", "waits for an alarm; tests/unit/monitor/test_monitor_outputs.py runs such a command"),
    (r"--(?:benchmark|climb)\b", "takes ten seconds; tests/unit/loader/test_tune.py climbs"),
    (r"\blegroom demo\b", "takes two minutes; tests of its own run it"),
    (
        r"\bsmall\b|\.sh\b",
        "needs a /dev/shm of its own, or several trainings; tests/real and tests/unit/examples run it",
    ),
    (r"\bmake\b|\bpip\b", "builds the whole project"),
    (r"\bdocs/evidence/|\btests/real/", "measures for minutes; tests/real/test_real_evidence.py runs it"),
]
MAY_SAY_NO = {"doctor", "plan", "check", "watch"}  # exit 1: an answer, and which one depends on the machine
ONLY_READ = {"doctor", "plan", "check", "explain"}


@dataclass(frozen=True)
class Line:
    """One command line of a block."""

    block: Block
    text: str

    @property
    def parts(self) -> list[list[str]]:
        """The words of each program in it."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars=True)
        lexer.commenters, lexer.whitespace_split = "", True
        parts: list[list[str]] = [[]]
        skip = False
        for word in lexer:
            if skip:
                skip = False  # the name of a file that output goes to
            elif word in {">", ">>", "<"}:
                skip = True
            elif set(word) <= set("|&;()"):
                parts.append([])
            else:
                parts[-1].append(word)
        return [part for part in (_bare(part) for part in parts) if part]


def _bare(words: list[str]) -> list[str]:
    """Without variables set for the command, and without who runs it."""
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in {"sudo", "small", "time", "then", "{", "}"}):
        words = words[1:]
    return words


def lines(block: Block) -> list[Line]:
    """The command lines of a block of sh or console; what a console shows in answer is left out."""
    if block.language not in {"sh", "console"}:
        return []
    text = block.text.replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        line = _uncommented(line).strip()
        if line and not re.match(r"\w+\(\) \{", line):  # a function: bash -n has looked at it
            found.append(Line(block, line))
    return found


def _uncommented(line: str) -> str:
    """Without a trailing comment, quotes respected."""
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def wrong(line: Line) -> str | None:
    """What is wrong with a line, or None."""
    for words in line.parts:
        program, *rest = words
        if program == "legroom":
            problem = _wrong_legroom(rest)
        elif program in {"python", "python3"} or program.endswith((".py", ".sh")):
            problem = _wrong_script(line.block.page, words if program.startswith("python") else ["", *words])
        elif program == "make":
            problem = _wrong_targets(rest)
        elif program == "pip":
            problem = _wrong_extras(" ".join(rest))
        else:
            problem = None if program in OTHERS else f"nobody knows the program {program!r}"
        if problem:
            return problem
    return None


def _context(command: click.Command) -> click.Context:
    """As at the door: a command keeps the help option of the first context it meets, for the tests after this one."""
    return click.Context(command, click.Context(cli, **cli.context_settings))


def _wrong_legroom(words: list[str]) -> str | None:
    command: click.Command = cli
    try:
        while isinstance(command, click.Group):
            global_options = [word for word in words if word.startswith("-")] if command is cli else []
            while words and words[0].startswith("-"):
                command.make_parser(_context(command)).parse_args([words[0]])
                words = words[1:]
            if not words:
                return None if global_options else f"{command.name} needs a verb"
            found = command.get_command(_context(command), words[0])
            if found is None:
                return f"legroom has no verb {words[0]!r}"
            command, words = found, words[1:]
        values, _, _ = command.make_parser(_context(command)).parse_args(list(words))
    except click.UsageError as problem:
        return problem.format_message()
    for parameter in command.params:
        value = values.get(parameter.name)
        choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
        if choices and isinstance(value, str) and value not in choices:
            return f"{parameter.name}={value!r} is none of {choices}"
    return None


def _wrong_script(page: str, words: list[str]) -> str | None:
    if words[1:2] in ([], ["-c"], ["-m"]):
        return None
    home = (REPO / page).parent
    places = [home / words[1], REPO / words[1]]
    script = next((place for place in places if place.is_file()), None)
    if script is None:  # the reader's own
        return None if home == REPO or home.name == "docs" else f"there is no {words[1]}"
    if script.suffix != ".py":
        return None
    known = {
        argument.value
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    known |= {f"--no-{name[2:]}" for name in known if name.startswith("--")}
    for word in words[2:]:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known and not _in_beside(script, flag):
            return f"{words[1]} has no flag {flag}"
    return None


def _in_beside(script: Path, flag: str) -> bool:
    """Whether a module of the same example names the flag: flags that several scripts share."""
    return any(f'"{flag}"' in other.read_text(encoding="utf-8") for other in script.parent.glob("*.py"))


def _wrong_targets(words: list[str]) -> str | None:
    rules = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.M))
    missing = [word for word in words if not word.startswith("-") and "=" not in word and word not in rules]
    return f"make has no target {missing[0]!r}" if missing else None


def _wrong_extras(text: str) -> str | None:
    known = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"(?:legroom|\.)\[([\w,-]+)\]", text):
        for name in names.split(","):
            if name not in known:
                return f"there is no extra {name!r}"
    return None


def why_not_run(line: Line) -> str | None:
    """Why a line is only looked at, or None."""
    if reason := line.block.marks.get("no"):
        return reason
    for pattern, reason in NOT_RUN:
        if re.search(pattern, line.text):
            return reason
    for words in line.parts:
        if words[0] not in {"legroom", "python", "python3"}:
            return f"{words[0]} is not ours"
        if words[0] == "legroom" and "--" in words and words[words.index("--") + 1] != "python":
            return f"{words[words.index('--') + 1]} is not ours"
    return None


def may_end_with(line: Line) -> set[int]:
    """The exit statuses that are no mistake of the page's."""
    parts = [words for words in line.parts if words[0] == "legroom"]
    verbs = {next((word for word in words[1:] if word[0] != "-"), "") for words in parts}
    any_answer = "exit" in line.block.marks or "--last" in line.text
    return {0, 1} if any_answer or verbs & MAY_SAY_NO else {0}


def only_reads(line: Line) -> bool:
    """Whether another page need not run the same line: it changes nothing, and takes nothing that a page changes."""
    return (
        all(words[0] == "legroom" and {*words[1:2]} & ONLY_READ for words in line.parts) and "--data" not in line.text
    )


def goes_on(line: Line) -> bool:
    """Whether it ends only when it is told to."""
    return bool(re.search(r"\blegroom watch\b", line.text)) and not re.search(r"--(once|replay|help)\b", line.text)

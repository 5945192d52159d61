"""Lines of a log that report no failure: quotes of a failure message, and progress after one. Pure.

Quotes are source lines and values in tracebacks (CPython, IPython, rich, loguru), the source line of a warning, printed
arguments and commands, help texts, tips, names of tests and commits. Many training scripts contain
`if "out of memory" in str(error):`.

Progress is what a log reports of a run that goes on: training steps, and the end of a run that did what it should.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_FRAME = re.compile(r'File "[^"<>]*(?:<[^<>"]*>)?[^"<>]*", line \d+(?:, in .*)?$')
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?::|$)")
_WARNING = re.compile(r":\d+: \w*Warning: ")
_ARROW = re.compile(r"^-{1,6}> ?\d+\b")  # IPython: the line that was executed
_NUMBERED = re.compile(r"^ {1,8}\d+(?: |$)")  # IPython: the lines around it
_AROUND = 12
_BOX = re.compile(r"[╭┌+][─-]+ ?(?:\w+ )?Traceback \(most recent call last\)")  # rich
_BOX_LINE = re.compile(r"[│|]")
_BOX_END = re.compile(r"[╰└+][─-]")
_LONGEST_BOX = 2000
_COMMAND = re.compile(r"^\++ (?!Exception Group)[\w'\"\[./:]")  # bash -x
_CONFIG = re.compile(
    r"(?:\w(?:Arguments|Config|Args|Namespace)\(|\bconfig \w+ \{)$"
)  # transformers prints one field per line
_CONFIG_LINE = re.compile(r"^\s*[\"']?\w+[\"']?\s*[=:].*,?$")
_DIGITS = re.compile(r"\d+")


def code_lines(lines: list[str]) -> set[int]:
    """The lines that are source code, values or commands, not messages."""
    found: set[int] = set()
    shape: re.Pattern[str] | None = None  # inside a frame: the prefix of its lines
    indent = 0
    box = config = -1  # where it began
    for at, line in enumerate(lines):
        if box >= 0:
            if _BOX_END.search(line, 0, 200):
                box = -1
            elif _BOX_LINE.search(line, 0, 200) and at - box < _LONGEST_BOX:
                found.add(at)
                continue
            else:
                box = -1
        if config >= 0:
            if _CONFIG_LINE.match(line) and at - config < _LONGEST_BOX:
                found.add(at)
                continue
            config = -1
        if 'File "' in line and (frame := _FRAME.search(line, 0, 1000)):
            prefix = line[: frame.start()]
            prefix = prefix[:-2] + "  " if prefix.endswith("> ") else prefix  # loguru
            shape = _shape(prefix.rstrip())
            indent = len(prefix) - len(prefix.rstrip())
            continue
        if shape is not None:
            inside = shape.match(line)
            rest = line[inside.end() :] if inside else ""
            deep = len(rest) - len(rest.lstrip())
            if inside and (deep > indent or (indent == 0 and not _EXCEPTION.match(rest))):
                found.add(at)
                if indent == 0:
                    shape = None  # the indentation was lost: one line is certain
                continue
            shape = None
        if "Traceback" in line and _BOX.search(line, 0, 400):
            box = at
        elif line.startswith("+") and _COMMAND.match(line):
            found.add(at)
        elif line.startswith("-") and _ARROW.match(line):
            found.add(at)
            found.update(_numbered(lines, at))
        elif line.startswith("  ") and at and _WARNING.search(lines[at - 1], 0, 400):
            found.add(at)
        elif line.endswith(("(", "{")) and _CONFIG.search(line[-200:]):
            config = at
    return found


def _shape(prefix: str) -> re.Pattern[str]:
    return re.compile(r"[0-9a-fA-F]*".join(re.escape(part) for part in _DIGITS.split(prefix[-200:])))


def _numbered(lines: list[str], at: int) -> list[int]:
    """The numbered lines around an arrow."""
    found = []
    for step in (-1, 1):
        near = at + step
        while 0 <= near < len(lines) and abs(near - at) <= _AROUND and _NUMBERED.match(lines[near]):
            found.append(near)
            near += step
    return found


# Printed arguments and commands. A dict with one of the last names reports something.
_CALL = re.compile(r"\b\w*(?:Namespace|Arguments|Config|Args|Params|Options|Settings)\(")
_WORDS = re.compile(r"\[(?:'[^']*'|\"[^\"]*\")(?:, (?:'[^']*'|\"[^\"]*\"))*\]")
_DICT = re.compile(r"\{'[^{}]{0,3000}\}")
_REPORT = re.compile(r"(?i)'(?:\w*(?:error|exception|reason|message|msg|status|state|detail)\w*)': ")
_FIELD = "·"


def without_printed_values(line: str) -> str:
    """The line with printed arguments, dicts and lists of words blanked out; its length stays."""
    if (call := _CALL.search(line)) is not None:
        depth, end = 0, call.end() - 1
        for end in range(call.end() - 1, len(line)):
            depth += (line[end] == "(") - (line[end] == ")")
            if depth == 0:
                break
        line = line[: call.end()] + _FIELD * (end - call.end()) + line[end:]
    line = _WORDS.sub(_blank, line)
    return _DICT.sub(lambda found: found[0] if _REPORT.search(found[0]) else _blank(found), line)


def _blank(found: re.Match[str]) -> str:
    return _FIELD * len(found[0])


_OPTION = re.compile(r"^\s{1,8}--?[\w-]+(?:,? +\[?-{0,2}[\w<>.-]+\]?){0,4} {2,}\S")  # a help text
_TEST = re.compile(r"::\w+.*\b(?:PASSED|SKIPPED|XFAIL|XPASS)\b|\b(?:PASSED|SKIPPED|XFAIL|XPASS)\b.*::\w+")
_COMMIT = re.compile(r"^(?:HEAD is now at |commit |\* )?[0-9a-f]{7,40} \S")
_COMMENT = re.compile(
    r"^\s*(?:#{1,4}|//) (?!(?:There is insufficient|A fatal error|Native memory|Out of Memory Error))"
)
_BEFORE = re.compile(
    r"(?i)(?:^\W*(?:tip|hint|faq|troubleshooting|usage)\b|\bhow (?:to|do)\b"
    r"|\b(?:if|when(?:ever)?|in case|should) (?:you|this|it|there|a|the|your)\b"
    r"|\b(?:to |helps? |can )?(?:avoid|prevent|solve|work around|get rid of)(?:s|ing)?\b|\bfix(?:e[sd])?\b"
    r"|\blower it (?:on|if|at)\b|\b(?:e\.g\.|such as|for example)|\bnot (?:an? )?$"
    r"|\b(?:against|despite|no|without) [\"'`]?$)"
)
_REPORTS = re.compile(r"(?:^|[\s\])|>:-])(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception)\b(?:: |\(|$)")
_UNLIKE = (  # no error is two of these
    re.compile(r"(?i)too many open files"),
    re.compile(r"(?i)no space left"),
    re.compile(r"(?i)cuda out of memory"),
    re.compile(r"OOMKilled|(?i:exit code:? 137)"),
)
_REACH = 100  # characters before a message in which a word makes it a mention


def is_mention(line: str, at: int) -> bool:
    """Whether a help text, a tip, a comment, or the name of a test or commit mentions the message at that offset."""
    if _OPTION.match(line) or _TEST.search(line) or _COMMIT.match(line) or _COMMENT.match(line):
        return True
    if line.count("`", 0, at) % 2 and "`" in line[at:]:
        return True
    if sum(pattern.search(line, 0, 400) is not None for pattern in _UNLIKE) > 1:
        return True  # a list of messages
    before = line[max(0, at - _REACH) : at]
    found = _BEFORE.search(before)
    return found is not None and not _REPORTS.search(before, found.end())


_MOST, _WITHIN = 200, 5000  # lines with a step that are kept, and lines in which they are sought
_STEP = re.compile(r"\d%\||\bit/s\b|\bs/it\b|(?i:\b(?:epochs?|steps?|iter(?:ation)?s?|batch(?:es)?|loss)\b\W{0,12}\d)")
_NO_STEP = re.compile(r"(?i:error|exception|traceback|fail|kill|abort|wandb:|^\s+(?!\d+%\|)\S)")
_BAR = re.compile(r"\d%\|.{0,300}?\b(\d+/\d+)\b")
_SUBJECT = r"(?:training|run|experiment|fit(?:ting)?|fine-?tuning|evaluation|job)"
_END = re.compile(
    rf"(?i:\b{_SUBJECT}\b.{{0,20}}\b(?:is )?(?:completed?|done|finished|successful(?:ly)?|succeeded)\b"
    r"|\b(?:done|finished) (?:training|in [\d:.]+)|\bsuccessfully (?:finished|completed|trained)"
    r"|^\W*(?:\S+[\])|:>-] +)?(?:all |training )?(?:done|finished|completed?|success(?:ful)?(?:ly)?)\b\W*(?:$|[,;(:] ?)"
    r"|\b(?:saved|wrote|written|exported)\b.{0,60}\b(?:model|checkpoint|weights|\S+\.(?:pth?|ckpt|safetensors|onnx|h5|keras|pkl))\b"
    r"|\b(?:model|checkpoint) (?:was )?(?:saved|written)\b|\bbest (?:trial|config|checkpoint|model|epoch) ?[:=]"
    r"|'train_runtime':|^\W*train_runtime +=|\*+ (?:train|eval) metrics \*+"
    r"|\btrial \S+ (?:finished|completed?)\b|\b\d+ passed(?:, \d+ \w+)* in \d)"
    r"|`Trainer\.fit` stopped: `max_(?:epochs|time)="
)
# Nor what a batch script, a scheduler or wandb prints after every ending.
_NO_END = re.compile(
    r"(?i:error|exception|traceback|fail|kill|abort|wandb|interrupt|exit|cancel|could not|unable|cannot"
    r"|not (?:be )?(?:done|saved|finished|complete)|^\s{2,}(?!\w+ +=)\S"
    r"|\d{1,2}:\d\d:\d\d \w*T[ C]?|\bat \w{3} \w{3}\b|slurm|job \d+)"
)


def steps(lines: list[str], failures: Collection[int]) -> tuple[int, ...]:
    """The last lines, counted from the end, in which the program reports a step; ``failures`` are lines that do not."""
    found: list[int] = []
    bars: set[str] = set()
    first = max(0, len(lines) - _WITHIN)
    for at, line in enumerate(lines[first:], start=first):
        number = len(lines) - at
        if number in failures or not _STEP.search(line) or _NO_STEP.search(line):
            continue
        if (bar := _BAR.search(line)) is not None:
            if bar[1] in bars:
                continue  # drawn again when it is closed, also after an error
            bars.add(bar[1])
        found.append(number)
    return tuple(found[-_MOST:])


def end_of_run(lines: list[str], code: Collection[int], near: int) -> int | None:
    """The last of so many last lines, counted from the end, that reports the end of a successful run.

    ``code`` are the lines that are source code or values.
    """
    for at in range(len(lines) - 1, max(-1, len(lines) - near), -1):
        if at not in code and _END.search(lines[at], 0, 400) and not _NO_END.search(lines[at], 0, 400):
            return len(lines) - at
    return None

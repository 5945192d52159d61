"""Lines of a log that report no failure: quotes of a failure message, and progress after one. Pure.

Quotes are source lines and values in tracebacks (CPython, IPython, rich, loguru), the source line of a warning, printed
arguments and commands, help texts, captured output of tests, tips, names of tests and commits, and all that stands in
quotation marks. Many training scripts contain `if "out of memory" in str(error):`.

A line that is no quote is a message if it begins with the words, after what a logger, a launcher or a container puts
before each line, or after the type of an exception that can have such a message. Otherwise it only says something.

Progress is what a log reports of a run that goes on: training steps, and the end of a run that did what it should.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

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
_HELP, _IN_HELP = re.compile(r"^usage: "), re.compile(r"^(?:\s|[\w ]+:$|$)")
_CAPTURED, _IN_CAPTURED = re.compile(r"^-{3,} ?Captured \w+"), re.compile(r"^(?![-=_!]{5,})")  # pytest


def code_lines(lines: list[str]) -> set[int]:
    """The lines that are source code, values or commands, not messages."""
    found: set[int] = set()
    shape: re.Pattern[str] | None = None  # inside a frame: the prefix of its lines
    indent = 0
    box = config = -1  # where it began
    block: re.Pattern[str] | None = None  # inside a help text or captured output: its lines
    for at, line in enumerate(lines):
        if box >= 0:
            if _BOX_END.search(line, 0, 200):
                box = -1
            elif _BOX_LINE.search(line, 0, 200) and at - box < _LONGEST_BOX:
                found.add(at)
                continue
            else:
                box = -1
        if block is not None:
            if block.match(line):
                found.add(at)
                continue
            block = None
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
        elif _HELP.match(line):
            block = _IN_HELP
        elif _CAPTURED.match(line):
            block = _IN_CAPTURED
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


_OPTION = re.compile(r"^\s{1,8}--?[\w-]+(?:,? +\[?-{0,2}[\w<>.-]+\]?){0,4} {2,}\S")  # a help text
_TEST = re.compile(r"::\w+.*\b(?:PASSED|SKIPPED|XFAIL|XPASS)\b|\b(?:PASSED|SKIPPED|XFAIL|XPASS)\b.*::\w+")
_COMMIT = re.compile(r"^(?:HEAD is now at |commit |\* )?[0-9a-f]{7,40}:? \S")
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
    if sum(pattern.search(line, 0, 400) is not None for pattern in _UNLIKE) > 1:
        return True  # a list of messages
    before = line[max(0, at - _REACH) : at]
    found = _BEFORE.search(before)
    return found is not None and not _REPORTS.search(before, found.end())


Place = Literal["raised", "below", "elsewhere"]  # an exception, the lines of its message, any other line

# What stands before a message: ranks, times, levels, files, containers, programs.
_SOURCE = re.compile(
    r"(?:\[[^\]]{0,200}\]:?|\([^)]{0,80}\):?|\d[\d.,TZ]*[:/-][\d:.,/TZ+-]*|(?<=\s)\d+|[EWIF]\d{4}\b|[FPE](?=\s)|-+"
    r"|^[\w.-]+ *\||(?<=\s)\|(?=\s)|<std\w+>:?|(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL|E?RR|stderr|stdout)\b:?"
    r"|(?i:fatal|error|warning|警告|错误|エラー)[:：]"
    r"|[\w./-]+\.(?:py|cc|cpp|cu|h|go):\d+[\]:]*|[\w.]+:[\w<>.]+:\d+"
    r"|(?![\w.]{0,80}(?:Error|Exception|Interrupt|OutOf|Exhausted))(?=[A-Za-z]+[\d_.-])[\w.-]{2,80}(?:\[\d+\])?:?(?=\s)"
    r"|(?:srun|slurmstepd|kernel|root|python3?|bash|Process \S+):)\s*"
)
_TYPE = re.compile(
    r"((?:[A-Za-z_]\w*\.)*_?[A-Za-z]\w*?(?:Error|Exception|Exhausted|OutOfMemory)\w*)(?:\(\w+\))?"
    r"(?: \(see above for traceback\))?(?::\s*|$)"
)
_LONGEST_TYPE = 400  # characters with it: searching a line of thousands of letters without a space would take minutes
# Exceptions of the system, of allocators and of libraries that pass their message on.
CARRIES = re.compile(
    r"(?:^|\.)_?(?:(?:Xla|Jax)?Runtime|OS|IO|Environment|(?:Array)?Memory|System|BlockingIO|Accelerator|Internal|Unknown"
    r"|Import|XGBoost|CatBoost|LightGBM|Operational|Database|ZMQ|Safetensor|Arrow\w*|DistBackend|(?i:cu|hip|nccl)\w*)Error$"
    r"|OutOf|Exhausted|ObjectStoreFull|(?:^|\.)Exception$"
)
# Messages of JAX and vLLM, also as ValueError.
_OF_ANY_TYPE = re.compile(r"RESOURCE_EXHAUSTED|No available memory for|To serve at least|Free memory on device")
_PROSE = re.compile(r"(?:\b[a-z]{2,}(?:'[a-z]+)?[ ,]+){3}|[\u3040-\u30ff\u4e00-\u9fff]{5}|^>>>")
_OF_SERVER = re.compile(
    r"(?i)\b(?:server|remote|endpoint|response|https?|answered|replied|requests? (?:\S+ )?failed"
    r"|(?:error|status|code)\W{1,3}[45]\d\d)\b"
)
# The text of a MemoryError of an allocator; any program can raise one with a text of its own.
_OF_ALLOCATOR = re.compile(r"(?i)memory|alloc|oom\b|buffer|array|bytes|\d ?[kmgt]i?b\b|errno|\benomem\b|[^\x00-\x7f]")
# Before a record of what ended a process, whatever its words.
_SYSTEM = re.compile(
    r"\b(?:systemd(?:-oomd)?\[\d+\]|kernel|slurmstepd|earlyoom(?:\[\d+\])?): |\bkubelet\s|^Message: {2,}"
)
_WORD, _SENTENCE = re.compile(r"OOM ?Killed"), re.compile(r"[^\s:=|(\[,>'\"] $")  # Reason: OOMKilled; it was OOMKilled
_BRACKETS = re.compile(r"\[[^\]]*\]")
# What stands before the words in a message of a command (tar: a: Cannot write: …), and of a library in native code.
_COMMAND_ERROR = re.compile(r"^(?!error|warning|fatal)[a-z./][\w./+-]*: (?:.*[:：] *)?$")
_NATIVE = re.compile(
    r"\bNCCL\b|terminate called|what\(\):|\.(?:cc|cpp|cuh?|h|c):\d+|libgomp:|OpenBLAS|memory allocation of|nccl\w*Error"
    r"|at line \d+ in file"
)
_RECORDS = frozenset({"oom-kill", "oom-daemon", "fault"})
_MARK = re.compile(r"(?:^|(?<=[\s(\[{:=,，：]))[`'\"“‘「『](?=\S)")
_CLOSING = {"“": "”", "‘": "’", "「": "」", "『": "』"}
_VALUE = re.compile(
    r"(?i:(?:error|exception|reason|message|msg|status|state|detail)\w*['\"]?\s*[:=]\s*$)|[A-Z]\w*(?:Error|Exception)\($"
)


def _quotations(line: str) -> list[tuple[int, int]]:
    """Where each text in quotation marks begins and ends."""
    found, begin = [], 0
    while (mark := _MARK.search(line, begin)) is not None:
        end = line.find(_CLOSING.get(mark[0], mark[0]), mark.end())
        if end >= 0 and line[end + 1 : end + 2] != ":":  # not the name of a value
            found.append((mark.start(), end))
        begin = max(end, mark.start()) + 1
    return found


def without_quotations(line: str) -> str:
    """The line with the texts in quotation marks blanked out; its length stays."""
    for begin, end in _quotations(line):
        line = line[: begin + 1] + "·" * (end - begin - 1) + line[end:]
    return line


def after_source(line: str) -> int:
    """Where the message begins, after what a logger, a launcher or a container puts before each line."""
    at = 0
    while (found := _SOURCE.match(line, at, 1000)) is not None and found.end() > at:
        at = found.end()
    return at


def worth(line: str, code: str, at: int, place: Place) -> Literal["message", "said", "quoted"]:
    """What the words at that offset are: a message, a sentence that contains them, or a quotation."""
    begin = after_source(line)
    raised = place == "raised"
    kind = _TYPE.search(line, 0, _LONGEST_TYPE) if raised else _TYPE.match(line, begin, begin + _LONGEST_TYPE)
    certain = kind is not None and _OF_ANY_TYPE.match(line, kind.end()) is not None
    carried = certain or (kind is not None and CARRIES.search(kind[1]) is not None)
    quote = next((start for start, end in _quotations(line) if start < at <= end), None)
    if quote is not None:
        named = _VALUE.search(line, max(0, quote - 40), quote) is not None
        if not named or (kind is not None and not carried):
            return "quoted"
        return "message" if carried or code in _RECORDS else "said"
    if kind is not None:
        text = line[kind.end() :]
        if at < kind.end() and kind[1].endswith("MemoryError") and text.strip() and not _OF_ALLOCATOR.search(text):
            return "said"
        head = _BRACKETS.sub("", line[kind.end() : at])
        whole = certain or _NATIVE.search(head) or not (_PROSE.search(head) or _OF_SERVER.search(head))
        return "message" if carried and whole and place != "elsewhere" else "said"
    if _NATIVE.search(line) or _COMMAND_ERROR.match(line[:at]):
        return "message"
    if code in (*_RECORDS, "disk-quota") and _SYSTEM.search(line[:at]):
        return "message"
    head = line[min(begin, at) : at]
    begins = not (_PROSE.search(head) or (_WORD.match(line, at) and _SENTENCE.search(head)))
    return "message" if begins and (code in _RECORDS or place == "below") else "said"


_MOST, _WITHIN = 200, 5000  # lines with a step that are kept, and lines in which they are sought
_STEP = re.compile(
    r"\d%\||\bit/s\b|\bs/it\b|\"POST \S+ HTTP/[\d.]+\" 2\d\d\b"
    r"|(?i:\b(?:epochs?|steps?|iter(?:ation)?s?|batch(?:es)?|loss|attempt|trial|run)\b\W{0,12}\d)"
    r"|(?:损失|損失|轮次|步数|ステップ|エポック|反復)\W{0,4}\d|第 ?\d+ ?(?:轮|步|批|エポック|ステップ|回)"
    r"|(?i:\b(?:resum|continu|restart)(?:ing|ed)\b.{0,20}\bfrom\b)"
)
_OF_ALL = re.compile(r"(?<![\w./])(\d{1,9})/(\d{1,9})(?![\w/]|\.\d)")
_NO_STEP = re.compile(
    r"(?i:\b(?:srun|slurmstepd|systemd\[\d+\]|kernel|kubelet): |error|exception|traceback|fail|kill|abort|wandb:)"
    r"|^\s+(?!\d+%\|)\S"
)
_BAR = re.compile(r"\d%\|.{0,300}?\b(\d+/\d+)\b")
_SUBJECT = r"(?:training|run|experiment|fit(?:ting)?|fine-?tuning|evaluation|job|task|request|prompt)"
_END = re.compile(
    rf"(?i:\b{_SUBJECT}\b.{{0,20}}\b(?:is )?(?:completed?|done|finished|successful(?:ly)?|succeeded|executed)\b"
    r"|\b(?:done|finished) (?:training|in [\d:.]+)|\bsuccessfully (?:finished|completed|trained)"
    r"|^\W*(?:\S+[\])|:>-] +)?(?:all |training )?(?:done|finished|completed?|success(?:ful)?(?:ly)?)\b\W*(?:$|[,;(:] ?)"
    r"|\b(?:saved|wrote|written|exported)\b.{0,60}\b(?:model|checkpoint|weights|\S+\.(?:pth?|ckpt|safetensors|onnx|h5|keras|pkl))\b"
    r"|\b(?:model|checkpoint) (?:was )?(?:saved|written)\b|\bbest (?:trial|config|checkpoint|model|epoch) ?[:=]"
    r"|'train_runtime':|^\W*train_runtime +=|\*+ (?:train|eval) metrics \*+"
    r"|\btrial \S+ (?:finished|completed?)\b|\b\d+ passed(?:, \d+ \w+)* in \d)"
    r"|(?i:\b(?:results?|metrics|report|predictions|scores|summary)\b.{0,20}\b(?:written|saved|exported)\b)"
    r"|(?:训练|实验|运行|评估)(?:已)?(?:完成|结束)|(?:学習|訓練|実験|評価)(?:が|は)?(?:完了|終了)|已保存|保存しました"
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
    counts: dict[str, int] = {}  # so many of that total were reported
    first = max(0, len(lines) - _WITHIN)
    for at, line in enumerate(lines[first:], start=first):
        number = len(lines) - at
        if (bar := _BAR.search(line)) is not None:
            if bar[1] in bars:
                continue  # drawn again when it is closed, also after an error
            bars.add(bar[1])
        counted = _OF_ALL.search(line, 0, 200)
        more = counted is not None and int(counted[1]) > counts.setdefault(counted[2], int(counted[1]))
        if number in failures or not (more or _STEP.search(line)) or _NO_STEP.search(line):
            continue
        if counted is not None:
            counts[counted[2]] = int(counted[1])
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

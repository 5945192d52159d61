"""Find failure messages, exceptions, tracebacks and steps in the end of a log, and which of them count.

A job that skips a batch after "CUDA out of memory" and fails with a ValueError an hour later did not run out of memory.
So if an exception ended the program, only lines in the tracebacks that led to it count. An exception that only reports
another process's exit or a timeout is a consequence: its cause is further up. There, messages that the program survived
(it reported many steps afterwards) do not count. After most signals no message counts: only signals that a failed
allocation can cause let messages decide.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from legroom.messages import say
from legroom.records.failure import Evidence, LogFacts, Role, Sign
from legroom.rescue.failure_message_patterns import CONSEQUENCE, NUMBERS, SHORTAGES, code_of, frame_code_of, start_of
from legroom.rescue.log_lines_without_failure import (
    CARRIES,
    Place,
    after_source,
    code_lines,
    end_of_run,
    is_mention,
    steps,
    without_quotations,
    worth,
)

KEEP = 4 << 20  # bytes of a log's end: 64 ranks that each print a long traceback fit
LONGEST = 4 << 10  # bytes from each end of a line that are examined; progress bars run to megabytes
_MOST_SIGNS = 2000
_MESSAGE_LINES = 15  # lines that the message of an exception may have
# Of these it matters whether the line is a message or only contains the words.
_WEIGHED = frozenset({*SHORTAGES, "fault"}) - {"worker-bus", "oom-handled"}
_HELD, _BEFORE = 2000, 500  # characters kept of a matching line, and of them before the match
_MOST_ERRORS = 200
_LONGEST_TRACEBACK = 2000  # lines
NEAR = 450  # lines from the end, and around an exception, that are searched
_NUMBER = re.compile(r"\d+")

_HEADER = re.compile(r"(?:Exception Group |Original )?Traceback \(most recent call last\)")
_KIND = r"(?:Error|Exception|Interrupt|Exit|Expired|Warning|Died|OutOfMemory\w*|Group)"
_SEE = r"(?: \(see above for traceback\))?"
_NAME = rf"(?:(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*{_KIND}|[A-Za-z_][\w.]*\.[A-Z]\w+)"
_ERROR = re.compile(rf"^\+?[ |]{{0,1}}({_NAME}){_SEE}(?::|$)")
# Without a traceback header: only names that certainly are exceptions, at the start or after a prefix.
_BARE_NAME = r"(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt)"
_BARE = re.compile(rf"({_BARE_NAME}){_SEE}(?:: |:?$)")
_USAGE = re.compile(r"^[\w./-]+: (error): (?:the following arguments are|unrecognized arguments|argument \S+:)")
_OF_ERRORS = ("Err", "Exc", "Interrupt", ": error: ")
_ANY_NAME = re.compile(r"^[A-Za-z_][\w.]*(?:: |:?$)")
_LINK = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# What another process or native code prints just before the exception it causes.
_FINAL_MESSAGES = frozenset({
    "fault", "assertion", "oom-kill", "oom-daemon", "worker-bus", "bus", "killed", "child-killed", "crash", "abort",
    "shm", "shm-other", "ended-by", "gpu-hint", "pinned",
})  # fmt: skip
_FOR_WORKERS = "[budget-too-small]"
_FROM_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d")
_REMOTE = re.compile(r"RemoteTraceback|DataLoader worker")
_IN_SCRIPT = re.compile(r'File "[^"<>]+", line \d+, in <module>')
_FRAME = re.compile(r'^\s+\S|^\s*File "|^\s*\^+$|^$')
_INSIDE = re.compile(r' {2}|File "|\^\^')


class LogTail:
    """The last bytes of a stream."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self.passed = 0  # bytes dropped

    def feed(self, data: bytes) -> None:
        """Append data, dropping the oldest."""
        self._chunks.append(data)
        self._held += len(data)
        while self._held - len(self._chunks[0]) >= self._keep:
            old = self._chunks.popleft()
            self._held -= len(old)
            self.passed += len(old)

    def bytes(self) -> bytes:
        """The bytes kept."""
        return b"".join(self._chunks)


class _Traceback(NamedTuple):
    start: int  # the header's line
    prefix: re.Pattern[str]  # prefix of each line: a rank, a time, a file
    ignored: bool


class _LoggedException(NamedTuple):
    name: str
    at: int
    start: int  # its first line


def facts_of(data: bytes, skipped: int = 0) -> LogFacts:
    """Failure messages, exceptions and reported steps in these bytes, the end of a log."""
    lines = _lines(data, skipped)
    count = len(lines)
    code = code_lines(lines)
    exceptions = _exceptions(lines, code)
    signs = _signs(lines, exceptions, code)
    by_number = {sign.number: sign for sign in signs}
    messages = {number: sign for number, sign in by_number.items() if sign.code != "advice"}  # no quotes of one
    errors = tuple(
        messages.get(count - exception.at) or _sign(exception.name, lines[exception.at], count - exception.at, 0)
        for exception in exceptions
    )
    chain = own = None
    if exceptions:
        own = count - exceptions[-1].start
        final = {sign.number for sign in signs if sign.code in _FINAL_MESSAGES}
        chain = count - _chain_start(lines, exceptions[-1].start, final)
    return LogFacts(
        signs=signs,
        last_error=errors[-1] if errors else None,
        chain_from=chain,
        own_from=own,
        errors=errors,
        raised_in=_raised_in(lines, exceptions[-1]) if exceptions else None,
        progress=steps(lines, by_number.keys()),
        done=None if (done := end_of_run(lines, code, NEAR)) is None else _sign("done", lines[-done], done, 0),
        lines=count,
        skipped=skipped,
    )


def _exceptions(lines: list[str], code: set[int]) -> list[_LoggedException]:
    """The exceptions, each with the line where its traceback begins."""
    exceptions: deque[_LoggedException] = deque(maxlen=_MOST_ERRORS)
    open_tracebacks: list[_Traceback] = []
    ignored = False
    for at, line in enumerate(lines):
        if "Traceback" in line and (header := _HEADER.search(line, 0, 400)):
            shape = _shape(line[: header.start()])
            open_tracebacks = [
                one
                for one in open_tracebacks
                if one.prefix.pattern != shape.pattern and at - one.start < _LONGEST_TRACEBACK
            ][-63:]
            open_tracebacks.append(_Traceback(at, shape, ignored))
            ignored = False
            continue
        if "Exception ignored in" in line or "--- Logging error ---" in line:
            ignored = True  # at interpreter exit, or in a log handler: this traceback ended nothing
            continue
        if at in code or (not open_tracebacks and not any(word in line for word in _OF_ERRORS)):
            continue
        name, owner = _exception(lines, at, open_tracebacks)
        if owner is not None:
            open_tracebacks.remove(owner)
        if owner is None and exceptions and _continues(exceptions[-1], lines, at):
            continue
        if name is not None and (owner is None or not owner.ignored):
            exceptions.append(_LoggedException(name, at, _frames_start(lines, at) if owner is None else owner.start))
    return list(exceptions)


def _continues(exception: _LoggedException, lines: list[str], at: int) -> bool:
    """Whether that line belongs to the message of the exception right above it, which quotes another one."""
    return exception.at == at - 1 and lines[at - 1].endswith((":", "：")) and not CARRIES.search(exception.name)


def _raised_in(lines: list[str], exception: _LoggedException) -> Role | None:
    """The process that raised that exception, where its traceback proves it.

    torch passes a worker's exception on with the worker's number. legroom.DataLoader refuses in the training process
    what its workers have no memory for. The training process's traceback begins in its script; that of a thread or of
    another child process does not.
    """
    if _FROM_WORKER.search(lines[exception.at]) or _FOR_WORKERS in lines[exception.at]:
        return "worker"
    if any(_REMOTE.search(line) for line in lines[max(0, exception.start - NEAR) : exception.at + 1]):
        return None  # passed on from a process pool
    first = next((line for line in lines[exception.start : exception.at] if 'File "' in line), "")
    return "main" if _IN_SCRIPT.search(first) else None


def _signs(lines: list[str], exceptions: list[_LoggedException], in_code: set[int]) -> tuple[Sign, ...]:
    """Failure messages near the end and near exceptions; the program survived any others."""
    count = len(lines)
    signs: deque[Sign] = deque(maxlen=_MOST_SIGNS)
    known: dict[
        tuple[bool, Place, str], tuple[str | None, bool]
    ] = {}  # lines of different ranks differ only in numbers
    done, below = 0, 0
    raised = {exception.at: exception.name for exception in exceptions}
    for begin, end in [
        *((exception.start - NEAR, exception.at + NEAR) for exception in exceptions),
        (count - NEAR, count),
    ]:
        for at in range(max(done, begin), min(end, count)):
            line = lines[at]
            if at in raised:
                below = at + _MESSAGE_LINES if CARRIES.search(raised[at]) else 0
            place: Place = "raised" if at in raised else "below" if at < below else "elsewhere"
            key = (at in in_code, place, _NUMBER.sub(_same, line))
            if key not in known:
                known[key] = (frame_code_of(line), False) if at in in_code else _message_code(line, place)
            code, said = known[key]
            if code in SHORTAGES and _of_another(lines, at):
                code = "advice"
            if code is not None:
                signs.append(_sign(code, line, count - at, start_of(code, line), said=said))
        done = max(done, min(end, count))
    return tuple(signs)


def _message_code(line: str, place: Place) -> tuple[str | None, bool]:
    """The code of a line, and whether it only says something about it; of a quote or a mention, None or ``advice``."""
    code = code_of(line)
    if code is None or code.startswith("frame-"):
        return code, False
    what = worth(line, code, start_of(code, line), place)
    if what == "quoted":
        line = without_quotations(line)
        if (code := code_of(line)) is None:
            return "advice", False
        what = worth(line, code, start_of(code, line), place)
    if is_mention(line, start_of(code, line)):
        return "advice", False
    return code, what == "said" and code in _WEIGHED


# A row of sacct, of kubectl get events, of kubectl get pods; why a container of kubectl describe ended.
_SUBJECT = re.compile(
    r"^\s*(\d+(?:_\d+)?)(?:[.+][^\s|]*)?[\s|].{0,99}\b(?:COMPLETED|FAILED|RUNNING|PENDING|CANCELLED|TIMEOUT|OUT_OF_ME|NODE_FAIL)"
    r"|\s((?:pod|node|job)/[\w.-]+)\s|^([a-z][\w.-]+)\s{2,}\d+/\d+\s{2,}[A-Z]"
    r"|^\s+\"?[Rr]eason\"?:\s+\"?(OOMKilled|Error)\b"
)
_ROWS = 60  # of one table, before and after a row


def _of_another(lines: list[str], at: int) -> bool:
    """Whether that line is a row of a table that names several jobs or pods: it does not show whose it is."""
    own = _SUBJECT.search(lines[at], 0, 400)
    if own is None or own.lastindex is None:
        return False
    kind = own.lastindex
    rows = (_SUBJECT.search(line, 0, 400) for line in lines[max(0, at - _ROWS) : at + _ROWS])
    return any(row is not None and row.lastindex == kind and row[kind] != own[kind] for row in rows)


def _same(number: re.Match[str]) -> str:
    return number[0] if number[0] in NUMBERS else "0"


def _sign(code: str, line: str, number: int, at: int, *, said: bool = False) -> Sign:
    begin = max(0, at - _BEFORE) if len(line) > _HELD else 0
    return Sign(code, line[begin : begin + _HELD].strip(), number, at - begin, said)


def _lines(data: bytes, skipped: int) -> list[str]:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # PowerShell's redirection
        data = data.decode("utf-16", "replace").encode()
    data = _ESCAPE.sub(b"", data) if b"\x1b" in data else data
    # A log of JSON objects has a traceback on one line, with escaped newlines.
    data = data.replace(rb"\r\n", b"\n").replace(rb"\n", b"\n") if rb"recent call last):\n" in data else data
    # A progress bar uses carriage returns: each state counts as a line.
    parts = re.split(rb"[\r\n]+", data)
    if skipped and len(parts) > 1:
        parts = parts[1:]  # the first line is incomplete
    return [_text(part) for part in parts if part]


def _text(part: bytes) -> str:
    if len(part) > 2 * LONGEST:
        part = part[:LONGEST] + b" ... " + part[-LONGEST:]
    try:
        return part.decode()
    except UnicodeDecodeError:
        # Chinese Windows uses its own code page; one character cut in half does not indicate that.
        text = part.decode("utf-8", "replace")
        if text.count("\ufffd") <= 2:
            return text
        return part.decode("gb18030", "replace")


def _shape(prefix: str) -> re.Pattern[str]:
    """A pattern for the prefix of a traceback's lines; its numbers may change."""
    prefix = re.sub(rf"(?:{_BARE_NAME}|Process \S+|Exception)\s*:?\s*$", "", prefix)  # an error that quotes a traceback
    if len(prefix) > 200:
        return re.compile("")
    if not prefix.strip(" +|"):  # indented, or in a group of exceptions
        return re.compile(re.escape(prefix).replace(r"\+", "[+|]"))
    return re.compile("[0-9a-fA-F]*".join(re.escape(part) for part in re.split(r"\d+", prefix.rstrip())) + " ?")


def _exception(lines: list[str], at: int, open_tracebacks: list[_Traceback]) -> tuple[str | None, _Traceback | None]:
    """The exception on that line and the traceback that it ends; (None, None) if there is none."""
    line = lines[at]
    for one in reversed(open_tracebacks):
        inside = one.prefix.match(line)
        if inside is None:
            continue
        rest = line[inside.end() :]
        if match := _ERROR.match(rest):
            return match[1], one
        above = one.prefix.match(lines[at - 1])
        frame = above is not None and lines[at - 1][above.end() :][:4] == "    "
        if frame and (match := _ANY_NAME.match(rest)):
            return match[0].rstrip(": "), one
        if one.prefix.pattern:
            return None, None  # a line of this traceback
    if match := _bare(line) or _USAGE.match(line):
        return match[1], None
    return None, None


def _bare(line: str) -> re.Match[str] | None:
    return _BARE.match(line, after_source(line))


def _frames_start(lines: list[str], at: int) -> int:
    """Where the frames above an exception begin, if the traceback header is missing."""
    start = at
    while start > 0 and at - start < 200 and _FRAME.match(lines[start - 1]):
        start -= 1
    return start


def _chain_start(lines: list[str], start: int, final: set[int]) -> int:
    """Where the first traceback of the chain begins that leads to the one at that line.

    Tracebacks belong together if a linking sentence joins them, or if no ordinary output is between them.
    """
    count = len(lines)
    inside = linked = False
    for at in range(start - 1, -1, -1):
        line = lines[at]
        if _HEADER.search(line, 0, 400):
            start, inside, linked = at, False, False
        elif inside:
            if not _INSIDE.search(line):
                break
        elif _LINK.search(line):
            linked = True  # the lines above may end a message of several lines
        elif _ERROR.match(line) or _bare(line):
            inside = True
        elif count - at in final:
            start = at  # another process's final message, right above
        elif not (linked or line.startswith("[rank")):
            break
    return start


_RSS = re.compile(r"Kill(?:ed)? process (\d+)(?:.*?anon-rss:(\d+)kB)?")
OOM_KILL = re.compile(r"Kill(?:ed)? process (\d+)|oom-kill:.*task_memcg=([^,]*),.*pid=(\d+)")


def killed_in(lines: Iterable[str]) -> dict[int, int | None]:
    """The processes killed according to these kernel log lines, each with its RSS if a line has it."""
    found: dict[int, int | None] = {}
    for line in lines:
        if match := _RSS.search(line):
            found[int(match[1])] = int(match[2]) * 1024 if match[2] else found.get(int(match[1]))
        elif match := OOM_KILL.search(line):
            found.setdefault(int(match[3]), None)
    return found


_SHOWN = 200  # characters shown of a log line
WINDOW = 400  # lines from the end in which a message without an exception counts
_WENT_ON = 10  # steps reported after a message: the program survived it
BEFORE_A_DEATH = 3  # the same, if a later line reports another kind of exit; fewer may be of other ranks or a buffer
_DEATHS = frozenset({"killed", "child-killed", "crash", "bus", "worker-bus", "ended-by", "oom-kill", "oom-daemon"})
_EXITS = _DEATHS | {"terminated", "abort", "worker-killed", "worker-crash", "worker-gone", "gone", "fault", "assertion"}
_POOLS = frozenset(SHORTAGES) - {"oom-kill", "oom-daemon"}  # what the program itself reports
# What a program writes about a shortage that it handles itself.
_TRIES_ON = re.compile(
    r"(?i)续行|继续|続行|重试|再試行|跳过|スキップ|改用|\busing \S+ instead\b"
    r"|\b(?:retrying|(?:will |to )(?:try again|retry)|trying (?:again|with)|skipp(?:ing|ed)|falling back|halving"
    r"|continuing|attempting to recover|(?<!try )reducing (?:the )?batch|keeping the)\b"
)
_CONTEXT = 40  # lines between an error and a frame or device name that belongs to it
_RIGHT_ABOVE = 4  # lines between a handled shortage and an exception that it may have caused
# Errors of the program's own code: none of them passes on what another exception reported.
OWN = re.compile(r"(?:Key|Index|(?:Unbound|Name)\w*|Attribute|Type|Import|ModuleNotFound|ZeroDivision|Assertion)Error$")
_SIGNALS_WITHOUT_MESSAGES = frozenset(
    {2, 4, 8, 9, 11, 15}
)  # INT, ILL, FPE, KILL, SEGV, TERM: no failed allocation ends with these
_TIMEOUT = re.compile(r"[Tt]ime(?:d )?-?out|TimeoutE|Pin memory thread exited|KeyboardInterrupt")


def quoted_line(sign: Sign) -> str:
    """A log line as evidence: its beginning, or the part around the match."""
    line = sign.line
    if sign.at > _SHOWN // 2 and len(line) > _SHOWN:
        line = "…" + line[sign.at - _SHOWN // 4 :]
    return say("log, line {number} from the end: {line}", number=sign.number, line=line[:_SHOWN])


@dataclass(frozen=True, slots=True)
class Signs:
    """The log messages that count."""

    counting: tuple[Sign, ...]
    decisive: Sign | None  # the exception that ended the program, if it is not a consequence
    ignores_messages: bool  # ended by a signal that no failed allocation causes
    origin: Sign | None = None  # the exception before the consequence, if a consequence ended it
    handled: Sign | None = None  # a shortage right above the decisive exception, a possible cause of it
    later_death: Sign | None = None  # reported after the decisive exception and a step or two: either may be the end
    went_on: Sign | None = None  # the last shortage after which the program went on
    doubted: bool = (
        False  # from a log alone: something follows the decisive shortage that a dead program does not print
    )

    @classmethod
    def of(cls, evidence: Evidence) -> Signs:
        """The messages that count in that evidence."""
        log, ending = evidence.log, evidence.ending
        near = tuple(sign for sign in log.signs if sign.number <= WINDOW)
        if ending is not None and ending.signal in _SIGNALS_WITHOUT_MESSAGES:
            return cls(near, None, ignores_messages=True)
        last = log.last_error
        if last is None or _is_consequence(last) or (ending is not None and ending.signal is not None):
            return cls._of_consequence(log, live=evidence.live)
        # An exception exits with a small status. After 128 + a signal, one step shows that the program survived it.
        steps = 1 if ending is not None and _signal_of_shell(ending.status) else BEFORE_A_DEATH
        if _died_later(log, last, steps) or (
            not evidence.live and last.code not in SHORTAGES and _survived(log, last, steps)
        ):
            return cls._of_consequence(log, steps, live=evidence.live)  # it was printed and the program continued
        after = 0 if evidence.live else steps_after(log, last)
        done = not evidence.live and _done_after(log, last)
        printed = not evidence.live and _printed_at_the_end(log, last)
        # After an exception that left the script: standard output that was held back, other ranks, a batch script.
        own = log.raised_in == "main"
        if (done and (after or not own)) or (last.code in _POOLS and after >= _outlived(log, last) and not own):
            return cls._of_consequence(log, steps)
        reach = log.chain_from or last.number
        other = last.code not in SHORTAGES
        if other and not evidence.live and OWN.match(last.code):
            reach = log.own_from or reach  # raised while the program handled what is above
        counting = tuple(sign for sign in log.signs if sign.number <= reach and not (other and sign.said))
        later = None
        if last.code in SHORTAGES and not evidence.live:
            later = _death_after(log, last, _DEATHS, 1)
            if later is None and log.raised_in is None and log.own_from != last.number:
                later = _death_after(log, last, frozenset({"ended-by"}), 0)  # no script ended at this traceback
        return cls(
            counting, last, ignores_messages=False, handled=_right_above(log, reach), later_death=later,
            doubted=last.code in _POOLS and bool(after or done or printed),
        )  # fmt: skip

    @classmethod
    def _of_consequence(cls, log: LogFacts, steps: int = BEFORE_A_DEATH, *, live: bool = False) -> Signs:
        own = [error for error in log.errors if not _is_consequence(error) and not _survived(log, error, steps)]
        own = [error for error in own if not _went_on(log, error, live=live)]
        if not live and log.last_error is not None and _done_after(log, log.last_error):
            own = [error for error in own if not _done_after(log, error)]
        reach = max([WINDOW, *(error.number + WINDOW for error in own)])
        counting = tuple(sign for sign in log.signs if sign.number <= reach and not _survived(log, sign, steps))
        went_on = [sign for sign in log.signs if _went_on(log, sign, live=live)]
        ended = {sign.number for sign in went_on}
        counting = tuple(sign for sign in counting if sign.number not in ended)
        return cls(
            counting, None, ignores_messages=False, origin=own[-1] if own else None,
            went_on=went_on[-1] if went_on else None,
        )  # fmt: skip

    def first(self, *codes: str) -> Sign | None:
        """The first line that counts with one of these codes: the earliest is nearest to the cause."""
        return next((sign for sign in self.counting if sign.code in codes), None)

    def text(self, *codes: str) -> Sign | None:
        """The same; None if messages are ignored for this signal."""
        return None if self.ignores_messages else self.first(*codes)


def context(evidence: Evidence, sign: Sign, *codes: str) -> Sign | None:
    """A line near that message with one of these codes, which shows where it comes from."""
    near = (one for one in evidence.log.signs if one.code in codes)
    return next((one for one in near if abs(one.number - sign.number) <= _CONTEXT), None)


def _is_consequence(error: Sign) -> bool:
    return bool(CONSEQUENCE.search(error.line) or _TIMEOUT.search(error.line))


def _signal_of_shell(status: int | None) -> bool:
    """Whether that exit status is a shell's for a process that a signal ended which no failed allocation causes."""
    return status is not None and status - 128 in _SIGNALS_WITHOUT_MESSAGES


def _survived(log: LogFacts, sign: Sign, steps: int = BEFORE_A_DEATH) -> bool:
    """Whether the program continued after that line."""
    return _died_later(log, sign, steps) or sum(number < sign.number for number in log.progress) >= _WENT_ON


def steps_after(log: LogFacts, sign: Sign) -> int:
    return sum(number < sign.number for number in log.progress)


def _done_after(log: LogFacts, sign: Sign) -> bool:
    return log.done is not None and log.done.number < sign.number


def _printed_at_the_end(log: LogFacts, error: Sign) -> bool:
    """Whether that line has no traceback and the run had ended: it may be a sample, or a model's answer."""
    if log.own_from != error.number or log.done is None or log.done.number < error.number:
        return False
    return not any(error.number < number < log.done.number for number in log.progress)


def _went_on(log: LogFacts, sign: Sign, *, live: bool) -> bool:
    """Whether the program went on after that shortage, and no later line reports an exit.

    The line itself says so, or a step or the end of the run follows. The latter counts in a log alone: the last
    lines of a program that is known to have failed are held-back output or of other ranks.
    """
    of_program = sign.code in _POOLS
    if not of_program and (live or sign.code not in SHORTAGES):
        return False
    exits = (error.number for error in log.errors if error.code not in (_POOLS if of_program else SHORTAGES))
    kinds = _EXITS if of_program else _EXITS - set(SHORTAGES)
    deaths = (one.number for one in log.signs if one.code in kinds)
    exit_at = max((number for number in (*exits, *deaths) if number < sign.number), default=0)
    if exit_at and live:
        return False
    if _TRIES_ON.search(sign.line):
        return True
    return not live and _goes_on_below(log, sign, exit_at)


def _recorded(sign: Sign) -> bool:
    """Whether a kernel, a scheduler or a daemon reports it: the process is dead, the others may go on for a while."""
    return sign.code not in _POOLS and not sign.said


def _outlived(log: LogFacts, sign: Sign) -> int:
    """So many steps after that line show that the program went on: one, or more after a traceback."""
    error = _recorded(sign) or any(one.number == sign.number for one in log.errors)
    printed = log.last_error is not None and log.last_error.number == sign.number == log.chain_from
    return BEFORE_A_DEATH if error and not printed else 1


def _goes_on_below(log: LogFacts, sign: Sign, exit_at: int) -> bool:
    """Whether the program went on after that line, before the exit at that line."""
    between = sum(exit_at < number < sign.number for number in log.progress)
    done = log.done is not None and exit_at < log.done.number < sign.number
    return done or between >= (_WENT_ON if exit_at and _recorded(sign) else _outlived(log, sign))


def _died_later(log: LogFacts, sign: Sign, steps: int = BEFORE_A_DEATH) -> bool:
    """Whether the program continued and a later line reports another kind of exit.

    So many steps between them suffice, or that the line itself says that the shortage was handled.
    """
    if sign.code in _DEATHS:
        return False
    handled = sign.code in SHORTAGES and _TRIES_ON.search(sign.line) is not None
    deaths = _DEATHS | {"terminated"} if handled or steps < BEFORE_A_DEATH else _DEATHS
    return _death_after(log, sign, deaths, 0 if handled else steps) is not None


def _death_after(log: LogFacts, sign: Sign, deaths: frozenset[str], steps: int) -> Sign | None:
    """The last line that reports another kind of exit, if so many steps or more are between it and that line."""
    death = next((one for one in reversed(log.signs) if one.code in deaths), None)
    if death is None or death.number >= sign.number:
        return None
    return death if sum(death.number < number < sign.number for number in log.progress) >= steps else None


def _right_above(log: LogFacts, reach: int) -> Sign | None:
    alive = (*log.progress, log.done.number if log.done else 0)
    above = [
        sign
        for sign in log.signs
        if reach < sign.number <= reach + _RIGHT_ABOVE and sign.code in SHORTAGES
        if not sign.said or sign.at <= after_source(sign.line)
        if not any(reach <= number < sign.number for number in alive)
    ]
    return above[-1] if above else None


_NAMED = re.compile(r"""['"](/[^'"]{1,400})['"]|(?<![\w./])(/[\w.@+=-]+(?:/[\w.@+=-]+)*)""")
_MOST_NAMED = 8


def named_paths(log: LogFacts) -> tuple[str, ...]:
    """The paths that its messages about a full disk name, the last ones."""
    lines = (sign.line for sign in log.signs if sign.code.startswith("disk") and 'File "' not in sign.line)
    paths = (found[1] or found[2] for line in lines for found in _NAMED.finditer(line))
    return tuple(dict.fromkeys(path for path in paths if not path.startswith("/dev/")))[-_MOST_NAMED:]

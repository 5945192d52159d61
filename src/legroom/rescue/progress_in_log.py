"""What a log reports of a run that goes on: training steps, and the end of a run that did what it should. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

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

"""A command line of which only the shape is left.

Covers: the program, its script, the names of its options and their numbers. Does not cover: finding secrets in free
text (redact.py); here nothing is looked for, only what is known to be harmless is kept.
"""

from __future__ import annotations

import re
from itertools import pairwise

_KEPT = re.compile(r"-{1,2}[A-Za-z][\w.-]*|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SCRIPT = re.compile(r"(?:.*[/\\])?([\w-]+\.py)", re.DOTALL)
_NUMBERED = re.compile(r"(-{1,2}[A-Za-z][\w.-]*)=(-?\d+(?:\.\d+)?)")
_OPTION = re.compile(r"(-{1,2}[A-Za-z][\w.-]*)=.*", re.DOTALL)
_SECRETIVE = re.compile(r"pass|pwd|token|secret|key|auth|pin|code", re.IGNORECASE)
_LONGEST = 40  # words: enough for the flags of any training


def shape_of(command: str) -> str:
    """``/home/me/bin/python train.py --data /x --batch 32`` as ``python train.py --data … --batch 32``."""
    words = command.split()
    if not words:
        return command
    kept = [re.split(r"[/\\]", words[0])[-1]]
    kept += [_kept(last, word) for last, word in pairwise(words[:_LONGEST])]
    return " ".join((*kept, "…") if len(words) > _LONGEST else kept)


def _kept(last: str, word: str) -> str:
    if last.startswith("-") and "=" not in last and _SECRETIVE.search(last) and not word.startswith("--"):
        return "…"
    if numbered := _NUMBERED.fullmatch(word):
        return f"{numbered[1]}=…" if _SECRETIVE.search(numbered[1]) else word
    if option := _OPTION.fullmatch(word):
        return f"{option[1]}=…"
    if script := _SCRIPT.fullmatch(word):
        return script[1]
    return word if _KEPT.fullmatch(word) else "…"

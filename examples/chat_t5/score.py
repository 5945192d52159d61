"""How good answers are: the share that is exactly right, and the overlap of their words with the right ones.

Covers: both sums, so that ranks can add theirs up. Does not cover: making answers (chat.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

LONGEST = 4  # n-grams of one to four words
COUNTS = 2 + 2 * LONGEST + 2  # of ``counts``


def counts(pairs: Iterable[tuple[str, str]]) -> list[float]:
    """Sums over (answer, right answer): rows, exact ones, n-grams in common and in all, lengths of both."""
    rows = exact = made = wanted = 0
    common, total = [0] * LONGEST, [0] * LONGEST
    for answer, right in pairs:
        rows, exact = rows + 1, exact + (answer == right)
        ours, theirs = answer.split(), right.split()
        made, wanted = made + len(ours), wanted + len(theirs)
        for size in range(1, LONGEST + 1):
            found, known = (Counter(zip(*(words[at:] for at in range(size)), strict=False)) for words in (ours, theirs))
            common[size - 1] += (found & known).total()
            total[size - 1] += found.total()
    return [rows, exact, *common, *total, made, wanted]


def scores(sums: list[float]) -> tuple[float, float]:
    """(share of exact answers, BLEU) of such sums, both between 0 and 1."""
    rows, exact, made, wanted = sums[0], sums[1], sums[-2], sums[-1]
    common, total = sums[2 : 2 + LONGEST], sums[2 + LONGEST : -2]
    if not rows:
        return 0.0, 0.0
    # Sizes of which there is not one n-gram, because all answers are shorter, say nothing.
    shares = [right / of for right, of in zip(common, total, strict=True) if of]
    if not shares or not all(shares):
        return exact / rows, 0.0
    short = min(1.0, math.exp(1 - wanted / made))
    return exact / rows, short * math.exp(sum(map(math.log, shares)) / len(shares))

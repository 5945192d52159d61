"""Which batch to try next: the search, as a pure function of the trials made so far.

Covers: the first sizes, the line through what was measured, the step near the top, closing in after a failure, when to
stop. Does not cover: trying anything (meter_cuda.py, meter_host.py), ranks (finder.py).

Memory at the peak grows linearly with the batch. Two small trials give the line and the line gives the top; but what
the allocator really needs is a little more than what is allocated. So the answer is always a batch that was tried, and
the search closes in on the border between what fits and what does not until they are 2 % apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from legroom.model.gpu import Trial

MOST_TRIALS = 6
_FIRST = 2  # batch norm refuses a single sample
_EARLY = 0.4  # the second trial goes this far towards the cap by what the first one says alone
# Allocators cut memory into pieces: of three trainings on an H200 the fullest got 0.88, 0.93 and 0.94 of the cap out.
_SHARES = (0.92, 0.88, 0.85, 0.8)  # of the cap that the peak is aimed at: first, and after each failure there
_HOST_TOP = 0.985
_UP = 0.65  # of the way to the top, where the first of them fitted
_WORTH_A_TRIAL = 1.05  # times what fits already: less is not worth one of six
_ELASTIC = 1.2  # times the top: tried where a step that reached it had to make room and could
_FAR = 8  # a line is drawn from too little beyond this many times the largest batch measured:
_SHORT_OF_TOP = 0.9  # it is made better from here first,
_CAREFUL_FAR, _CAREFUL_SHORT = 1.4, 0.8  # the same where memory is only roughly a line
_BEYOND_FALL = 2  # times the largest batch: so far proportion is sure, where memory fell with it
_LINE_WAS_WRONG = 0.6  # and left, where it fails twice
_CLOSE = 0.02
_APART = 0.7  # points closer together than this do not make a line: noise would
_GROWTH = 256


def next_batch(
    trials: Sequence[Trial], cap: int, most: int | None = None, *, rough: bool = False
) -> int | None:
    """The batch to try next, None when there is nothing left to learn; ``cap`` is what the peak may reach.

    ``rough``: the host's malloc keeps or returns what was freed as it sees fit, so a line is no more than a hint.
    """
    if not trials:
        return _FIRST if most is None else min(_FIRST, most)
    low = largest(trials)
    high = min((trial.batch for trial in trials if not trial.fits), default=None)
    if low == 0:
        return None if high == 1 or len(trials) >= MOST_TRIALS else max(1, (high or 2) // 2)
    if len(trials) >= MOST_TRIALS or low == most:
        return None
    wanted = _upwards(trials, low, cap, rough) if high is None else _between(trials, low, high, cap)
    if wanted is None:
        return None
    wanted = max(low + 1, wanted)
    return wanted if most is None else min(wanted, most)


def largest(trials: Sequence[Trial]) -> int:
    """The largest batch that fitted; 0: none did."""
    return max((trial.batch for trial in trials if trial.fits), default=0)


def line(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """(fixed, per sample) of the line through the largest batch and the next that is well below it."""
    known = sorted({trial.batch: trial.peak for trial in trials if trial.peak is not None}.items())
    if len(known) < 2:
        return None
    top, peak = known[-1]
    lower = [point for point in known[:-1] if point[0] <= _APART * top] or known[:1]
    batch, at = lower[-1]
    slope = (peak - at) / (top - batch)
    return peak - slope * top, slope


def _top(trials: Sequence[Trial], cap: int, share: float = 1.0) -> float | None:
    """The batch at which the line meets that share of the cap; None: there is no line, or it does not rise."""
    found = line(trials)
    if found is None or found[1] <= 0:
        return None
    fixed, slope = found
    return max(1.0, (share * cap - fixed) / slope)


def _is_line(trials: Sequence[Trial]) -> bool:
    """Whether the line's fixed part can be one: not below nothing, not above what the least of the trials took.

    glibc keeps what was freed of blocks up to 32 MB in its heap, with holes, and maps larger ones by themselves. Where
    the batch brings a model's blocks over that border a larger batch takes less: on a CPU 330 MB at 60 samples and 174
    at 66. A line through both sides says nothing.
    """
    fixed, _ = line(trials) or (-1.0, 0.0)
    return 0 <= fixed <= min(trial.peak for trial in trials if trial.peak is not None)


def _in_proportion(trials: Sequence[Trial], low: int, cap: int) -> float:
    """The batch at which ``low``'s own bytes a sample meet the cap: sure wherever there is any fixed part."""
    return low * cap / max(1, next(trial.peak or 1 for trial in trials if trial.batch == low))


def _fell(trials: Sequence[Trial], low: int) -> bool:
    """Whether the largest batch took less than a smaller one: its blocks are beyond the border, as larger ones are."""
    peaks = {trial.batch: trial.peak or 0 for trial in trials if trial.fits}
    return peaks[low] < max(peaks.values())


def _upwards(trials: Sequence[Trial], low: int, cap: int, rough: bool) -> int | None:
    """Nothing has failed yet."""
    top = _top(trials, cap)
    if rough and len(trials) > 1 and not _is_line(trials):
        top = _in_proportion(trials, low, cap)
    if top is None:
        if len(trials) > 1:  # more samples, no more memory
            return low * _FAR
        only = next(trial for trial in trials if trial.fits)
        steady, peak = only.steady or 0, only.peak or 0
        each = max(1.0, (peak - steady) / low)  # work space that does not grow is laid on the samples too
        return int(min(max(low * 2, _EARLY * (cap - steady) / each), low * _GROWTH))
    if top - low <= max(1.0, _CLOSE * top):
        if _made_room(trials, low):
            return int(top * _ELASTIC)
        # One sample more may still fit: a few samples are a large share of a small batch.
        return low + 1 if top >= low + 1 and low < 1 / _CLOSE else None
    far, short = (_CAREFUL_FAR, _CAREFUL_SHORT) if rough else (_FAR, _SHORT_OF_TOP)
    if top > far * low and not (rough and _fell(trials, low) and top <= _BEYOND_FALL * low):
        return int(top * short)
    if (
        rough
    ):  # there a trial that fails is a process that dies: one step, and only as far as the line is sure
        return int(top * _HOST_TOP)
    near = int(_top(trials, cap, _SHARES[0]) or top)
    return near if near > _WORTH_A_TRIAL * low else int(low + _UP * (top - low))


def _made_room(trials: Sequence[Trial], low: int) -> bool:
    """Whether the largest step fitted by flushing the allocator's cache, at the top of the line or beyond.

    cuDNN takes the fastest way for which there is work space. Convolutions without TF32 on an H200 took 22 MB a sample
    up to 300 samples, which is where the line ends, and 16 MB at 375, which fitted too: the line is one of comfort.
    """
    return any(trial.fits and trial.retries and trial.batch == low for trial in trials)


def _between(trials: Sequence[Trial], low: int, high: int, cap: int) -> int | None:
    """Something failed at ``high`` and ``low`` fits."""
    if high - low <= max(1.0, _CLOSE * high):
        return None
    if low >= 0.85 * high:
        return (low + high) // 2
    top = _top(trials, cap)
    if top is None:  # a single point: halfway, in ratios
        return min(high - 1, int((low * high) ** 0.5))
    failures = sum(1 for trial in trials if not trial.fits)
    if failures > 1 and high > _FAR * low:
        return int(high * _LINE_WAS_WRONG)
    aimed = int(_top(trials, cap, _SHARES[min(failures, len(_SHARES) - 1)]) or top)
    if (
        aimed <= low
    ):  # more has fitted than was aimed at: the line itself is trusted, where it ends short of the failure
        aimed = int(top * _HOST_TOP)
        aimed = aimed if low < aimed < high * _HOST_TOP else (low + high) // 2
    return min(high - 1, aimed)

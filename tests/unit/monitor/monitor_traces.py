"""Use of a pool over time as training runs cause it: leaks that kill, and warm-ups that are healthy. Seeded, with noise.

Each is a list of bytes used, one a sample, of a pool of SIZE; a leak's ends where the pool is full.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

SIZE = 8 << 30
Course = list[float]


def _noisy(rng: random.Random, shares: Course) -> Course:
    """Noise of up to 1.5 % of the pool, now and then a spike of 3 %."""
    noise = rng.uniform(0.0005, 0.015)
    spiky = rng.random() < 0.3
    out = []
    for share in shares:
        share += rng.uniform(-noise, noise)
        if spiky and rng.random() < 0.02:
            share += 0.03
        out.append(max(0.0, share) * SIZE)
    return out


def leak(seed: int) -> Course:
    """A warm-up, then an even leak, with garbage collected on top in some; full after 2 to 40 minutes."""
    rng = random.Random(seed)
    base = rng.uniform(0.05, 0.5)
    warm = rng.randrange(10, 120)
    tau = warm / rng.uniform(2, 5)
    shares = [base * (1 - math.exp(-t / tau)) for t in range(warm)]
    lasts = rng.choice([rng.randrange(120, 300), rng.randrange(300, 2400)])
    saw = rng.choice([0.0, 0.0, rng.uniform(0.01, 0.05)])
    period = rng.randrange(5, 20)
    stairs = rng.choice([1, 1, rng.randrange(2, max(3, lasts // 40))])  # lost at the end of each epoch, say
    level = shares[-1]
    rate = (1 - level) / lasts
    for t in range(lasts + 60):
        shares.append(level + rate * (t // stairs * stairs) + saw * (t % period) / period)
    course = _noisy(rng, shares)
    dead = next((place for place, used in enumerate(course) if used >= SIZE), len(course))
    return course[:dead]


def saturating(rng: random.Random) -> Course:
    """Caches that fill towards a level."""
    top, tau = rng.uniform(0.2, 0.9), rng.uniform(10, 300)
    return [top * (1 - math.exp(-t / tau)) for t in range(1500)]


def workers_starting(rng: random.Random) -> Course:
    """One worker after another takes its share."""
    count, gap = rng.randrange(2, 17), rng.randrange(1, 12)
    each, base = rng.uniform(0.2, 0.7) / count, rng.uniform(0.02, 0.15)
    return [base + each * min(count, t // gap) for t in range(1200)]


def collected(rng: random.Random) -> Course:
    """Garbage that piles up and is collected."""
    base, height, period = rng.uniform(0.1, 0.3), rng.uniform(0.1, 0.5), rng.randrange(8, 240)
    return [base + height * (t % period) / period * rng.uniform(0.97, 1.0) for t in range(1500)]


def first_epoch(rng: random.Random) -> Course:
    """The first epoch reads everything into a cache, evenly; later ones find it there."""
    base, top, lasts = rng.uniform(0.02, 0.3), rng.uniform(0.3, 0.65), rng.randrange(40, 900)
    return [base + max(0.0, top - base) * min(1.0, t / lasts) for t in range(1500)]


def validating(rng: random.Random) -> Course:
    """A second dataset comes in for a while, again and again, after a warm-up."""
    base, more = rng.uniform(0.2, 0.5), rng.uniform(0.1, 0.35)
    every, lasts = rng.randrange(60, 300), rng.randrange(10, 50)
    rise = rng.randrange(1, lasts)
    return [
        base * (1 - math.exp(-t / 15)) + (more * min(1.0, (t % every) / rise) if t % every < lasts and t > every else 0)
        for t in range(1500)
    ]


def flat(rng: random.Random) -> Course:
    """Nearly full, and staying there: caches of an allocator, a level and no trend."""
    base = rng.uniform(0.3, 0.93)
    return [base + 0.01 * math.sin(t / rng.uniform(20, 21)) for t in range(1500)]


HEALTHY: tuple[Callable[[random.Random], Course], ...] = (
    saturating,
    workers_starting,
    collected,
    first_epoch,
    validating,
    flat,
)


def healthy(kind: Callable[[random.Random], Course], seed: int) -> Course:
    """One of that kind, with noise."""
    rng = random.Random(seed)
    return _noisy(rng, kind(rng))

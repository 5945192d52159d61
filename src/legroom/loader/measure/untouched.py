"""Random numbers as if nobody had drawn: a measurement must not change what a seeded training does.

Covers: the global generators of random, numpy and torch's CPU. Does not cover: generators a dataset owns, CUDA's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Put the generators back as they were."""
    import torch

    numpy = sys.modules.get("numpy")
    plain, tensors = random.getstate(), torch.get_rng_state()
    arrays = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(plain)
        torch.set_rng_state(tensors)
        if numpy:
            numpy.random.set_state(arrays)

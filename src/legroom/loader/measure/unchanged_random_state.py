"""The program's random numbers after a measurement are those that it would have drawn without one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the global generators of random, numpy and torch's CPU afterwards.

    A measurement must not change what a seeded run computes. Generators that a dataset owns, and CUDA's, are not
    covered.
    """
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

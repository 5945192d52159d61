"""The end of a dataset that is iterated over, noticed in the worker that came to it.

Covers: telling that a worker's share is over, before or within its first batch. Does not cover: what follows from it
(arena/door.py).

torch asks a worker's dataset for one iterator, right after ``worker_init_fn``, and tells the end of it to nobody but
the main process, which goes on to wait for the next worker. So that one iterator is watched: the class's ``__iter__``
is another for this one call, in this process, and itself again after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Ending:
    """An iterator that says when it is over, and whether it had given anything."""

    def __init__(self, samples: Iterator[Any], over: Callable[[bool], None]) -> None:
        self._samples, self._over, self._given = samples, over, False

    def __iter__(self) -> Ending:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            self._over(self._given)
            raise
        self._given = True
        return sample


def watch_end(dataset: Any, over: Callable[[bool], None]) -> None:
    """Call ``over`` when the next iterator of the dataset ends, with whether it gave a sample.

    A class that cannot be changed is left alone: then nobody is told.
    """
    kind = type(dataset)
    own = kind.__dict__.get("__iter__")

    def once(self: Any) -> Any:
        if self is not dataset:
            return plain(self)
        _put_back(kind, own)
        return Ending(iter(dataset), over)

    try:
        plain = kind.__iter__
        kind.__iter__ = once
    except (AttributeError, TypeError):
        return


def _put_back(kind: Any, own: Any) -> None:
    if own is None:
        del kind.__iter__
    else:
        kind.__iter__ = own

"""One pass over a loader.

Covers: taking batches from torch's iterator and opening them, progress, deaths, the end. Does not cover: making torch's
iterator (dataloader.py).

Ownership: torch's iterator owns the worker processes and ends them when it dies, and it dies with this. The loader
holds neither, so a loop that is left with ``break`` ends its workers as torch's own does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from legroom.errors import BudgetTooSmall
from legroom.loader.arena import inbox as arena_inbox
from legroom.loader.arena.door import Door
from legroom.loader.arena.inbox import Parcel, Pinner, unopened
from legroom.loader.arena.pin import pinned
from legroom.loader.deaths import Crew
from legroom.loader.progress import Progress, Scattered
from legroom.loader.rejoin import NOTHING
from legroom.loader.torch_internals import dataset_ended, release_frames


class Epoch:
    """An iterator over batches.

    What it does not do itself is done by torch's iterator inside: to other code it is one of torch's, with
    ``_workers`` and all, also for ``isinstance``.
    """

    def __init__(
        self,
        inner: Iterator[Any],
        crew: Crew | None,
        progress: Progress,
        pinner: Pinner | None,
        tell: Callable[[str], None],
        *,
        lasting: bool,
        door: Door | None = None,
        scattered: Scattered | None = None,
    ) -> None:
        self._inner, self._crew, self._progress, self._pinner = inner, crew, progress, pinner
        self._tell, self._door = tell, door
        self._scattered = scattered  # who knows which batch came, where they come out of order
        self._lasting = lasting  # the workers outlive this pass
        self._pid = os.getpid()
        if crew is not None:
            arena_inbox.lives_with(inner, crew.pids)

    def __iter__(self) -> Epoch:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # it is not there yet, or no longer
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return partial(self._shut_down, found) if name == "_shutdown_workers" else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._inner.__reduce_ex__(protocol)  # torch's error

    def _shut_down(self, workers: Callable[[], None]) -> None:
        self._let_go()
        workers()
        arena_inbox.sweep()

    def _let_go(self) -> None:
        """Hold up no worker that waits to start."""
        if self._door is not None:
            self._door.close()

    def __next__(self) -> Any:
        item = self._take()
        self._progress.gave(None if self._scattered is None else self._scattered.gone())
        if self._crew is None:
            self._progress.ended = dataset_ended(self._inner)
        if not isinstance(item, Parcel):
            return item if self._pinner is None else pinned(item)
        if item.note is not None:
            self._tell(item.note)
        self._progress.heard(item.state)
        batch = item.open(self._pinner)
        return batch if self._pinner is None else pinned(batch)

    def skip(self, batches: int) -> None:
        """Produce so many batches and drop them; they have been given out before."""
        for _ in range(batches):
            try:
                self._take()
            except StopIteration:
                return

    def _take(self) -> Any:
        door, self._door = self._door, None  # it is there for the first batch alone
        try:
            with unopened():
                item = next(self._inner)
                while item is NOTHING:  # it only kept a turn
                    item = next(self._inner)
                return item
        except StopIteration:
            self._progress.over = True
            arena_inbox.sweep()
            raise
        except Exception as problem:
            if self._scattered is not None:
                self._scattered.gone()  # it failed, and was not given out
            release_frames(
                problem
            )  # else the workers live until garbage is collected, and are waited for in vain
            better = self._better(problem, door)
            if better is None:
                raise
            try:
                raise better from (None if isinstance(better, BudgetTooSmall) else problem)
            finally:
                del better  # for the same reason
        finally:
            if door is not None:
                door.open()

    def _better(self, problem: Exception, door: Door | None) -> Exception | None:
        """An error that says more: why there is no room, or what a worker died of."""
        # The first worker refuses by this error, by a MemoryError while it draws, or by ending itself.
        if door is not None and (refusal := door.refusal()) is not None:
            return refusal
        if isinstance(problem, RuntimeError) and self._crew is not None:
            return self._crew.died(problem)
        return None

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():  # torch ends the workers then
            return
        crew = getattr(self, "_crew", None)
        if crew is None or self._lasting or os.getpid() != self._pid:
            return
        self._let_go()
        del self._inner  # ends the workers

"""Things made once a process for some arrays, kept for as long as the arrays are.

Covers: sharing between several gatherers, and when the thing is dropped. Does not cover: what it is (a registered map,
a copy on the card).

Registering takes 46 ms a GB and copying longer; a loop that makes new batches every epoch shall pay once. So a thing
lives while anybody uses it or any array it was made for lives, and is dropped after both: by whoever lets go last. At
the end of the interpreter and in forked children nothing is done: the first has no one left who could wait for the
GPU, the second never owned it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Kept:
    thing: Any
    drop: Callable[[Any], None]
    pid: int = field(default_factory=os.getpid)
    users: int = 0
    arrays: set[int] = field(default_factory=set)
    dropped: bool = False


class Use(Generic[T]):
    """Somebody's hold on a thing; letting go twice is letting go once."""

    __slots__ = ("_let_go", "thing")

    def __init__(self, thing: T, let_go: Callable[[], None]) -> None:
        self.thing = thing
        self._let_go: Callable[[], None] | None = let_go

    def release(self) -> None:
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class Keep:
    """The things of this process, by key."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}
        # Arrays may die, and finalizers run, wherever this thread is: also inside the lock.
        self._lock = threading.RLock()

    def use(self, key: Hashable, array: Any, make: Callable[[], T], drop: Callable[[T], None]) -> Use[T]:
        """The thing of that key, made where it is not there yet."""
        with self._lock:
            while True:
                kept = self._kept.get(key)
                if kept is None or kept.pid != os.getpid():  # what a parent made is the parent's
                    kept = self._kept[key] = _Kept(make(), drop)
                kept.users += 1
                if not kept.dropped:  # else a finalizer ran between the lines above
                    break
            if id(array) not in kept.arrays:
                kept.arrays.add(id(array))
                weakref.finalize(array, self._died, key, kept, id(array)).atexit = False
            thing: T = kept.thing
        return Use(thing, partial(self._leave, key, kept))

    def __contains__(self, key: Hashable) -> bool:
        kept = self._kept.get(key)
        return kept is not None and kept.pid == os.getpid()

    def __len__(self) -> int:
        return len(self._kept)

    def _leave(self, key: Hashable, kept: _Kept) -> None:
        with self._lock:
            kept.users -= 1
            self._drop_if_idle(key, kept)

    def _died(self, key: Hashable, kept: _Kept, array: int) -> None:
        with self._lock:
            kept.arrays.discard(array)
            self._drop_if_idle(key, kept)

    def _drop_if_idle(self, key: Hashable, kept: _Kept) -> None:
        if kept.users == 0 and not kept.arrays and not kept.dropped and kept.pid == os.getpid():
            kept.dropped = True
            del self._kept[key]
            kept.drop(kept.thing)


KEEP = Keep()

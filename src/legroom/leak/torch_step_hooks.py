"""Count the steps of torch: optimizer.step, batches of a DataLoader, batches that a DataLoader worker makes.

The optimizer has a public hook. Batches are counted by replacing private methods of torch's DataLoader; where a version
of torch does not have them, only the optimizer's steps are seen.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

Count = Callable[[str], None]


class TorchSteps:
    """Reports each step to ``count`` with its source: optimizer, loader or worker."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._undo: list[Callable[[], None]] = []
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps of each
        self._leader: weakref.ref[Any] | None = None  # the one with the most steps
        self.installed = False

    def install(self, *, imported: bool = False) -> bool:
        """Install the hooks if torch has been imported completely (``imported``: it has); whether they are there."""
        torch: Any = sys.modules.get("torch")
        spec = getattr(torch, "__spec__", None)
        if self.installed or torch is None or (not imported and getattr(spec, "_initializing", False)):
            return self.installed
        self.installed = True
        for add in (self._optimizer, self._loader, self._workers):
            try:
                add()
            except (ImportError, AttributeError):  # another version of torch
                continue
        return True

    def remove(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.installed = False

    def _optimizer(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        handle = register_optimizer_step_post_hook(self._optimizer_stepped)
        self._undo.append(handle.remove)

    def _optimizer_stepped(self, optimizer: Any, *_: object) -> None:
        """Two optimizers of one loop are one step: the one with the most steps counts, as long as it exists."""
        leader = self._leader() if self._leader is not None else None
        most = self._optimizers.get(leader, 0) if leader is not None else max(self._optimizers.values(), default=0)
        steps = self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
        if steps > most:
            self._leader = weakref.ref(optimizer)
            self._count("optimizer")

    def _loader(self) -> None:
        from torch.utils.data import dataloader

        self._wrap(dataloader._BaseDataLoaderIter, "__next__", "loader")

    def _workers(self) -> None:
        from torch.utils.data._utils import fetch

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._replace(kind, "fetch", _CountedMethod(kind.__dict__["fetch"], lambda: self._count("worker")))

    def _wrap(self, kind: Any, name: str, source: str) -> None:
        original, count = kind.__dict__[name], self._count

        def wrapped(self: Any, *given: Any) -> Any:
            made = original(self, *given)
            count(source)
            return made

        wrapped.__name__, wrapped.__qualname__, wrapped.__doc__ = name, original.__qualname__, original.__doc__
        self._replace(kind, name, wrapped)

    def _replace(self, kind: Any, name: str, new: Any) -> None:
        original = kind.__dict__[name]
        setattr(kind, name, new)
        self._undo.append(lambda: setattr(kind, name, original))


class _CountedMethod:
    """A method whose calls are counted when they begin, without a frame between the caller and the method.

    `legroom.collate` looks for torch's worker loop right above ``fetch``. A wrapper there would make it send its
    batches through /dev/shm.
    """

    def __init__(self, method: Callable[..., Any], count: Callable[[], None]) -> None:
        self._method, self._count = method, count

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            self._count()
        return self._method.__get__(instance, owner)


def worker_dataset() -> tuple[bool, Any]:
    """Whether this is a DataLoader worker, and its dataset."""
    data: Any = sys.modules.get("torch.utils.data")
    try:
        info = data.get_worker_info() if data is not None else None
    except AttributeError:
        return False, None
    return info is not None, getattr(info, "dataset", None)

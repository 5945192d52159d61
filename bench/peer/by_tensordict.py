"""tensordict: memory-mapped tensors in a directory on disk; shared through the page cache.

As with numpy, converting only once is left to the user: a lock, a scratch name that the next converter clears, a
rename.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from peer.protocol import KEY, Peer, Place


class Contender(Peer):
    title = "tensordict memmap"
    package = "tensordict"
    elects = "a lock in user code"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        import h5py
        import torch
        from tensordict import TensorDict

        self._h5py, self._torch, self._dict = h5py, torch, TensorDict
        self._path = place.folder / "images"

    def attach(self) -> Any:
        if not self._path.exists():
            return None
        return self._dict.load_memmap(self._path)[KEY]

    def load(self) -> None:
        scratch = self._path.with_suffix(".tmp")
        with self.place.loading():
            shutil.rmtree(scratch, ignore_errors=True)
            with self._h5py.File(self.place.source, "r") as file:
                images = self._torch.from_numpy(file[KEY][:])
            self._dict({KEY: images}, batch_size=[len(images)]).memmap(scratch)
            os.rename(scratch, self._path)

    def rows(self, data: Any, index: Any) -> Any:
        return data[self._torch.from_numpy(index)]

    def view(self, data: Any) -> Any:
        return data.numpy()

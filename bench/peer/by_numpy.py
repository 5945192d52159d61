"""numpy: the data once as ``.npy`` on disk, mapped by everybody; shared through the page cache.

numpy has no way to say that somebody is converting already. Here its user has written that: a lock, a scratch name
that the next converter overwrites, a rename.
"""

from __future__ import annotations

import os
from typing import Any

from peer.protocol import KEY, Peer, Place


class Contender(Peer):
    title = "numpy memmap"
    package = "numpy"
    elects = "a lock in user code"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        import h5py
        import numpy as np

        self._h5py, self._np = h5py, np
        self._path = place.folder / "images.npy"

    def attach(self) -> Any:
        try:
            return self._np.load(self._path, mmap_mode="r")
        except FileNotFoundError:
            return None

    def load(self) -> None:
        scratch = self._path.with_suffix(".tmp")
        with self.place.loading():
            with self._h5py.File(self.place.source, "r") as file:
                images = file[KEY]
                out = self._np.lib.format.open_memmap(scratch, "w+", images.dtype, images.shape)
                images.read_direct(out)
                del out
            os.replace(scratch, self._path)

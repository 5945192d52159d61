"""h5py: every process reads the file into memory of its own. What most training scripts do."""

from __future__ import annotations

from typing import Any

from peer.protocol import KEY, Peer, Place


class Contender(Peer):
    title = "h5py preload"
    package = "h5py"
    elects = "none: each process loads"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        import h5py

        self._h5py = h5py

    def attach(self) -> Any:
        with self.place.loading(), self._h5py.File(self.place.source, "r") as file:
            return file[KEY][:]

    def held(self) -> int:
        return 0

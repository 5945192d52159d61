"""Legroom: one copy in shared memory, found by content, loaded by one of those who ask."""

from __future__ import annotations

import os
from typing import Any

from peer.protocol import KEY, Peer, Place


class Contender(Peer):
    title = "legroom"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        os.environ.update(LEGROOM_SHM=str(place.memory), LEGROOM_DIR=str(place.folder))
        import legroom
        from legroom.cache import elect_builder_and_publish, store_directories  # noqa: F401

        def trace(step: str) -> None:
            if step in ("read", "done"):
                place.mark({"read": "loading", "done": "loaded"}[step])

        store_directories.step_hook = trace
        self._open = legroom.open

    def attach(self) -> Any:
        return self._open(self.place.source)

    def rows(self, data: Any, index: Any) -> Any:
        return data[KEY][index]

    def view(self, data: Any) -> Any:
        return data[KEY]

    def tidy(self) -> None:
        from legroom.cache.drop_and_gc import gc

        gc()

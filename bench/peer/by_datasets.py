"""Hugging Face datasets: an Arrow file in its cache, mapped by everybody; numpy format.

``from_generator`` builds the file once, under a file lock, or finds it by the fingerprint of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer.protocol import KEY, Peer, Place


def rows_of(source: str, folder: str, memory: str) -> Iterator[dict[str, Any]]:
    """The rows of the source, in the process that builds."""
    import h5py

    with Place(Path(source), Path(folder), Path(memory)).loading(), h5py.File(source, "r") as file:
        images = file[KEY]
        for at in range(0, len(images), 64):
            for image in images[at : at + 64]:
                yield {KEY: image}


class Contender(Peer):
    title = "HF datasets"
    package = "datasets"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        import datasets
        import h5py
        import numpy as np

        datasets.disable_progress_bars()
        self._datasets, self._h5py, self._np = datasets, h5py, np
        self._cache = place.folder / "hf"

    def attach(self) -> Any:
        with self._h5py.File(self.place.source, "r") as file:
            shape, kind = file[KEY].shape[1:], file[KEY].dtype
        features = self._datasets.Features({KEY: self._datasets.Array3D(shape, str(kind))})
        place = self.place
        found = self._datasets.Dataset.from_generator(
            rows_of,
            features=features,
            cache_dir=str(self._cache),
            gen_kwargs={"source": str(place.source), "folder": str(place.folder), "memory": str(place.memory)},
        )
        # Without the dtype it hands out int64, eight times the bytes, at half the rate.
        return found.with_format("numpy", dtype=kind)

    def rows(self, data: Any, index: Any) -> Any:
        return data[index][KEY]

    def view(self, data: Any) -> Any:
        return None

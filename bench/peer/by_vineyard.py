"""vineyard: an object store in a daemon's shared memory; tensors are named, and mapped by clients.

That only one process puts them is left to the user: a lock.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

from peer.protocol import KEY, Peer, Place


class Contender(Peer):
    title = "vineyard"
    package = "vineyard"
    elects = "a lock in user code"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        # Imported by vineyard 0.24, gone from setuptools since, and used only to find executables.
        sys.modules.setdefault("pkg_resources", types.ModuleType("pkg_resources"))
        import h5py
        import vineyard

        self._h5py, self._vineyard = h5py, vineyard
        self._socket = place.folder / "v.sock"
        self.awaited = str(self._socket)
        self._program = Path(vineyard.__file__).parent / "bdist" / "vineyardd"
        if not self._program.exists():
            raise ImportError("vineyard-bdist, which holds vineyardd")

    def daemon(self) -> list[str] | None:
        size = 8 * self.place.source.stat().st_size
        where = ["--socket", str(self._socket), "--size", str(size)]
        return [str(self._program), "--deployment", "local", "--meta", "local", "--norpc", *where]

    def connect(self) -> None:
        self._client = self._vineyard.connect(str(self._socket))

    def attach(self) -> Any:
        try:
            return self._client.get(self._client.get_name(KEY))
        except self._vineyard.ObjectNotExistsException:
            return None

    def load(self) -> None:
        with self.place.loading(), self._h5py.File(self.place.source, "r") as file:
            self._client.put(file[KEY][:], persist=True, name=KEY)

    def held(self) -> int:
        return int(self._client.status.memory_usage)

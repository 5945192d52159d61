"""Ray: an object in the node's object store, kept by a detached, named actor that every job finds.

An object dies with its owner, so the owner is an actor of its own; Ray starts it again when it is killed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from peer.protocol import KEY, Peer, Place


class Holder:
    """Loads the data when it starts, and says where they are."""

    def __init__(self, source: str, folder: str, memory: str) -> None:
        import h5py
        import ray

        with Place(Path(source), Path(folder), Path(memory)).loading(), h5py.File(source, "r") as file:
            self._kept = ray.put(file[KEY][:])

    def where(self) -> list[Any]:
        return [self._kept]  # in a list: the reference itself, not the data


class Contender(Peer):
    title = "Ray object store"
    package = "ray"
    awaited = "Ray runtime started"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        import ray

        self._ray = ray
        self._port = place.folder / "port"

    def daemon(self) -> list[str] | None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._port.write_text(str(port))
        size = max(4 * self.place.source.stat().st_size, 100_000_000)
        # fmt: off
        return [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats",
            "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false", "--num-cpus=2",
            f"--object-store-memory={size}", f"--temp-dir={self.place.folder / 'ray'}",
            "--plasma-directory=/dev/shm",
        ]
        # fmt: on

    def connect(self) -> None:
        address = f"127.0.0.1:{self._port.read_text()}"
        self._ray.init(address=address, namespace="bench", logging_level="ERROR", log_to_driver=False)

    def attach(self) -> Any:
        try:
            holder = self._ray.get_actor(KEY)
        except ValueError:
            return None
        return self._ray.get(self._ray.get(holder.where.remote())[0])

    def load(self) -> None:
        place = self.place
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Holder)
        actor.options(name=KEY, lifetime="detached", get_if_exists=True).remote(
            *map(os.fspath, (place.source, place.folder, place.memory))
        )

    def get(self) -> Any:
        self.load()
        return self.attach()

    def held(self) -> int:
        time.sleep(3)  # what nodes report about themselves is a second or two old
        name = "object_store_memory"
        return int(self._ray.cluster_resources()[name] - self._ray.available_resources().get(name, 0))

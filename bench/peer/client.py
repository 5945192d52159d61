"""One process that uses a contender, told what to do line by line.

    python -m peer.client NAME SOURCE FOLDER MEMORY

Reads a word a line from stdin, answers with one JSON object a line on what was its stdout; what libraries print
goes to stderr. Nothing but the contender's own imports is loaded before it says that it is ready, so that its
memory then is that of a bare interpreter with those imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import make
from peer.protocol import Peer, Place

BATCH = 64
EPOCHS = 4


class Client:
    """The state of one process: its contender, and the data once it has them."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.data: Any = None

    def about(self) -> dict[str, Any]:
        """Its name, its version, and the daemon it needs."""
        from measure import installed

        peer = self.peer
        return {
            "title": peer.title,
            "elects": peer.elects,
            "version": installed(peer.package) if peer.package else None,
            "command": peer.daemon(),
            "awaited": peer.awaited,
        }

    def connect(self) -> dict[str, Any]:
        start = time.perf_counter()
        self.peer.connect()
        return {"connect_ms": 1e3 * (time.perf_counter() - start)}

    def attach(self) -> dict[str, Any]:
        """Until the first row has been read."""
        import numpy as np

        first = np.array([0])
        start = time.perf_counter()
        self.data = self.peer.attach()
        view = self.peer.view(self.data)
        (self.peer.rows(self.data, first) if view is None else view[0]).max()
        return {"attach_ms": 1e3 * (time.perf_counter() - start)}

    def get(self) -> dict[str, Any]:
        start = time.perf_counter()
        self.data = self.peer.get()
        return {"get_ms": 1e3 * (time.perf_counter() - start)}

    def touch(self) -> dict[str, Any]:
        """The checksum of everything: every page of the data has been used then."""
        import numpy as np

        view = self.peer.view(self.data)
        total = 0
        for at in range(0, self._count(), BATCH):
            rows = np.arange(at, min(at + BATCH, self._count()))
            part = self.peer.rows(self.data, rows) if view is None else view[at : at + BATCH]
            total = zlib.crc32(np.ascontiguousarray(part).data, total)
        return {"crc": total}

    def gather(self) -> dict[str, Any]:
        """GB/s of random batches: by the library's own indexing, and by np.take into a reused buffer."""
        import numpy as np

        view = self.peer.view(self.data)
        one = np.asarray(self.peer.rows(self.data, np.array([0])))[0]
        out = _page_aligned(BATCH, one)
        own = self._epochs(lambda index: self.peer.rows(self.data, index), out.nbytes)
        take = None
        if view is not None:
            # In mode "raise" numpy gathers into a buffer of its own first.
            take = self._epochs(lambda index: np.take(view, index, 0, out, "clip"), out.nbytes)
        return {"own": own, "take": take}

    def held(self) -> dict[str, Any]:
        return {"held": self.peer.held()}

    def tidy(self) -> dict[str, Any]:
        self.peer.tidy()
        return self.held()

    def _count(self) -> int:
        view = self.peer.view(self.data)
        return len(self.data if view is None else view)

    def _epochs(self, take: Callable[[Any], object], nbytes: int) -> float:
        import numpy as np

        rng, count, best = np.random.default_rng(3), self._count(), 0.0
        for _ in range(EPOCHS):
            order = rng.permutation(count)
            start = time.perf_counter()
            for at in range(0, count - BATCH + 1, BATCH):
                take(order[at : at + BATCH])
            best = max(best, count // BATCH * nbytes / (time.perf_counter() - start) / 1e9)
        return best


def _page_aligned(count: int, one: Any) -> Any:
    """A buffer for that many rows, its pages there already.

    At the start of a page: numpy's own large arrays begin 16 bytes into one, and copying to an address that is 16
    bytes further into its page than the source runs at a third of the rate (measured). Which contender that would
    hit is chance.
    """
    import numpy as np

    whole = np.ones(count * one.nbytes + 4096, np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + count * one.nbytes].view(one.dtype).reshape(count, *one.shape)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, *paths = sys.argv[1:]
    try:
        client = Client(make(name, Place(*map(Path, paths))))
    except ImportError as problem:
        answers.write(json.dumps({"missing": str(problem)}) + "\n")
        return
    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        try:
            answer = getattr(client, line.strip())()
        except Exception as problem:  # the trial decides what it means
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

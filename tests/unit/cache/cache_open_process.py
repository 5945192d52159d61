"""One process that opens a file when told to and says what that costs it. Run as a script: file, folder, number."""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np

import legroom
from legroom.cache import (  # noqa: F401  (a bare process has the code loaded)
    cached_arrays_and_tables,
    elect_builder_and_publish,
    mapped_files_and_checksums,
    store_directories,
)
from legroom.formats import npy_reader  # noqa: F401
from legroom.loader.batches.legroom_open import open as _open  # noqa: F401


def private() -> int:
    """Bytes this process holds for itself alone."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(rows[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


def mapped(root: str) -> tuple[int, int]:
    """PSS of what is mapped from the store, and the bytes of it that have been written to."""
    pss = written = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = len(words) > 5 and words[5].startswith(root)
        elif inside and words[0] == "Pss:":
            pss += int(words[1]) * 1024
        elif inside and words[0] == "Anonymous:":
            written += int(words[1]) * 1024
    return pss, written


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.02)  # dozens of these processes wait at once


def main(path: str, folder: Path, number: str) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store_directories.step_hook = lambda name: os.write(log, f"{os.getpid()} {name}\n".encode()) and None
    (folder / f"started-{number}").touch()
    wait_for(folder / "open")
    before = private()
    data = legroom.open(path)
    data.ready()
    crc = 0
    for name in sorted(data):
        array = data[name]
        crc = zlib.crc32(array.reshape(-1).view(np.uint8), zlib.crc32(name.encode(), crc))
    (folder / f"opened-{number}").touch()
    wait_for(folder / "measure")
    pss, written = mapped(data.info.store or "?")
    result = {"pid": os.getpid(), "crc": crc, "pss": pss, "written": written, "grown": private() - before}
    (folder / f"measured-{number}").write_text(json.dumps(result))
    wait_for(folder / "end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

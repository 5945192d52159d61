"""On tmpfs, room that is reserved first gives an error; room that is only promised kills at first touch.

Covers: posix_fallocate, ftruncate, Python's SharedMemory, torch's shared tensors and a torch loader, each
asking a /dev/shm of 16 MiB for 32. Does not cover: memory cgroups (tmpfs_and_cgroup.py).
"""

from __future__ import annotations

import mmap
import os
import sys

import experiment as ex
import rigs

ASKED = 32 * ex.MB
LOADER_S = 2  # how long the loader's consumer waits before it gives up


def fallocate() -> None:
    descriptor = os.open("/dev/shm/fallocate", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(descriptor, 0, ASKED)


def ftruncate() -> None:
    descriptor = os.open("/dev/shm/ftruncate", os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, ASKED)
    print("granted; writing at MiB", end=" ", flush=True)
    touch(mmap.mmap(descriptor, ASKED))


def shared_memory() -> None:
    from multiprocessing.shared_memory import SharedMemory

    segment = SharedMemory(create=True, size=ASKED)
    print("granted; writing at MiB", end=" ", flush=True)
    assert segment.buf is not None
    touch(segment.buf)


def touch(buffer: mmap.mmap | memoryview) -> None:
    """Write one byte a page; say how far it came, since nothing can be said afterwards."""
    for start in range(0, ASKED, 8 * ex.MB):
        print(f"{start // ex.MB}", end=" ", flush=True)
        for offset in range(start, start + 8 * ex.MB, mmap.PAGESIZE):
            buffer[offset] = 1


def torch_share() -> None:
    import torch

    torch.zeros(ASKED, dtype=torch.uint8).share_memory_()


def torch_loader() -> None:
    """Batches that no collate function puts together are shared by a thread behind the worker's queue."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(Whole(), batch_size=None, num_workers=1, timeout=LOADER_S):
        pass


class Whole:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> object:
        import torch

        return torch.zeros(ASKED, dtype=torch.uint8)


WAYS = (fallocate, ftruncate, shared_memory, torch_share, torch_loader)


def inside(way: str) -> None:
    try:
        globals()[way]()
    except (OSError, RuntimeError) as problem:
        print(f"{type(problem).__name__}: {problem}")
        raise SystemExit(3) from None


def main() -> None:
    ex.need("mount")
    ex.need_module("torch")
    ended, rows, said = {}, [], {}
    for way in WAYS:
        child = ex.run(rigs.small_shm(ex.role(__file__, way.__name__), "16m"))
        ended[way], said[way] = ex.ending(child.returncode), child.stdout.strip()
        rows.append((way.__name__, ended[way], said[way][:88]))
    ex.table(("32 MiB of 16 requested by", "ended by", "output until then"), rows)
    from importlib.metadata import version

    print(f"torch {version('torch')}\n")
    reserves = tuple(map(int, version("torch").split(".")[:2])) >= (2, 10)
    ex.verdict(
        {
            "posix_fallocate gives ENOSPC": "[Errno 28]" in said[fallocate],
            "ftruncate dies of SIGBUS": ended[ftruncate] == "SIGBUS",
            "SharedMemory dies of SIGBUS": ended[shared_memory] == "SIGBUS",
            "torch from 2.10 on says so": not reserves or "unable to allocate" in said[torch_share],
            "its loader, uncollated, only times out": not reserves or "timed out" in said[torch_loader],
        }
    )


if __name__ == "__main__":
    inside(sys.argv[1]) if len(sys.argv) > 1 else main()

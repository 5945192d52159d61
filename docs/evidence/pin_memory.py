"""pin_memory takes nothing from /dev/shm: pinned memory is the driver's, not the filesystem's.

Covers: what pinned tensors and a pinning loader take from /dev/shm and from the process's RssShmem; whether
RLIMIT_MEMLOCK bounds them, as an unprivileged user.
Does not cover: whether pinning is worth its host memory. Needs CUDA to show it; without, torch pins
nothing and the loader's peak is all there is to see. Root is used where there is root, and not needed.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import experiment as ex
import rigs

BATCH, WORKERS, PREFETCH = 4 * ex.MB, 2, 2
PINNED = 256 * ex.MB  # four times the 64 MiB that containers come with


def rss_shmem() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def loader_peak(pin: bool) -> tuple[int, bool]:
    """The most one pass took from /dev/shm, and whether its batches came pinned."""
    import torch
    from torch.utils.data import DataLoader

    ones = torch.ones(BATCH, dtype=torch.uint8)
    options: dict[str, Any] = {"num_workers": WORKERS, "prefetch_factor": PREFETCH, "pin_memory": pin}
    with ex.ShmPeak() as shm:
        for batch in DataLoader([ones] * 12, batch_size=1, **options):
            pinned = batch.is_pinned()
            time.sleep(0.05)
    return shm.most, pinned


def memlock() -> None:
    """As an unprivileged user under a limit of 64 kB: pin more than that."""
    import resource

    import torch

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    kept = torch.ones(PINNED, dtype=torch.uint8).pin_memory()
    print(limit, kept.is_pinned())


def under_memlock() -> str | None:
    """The limit under which an unprivileged user pinned 256 MiB all the same, or None."""
    limited = ["sh", "-c", 'ulimit -l 64 && exec "$@"', "sh", *ex.role(__file__, "memlock")]
    done = ex.run(rigs.as_user(65534, limited))
    limit, _, pinned = done.stdout.strip().partition(" ")
    return f"RLIMIT_MEMLOCK {limit} B" if pinned == "True" else None


def inside() -> None:
    import torch

    warnings.simplefilter("ignore")  # torch says that there is nothing to pin for; the table does too
    cuda = torch.cuda.is_available()
    print(f"CUDA: {torch.cuda.get_device_name() if cuda else 'none'}; torch {torch.__version__}\n")
    rows, taken = [], {}
    for pin in (False, True):
        taken[pin], pinned = loader_peak(pin)
        rows.append((f"loader, pin_memory={pin}", ex.mb(taken[pin]), "yes" if pinned else "no", ""))
    if cuda:
        torch.cuda.init()
        torch.empty(1, device="cuda")  # the context has shared pages of its own: not counted below
        shm, rss = ex.shm_used(), rss_shmem()
        kept = torch.ones(PINNED, dtype=torch.uint8).pin_memory()
        held, grown = ex.shm_used() - shm, rss_shmem() - rss
        rows.append((f"a tensor of {ex.mb(PINNED)}", ex.mb(held), "yes" if kept.is_pinned() else "no", ex.mb(grown)))
        limited = under_memlock() if rigs.why_not_user() is None else None
        rows.append((f"the same as uid 65534, {limited or 'no limit could be set'}", "", "yes" if limited else "?", ""))
    ex.table(("what", "taken from /dev/shm", "pinned", "growth of RssShmem"), rows)
    if not cuda:
        ex.not_shown("needs CUDA: without it torch pins nothing")
    ex.verdict(
        {
            "the loader's batches came pinned": pinned,
            "pinning adds at most the batch it copies": taken[True] <= taken[False] + BATCH + ex.MB,
            "a pinned tensor takes nothing": kept.is_pinned() and held < ex.MB,
            "RLIMIT_MEMLOCK does not bound it": limited is not None or rigs.why_not_user() is not None,
        }
    )


def main() -> None:
    ex.need_module("torch")
    command = ex.role(__file__, "inside")
    if rigs.why_not_mount() is None:
        print("a /dev/shm of 64 MiB of our own")
        command = rigs.small_shm(command, "64m")
    else:
        print(f"the machine's own /dev/shm ({rigs.why_not_mount()})")
    sys.stdout.flush()
    raise SystemExit(ex.run(command, show=True).returncode)


if __name__ == "__main__":
    {"inside": inside, "memlock": memlock, "": main}[sys.argv[1] if len(sys.argv) > 1 else ""]()

"""Both sharing strategies allocate in /dev/shm; changing it cures a lack of file descriptors alone.

Covers: torch's two strategies under a /dev/shm of 64 MiB, one of 512 MiB, and under 64 file descriptors.
Does not cover: which of the two is faster.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time

import experiment as ex
import rigs

STRATEGIES = ("file_descriptor", "file_system")
BATCH = 24 * ex.MB
NO_ROOM = ("unable to allocate shared memory(shm)", "Bus error")  # torch from 2.10 on, and before
NO_FDS = ("received 0 items of ancdata", "Too many open files")
WORK = {
    "large": {"tensors": 1, "nbytes": BATCH, "descriptors": 0},
    "many": {"tensors": 32, "nbytes": 4096, "descriptors": 64},
}
TITLE = {"large": "8 batches of 24 MiB", "many": "8 batches of 32 small tensors, kept, 64 descriptors"}


def load(strategy: str, *, tensors: int, nbytes: int, descriptors: int) -> tuple[str, int, int]:
    """One pass over a loader of that strategy: how it ended, the peak in /dev/shm, batches that came."""
    import torch
    from torch.utils.data import DataLoader

    class Batches(torch.utils.data.Dataset[list[torch.Tensor]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> list[torch.Tensor]:
            return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(tensors)]

    torch.multiprocessing.set_sharing_strategy(strategy)
    for _ in range(40):  # what the pass before this one held goes with its workers
        if ex.shm_used() == 0:
            break
        time.sleep(0.05)
    kept, came, result = [], 0, "done"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ex.ShmPeak() as shm:
        try:
            batches = iter(DataLoader(Batches(), num_workers=2, prefetch_factor=2, timeout=90))
            # The workers have started with the old limit: the lack is the consumer's, as it is in practice.
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors or soft, hard))
            for batch in batches:
                came += 1
                time.sleep(0.1)  # a training step: the workers run ahead as far as they may
                if descriptors:
                    kept.append(batch)
        except (RuntimeError, OSError) as problem:
            result = next((words for words in (*NO_ROOM, *NO_FDS) if words in str(problem)), str(problem)[-60:])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return result, shm.most, came


def inside(works: str, strategies: str) -> None:
    """In a /dev/shm of our own: the works with the strategies, one JSON list a line."""
    for work, strategy in itertools.product(works.split(","), strategies.split(",")):
        print(json.dumps([work, strategy, *load(strategy, **WORK[work])]))


def main() -> None:
    ex.need("mount")
    ex.need_module("torch")
    found, rows = {}, []
    # A failed pass may leave something behind, so each strategy meets the small /dev/shm in its own process.
    for size, works, strategies in (
        ("64m", "large", STRATEGIES[0]),
        ("64m", "large", STRATEGIES[1]),
        ("512m", "large,many", ",".join(STRATEGIES)),
    ):
        child = ex.run(rigs.small_shm(ex.role(__file__, works, strategies), size))
        if child.returncode:
            raise SystemExit(f"{works} at {size}: {ex.ending(child.returncode)}\n{child.stderr}")
        for work, strategy, result, peak, came in map(json.loads, child.stdout.splitlines()):
            found[size, work, strategy] = result, peak
            rows.append((TITLE[work], size, strategy, f"{came} of 8", ex.mb(peak), result))
    ex.table(("work", "/dev/shm", "strategy", "batches", "peak in it", "result"), rows)
    small = [found["64m", "large", strategy][0] for strategy in STRATEGIES]
    ex.verdict(
        {
            "both fail at 64 MiB, in the same way": small[0] == small[1] and small[0] in NO_ROOM,
            "both finish at 512 MiB": all(found["512m", "large", s][0] == "done" for s in STRATEGIES),
            "both hold more than two batches there": all(found["512m", "large", s][1] > 2 * BATCH for s in STRATEGIES),
            "file_descriptor runs out of descriptors": found["512m", "many", STRATEGIES[0]][0] in NO_FDS,
            "file_system does not": found["512m", "many", STRATEGIES[1]][0] == "done",
        }
    )


if __name__ == "__main__":
    inside(*sys.argv[1:]) if len(sys.argv) > 1 else main()

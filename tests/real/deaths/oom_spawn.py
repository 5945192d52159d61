"""torch.multiprocessing.spawn: one of two processes is OOM-killed."""

import time

import torch.multiprocessing as mp


def train(rank):
    kept = []
    while rank == 1:
        kept.append(bytearray(8 << 20))
    time.sleep(60)


if __name__ == "__main__":
    mp.spawn(train, nprocs=2)

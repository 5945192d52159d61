"""Another process kills one of two spawned ranks; memory has nothing to do with it."""

import os
import signal
import time

import torch.multiprocessing as mp


def train(rank):
    time.sleep(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    mp.spawn(train, nprocs=2)

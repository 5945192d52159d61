"""Another process kills one of two spawned ranks; memory is not involved."""

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

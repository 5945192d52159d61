"""A DataLoader worker writes decoded samples to a mapped file on a disk that fills up: bus error."""

import os

import numpy as np
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self):
        path = os.path.join(os.environ["DEATH_DISK"], "decoded.dat")
        self.decoded = np.memmap(path, np.float32, "w+", shape=(100, 1 << 18))

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.decoded[index] = index
        return index


for batch in DataLoader(Samples(), num_workers=1):
    print(batch, flush=True)

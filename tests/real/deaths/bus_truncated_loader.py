"""An .npy file is rewritten while a DataLoader worker has it mapped: bus error, and /dev/shm is empty."""

import os

import numpy as np
from torch.utils.data import DataLoader, Dataset

np.save("data.npy", np.ones((1000, 1000)))


class Samples(Dataset):
    def __init__(self):
        self.data = np.load("data.npy", mmap_mode="r")

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == 8:
            os.truncate("data.npy", 4096)
        return self.data[index].copy()


for batch in DataLoader(Samples(), batch_size=4, num_workers=1):
    print(batch.shape, flush=True)

"""A DataLoader worker caches samples on a full disk: OSError, raised again by the DataLoader."""

import os

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        sample = torch.randn(1 << 18)
        with open(os.path.join(os.environ["DEATH_DISK"], f"{index}.bin"), "wb") as file:
            file.write(sample.numpy().tobytes())
        return index


for batch in DataLoader(Samples(), num_workers=1):
    print(batch, flush=True)

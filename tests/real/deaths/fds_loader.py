"""Batches kept from a DataLoader hold one descriptor per tensor, and the limit is 64."""

import resource

import torch
from torch.utils.data import DataLoader, Dataset

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
torch.multiprocessing.set_sharing_strategy("file_descriptor")


class Samples(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.zeros(16), torch.zeros(16)


kept = []
for batch in DataLoader(Samples(), num_workers=1):
    kept.append(batch)

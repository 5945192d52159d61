"""The main process keeps every loss and its graph and is OOM-killed; its DataLoader workers are healthy."""

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        return torch.randn(1024)


kept = []
for batch in DataLoader(Samples(), batch_size=32, num_workers=2):
    kept.append(batch.repeat(64, 1) * 2)

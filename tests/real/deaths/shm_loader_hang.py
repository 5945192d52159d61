"""A worker drops a batch that does not fit in /dev/shm, and the DataLoader waits for it forever."""

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(6 << 20)


def collate(samples):
    return torch.stack(samples) + 0


for batch in DataLoader(Samples(), batch_size=1, num_workers=4, collate_fn=collate):
    print(batch.shape, flush=True)

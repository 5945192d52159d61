"""A DataLoader worker crashes."""

import ctypes

from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return ctypes.string_at(0)


for batch in DataLoader(Rows(), num_workers=1):
    print(batch)

"""A DataLoader worker exceeds the cgroup's limit."""

from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        held = []
        while True:
            held.append(bytearray(16 << 20))


for batch in DataLoader(Rows(), num_workers=1):
    print(batch)

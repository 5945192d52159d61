"""A DataLoader worker raises an exception: a bug in a dataset."""

from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {}["label"]


for batch in DataLoader(Rows(), num_workers=1):
    print(batch)

"""Another process kills a DataLoader worker; memory is not involved."""

import os
import signal

from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


for batch in DataLoader(Rows(), num_workers=1):
    print(batch)

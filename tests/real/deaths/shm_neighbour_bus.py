"""Another process has filled /dev/shm, and a DataLoader worker that writes little gets a bus error."""

import time
from multiprocessing.shared_memory import SharedMemory

from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(2)
        segment = SharedMemory(create=True, size=4 << 20)
        segment.buf[:] = bytes(4 << 20)
        return index


for batch in DataLoader(Samples(), num_workers=1):
    print(batch)

"""Another process filled /dev/shm, and a DataLoader's worker gets a bus error for the little it writes."""

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

"""A DataLoader worker writes more than /dev/shm holds: torch reports a bus error."""

from multiprocessing.shared_memory import SharedMemory

from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        segment = SharedMemory(create=True, size=256 << 20)
        segment.buf[:] = bytes(256 << 20)
        return index


for batch in DataLoader(Rows(), num_workers=1):
    print(batch)

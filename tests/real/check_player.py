"""One random setting of a loader: its dataset, its collate function and its real loop of two epochs.

``legroom check`` imports ``dataset`` and ``collate`` from here; run as a script this file is the training loop that
check is asked about. The setting is JSON in ``LEGROOM_SETTING``. The loop stops now and then, as a loop that validates
or saves a checkpoint does, until the workers have filled the queues. It runs at least two epochs, and more while they
take less than a few seconds. It is a user's script and nothing else: it knows nothing of how check measures, leaves
Python's garbage collector as it is, and fails if samples are missing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

SETTING: dict[str, Any] = json.loads(os.environ["LEGROOM_SETTING"])
_LONGEST_PAUSE = 30.0  # seconds; only workers that get no core take that long to fill the queues
_peak_shm = 0
_EPOCHS, _MORE_EPOCHS_S = 2, 3.0  # as many as fit into that time, and at least two


class Picture:
    """An image as PIL has it: a Python object around one block of bytes."""

    def __init__(self, pixels: bytes, size: tuple[int, int]) -> None:
        self.pixels, self.size = pixels, size


def make(index: int, record: Any = None) -> Any:
    """One sample, made as a transform makes it: with intermediate results of the same size."""
    size = SETTING["sample_bytes"]
    if SETTING["ragged"]:
        size = size // 2 + (index * 7919 % 97) * (size // 2) // 97
    values = np.full(max(1, size // 4), float(index % 251), dtype=np.float32)
    for _ in range(SETTING["temporaries"]):
        values = values * np.float32(1.0)
    kind = SETTING["kind"]
    if kind == "numpy":
        return values, index
    if kind == "torch":
        return torch.from_numpy(values), index
    if kind == "bytes":
        return values.tobytes(), index
    if kind == "image":
        picture = Picture(values.tobytes(), (len(values), 1))
        return {"image": picture, "about": {"name": f"{index:08d}.png", "boxes": [0.0, 1.0, 2.0], "of": record}}
    parts = np.array_split(values, SETTING["tensors"])
    return {f"field{number}": torch.from_numpy(part.copy()) for number, part in enumerate(parts)}


class Made(Dataset[Any]):
    """Samples computed from the index alone."""

    def __len__(self) -> int:
        return int(SETTING["samples"])

    def __getitem__(self, index: int) -> Any:
        return make(index)


class Records(Dataset[Any]):
    """A Python list of small objects, as annotations are often kept, and a sample made from each."""

    def __init__(self) -> None:
        self.records = [
            {"name": f"picture-{number:09d}", "label": float(number), "tags": [str(number), "x" * 20 + str(number)]}
            for number in range(SETTING["records"])
        ]

    def __len__(self) -> int:
        return int(SETTING["samples"])

    def __getitem__(self, index: int) -> Any:
        each = max(1, len(self.records) // len(self))
        mine = self.records[index * each : (index + 1) * each]
        return make(index, sum(len(record["tags"]) for record in mine))


class InMemory(Dataset[Any]):
    """Every sample lies in one array of the program."""

    def __init__(self) -> None:
        rows, width = SETTING["samples"], max(1, SETTING["sample_bytes"] // 4)
        self.values = np.ones((rows, width), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        row = self.values[index]
        return (torch.from_numpy(row) if SETTING["kind"] == "torch" else row), index


class Streamed(IterableDataset[Any]):
    """Samples in the order of a stream, each worker its own part."""

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SETTING["samples"], step):
            yield make(index)


def _made_dataset() -> Any:
    return {"made": Made, "records": Records, "memory": InMemory, "stream": Streamed}[SETTING["source"]]()


def collate_padded(samples: list[Any]) -> Any:
    """Tensors of different lengths in one padded batch."""
    tensors = [torch.as_tensor(sample[0]) for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), [sample[1] for sample in samples]


def collate_list(samples: list[Any]) -> Any:
    """The samples as they are: detection code does this."""
    return samples


def collate_pictures(samples: list[Any]) -> Any:
    """Pixels into one tensor, everything else beside it."""
    pixels = [np.frombuffer(sample["image"].pixels, dtype=np.float32) for sample in samples]
    width = max(map(len, pixels))
    batch = torch.zeros(len(samples), width)
    for row, values in enumerate(pixels):
        batch[row, : len(values)] = torch.from_numpy(values.copy())
    return batch, [sample["about"] for sample in samples]


collate = {"padded": collate_padded, "list": collate_list, "pictures": collate_pictures}.get(SETTING["collate"])
if __name__ != "__mp_main__":
    dataset = _made_dataset()


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _busy() -> int | None:
    """CPU time of all workers; None while one runs or waits for a CPU."""
    total = 0
    for pid in _children():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] in "RD":
            return None
        total += int(fields[11]) + int(fields[12])
    return total


def _pause() -> None:
    """Until no worker has used a CPU for a while: the queues are full."""
    global _peak_shm
    end, since, last = time.monotonic() + _LONGEST_PAUSE, time.monotonic(), _busy()
    while time.monotonic() < end and time.monotonic() < since + 0.12:
        time.sleep(0.02)
        now = _busy()
        if now is None or now != last:
            last, since = now, time.monotonic()
    room = os.statvfs("/dev/shm")
    _peak_shm = max(_peak_shm, (room.f_blocks - room.f_bfree) * room.f_frsize)


def main() -> None:
    if SETTING["loader"] == "torch":
        from torch.utils.data import DataLoader
    else:
        from legroom import DataLoader  # type: ignore[assignment]
    options: dict[str, Any] = {}
    if SETTING["workers"]:
        options = {
            "prefetch_factor": SETTING["prefetch"],
            "persistent_workers": SETTING["persistent"],
            "multiprocessing_context": SETTING["start_method"],
        }
    loader: Any = DataLoader(
        dataset,
        batch_size=SETTING["batch"],
        shuffle=SETTING["shuffle"] and SETTING["source"] != "stream",
        num_workers=SETTING["workers"],
        collate_fn=collate,
        **options,
    )
    epochs, until = 0, time.monotonic() + _MORE_EPOCHS_S
    while epochs < _EPOCHS or time.monotonic() < until:
        samples = 0
        for done, batch in enumerate(loader, 1):  # the batch of the step before lives until the new one is there
            samples += count(batch)
            if SETTING["workers"] and epochs < _EPOCHS and done in (1, 2, 5):
                _pause()
        assert samples == SETTING["samples"], f"{samples} of {SETTING['samples']} samples"
        epochs += 1
    print("survived", epochs, "with full queues in /dev/shm:", _peak_shm)


def count(batch: Any) -> int:
    """Samples in a batch."""
    if SETTING["collate"] == "list":
        return len(batch)
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch[1])


if __name__ == "__main__":
    main()

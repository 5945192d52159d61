"""The folder in which the blocks of the pages run: small files under the names that pages use.

Covers: data files, modules with datasets, scripts that stand for somebody's training, a log of a death, and the names a
block may be given. Does not cover: running anything. All stores and memories of Legroom lie in this folder.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
from archive_samples import write_mds, write_tar
from format_samples import hf_saved
from lmdb_files import write_lmdb

GIVEN = '''
"""Names that blocks may be given: pages speak of the reader's own dataset, model and training step."""
import torch


class _Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.zeros(3, 8, 8), index


dataset = _Samples()
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
sample = torch.zeros(4, 8)


def train(*batch):
    """A training step that is the reader's."""


def step(batch):
    """Another, for a batch of that many samples."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(batch, 8, device=device, requires_grad=True).square().mean().backward()
'''

DATASETS = """
import torch


def collate(samples):
    return torch.utils.data.default_collate(samples)


def make_dataset():
    return torch.utils.data.TensorDataset(torch.zeros(96, 3, 16, 16), torch.arange(96))


train_set = make_dataset()
"""

# A user's training script: takes any flags. Where asked to (tests only), it lives for a while.
TRAINING = """
import sys, time
if __name__ == "__main__":
    time.sleep(float(sys.argv[sys.argv.index("--linger") + 1]) if "--linger" in sys.argv else 0)
    print("trained with", *sys.argv[1:])
else:
    from data import make_dataset
"""

DEATH = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    for batch in loader:
RuntimeError: DataLoader worker (pid 12902) is killed by signal: Bus error. It is possible that dataloader's workers \
are out of shared memory. Please try to raise your shared memory limit.
"""


def furnish(folder: Path) -> None:
    """Put everything there that pages speak of."""
    rng = np.random.default_rng(0)
    for name in ("train.h5", "val.h5", "train_256.h5"):
        with h5py.File(folder / name, "w") as file:
            file["images"] = rng.integers(0, 255, (96, 16, 16, 3), dtype=np.uint8)
            file["heatmaps"] = rng.random((96, 16, 16), dtype=np.float32)
            file["labels"] = np.arange(96) % 4
    for folder_name in ("shards", "runs", "ckpt", "train", "chats", "data", "mytraining"):
        (folder / folder_name).mkdir()
    for number in range(2):
        np.save(folder / "shards" / f"{number}.npy", np.full((8, 4), number))
    _tables(folder)
    (folder / "images.lmdb").mkdir()
    write_lmdb(folder / "images.lmdb" / "data.mdb", {b"%04d" % number: bytes(64) for number in range(16)})
    _archives(folder)
    for module in ("data/__init__.py", "data/faces.py", "mytraining/data.py"):
        (folder / module).write_text(DATASETS)
    (folder / "doc_given.py").write_text(GIVEN)
    package = folder / "points_reader-1.0.dist-info"  # as if pip had installed the package of howto/add-format.md
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: points-reader\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[legroom.formats]\npoints = points_reader:FORMAT\n")
    for script in ("train.py", "train_faces.py", "somebody_elses.py"):
        (folder / script).write_text(TRAINING)
    (folder / "train.log").write_text(DEATH)
    for verb in (f"watch --pid {os.getpid()} --once --log run.jsonl", "run --report run.json -- python train.py"):
        command = [sys.executable, "-m", "legroom", *verb.split()]
        subprocess.run(command, cwd=folder, env=environment(folder), check=False, capture_output=True)


def _tables(folder: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    tokens = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(range(512 * 8)), 8)
    table = pyarrow.table({"tokens": tokens, "label": list(range(512)), "text": [f"line {i}" for i in range(512)]})
    (folder / "saved_dataset").mkdir()
    for split in ("train", "test"):
        hf_saved(folder / "saved_dataset" / split, table)
    (folder / "saved_dataset" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("train/0.parquet", "train/1.parquet", "chats/0.parquet", "chats.parquet"):
        pyarrow.parquet.write_table(table, folder / name, row_group_size=128)


def _archives(folder: Path) -> None:
    """Images in shards, in an MDS directory, and in a folder by class."""
    try:
        from PIL import Image
    except ImportError:
        return
    files, rows = [], []
    for number in range(16):
        buffer = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(buffer, "jpeg")
        files += [(f"{number:04d}.jpg", buffer.getvalue()), (f"{number:04d}.cls", b"%d" % (number % 2))]
        rows.append({"caption": b"an image", "image": buffer.getvalue(), "label": number.to_bytes(8, "little")})
        path = folder / "images" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
    for number in range(2):
        write_tar(folder / "shards" / f"train-{number}.tar", files[16 * number : 16 * number + 16])
    write_mds(folder / "mds" / "train", [rows[:9], rows[9:]], {"caption": "str", "image": "jpeg", "label": "int"})


def copy(template: Path, folder: Path) -> dict[str, str]:
    """A page's own copy of the folder, and the environment in which its blocks run."""
    shutil.copytree(template, folder, dirs_exist_ok=True)
    return environment(folder)


def environment(folder: Path) -> dict[str, str]:
    """Stores, memories and scratch files in that folder, and our own Python before any other."""
    places = {
        "LEGROOM_SHM": "shm",
        "LEGROOM_DIR": "disk",
        "XDG_STATE_HOME": "state",
        "XDG_CACHE_HOME": "cache",
        "TMPDIR": "tmp",
    }
    for name in places.values():
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    return {
        **os.environ,
        **{variable: str(folder / name) for variable, name in places.items()},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }

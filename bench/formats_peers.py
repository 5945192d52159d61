"""The files people have, read by Legroom and by the library or loop that each format's own users have, in one process.

    python bench/formats_peers.py [--only tar,lmdb] [--rounds 9] [--scale 1.0]

Windows of tokens: nanoGPT's loop over a memmap makes int64 tensors of inputs and targets. A bare gather is `numpy.take`
of rows with as many bytes as a window, from the same shared copy and from a memmap, into one buffer, which stays in the
CPU cache but must be used up before the next batch, and into two in turn. The barest loop is a generator of the same
dicts of tensors, without anything else that Legroom's does. All get other rows in every round. Rounds are many and
short, and Legroom's loops go on from round to round, through whole epochs, as in a training run.
Samples: the raw bytes of each, nothing is decoded. Contenders take turns and use the CPU time of their thread, so that
other programs count little; the best round counts. Files are in the page cache. Does not cover: cold disks, GPUs.
Memory: eight processes open the data and read everything. By how much more their PSS is than that of eight processes
with fewer samples, divided by the bytes that these have less. Legroom's entry is counted once, as a part of its bytes.
A peer that cannot be imported is a row that says so.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch

import legroom
from measure import RESULTS, Row, alternate, as_json, best, in_words, kept, machine, places, save, settle, show, spreads

SIZES = [(12, 1024), (64, 1024), (64, 4096), (256, 2048)]  # batch_size, sequence_length
STEPS = 100
SHORT_ROUNDS = 8  # of tokens for each round of samples
PROCESSES = 8
FASTER, COPIES = 1.0, 1.05
BATCH = 64
FEW = 8 * BATCH  # samples: enough for all the memory that batches take while they are used
PEERS = ("webdataset", "mosaicml-streaming", "lmdb", "datasets", "megatron-core", "torchvision")
Loops = dict[str, Callable[[], object]]
Loop = Callable[[], float]  # CPU seconds of this thread for one batch


# Tokens.


def by_nanogpt(tokens: np.ndarray, length: int, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.stack([torch.from_numpy(tokens[at : at + length].astype(np.int64)) for at in starts])
    targets = torch.stack([torch.from_numpy(tokens[at + 1 : at + 1 + length].astype(np.int64)) for at in starts])
    return inputs, targets


def token_batches(path: Path, batch_size: int, length: int, rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    """Windows of one size: how many times as fast as each of the others."""
    flat = np.memmap(path, np.uint16, "r")
    chance, windows = np.random.default_rng(1), len(flat) // (length + 1)
    buffers = [np.empty((batch_size, 2 * (length + 1)), np.uint8) for _ in range(2)]
    with legroom.open(path, dtype="uint16") as data, legroom.open(path, dtype="uint16", backing="inplace") as mapped:
        data.ready()
        loops = {
            "legroom": data.batches(batch_size, sequence_length=length, shuffle=True),
            "legroom of the memmap": mapped.batches(batch_size, sequence_length=length, shuffle=True),
        }
        first = next(iter(data.batches(8, sequence_length=length)))["tokens"].numpy()
        np.testing.assert_array_equal(first[:, :-1], by_nanogpt(flat, length, np.arange(8) * length)[0])

        def order() -> np.ndarray:
            return chance.permutation(windows)[: STEPS * batch_size].reshape(STEPS, batch_size)

        def take(tokens: np.ndarray, count: int, use: Callable[[np.ndarray], object] | None = None) -> Loop:
            rows = tokens[: windows * (length + 1)].reshape(windows, length + 1).view(np.uint8)

            def once() -> float:
                pairs = list(zip(order(), cycle(buffers[:count])))
                start = time.thread_time()
                for at, out in pairs:
                    found = np.take(rows, at, axis=0, out=out, mode="clip")
                    if use is not None:
                        use(found)
                return (time.thread_time() - start) / STEPS

            return once

        def as_tensor(rows: np.ndarray) -> dict[str, torch.Tensor]:
            return {"tokens": torch.from_numpy(rows.view(np.uint16))}

        def barest() -> float:
            """What Python leaves of a gather: the same windows in the same dicts of tensors, and nothing else."""
            tokens, size = data["tokens"], 2 * (length + 1)
            items = np.ndarray((len(tokens) - 1) // length, f"V{size}", tokens, strides=(2 * length,))
            row, at = np.dtype((np.uint16, (length + 1,))), order()
            start = time.thread_time()
            for _ in ({"tokens": torch.from_numpy(items[rows].view(row))} for rows in at):
                pass
            return (time.thread_time() - start) / STEPS

        def nanogpt() -> float:
            starts = order() * length
            start = time.thread_time()
            for at in starts:
                by_nanogpt(flat, length, at)
            return (time.thread_time() - start) / STEPS

        def loop(name: str, use: Callable[[torch.Tensor], object] | None = None) -> Loop:
            found: list[Iterator[dict[str, torch.Tensor]]] = []

            def once() -> float:
                count, start = 0, time.thread_time()
                for batch in islice(found[0], STEPS) if found else ():
                    count += 1
                    if use is not None:
                        use(batch["tokens"])
                if count == STEPS:
                    return (time.thread_time() - start) / STEPS
                found[:] = [iter(loops[name])]  # the epoch has ended in this round, which begins again
                next(found[0])
                return once()

            return once

        figures = alternate(
            {
                "nanoGPT": nanogpt,
                "take": take(data["tokens"], 1),
                "take, two buffers": take(data["tokens"], 2),
                "take, two buffers, as tensors": take(data["tokens"], 2, as_tensor),
                "take of the memmap": take(flat, 1),
                "take of the memmap, two buffers": take(flat, 2),
                "barest loop": barest,
                **{name: loop(name) for name in loops},
                "legroom, as int64": loop("legroom", torch.Tensor.long),
            },
            rounds,
        )
    least = best(figures)
    case = f"tokens, {batch_size} × {length}"

    def row(what: str, peer: str, ours: str, target: float | None, note: str = "") -> Row:
        return Row(f"{case}, {what}", least[peer] / least[ours], "×", target, at_least=True, note=note)

    every = ", ".join(f"{name} {value * 1e6:.1f} µs" for name, value in least.items())
    return [
        row("bare gather of the shared copy", "take", "legroom", 0.9, every),
        row("the same into two buffers", "take, two buffers", "legroom", 0.9),
        row("the same as tensors, which Legroom returns", "take, two buffers, as tensors", "legroom", 0.9),
        row("the same; a barest loop of tensors instead of Legroom's", "take, two buffers", "barest loop", None),
        row("bare gather of a memmap, with backing='inplace'", "take of the memmap", "legroom of the memmap", 0.9),
        row("the same into two buffers", "take of the memmap, two buffers", "legroom of the memmap", 0.9),
        row("nanoGPT's loop, as int64", "nanoGPT", "legroom, as int64", FASTER),
    ], figures


def tokens(folder: Path, scale: float, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    path = folder / "train.bin"
    np.random.default_rng(0).integers(0, 50_257, int(100_000_000 * scale), dtype=np.uint16).tofile(path)
    rows, raw = [], {}
    for batch_size, length in SIZES:
        found, figures = token_batches(path, batch_size, length, rounds * SHORT_ROUNDS)
        rows += found
        raw[f"{batch_size} × {length}"] = spreads(figures)
    path.unlink()
    return rows, raw


# Samples. Each format writes its data, names the loops of both sides, and reads everything in one process.


class Samples:
    """A format with samples."""

    name, peer, module, package = "", "", "", ""
    count, size = 4000, 110_000  # the images of ImageNet have 110 kB on average
    measures_memory = True

    def write(self, path: Path, count: int) -> None:
        """Write that many samples."""
        raise NotImplementedError

    def open_peer(self, path: Path) -> Any:
        """What the peer's users open."""
        raise NotImplementedError

    def theirs(self, peer: Any, count: int) -> Loops:
        """The peer's loops over all samples, by what they do."""
        raise NotImplementedError

    def ours(self, data: Any, count: int) -> Loops:
        """Legroom's, by the same names."""
        raise NotImplementedError

    def read_all(self, peer: Any, count: int) -> None:
        """Read every sample by the peer, for its memory."""
        next(iter(self.theirs(peer, count).values()))()

    def check(self, peer: Any, data: Any) -> None:
        """Both read the same."""
        raise NotImplementedError

    def clean(self) -> None:
        """Remove what the peer leaves behind."""

    def blob(self, number: int, size: int | None = None) -> bytes:
        return np.random.default_rng(number).bytes(size or self.size)


def through(samples: Iterable[Any]) -> Callable[[], None]:
    def loop() -> None:
        for _ in samples:
            pass

    return loop


def shuffled(samples: Any, count: int) -> Callable[[], None]:
    """A loop over all samples by number; the order is made before."""
    order = memoryview(np.random.default_rng(0).permutation(count))  # its items are Python integers

    def loop() -> None:
        for number in order:
            samples[number]

    return loop


def loader(dataset: Any, **more: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, **more)


class Tar(Samples):
    name, peer, module, package = "tar", "webdataset", "webdataset", "webdataset"

    def write(self, path: Path, count: int) -> None:
        import io
        import tarfile

        with tarfile.open(path, "w") as tar:
            for number in range(count):
                for end, content in (("jpg", self.blob(number)), ("cls", b"%d" % (number % 10))):
                    about = tarfile.TarInfo(f"{number:06d}.{end}")
                    about.size = len(content)
                    tar.addfile(about, io.BytesIO(content))

    def open_peer(self, path: Path) -> Any:
        import webdataset

        return webdataset.WebDataset(str(path), shardshuffle=False)

    def _dataset(self, data: Any) -> Any:
        return data.dataset("__key__", "jpg", "cls", decode={"jpg": bytes, "cls": bytes})

    def theirs(self, peer: Any, count: int) -> Loops:
        return {"in order": through(peer), "shuffled": through(peer.shuffle(1000))}

    def ours(self, data: Any, count: int) -> Loops:
        return {"in order": through(self._dataset(data)), "shuffled": shuffled(self._dataset(data), count)}

    def check(self, peer: Any, data: Any) -> None:
        for one, (key, image, label) in zip(peer, self._dataset(data), strict=True):
            assert (one["__key__"], one["jpg"], one["cls"]) == (key, image, label)


class Mds(Samples):
    name, peer, module, package = "MDS", "mosaicml-streaming", "streaming", "mosaicml-streaming"

    def write(self, path: Path, count: int) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=str(path), columns={"image": "bytes", "label": "int", "caption": "str"}) as out:
            for number in range(count):
                out.write({"image": self.blob(number), "label": number % 10, "caption": f"number {number}"})

    def open_peer(self, path: Path) -> Any:
        from streaming import StreamingDataset

        return StreamingDataset(local=str(path), batch_size=1, shuffle=False)

    def theirs(self, peer: Any, count: int) -> Loops:
        return {"shuffled": shuffled(peer, count)}

    def ours(self, data: Any, count: int) -> Loops:
        return {"shuffled": shuffled(data.dataset("image", "label", "caption", decode={"image": bytes}), count)}

    def clean(self) -> None:
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()

    def check(self, peer: Any, data: Any) -> None:
        ours = data.dataset("image", "label", "caption", decode={"image": bytes})
        for number, (image, label, caption) in enumerate(ours):
            assert peer[number] == {"image": image, "label": int(label), "caption": caption}


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


class Images(Samples):
    name, peer, module, package = "image folder", "torchvision's ImageFolder", "torchvision.datasets", "torchvision"

    def write(self, path: Path, count: int) -> None:
        for number in range(count):
            file = path / f"class{number % 10}" / f"{number:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.blob(number))

    def open_peer(self, path: Path) -> Any:
        from torchvision.datasets import ImageFolder

        return ImageFolder(str(path), loader=read_file)

    def theirs(self, peer: Any, count: int) -> Loops:
        return {"shuffled, in torch's DataLoader": through(loader(peer, collate_fn=list))}

    def ours(self, data: Any, count: int) -> Loops:
        return self.theirs(data.dataset("image", "label", decode={"image": bytes}), count)

    def check(self, peer: Any, data: Any) -> None:
        ours = data.dataset("image", "label", decode={"image": bytes})
        for number, (image, label) in enumerate(ours):
            assert peer[number] == (image, int(label))


class Lmdb(Samples):
    name, peer, module, package = "LMDB", "lmdb", "lmdb", "lmdb"

    def write(self, path: Path, count: int) -> None:
        import lmdb

        with lmdb.open(str(path), map_size=1 << 32) as out, out.begin(write=True) as transaction:
            for number in range(count):
                transaction.put(b"%08d" % number, self.blob(number))

    def open_peer(self, path: Path) -> Any:
        import lmdb

        return lmdb.open(str(path), readonly=True, lock=False, readahead=False)

    def theirs(self, peer: Any, count: int) -> Loops:
        keys = [b"%08d" % number for number in range(count)]
        random.Random(0).shuffle(keys)

        def by_key(buffers: bool) -> Callable[[], None]:
            def loop() -> None:
                with peer.begin(buffers=buffers) as transaction:
                    for key in keys:
                        transaction.get(key)

            return loop

        def in_order(buffers: bool) -> Callable[[], None]:
            def loop() -> None:
                with peer.begin(buffers=buffers) as transaction:
                    for _ in transaction.cursor().iternext(keys=False):
                        pass

            return loop

        return self._named(by_key(False), by_key(True), in_order(False), in_order(True))

    def ours(self, data: Any, count: int) -> Loops:
        copied, views = data.dataset("value", decode={"value": bytes}), data.dataset("value")
        return self._named(shuffled(copied, count), shuffled(views, count), through(copied), through(views))

    def _named(self, *loops: Callable[[], object]) -> Loops:
        names = ("shuffled, as bytes", "shuffled, as views", "in order, as bytes", "in order, as views")
        return dict(zip((f"{self.size} B {name}" for name in names), loops, strict=True))

    def check(self, peer: Any, data: Any) -> None:
        with peer.begin() as transaction:
            ours = data.dataset("value", decode={"value": bytes})
            for theirs, value in zip(transaction.cursor().iternext(keys=False), ours, strict=True):
                assert theirs == value


class SmallLmdb(Lmdb):
    count, size = 100_000, 500
    measures_memory = False  # of 50 MB; the offsets of small values are a part of the entry


class HuggingFace(Samples):
    name, peer, module, package = "Hugging Face directory", "datasets", "datasets", "datasets"
    count, size = 50_000, 2048  # tokens

    def write(self, path: Path, count: int) -> None:
        import datasets

        datasets.disable_progress_bars()
        values = np.random.default_rng(0).integers(0, 50_000, count * self.size, dtype=np.int32)
        columns = {
            "tokens": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values), self.size),
            "label": pyarrow.array(np.arange(count)),
        }
        datasets.Dataset(pyarrow.table(columns)).save_to_disk(str(path))

    def open_peer(self, path: Path) -> Any:
        import datasets

        return datasets.load_from_disk(str(path)).with_format("torch")

    def theirs(self, peer: Any, count: int) -> Loops:
        return {f"batches of {BATCH}, datasets in torch's DataLoader": through(loader(peer))}

    def ours(self, data: Any, count: int) -> Loops:
        return {name: through(data.batches(BATCH, shuffle=True)) for name in self.theirs(range(1), 1)}

    def read_all(self, peer: Any, count: int) -> None:
        for _ in peer.with_format("numpy").iter(BATCH):  # a tenth of the time
            pass

    def check(self, peer: Any, data: Any) -> None:
        ours = data.dataset("tokens", "label")
        for number in range(0, len(peer), 997):
            theirs = peer[number]
            assert torch.equal(theirs["tokens"], ours[number][0].long()) and theirs["label"] == ours[number][1]


def as_megatron(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What GPTDataset returns: int64, and a mask and positions that are the same for every window."""
    tokens = batch["tokens"].long()
    inputs = tokens[:, :-1]
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    return {"tokens": inputs, "labels": tokens[:, 1:], "loss_mask": torch.ones(inputs.shape), "position_ids": positions}


class Megatron(Samples):
    name, peer, module = "Megatron", "Megatron's dataset", "megatron.core.datasets.gpt_dataset"
    package = "megatron-core"
    count, size = 150_000, 1024  # documents, sequence_length

    def write(self, path: Path, count: int) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        chance = np.random.default_rng(0)
        out = IndexedDatasetBuilder(str(path.with_suffix(".bin")), dtype=np.uint16)
        for length in chance.integers(200, 1800, count).tolist():
            tokens = torch.from_numpy(chance.integers(0, 50_000, length, dtype=np.int32))
            out.add_document(tokens, [length])
        out.finalize(str(path.with_suffix(".idx")))

    def open_peer(self, path: Path) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        class Tokenizer:
            eod, pad, vocab_size, unique_identifiers = 0, -1, 50_000, {"class": "none"}

        config = GPTDatasetConfig(
            random_seed=1, sequence_length=self.size, blend=([str(path)], None), split="1,0,0", tokenizer=Tokenizer(),
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        )  # fmt: skip
        stored = IndexedDataset(str(path), mmap=True)
        indices = np.arange(len(stored.document_indices) - 1, dtype=np.int32)
        return stored, GPTDataset(stored, str(path), indices, None, Split.train, config)

    def theirs(self, peer: Any, count: int) -> Loops:
        stored, windows = peer
        return self._named(shuffled(stored, count), through(torch.utils.data.DataLoader(windows, BATCH)))

    def ours(self, data: Any, count: int) -> Loops:
        windows = data.batches(BATCH, sequence_length=self.size, shuffle=True, transform=as_megatron)
        return self._named(shuffled(data["sequences"], count), through(windows))

    def _named(self, *loops: Callable[[], object]) -> Loops:
        names = ("documents, shuffled", f"batches of {BATCH} × {self.size}, GPTDataset in torch's DataLoader")
        return dict(zip(names, loops, strict=True))

    def check(self, peer: Any, data: Any) -> None:
        for number in range(0, len(data["sequences"]), 97):
            np.testing.assert_array_equal(peer[0][number], data["sequences"][number])


FORMATS: dict[str, Samples] = {
    "megatron": Megatron(),
    "tar": Tar(),
    "mds": Mds(),
    "images": Images(),
    "lmdb": Lmdb(),
    "lmdb-small": SmallLmdb(),
    "hf": HuggingFace(),
}


def load_peer(which: Samples) -> str | None:
    """Import the peer; else why it cannot be."""
    try:
        if which.package in ("torchvision", "mosaicml-streaming"):  # which imports torchvision
            declare_vision_operators()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(which.module)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


def declare_vision_operators() -> None:
    """torchvision's compiled operators are built for one torch, and its import fails without two of them.

    ImageFolder is Python alone. So the two are declared where they are missing; nothing here calls them.
    """
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as problem:
        if "torchvision::" not in str(problem):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    global _declared
    _declared = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_declared: Any = None


def samples(name: str, folder: Path, scale: float, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """One format: speed of one process, then memory of eight."""
    which = FORMATS[name]
    why = load_peer(which)
    if why is not None:
        return [Row(f"{which.name}, {which.peer}", float("nan"), "", note=f"not measured: {why}")], {}
    count = max(200, int(which.count * scale))
    path, few = folder / name, folder / f"{name}-few"
    which.write(path, count)
    which.write(few, FEW)
    source, small = source_of(which, path), source_of(which, few)
    settle(*(file for file in folder.rglob("*") if file.is_file() and name in str(file)))
    rows, raw = [], {}
    with legroom.open(source) as data:
        data.ready()
        peer = which.open_peer(path)
        which.check(peer, data)
        size = data.info.bytes
        theirs = which.theirs(peer, count)
        for what, ours in which.ours(data, count).items():
            figures = alternate({which.peer: partial(cpu, theirs[what]), "legroom": partial(cpu, ours)}, rounds)
            least = best(figures)
            note = ", ".join(f"{who} {seconds / count * 1e6:.2f} µs a sample" for who, seconds in least.items())
            ratio = least[which.peer] / least["legroom"]
            rows.append(Row(f"{which.name}, {what}", ratio, f"× {which.peer}", FASTER, at_least=True, note=note))
            raw[what] = spreads(figures)
        del peer, theirs, ours
    if not which.measures_memory:
        return rows, raw
    places_of = {"legroom": (source, small), "peer": (path, few)}
    with legroom.open(small) as data:
        sizes = size, data.info.bytes
    copies = {who: memory(name, who, *where, count, sizes) for who, where in places_of.items()}
    which.clean()
    raw["memory"] = copies
    other = copies["peer"]["copies"]
    beside = f"{other:.3g}" if other == other else "not measured, processes cannot open it independently"
    note = f"{which.peer}: {beside}; {size / 1e6:.0f} MB"
    rows.append(Row(f"{which.name}, {PROCESSES} processes", copies["legroom"]["copies"], "copies", COPIES, note=note))
    return rows, raw


def source_of(which: Samples, path: Path) -> Path:
    return path.with_suffix(".idx") if isinstance(which, Megatron) else path


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


# Memory.


def memory(name: str, who: str, path: Path, few: Path, count: int, sizes: tuple[int, int]) -> dict[str, float]:
    """Copies of the data in eight processes, which a process of its own forks."""
    line = [sys.executable, __file__, "--memory", name, who, os.fspath(path), os.fspath(few), str(count)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode and who != "legroom":
        return {"copies": float("nan")}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    copies = found["grown_bytes"] / (sizes[0] - sizes[1]) + found["entry_bytes"] / sizes[0]
    return {**found, "copies": copies}


def measure_memory(name: str, who: str, path: Path, few: Path, count: int) -> dict[str, float]:
    which = FORMATS[name]
    why = load_peer(which)
    assert why is None, why
    torch.set_num_threads(1)
    kept_open = read(which, who, few, FEW)  # imports, and what is allocated once
    del kept_open
    gc.collect()
    gc.freeze()
    # As many samples in all: pages of the parent that a loop writes to, such as reference counts, become its own.
    own_few, shared_few = forked(which, who, few, FEW, max(1, count // FEW))
    own, shared = forked(which, who, path, count)
    if who != "legroom":
        return {"grown_bytes": own - own_few + shared - shared_few, "entry_bytes": 0}
    with legroom.open(path) as data:  # its files, whether or not all of them is mapped
        files = [file.stat() for file in Path(os.environ["LEGROOM_SHM"]).rglob(f"{data.info.key}/*")]
    return {"grown_bytes": own - own_few, "entry_bytes": sum(file.st_blocks * 512 for file in files)}


def forked(which: Samples, who: str, path: Path, count: int, times: int = 1) -> tuple[int, int]:
    """PSS of eight processes that have read everything: of their own memory and files, and of shared memory."""
    (go, tell), (hear, done) = os.pipe(), os.pipe()
    pids = []
    for _ in range(PROCESSES):
        pid = os.fork()
        if pid == 0:
            try:
                kept_open = read(which, who, path, count, times)
                os.write(done, b".")
                os.read(go, 1)
                del kept_open
            finally:
                os.write(done, b"!")  # it failed, or nothing reads this any more
                os._exit(0)
        pids.append(pid)
    said = b"".join(os.read(hear, 1) for _ in pids)
    if said != b"." * PROCESSES:
        os.write(tell, b"." * PROCESSES)
        raise SystemExit("it cannot be opened by several processes at once")
    found = [smaps(pid) for pid in pids]
    os.write(tell, b"." * PROCESSES)
    for pid in pids:
        os.waitpid(pid, 0)
    shared = sum(one["Pss_Shmem"] for one in found)
    return sum(one["Pss"] for one in found) - shared, shared


def smaps(pid: int) -> dict[str, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}


def read(which: Samples, who: str, path: Path, count: int, times: int = 1) -> object:
    """Open the data, read every sample, and return freed memory to the system; returns what stays open."""
    libc = ctypes.CDLL(None)
    opened = legroom.open(path) if who == "legroom" else which.open_peer(path)
    loop = (
        next(iter(which.ours(opened, count).values())) if who == "legroom" else partial(which.read_all, opened, count)
    )
    for _ in range(times):
        loop()
    gc.collect()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return opened


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--scale", type=float, default=1.0, help="of the data's size")
    options.add_argument(
        "--only", default="", help=f"some of {','.join(['tokens', *FORMATS])}; others' results are kept"
    )
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--memory", nargs=5, help=argparse.SUPPRESS)
    given = options.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if given.memory:
        name, who, path, few, count = given.memory
        print(json.dumps(measure_memory(name, who, Path(path), Path(few), int(count))))
        return
    where = machine("numpy", "torch", "pyarrow", *PEERS)
    print(in_words(where))
    chosen = [name for name in given.only.split(",") if name] or ["tokens", *FORMATS]
    parts: dict[str, Any] = kept("formats_peers", given.results).get("parts", {})
    for name in chosen:
        with places() as (_, disk):
            if name == "tokens":
                rows, raw = tokens(disk, given.scale, given.rounds)
            else:
                rows, raw = samples(name, disk, given.scale, given.rounds)
        parts[name] = {"machine": where, "rounds": given.rounds, "rows": as_json(rows), "raw": raw}
        print(show(rows), flush=True)
        ordered = {name: parts[name] for name in ("tokens", *FORMATS) if name in parts}
        save("formats_peers", {"machine": where, "parts": ordered}, given.results)


if __name__ == "__main__":
    main()

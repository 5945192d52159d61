"""Makes some batches twice, in different processes, and names what differs: whether batches can be shared.

The second process makes them in another order, at another time and with another hash seed. So a dataset that reads the
clock, counts its calls, or iterates over a set makes other batches there. Of an IterableDataset, it makes the first
half, and the rest with another object that continues from the state of the first.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from itertools import islice
from typing import Any

from legroom.errors import BatchSizeNeeded, DatasetFailed
from legroom.loader.dataloader.resume import dataset_state_dict
from legroom.loader.dataloader.sharing.group_settings import leaves
from legroom.loader.dataloader.sharing.make_batches_in_trainer import OwnBatches
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Orders, SeededStream
from legroom.loader.measure.import_dataset import chosen_batch_size, find_dataset, length
from legroom.messages import say

BATCHES = 4
_CODE = "from legroom.loader.measure.compare_batches_made_twice import main; main()"


def differing_parts(dataset: str, collate: str | None, batch_size: int | None, timeout: float) -> dict[str, Any]:
    """``batches``: how many were made twice; ``differing``: for each of them that differs, the paths of its parts."""
    found = [
        _made(dataset, collate, batch_size, timeout, seed, backwards) for seed, backwards in (("1", ""), ("2", "1"))
    ]
    differing = {}
    for number, one in found[0].items():
        other = found[1].get(number, {})
        if paths := [path for path in {**one, **other} if one.get(path) != other.get(path)]:
            differing[number] = paths
    return {"batches": len(found[0]), "differing": differing}


def _made(dataset: str, collate: str | None, batch_size: int | None, timeout: float, seed: str, backwards: str) -> Any:
    """The digests of all parts of some batches, made in a new process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, dataset, collate or "", str(batch_size or ""), backwards],
            capture_output=True, text=True, timeout=timeout,
            env={**os.environ, "PYTHONHASHSEED": seed, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DatasetFailed(
            say("the dataset made no {count} batches within {seconds:.0f} s", count=BATCHES, seconds=timeout),
            fix=(say("give it more time: timeout={seconds:.0f}", seconds=2 * timeout),),
        ) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()
        raise DatasetFailed(
            say("the dataset {name} could not be loaded", name=dataset), why=last[-1] if last else str(done.returncode)
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise BatchSizeNeeded(answer["error"]["message"], why=answer["error"]["why"], fix=tuple(answer["error"]["fix"]))
    return answer


def main() -> None:
    """In the child: print the digests of some batches as one line."""
    spec, collate, size, backwards = sys.argv[1:5]
    sys.path.insert(0, os.getcwd())
    found = find_dataset(spec, collate or None)
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, default_collate

    try:
        batch_size = chosen_batch_size(int(size) if size else None, found.settings)
    except BatchSizeNeeded as problem:
        sys.stdout.write(json.dumps({"error": problem.as_dict()}) + "\n")
        return
    collate_fn = found.collate_fn or default_collate
    if isinstance(found.dataset, IterableDataset):
        made = _stream_batches(found.dataset, collate_fn, batch_size, spec if backwards else None)
    else:
        count = length(found.dataset)
        if count is None:
            raise TypeError(say("a dataset without a length cannot be shared"))
        sampler = BatchSampler(RandomSampler(range(count)), batch_size, drop_last=False)
        own = OwnBatches(found.dataset, True, collate_fn, Orders(sampler, True, 1), lambda *_, **__: None)
        numbers = range(min(BATCHES, -(-count // batch_size)))
        made = {}
        for number in reversed(numbers) if backwards else numbers:
            made[number] = dict(leaves(own.make_here((0, number))))
    sys.stdout.write(json.dumps(made) + "\n")


def _stream_batches(dataset: Any, collate_fn: Any, batch_size: int, again: str | None) -> dict[int, dict[str, str]]:
    """The first batches of an IterableDataset; ``again``: from the middle on, of another one that continues there."""
    if dataset_state_dict(dataset) is None:
        raise TypeError(say("an IterableDataset without state_dict cannot be shared"))
    stream = SeededStream(dataset, 1, 0, batch_size)
    samples, made = iter(stream), {}
    for number in range(BATCHES):
        if again is not None and number == BATCHES // 2:
            state = pickle.loads(pickle.dumps(stream.state_dict()))
            stream = SeededStream(find_dataset(again, None).dataset, 1, 0, batch_size)
            stream.load_state_dict(state)
            samples = iter(stream)
        if batch := list(islice(samples, batch_size)):
            made[number] = dict(leaves(collate_fn(batch)))
    return made

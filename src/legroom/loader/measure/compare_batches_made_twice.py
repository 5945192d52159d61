"""Makes some batches twice, in different processes, and names what differs: whether batches can be shared.

The second process makes them in another order, at another time and with another hash seed. So a dataset that reads the
clock, counts its calls, or iterates over a set makes other batches there. Of an IterableDataset, it makes the first
half, and the rest with another object that continues from the state of the first.
"""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

from legroom.loader.dataloader.resume import dataset_state_dict
from legroom.loader.dataloader.sharing.group_settings import leaves
from legroom.loader.dataloader.sharing.make_batches_in_trainer import OwnBatches
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Orders, SeededStream
from legroom.loader.measure.import_dataset import chosen_batch_size, find_dataset, length
from legroom.loader.measure.measure_in_child import in_child
from legroom.messages import say

BATCHES = 4


def differing_parts(dataset: str, collate: str | None, batch_size: int | None, timeout: float) -> dict[str, Any]:
    """``batches``: how many were made twice; ``differing``: for each of them that differs, the paths of its parts."""
    found = [
        in_child(
            dataset, timeout, environment={"PYTHONHASHSEED": seed, "CUDA_VISIBLE_DEVICES": ""}, task="digests",
            spec=dataset, collate=collate, batch_size=batch_size, backwards=backwards,
        )
        for seed, backwards in (("1", False), ("2", True))
    ]  # fmt: skip
    differing = {}
    for number, one in found[0].items():
        other = found[1].get(number, {})
        if paths := [path for path in {**one, **other} if one.get(path) != other.get(path)]:
            differing[number] = paths
    return {"batches": len(found[0]), "differing": differing}


def batches_digests(
    spec: str, collate: str | None, batch_size: int | None, backwards: bool
) -> dict[int, dict[str, str]]:
    """In the child: the digests of all parts of some batches."""
    found = find_dataset(spec, collate)
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, default_collate

    batch_size = chosen_batch_size(batch_size, found.settings)
    collate_fn = found.collate_fn or default_collate
    if isinstance(found.dataset, IterableDataset):
        return _stream_batches(found.dataset, collate_fn, batch_size, spec if backwards else None)
    count = length(found.dataset)
    if count is None:
        raise TypeError(say("a dataset without a length cannot be shared"))
    sampler = BatchSampler(RandomSampler(range(count)), batch_size, drop_last=False)
    own = OwnBatches(found.dataset, True, collate_fn, Orders(sampler, True, 1), lambda *_, **__: None)
    numbers = range(min(BATCHES, -(-count // batch_size)))
    return {number: dict(leaves(own.make_here((0, number)))) for number in (numbers[::-1] if backwards else numbers)}


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

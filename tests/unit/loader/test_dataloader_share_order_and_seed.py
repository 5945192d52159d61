"""Order and random numbers of a shared loader; what makes two trainers one group."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import share_data

from legroom.errors import ShareMismatch, ShareUnsupported, Unpicklable, UsageError
from legroom.loader.dataloader.sharing import group_settings, order_and_seed_of_each_batch, start_producer_process

torch = pytest.importorskip("torch")
import legroom  # noqa: E402  its DataLoader needs torch


def loader(dataset: Any = None, **given: Any) -> Any:
    return legroom.DataLoader(
        dataset or share_data.Noise(40), **{"batch_size": 4, "num_workers": 2, "share": "g", **given}
    )


def orders(of: Any, seed: int = 5) -> order_and_seed_of_each_batch.Orders:
    return order_and_seed_of_each_batch.Orders(of.batch_sampler, True, seed, of.generator)


def test_an_order_depends_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    one = orders(loader(shuffle=True))
    first = [one.draw(epoch).digest for epoch in range(3)]
    torch.manual_seed(2)
    assert first == [orders(loader(shuffle=True)).draw(epoch).digest for epoch in range(3)]
    assert len(set(first)) == 3 and orders(loader(shuffle=True), 6).draw(0).digest != first[0]
    assert sorted(index for number in range(10) for index in one.of(0)[number]) == list(range(40))


def test_drawing_an_order_leaves_all_generators_as_they_were() -> None:
    generator = torch.Generator().manual_seed(3)
    one = loader(shuffle=True, generator=generator)
    before = torch.get_rng_state(), random.getstate(), generator.get_state(), np.random.get_state()[1].tolist()
    orders(one).draw(4)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert torch.equal(before[2], generator.get_state()) and generator.initial_seed() == 3
    assert before[3] == np.random.get_state()[1].tolist()


def test_a_distributed_sampler_is_told_the_epoch_and_keeps_its_own() -> None:
    sampler: Any = torch.utils.data.DistributedSampler(share_data.Noise(40), num_replicas=2, rank=1)
    sampler.set_epoch(7)
    found = orders(loader(sampler=sampler))
    assert found.draw(0).digest != found.draw(1).digest and sampler.epoch == 7


def test_indices_that_are_not_numbers_keep_their_type() -> None:
    order = order_and_seed_of_each_batch.Order([["a", ("b", 1)], [True]], batched=True)
    assert [order[0], order[1]] == [["a", ("b", 1)], [True]] and type(order[1][0]) is bool
    assert order_and_seed_of_each_batch.Order([3, 4], batched=False)[1] == [4]


@pytest.mark.parametrize("last", [["a"], [1 << 70], [True], [], [5, 6, 7]])
def test_an_order_of_several_blocks_has_every_batch(last: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_and_seed_of_each_batch, "_BLOCK", 2)
    batches = [[0, 1], [], [2], [3, 4, 5], [6], last, [8]]
    order = order_and_seed_of_each_batch.Order(iter(batches), batched=True)
    assert [order[number] for number in range(len(order))] == batches
    assert order.digest == order_and_seed_of_each_batch.Order(batches, batched=True).digest


def test_an_order_may_be_empty() -> None:
    assert len(order_and_seed_of_each_batch.Order([], batched=True)) == 0


def test_a_batch_is_the_same_with_any_generators_and_threads() -> None:
    one = loader(shuffle=True)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        found.append(share_data.reference(one, 1))
    assert found[0] == found[1]


def test_generators_of_the_program_advance_as_without_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")  # no group: only the draws matter
    for persistent in (False, True):
        for generator in (False, True):
            states = []
            for share in (None, "g"):
                torch.manual_seed(11)
                own = torch.Generator().manual_seed(4) if generator else None
                one = loader(shuffle=True, share=share, generator=own, persistent_workers=persistent, num_workers=1)
                for _ in range(2):
                    iterator = iter(one)
                    next(iterator)
                    del iterator
                states.append((torch.get_rng_state().tolist(), None if own is None else own.get_state().tolist()))
            assert states[0] == states[1]


def test_states_of_shared_and_other_loaders_are_not_mixed() -> None:
    state = loader().state_dict()
    with pytest.raises(UsageError, match="share="):
        loader(share=None).load_state_dict(state)
    with pytest.raises(UsageError, match="share="):
        loader().load_state_dict(loader(share=None).state_dict())
    with pytest.raises(UsageError, match="batch_size"):
        loader(batch_size=8).load_state_dict({**state, "begun": True, "yielded": 2})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dataset": share_data.Stream()}, "IterableDataset without state_dict"),
        ({"num_workers": 0}, "num_workers"),
        ({"on_slow": "wait"}, "timeout"),
        ({"on_slow": "skip"}, "on_slow"),
        ({"share": ""}, "name of a group"),
        ({"in_order": False}, "in_order"),
    ],
)
def test_what_cannot_be_shared_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        loader(**given)


def test_a_sampler_with_random_numbers_of_its_own_is_refused() -> None:
    one = loader(sampler=share_data.OwnRandom(40))
    with pytest.raises(ShareUnsupported, match="another order each time"):
        iter(one)


def settings(one: Any) -> dict[str, str]:
    return group_settings.settings_of(one, orders(one), 5)


def test_equal_loaders_have_equal_settings() -> None:
    given = {"shuffle": True, "collate_fn": functools.partial(share_data.collate, scale=2)}
    assert settings(loader(**given)) == settings(loader(**{**given, "num_workers": 1, "pin_memory": True}))


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"batch_size": 8}, "batch_size"),
        ({"drop_last": True}, "drop_last"),
        ({"shuffle": True}, "sampler"),
        ({"collate_fn": share_data.collate}, "collate_fn"),
        ({"collate_fn": lambda samples: samples}, "collate_fn"),
        ({"dataset": share_data.Noise(41)}, "dataset"),
        ({"dataset": share_data.Noise(40, scale=2.0)}, "samples"),
        ({"worker_init_fn": print}, "worker_init_fn"),
    ],
)
def test_a_difference_is_named(given: dict[str, Any], argument: str) -> None:
    with pytest.raises(ShareMismatch) as caught:
        group_settings.check_same("g", settings(loader()), settings(loader(**given)))
    assert caught.value.what.startswith(f"share='g': {argument} differs") and caught.value.code == "share-mismatch"


def test_each_rank_has_its_group() -> None:
    dataset = share_data.Noise(40)
    ranks = [torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=rank) for rank in (0, 1)]
    keys = {group_settings.group_key("g", loader(sampler=one).batch_sampler) for one in ranks}
    assert len(keys) == 2 and group_settings.group_key("g", loader().batch_sampler) not in keys


def test_digests_name_what_differs() -> None:
    one = {"image": torch.zeros(2), "meta": [1, {"name": "a"}], "array": np.arange(3)}
    other = {"image": torch.zeros(2), "meta": [1, {"name": "b"}], "array": np.arange(3).astype(np.int32)}
    first, second = (dict(group_settings.leaves(value)) for value in (one, other))
    assert [path for path in first if first[path] != second[path]] == ["['meta'][1]['name']", "['array']"]
    assert dict(group_settings.leaves({**one})) == first


def test_the_path_of_what_cannot_be_pickled() -> None:
    dataset = share_data.Noise(4)
    dataset.transforms = [abs, {"crop": share_data.Holder(lambda x: x)}]  # type: ignore[attr-defined]
    path, value = start_producer_process.find_unpicklable(dataset, "dataset")
    assert path == "dataset.transforms[1]['crop'].value" and callable(value)


def test_a_dataset_that_cannot_be_pickled_is_refused_where_threads_run(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    monkeypatch.setattr(start_producer_process, "why_no_fork", lambda: "this process has 3 threads")
    monkeypatch.setattr(
        "legroom.loader.dataloader.sharing.producer_client.why_no_fork", lambda: "this process has 3 threads"
    )
    dataset = share_data.Noise(8)
    dataset.lookup = lambda index: index  # type: ignore[attr-defined]
    with pytest.raises(Unpicklable) as caught, share_data.another_trainer("g"):
        iter(loader(dataset))
    assert "dataset.lookup" in caught.value.what and "3 threads" in caught.value.why

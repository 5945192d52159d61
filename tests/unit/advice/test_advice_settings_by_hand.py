"""Overrides, roll-back, the environment, and how loaders and trainers take the settings."""

from __future__ import annotations

import pytest
from machines import MB, healthy, with_pool
from measured_data import dataset

from legroom.advice.choose_settings import TuneRequest, choose, climb
from legroom.advice.explain_settings import settle
from legroom.advice.memory_need import batch_pages
from legroom.errors import DatasetFailed, UsageError
from legroom.records.loader_settings_and_flags import (
    VARIABLE,
    CompleteLoaderSettings,
    LoaderSettings,
    from_environment,
    read_word,
    to_environment,
)
from legroom.records.settings_and_overrides import Settings


def test_an_override_can_be_rolled_back_by_setting() -> None:
    chosen = settle(dataset(), healthy(), TuneRequest(16, effective_batch=64))
    mine = settle(dataset(), healthy(), TuneRequest(16, effective_batch=64), {"num_workers": 3, "prefetch_factor": 2})
    assert (mine.num_workers, mine.prefetch_factor) == (3, 2)
    assert mine.why["num_workers"] == "num_workers 3: set by you"
    back = mine.roll_back("num_workers")
    assert (back.num_workers, back.prefetch_factor) == (chosen.num_workers, 2)
    assert back.roll_back().values() == chosen.values() | {"threads": back.threads}
    assert chosen.roll_back("num_workers") == chosen, "nothing to roll back"


def test_a_loader_set_by_hand_is_the_one_that_the_settings_fit() -> None:
    """Batches of torch's workers are in /dev/shm, those of Legroom's are not."""
    small = with_pool(healthy(), "shm", 16 * MB, 0, 16 * MB)
    assert settle(dataset(), small, TuneRequest(16)).num_workers > 0
    asked = settle(dataset(), small, TuneRequest(16, loader_kind="torch"))
    mine = settle(dataset(), small, TuneRequest(16), {"loader_kind": "torch"})
    assert mine.loader_kind == "torch" and mine.plan == asked.plan and mine.loader() == asked.loader()
    assert mine.num_workers == 0 and mine.why["loader_kind"] == "loader_kind torch: set by you"


def test_workers_that_restart_every_epoch_by_hand_are_in_the_plan() -> None:
    request = TuneRequest(16, loader_kind="torch")
    kept, restarted = (settle(dataset(), healthy(), request, {"persistent_workers": on}) for on in (True, False))
    assert kept.plan is not None and restarted.plan is not None
    assert restarted.plan.need.shm - kept.plan.need.shm == batch_pages(dataset().tensors)


def test_a_batch_set_by_hand_keeps_the_effective_batch() -> None:
    chosen = Settings(batch_size=32, accumulation=2, ranks=3)
    assert chosen.effective_batch == 192
    smaller = chosen.override(batch_size=8)
    assert (smaller.batch_size, smaller.accumulation, smaller.effective_batch) == (8, 8, 192)
    assert chosen.override(accumulation=4).batch_size == 16
    with pytest.raises(UsageError, match="would change the effective batch") as caught:
        chosen.override(batch_size=32, accumulation=4)
    assert "384" in str(caught.value) and "192" in str(caught.value)
    with pytest.raises(UsageError, match="would change"):
        chosen.override(batch_size=7)
    assert smaller.roll_back("batch_size") == chosen.override().__class__(
        32,
        2,
        3,
        why={
            "batch_size": "batch_size 32: back to the recommended value",
            "accumulation": "accumulation 2: back to the recommended value",
        },
    )
    with pytest.raises(UsageError, match="contradicts the"):
        chosen.override(ranks=4)


@pytest.mark.parametrize(
    "chosen",
    [{"num_wrokers": 2}, {"num_workers": -1}, {"num_workers": 2.5}, {"num_workers": True}, {"pin_memory": 1},
     {"loader_kind": "mine"}, {"prefetch_factor": 0}, {"batch_size": "8"}],
)  # fmt: skip
def test_overrides_without_meaning(chosen: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Settings(batch_size=8).override(**chosen)


def test_settings_travel_through_the_environment() -> None:
    sent = LoaderSettings(num_workers=2, prefetch_factor=1, batch_size=8, accumulation=4, pin_memory=False)
    assert from_environment({VARIABLE: to_environment(sent)}) == sent
    assert from_environment({}) == from_environment({VARIABLE: ""}) == LoaderSettings()
    assert from_environment({VARIABLE: '{"workers": 1}'}) == LoaderSettings(num_workers=1)
    for text in ("{", "[1]", '{"num_workers": "two"}', '{"nonsense": 1}', "7"):
        with pytest.raises(UsageError):
            from_environment({VARIABLE: text})


def test_words_of_a_command_line() -> None:
    assert read_word("workers", "2") == 2 and read_word("pin_memory", "off") is False
    assert read_word("low_memory", "on") is True and read_word("pin_memory", "maybe") == "maybe"
    assert read_word("allocator", "expandable_segments:True") == "expandable_segments:True"
    assert read_word("workers", "many") == "many"


def test_loaders_and_trainers_take_them() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    some = Settings(4, 2, 1, num_workers=2, prefetch_factor=3, persistent_workers=True, threads=2, allocator="a:b")
    none = Settings(4)
    for settings in (some, none):
        loader = torch_data.DataLoader(range(8), **settings.loader())
        assert (loader.batch_size, loader.num_workers) == (4, settings.num_workers)
    assert some.environment() == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "PYTORCH_CUDA_ALLOC_CONF": "a:b"}
    assert none.environment() == {}


def test_trainers_know_every_argument() -> None:
    some = Settings(4, 2, 1, num_workers=2, prefetch_factor=3, persistent_workers=True)
    from inspect import signature

    transformers = pytest.importorskip("transformers")
    known = set(signature(transformers.TrainingArguments.__init__).parameters)
    assert some.training_arguments().keys() <= known
    assert some.training_arguments()["gradient_accumulation_steps"] == 2
    lightning = pytest.importorskip("lightning")
    assert some.lightning()["trainer"].keys() <= set(signature(lightning.Trainer.__init__).parameters)
    assert some.lightning()["loader"] == some.loader()


def _climb(rates: dict[tuple[int, int], float | str]) -> tuple[CompleteLoaderSettings, list[tuple[int, int]]]:
    tried: list[tuple[int, int]] = []

    def run(candidate: CompleteLoaderSettings) -> float | str:
        tried.append((candidate.num_workers, candidate.prefetch_factor))
        return rates[candidate.num_workers, candidate.prefetch_factor]

    return climb(choose(dataset(), healthy(), TuneRequest(16)), run).settings, tried


def test_climbing_stops_where_it_no_longer_pays() -> None:
    rates = {(0, 1): 100.0, (1, 1): 98.0, (2, 1): 190.0, (3, 1): 260.0, (4, 1): 262.0, (5, 1): 261.0,
             (3, 2): 290.0, (3, 4): 291.0}  # fmt: skip
    candidate, tried = _climb(rates)
    assert (candidate.num_workers, candidate.prefetch_factor) == (3, 2)
    assert max(workers for workers, _ in tried) == 5


def test_climbing_keeps_the_last_good_settings_when_one_fails() -> None:
    candidate, tried = _climb({(0, 1): 100.0, (1, 1): 180.0, (2, 1): "killed"})
    assert (candidate.num_workers, candidate.prefetch_factor) == (1, 1) and tried[-1] == (2, 1)


def test_climbing_that_fails_at_once_finds_no_settings() -> None:
    with pytest.raises(DatasetFailed, match="without workers") as caught:
        _climb({(0, 1): "ValueError: no such image"})
    assert caught.value.why == "ValueError: no such image"


def test_a_setting_that_follows_from_another_is_not_called_yours() -> None:
    mine = settle(dataset(), healthy(), TuneRequest(16), {"batch_size": 8})
    assert mine.accumulation == 2 and mine.why["batch_size"] == "batch_size 8: set by you"
    assert mine.why["accumulation"] == "accumulation 2: follows from what you set"

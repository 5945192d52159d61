"""share= with DistributedSampler, Lightning, accelerate and Hugging Face's Trainer."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import share_data

from legroom.errors import UsageError
from legroom.integrations.guard import apply_settings
from legroom.loader.dataloader.sharing.group_folder import groups
from legroom.loader.dataloader.sharing.group_settings import group_key
from legroom.records.settings_and_overrides import Settings

torch = pytest.importorskip("torch")
import legroom  # noqa: E402  its DataLoader needs torch

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*"),  # advice of the libraries about small runs
]


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    assert not [one for one in groups() if one["producer"]]


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Vectors with a label, with random noise."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.rand(4) + index, index % 2


def loader(**given: Any) -> Any:
    return legroom.DataLoader(Rows(), **{"batch_size": 4, "num_workers": 1, "share": "fit", **given})


def test_the_ranks_of_a_distributed_sampler_are_groups_of_their_own() -> None:
    found: dict[int, list[list[int]]] = {}
    for rank in (0, 1):
        sampler: Any = torch.utils.data.DistributedSampler(Rows(), num_replicas=2, rank=rank)
        one = loader(sampler=sampler)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            seen = [int(value) for values, _ in one for value in values[:, 0].tolist()]
            found.setdefault(epoch, []).append(seen)
    for epoch in (0, 1):
        assert sorted(found[epoch][0] + found[epoch][1]) == list(range(32))
    assert found[0] != found[1]


def test_lightning_keeps_it_when_it_rebuilds_a_loader_for_its_ranks() -> None:
    with warnings.catch_warnings(action="ignore"):
        data = pytest.importorskip("lightning.pytorch.utilities.data")
    sampler: Any = torch.utils.data.DistributedSampler(Rows(), num_replicas=2, rank=1)
    rebuilt = data._update_dataloader(loader(on_slow="wait", timeout=5), sampler)
    assert type(rebuilt) is legroom.DataLoader and rebuilt.share == "fit" and rebuilt.on_slow == "wait"
    assert rebuilt._sharing is not None and group_key("fit", rebuilt.batch_sampler) != group_key("fit", None)
    assert len(list(rebuilt)) == 4


def test_lightning_trains_with_it(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        pl = pytest.importorskip("lightning.pytorch")

    class Tiny(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    one = loader(shuffle=True)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    trainer.fit(Tiny(), one)
    assert trainer.global_step == 16 and one._sharing.position == (2, 0)


def test_accelerate_rebuilds_a_loader_and_its_guard_shares_again(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from legroom.integrations.accelerate import guarded

    plain = [share_data.line(0, number, batch) for number, batch in enumerate(loader(shuffle=False))]
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(loader(shuffle=False, memory_budget="64MB"))
    assert type(prepared.base_dataloader) is not legroom.DataLoader  # torch's class: share= would be lost
    found = []
    with guarded(accelerator, tune="off") as guard:
        for epoch in (0, 1):
            guard.epoch(epoch, prepared)
            found.append([share_data.line(0, number, batch) for number, batch in enumerate(prepared)])
    assert prepared.base_dataloader.memory_budget == "64MB"
    assert prepared.base_dataloader.share == "fit" and found[0] == plain and found[1] != plain
    assert prepared.base_dataloader._sharing.position == (2, 0)


def test_a_guard_does_not_change_the_workers_of_a_group() -> None:
    one = loader()
    why = one.why
    said = apply_settings(one, Settings(4, num_workers=3))
    assert "group share one set of workers" in said[0] and one.num_workers == 1
    one.num_workers, one.memory_budget = 2, "32MB"
    one.collate_fn = list
    assert (one.transport, one.why) == ("shared", why)
    kept = one.collate_fn
    assert kept.fn is list and kept.share == {"share": "fit", "on_slow": "own", "device": None, "memory_budget": "32MB"}


@pytest.mark.parametrize("state", [None, {}, {"version": "share-1"}, 3])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match=r"not the state of a legroom\.DataLoader with share="):
        loader().load_state_dict(state)


def test_the_trainer_of_hugging_face_shares(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from legroom.integrations.huggingface import LegroomCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in samples]), "labels": torch.tensor([y for _, y in samples])}

    made: list[Any] = []

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            made.append(self.accelerator.prepare(loader(collate_fn=collate, shuffle=True)))
            return made[-1]

    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), num_train_epochs=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[LegroomCallback(tune="off")])
    trainer.train()
    assert trainer.state.global_step == 16
    assert made[-1].base_dataloader.share == "fit" and made[-1].base_dataloader._sharing.position == (2, 0)
    assert os.listdir(tmp_path)

"""legroom.DataLoader with pin_memory on a real GPU: slots are registered, copies are right however they are made."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import legroom
from legroom.loader.dataloader import receive

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import loader_samples as samples  # noqa: E402

from legroom.loader.dataloader.pin_memory import cuda_pinner  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:This DataLoader will create")]
BATCHES, FLOATS = 60, 1_000_000


class Full(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, i: int) -> Any:
        return torch.full((FLOATS,), float(i)), i


def loader(**options: Any) -> Any:
    return legroom.DataLoader(Full(), 1, num_workers=4, pin_memory=True, **options)


def test_batches_lie_in_registered_memory_and_no_thread_pins_them() -> None:
    import threading

    if cuda_pinner() is None:
        pytest.skip("this driver has no cuCtxRecordEvent: torch's pin thread is used")
    made = loader()
    for rows, index in made:
        assert rows.is_pinned() and index.is_pinned()
        assert not [one.name for one in threading.enumerate() if "pin_memory" in one.name]
    assert made.pin_memory is True  # as frameworks read it
    assert any(arrival.pinned for arrival in receive._slots.values()) or len(receive._slots) == 0


@pytest.mark.parametrize("side", [False, True], ids=["current stream", "a stream of its own"])
def test_a_copy_that_is_still_running_keeps_its_source(side: bool) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    heavy = torch.rand(4096, 4096, device="cuda")
    got = []
    for rows, index in loader():
        with torch.cuda.stream(stream):
            for _ in range(10):  # the copy waits behind this while the worker would like to have its slot back
                heavy = heavy @ heavy
                heavy = heavy / heavy.norm()
            got.append((int(index), rows.to("cuda", non_blocking=True)))
        del rows, index
    torch.cuda.synchronize()
    for number, rows in got:
        assert bool((rows == number).all()), number
    assert len(got) == BATCHES


def test_a_consumer_that_keeps_everything_gets_pinned_copies() -> None:
    kept = list(loader())
    assert all(rows.is_pinned() for rows, _ in kept)
    assert [float(rows[0, 0]) for rows, _ in kept] == list(range(BATCHES))


def test_custom_batches_are_pinned_as_torch_pins_them() -> None:
    for kind in (legroom.DataLoader, torch.utils.data.DataLoader):
        made = kind(samples.Rows("nested"), 4, num_workers=1, pin_memory=True)
        batch = next(iter(made))
        assert batch["image"].is_pinned() and batch["list"][0].is_pinned() and batch["point"].y.is_pinned()
        assert isinstance(batch["point"], samples.Point)


def test_torchs_own_loader_with_our_collate_pins_by_its_thread() -> None:
    made = torch.utils.data.DataLoader(Full(), 1, num_workers=2, pin_memory=True, collate_fn=legroom.collate())
    for number, (rows, _) in enumerate(made):
        assert rows.is_pinned() and bool((rows.to("cuda", non_blocking=True) == number).all())


def test_nothing_stays_mapped_or_registered() -> None:
    for _ in range(3):
        for rows, _index in loader():
            rows.to("cuda", non_blocking=True)
            break
        del rows, _index
    torch.cuda.synchronize()
    gc.collect()
    receive.forget_ended_workers()
    gc.collect()
    assert len(receive._slots) == 0 and "legroom-batch" not in Path("/proc/self/maps").read_text()


def test_while_a_graph_is_captured() -> None:
    if cuda_pinner() is None:
        pytest.skip("this driver has no cuCtxRecordEvent")
    batches = iter(loader())
    static = torch.zeros(1, FLOATS, device="cuda")
    graph = torch.cuda.CUDAGraph()
    rows, _ = next(batches)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        doubled = static * 2
        del rows  # the slot goes back in the middle of the capture
    for number, (rows, _) in enumerate(batches, 1):
        static.copy_(rows, non_blocking=True)
        graph.replay()
        assert float(doubled[0, 0]) == 2 * number

"""Batches on a GPU for a group of real trainers: one copy from the host for all, whatever happens to the others."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import share_data
from share_data import Noise, Trainers, reference

from legroom.errors import UsageError
from legroom.loader.dataloader.sharing import copy_batches_to_gpu
from legroom.loader.dataloader.sharing.assign_copies_to_gpu import Claim, RingMemory
from legroom.loader.dataloader.sharing.copy_batches_to_gpu import ClaimAnswer, GpuBatches, OnHost
from legroom.loader.dataloader.sharing.group_folder import groups
from legroom.loader.dataloader.sharing.producer_client import Group, LongWaits

torch = pytest.importorskip("torch")
import share_gpu  # noqa: E402  needs torch

import legroom  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    # The GPU is not torch's: a trainer that makes all its batches itself pins them, and torch finds no accelerator.
    pytest.mark.filterwarnings(
        "ignore:.*multi-threaded, use of fork",
        "ignore:This DataLoader will create",
        "ignore:'pin_memory' argument is set as true",
    ),
]
joins_late = pytest.mark.load_sensitive(
    reason="a trainer joins its group when it gets a core, and makes its batches itself until then"
)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trainers with a GPU in RAM; afterwards no process, no file and no memory of a group is left."""
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    monkeypatch.setattr(
        copy_batches_to_gpu, "gpu_of", lambda device: share_gpu.FakeGpu(tmp_path / "copies", uuid=device)
    )
    made: list[Trainers] = []

    def trainers(dataset: Any, **given: Any) -> Trainers:
        made.append(Trainers(tmp_path, dataset=dataset, device="gpu-0", **given))
        return made[-1]

    with share_data.another_trainer("tests"):
        yield trainers
        for one in made:
            one.end()
    until = time.monotonic() + 60
    while any(one.producers() for one in made) and time.monotonic() < until:
        time.sleep(0.05)
    store = tmp_path / f"legroom-{os.geteuid()}"
    groups()
    assert not [path.name for path in store.glob("share/*")]
    assert not [path.name for path in store.glob("gpu/*.lock")]


def copies(folder: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in (folder / "copies").read_text().splitlines())


def gpus() -> list[dict[str, Any]]:
    """Of the producer; none while it does not answer."""
    return next((one["gpus"] for one in groups() if one["producer"]), [])


@joins_late
def test_each_batch_is_copied_from_the_host_once_for_all_trainers(make: Any, tmp_path: Path) -> None:
    group = make(Noise(400, floats=4_000))
    expected = reference(group.loader(), 1)
    for _ in range(3):
        group.start(1, pause=0.02)
    group.await_producer()
    group.wait_for(lambda: any(one["copied"] > 40 for one in gpus()))
    (gpu,) = gpus()
    group.join()
    for number in range(3):
        assert group.lines(number) == [*expected, "end"]
    # A ring has one writer per batch. Those that start apart, or fall out of the window, copy some for themselves.
    assert gpu["gpu"] == "gpu-0" and gpu["trainers"] == 3 and gpu["read"] > 1.8 * gpu["copied"]
    assert not [path.name for path in (tmp_path / f"legroom-{os.geteuid()}").glob("gpu/*.sock")]


@joins_late
def test_trainers_on_different_gpus_have_rings_of_their_own(make: Any) -> None:
    group = make(Noise(240, floats=4_000))
    expected = reference(group.loader(), 1)
    for number in range(4):
        group.start(1, pause=0.02, device=f"gpu-{number % 2}")
    group.await_producer()
    group.wait_for(lambda: sum(one["copied"] > 10 for one in gpus()) == 2)
    group.join()
    for number in range(4):
        assert group.lines(number) == [*expected, "end"]


def test_kills_and_stops_of_trainers_and_producers_change_no_batch(make: Any) -> None:
    group = make(Noise(80, floats=4_000))
    done = share_data.random_kills(group, 16, 5, 0.25)
    assert sum(done.values()) >= 16


@joins_late
def test_a_trainer_killed_while_it_copies_leaves_the_copy_to_another(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = tmp_path / "died"

    def die_once() -> None:
        try:
            os.close(os.open(died, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(
        copy_batches_to_gpu, "gpu_of", lambda device: share_gpu.FakeGpu(tmp_path / "copies", before_upload=die_once)
    )
    group = make(Noise(400, floats=4_000))
    expected = reference(group.loader(), 1)
    for _ in range(3):
        group.start(1, pause=0.02)
    group.await_producer()
    group.wait_for(died.exists)
    group.join()
    ended = [number for number in range(3) if group.lines(number) == [*expected, "end"]]
    assert len(ended) == 2 and copies(tmp_path)["upload"] > 20
    (dead,) = {0, 1, 2} - set(ended)
    assert group.lines(dead) == expected[: len(group.lines(dead))]


@pytest.mark.parametrize("refused", ["share", "create", "set_access"])
def test_without_shared_gpu_memory_each_trainer_copies_its_batches(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(copy_batches_to_gpu, "gpu_of", lambda device: share_gpu.FakeGpu(tmp_path / "copies", refused))
    group = make(Noise(120, floats=4_000))
    loader = group.loader()
    expected = reference(loader, 1)
    group.start(1, pause=0.02)
    group.await_producer()
    found = [share_data.line(0, number, batch) for number, batch in enumerate(loader)]
    assert found == expected and copies(tmp_path)["ring"] == copies(tmp_path)["upload"] == 0
    group.join()
    assert group.lines(0) == [*expected, "end"]
    if loader._sharing._gpu.why_own is not None:  # with "create", only one that was told to copy has tried
        assert "each trainer copies its batches to fake: " in loader.why
    assert refused != "share" or loader.why.endswith("the driver cannot export")


def test_tensors_are_private_and_keep_their_structure(tmp_path: Path) -> None:
    gpu = share_gpu.FakeGpu(tmp_path / "copies")
    batches = GpuBatches(gpu, tmp_path)
    host = torch.arange(4096, dtype=torch.uint8)
    image, label = host[:2048].view(torch.float32).view(8, 64), host[2048:2112].view(torch.int64)
    batch = {"image": image, "turned": image.t(), "same": image, "label": [label, 3], "name": "cat", "wide": label[:1]}
    batch["wide"] = label[:1].expand(5)
    where = OnHost(1, host.data_ptr(), host.nbytes)
    memory, said = RingMemory("ring", 8192, 2), list[tuple[str, int]]()

    def ask(serial: int, nbytes: int) -> ClaimAnswer:
        assert (serial, nbytes) == (1, 4096)
        return ClaimAnswer(Claim.COPY if not said else Claim.READY, 1, memory, not said, lambda *one: said.append(one))

    for _ in range(2):
        moved = batches.moved(batch, where, ask)
        assert moved["same"] is moved["image"] and moved["label"][1] == 3 and moved["name"] == "cat"
        assert torch.equal(moved["image"].view(torch.int32), image.view(torch.int32))
        assert torch.equal(moved["turned"].view(torch.int32), image.t().view(torch.int32))
        assert torch.equal(moved["label"][0], label) and torch.equal(moved["wide"], label[:1].expand(5))
        moved["image"].zero_(), moved["label"][0].fill_(-1)  # nobody else sees that
    batches.close()
    assert said == [("mapped", 1), ("copied", 1), ("read", 1), ("read", 1)] and not gpu.api.maps and not gpu.api.handles
    assert copies(tmp_path)["upload"] == 1 and host[1000] == 1000 % 256


@pytest.mark.parametrize(("claim", "told"), [(Claim.READY, "read"), (Claim.COPY, "no-copy")])
def test_memory_that_is_gone_with_its_last_trainer_is_not_made_again(tmp_path: Path, claim: Claim, told: str) -> None:
    gpu = share_gpu.FakeGpu(tmp_path / "copies")
    batches, said = GpuBatches(gpu, tmp_path), list[tuple[str, int]]()
    host = torch.arange(64)
    answer = ClaimAnswer(claim, 0, RingMemory("ring", 4096, 2), False, lambda *one: said.append(one))
    moved = batches.moved([host], OnHost(5, host.data_ptr(), host.nbytes), lambda *_: answer)
    assert torch.equal(moved[0], host) and said == [(told, 5)] and not gpu.api.maps and not gpu.api.handles
    assert batches.why_own is None and copies(tmp_path)["upload"] == 0


def test_a_full_gpu_is_no_error(tmp_path: Path) -> None:
    gpu = share_gpu.FakeGpu(tmp_path / "copies")
    gpu.free = 1 << 30
    batches, said = GpuBatches(gpu, tmp_path), list[tuple[str, int]]()
    host = torch.arange(64)
    answer = ClaimAnswer(Claim.COPY, 0, RingMemory("ring", 4096, 2), True, lambda *one: said.append(one))
    moved = batches.moved([host], OnHost(5, host.data_ptr(), host.nbytes), lambda *_: answer)
    assert torch.equal(moved[0], host) and moved[0].data_ptr() != host.data_ptr()
    assert said == [("no-ring", 5)] and "of GPU memory" in batches.why and not gpu.api.maps


def test_device_needs_share_and_a_cuda_device() -> None:
    with pytest.raises(UsageError, match="needs share"):
        legroom.DataLoader(Noise(4), 2, num_workers=1, device="cuda")
    loader = legroom.DataLoader(Noise(4), 2, num_workers=1, device="cpu", share="tests")
    with pytest.raises(UsageError, match="is not a CUDA device"):
        iter(loader)
    with pytest.raises(UsageError, match="is not a device"):
        iter(legroom.DataLoader(Noise(4), 2, num_workers=1, device="gpu", share="tests"))


def test_a_batch_that_comes_before_its_turn_keeps_its_slot() -> None:
    """While a trainer waits for an answer about the GPU, the next batches come, their worker ends, and one starts."""

    class Slots:
        def __init__(self) -> None:
            self.mapped = {70: "slot"}

        def add(self, slot_id: int, fd: int) -> None:
            self.mapped[slot_id] = f"slot of descriptor {fd}"

        def find(self, slot_id: int) -> str:
            return self.mapped[slot_id]

        def forget(self, slots: list[int]) -> None:
            for slot in slots:
                del self.mapped[slot]

    class Messages:
        def __init__(self, *messages: tuple[Any, ...]) -> None:
            self.waiting = list(messages)

        def send(self, *message: Any) -> bool:
            return True

        def wait(self, timeout: float) -> bool:
            return True

        def receive(self) -> Any:
            return (self.waiting.pop(0), [5]) if self.waiting else None

    batch = ("batch", (0, 1), 7, 70, False, b"body")
    again = ("batch", (0, 2), 8, 70, True, b"more")  # the same slot, sent anew
    group = Group.__new__(Group)
    group.connection, group.slots, group._early = (
        Messages(batch, ("forget", [70]), again, ("gpu", 6, "own", -1, None, False)),
        Slots(),
        [],
    )  # type: ignore[assignment]
    group._silent, group._silence, group._waits = False, 60.0, LongWaits("tests")
    assert group.claim(6, 100) is None
    assert group._await((0, 1)) == ("batch", (0, 1), 7, "slot", b"body")
    assert group._await((0, 2)) == ("batch", (0, 2), 8, "slot of descriptor 5", b"more")
    group.connection = Messages(("wait", (0, 3), 1, [], []), ("miss", (0, 3)))  # type: ignore[assignment]
    assert group._await((0, 3)) is None

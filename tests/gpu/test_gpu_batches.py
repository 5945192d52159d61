"""Batches on a real GPU: every path gives what the CPU gives, in order, from one copy, and cleans up."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from interrupted_loops import Interrupted, InterruptedAt
from legroom.errors import NoRoom, UsageError
from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches import cuda_calls_for_gather, cuda_pinned
from legroom.loader.batches.batch_settings import BatchSettings, open_gatherer
from legroom.loader.batches.cuda_calls_for_gather import Driver
from legroom.loader.batches.cuda_gather_base import RESOURCES

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import legroom  # noqa: E402  (only where there is something to test)

pytestmark = pytest.mark.gpu
SOURCE = Path(__file__).parents[2] / "src"
ROWS = 700
BATCH = 64


def columns() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(7)
    found: dict[str, np.ndarray[Any, Any]] = {
        "images": random.integers(0, 256, (ROWS, 3, 64, 64), np.uint8),
        "odd": random.integers(0, 256, (ROWS, 105), np.uint8),
        "three": random.integers(0, 256, (ROWS, 2, 3), np.int16),  # 12 bytes: four at a time
        "labels": np.arange(ROWS),
        "flags": random.integers(0, 2, (ROWS, 5)).astype(bool),
        "nothing": np.zeros((ROWS, 0, 2), np.float32),
    }
    for name in ("int8", "uint16", "uint32", "uint64", "int32", "float16", "float32", "float64"):
        found[name] = random.integers(0, 99, (ROWS, 7)).astype(name)
    found["complex64"] = found["float32"].astype(np.complex64)
    found["complex128"] = found["float32"].astype(np.complex128)
    return found


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="legroom-gpu-test-", dir="/var/tmp"))
    np.savez(folder / "data.npz", **columns())
    yield folder / "data.npz"
    shutil.rmtree(folder)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    memory = Path(tempfile.mkdtemp(prefix="legroom-gpu-test-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="legroom-gpu-test-", dir="/var/tmp"))
    monkeypatch.setenv("LEGROOM_SHM", os.fspath(memory))
    monkeypatch.setenv("LEGROOM_DIR", os.fspath(disk))
    yield memory
    # A loop that was left early may still have a thread that fills its next batch, and with it the arrays.
    deadline = time.monotonic() + 10
    while gc.collect() is not None and len(RESOURCES) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(memory)
    shutil.rmtree(disk)
    assert len(RESOURCES) == 0


@pytest.fixture
def shared(stores: Path, source: Path) -> Iterator[Any]:
    with legroom.open(source, backing="shm") as data:
        yield data


def same(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(batch) == list(other)
    for name, tensor in batch.items():
        assert tensor.device.type == "cuda" and tensor.is_contiguous(), name
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        assert torch.equal(tensor.cpu(), other[name]), name


REGISTERED = ("cuda-copy-engine", "cuda-kernel", "cuda-registered")


def equal_epochs(data: Any, path: str, **options: Any) -> Any:
    """Two epochs from the device and from memory, batch by batch; gives the batches object."""
    if path in REGISTERED:
        options["path"] = path
    on_gpu = data.batches(BATCH, shuffle=True, seed=5, device="cuda", **options)
    on_cpu = data.batches(BATCH, shuffle=True, seed=5)
    assert on_gpu.path == path, on_gpu.why
    assert on_gpu.why
    for epoch in range(2):
        on_gpu.set_epoch(epoch)
        on_cpu.set_epoch(epoch)
        count = 0
        for batch, expected in zip(on_gpu, on_cpu, strict=True):
            same(batch, expected)
            count += 1
        assert count == len(on_gpu) == -(-ROWS // BATCH)
    assert on_gpu.path == path, on_gpu.why
    return on_gpu


# Every path gives what the CPU gives.


@pytest.mark.parametrize("path", REGISTERED)
def test_registered(shared: Any, path: str) -> None:
    equal_epochs(shared, path)


def test_a_path_is_chosen_by_measurement_and_consecutive_rows_go_by_the_copy_engines(shared: Any) -> None:
    shuffled = shared.batches(16, shuffle=True, seed=4, device="cuda")
    for epoch in range(6):  # 264 batches, 200 of them to compare
        expected = shared.batches(16, shuffle=True, seed=4)
        shuffled.set_epoch(epoch)
        expected.set_epoch(epoch)
        for batch, right in zip(shuffled, expected, strict=True):
            same(batch, right)
    assert shuffled.path in REGISTERED and "ms per batch" in shuffled.why
    in_order = shared.batches(BATCH, device="cuda")
    assert in_order.path == "cuda-copy-engine" and "consecutive" in in_order.why
    for batch, expected in zip(in_order, shared.batches(BATCH), strict=True):
        same(batch, expected)


@pytest.mark.parametrize(
    "rows", [slice(100, None), range(7, ROWS, 3), [5, 4, 4, 9, ROWS - 1]], ids=["run", "every", "list"]
)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_chosen_rows(shared: Any, rows: Any, shuffle: bool, resident: bool) -> None:
    on_gpu = shared.batches(16, rows=rows, shuffle=shuffle, seed=3, epoch=1, device="cuda", resident=resident)
    on_cpu = shared.batches(16, rows=rows, shuffle=shuffle, seed=3, epoch=1)
    for batch, expected in zip(on_gpu, on_cpu, strict=True):
        same(batch, expected)
    assert resident or ("consecutive" in on_gpu.why) == (isinstance(rows, slice) and not shuffle)


def test_resident(shared: Any) -> None:
    equal_epochs(shared, "cuda-resident", resident=True)


def test_from_disk(stores: Path, source: Path) -> None:
    with legroom.open(source, backing="disk") as data:
        assert "on disk" in equal_epochs(data, "cuda-pinned").why


def test_registering_refused_by_cuda_itself(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the read-only flag CUDA refuses a read-only map; its error must not be left for the next kernel."""
    monkeypatch.setattr(cuda_calls_for_gather, "_FLAGS", (0,))
    batches = equal_epochs(shared, "cuda-pinned")
    assert "did not register" in batches.why
    assert "r--s" not in entry_maps()


def test_page_locking_refused(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CudaRefused("refused by the test")

    monkeypatch.setattr(Driver, "register", refuse)
    monkeypatch.setattr(Driver, "pinned", refuse)
    assert "refused by the test" in equal_epochs(shared, "cuda-copy").why


@pytest.mark.parametrize("path", REGISTERED)
@pytest.mark.parametrize("size", [1, 2, 16, 17, 300, ROWS])
def test_any_batch_size(shared: Any, size: int, path: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 1, "epoch": 3, "keys": ("images", "odd", "labels")}
    on_gpu = shared.batches(size, device="cuda", path=path, **options)
    for number, (batch, expected) in enumerate(zip(on_gpu, shared.batches(size, **options), strict=True)):
        same(batch, expected)
        if number > 20:
            break


def test_under_a_default_device_and_without_gradients(shared: Any) -> None:
    with torch.device("cuda"):
        for path in REGISTERED:
            equal_epochs(shared, path)
    with torch.inference_mode():
        loop = iter(shared.batches(BATCH, device="cuda"))
        next(loop)  # the second is begun
    assert not next(loop)["float32"].is_inference()


def test_more_words_than_32_bits_count() -> None:
    """Rows beyond the 2^31st word: odd rows go byte by byte, so 2.2 GB are enough."""
    width, count = 1_000_001, 2_200
    if os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize < 2 * width * count:
        pytest.skip("/dev/shm is too small")
    with tempfile.TemporaryDirectory(prefix="legroom-gpu-test-", dir="/dev/shm") as folder:
        path = Path(folder) / "wide.npy"
        wide = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, width))
        rows = np.array([0, 1, 2_147, 2_148, count - 1, 2_199, 1_073, 7, *range(2_100, 2_112)], np.int64)
        for row in rows:
            wide[row] = np.random.default_rng(row).integers(0, 256, width, np.uint8)
        entry = SimpleNamespace(backing="shm")
        files = {"wide": (path, path.stat().st_size - wide.nbytes)}
        # torch gathers up to 16 rows by another kernel.
        for some, path_name in itertools.product((rows, rows[:5]), REGISTERED):
            settings = BatchSettings(len(some), device="cuda", path=path_name)
            gatherer = open_gatherer({"wide": wide}, entry, settings, files=files)  # type: ignore[arg-type]
            assert gatherer.path == path_name, gatherer.why
            batch = gatherer.gather(some)["wide"].cpu().numpy()
            np.testing.assert_array_equal(batch, wide[some])
            gatherer.close()
        del gatherer, wide
        gc.collect()
    assert len(RESOURCES) == 0


# The order of things on the GPU.


def busy(matrix: Any) -> None:
    """Some milliseconds of work on the current stream, queued in microseconds."""
    for _ in range(5):
        torch.mm(matrix, matrix)


@pytest.mark.parametrize("how", [*REGISTERED, "cuda-pinned", "cuda-resident"])
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_batch_dropped_while_the_gpu_is_behind_is_not_overwritten(
    shared: Any, how: str, own_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "cuda-pinned":
        monkeypatch.setattr(cuda_calls_for_gather, "_FLAGS", (0,))
    matrix = torch.rand(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    options: dict[str, Any] = {"shuffle": True, "seed": 9, "keys": ("images", "labels")}
    seen: list[Any] = []
    expected: list[Any] = []
    path = how if how in REGISTERED else None
    on_gpu = shared.batches(BATCH, device="cuda", resident=how == "cuda-resident", path=path, **options)
    assert on_gpu.path == how, on_gpu.why
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for epoch in range(3):
            on_gpu.set_epoch(epoch)
            for batch in on_gpu:
                busy(matrix)  # everything below is queued far behind
                seen.append((batch["labels"].clone(), batch["images"].long().sum((1, 2, 3))))
                del batch
    torch.cuda.synchronize()
    on_cpu = shared.batches(BATCH, **options)
    for epoch in range(3):
        on_cpu.set_epoch(epoch)
        expected += [(b["labels"].clone(), b["images"].long().sum((1, 2, 3))) for b in on_cpu]
    assert len(seen) == len(expected)
    for got, wanted in zip(seen, expected, strict=True):
        assert torch.equal(got[0].cpu(), wanted[0]) and torch.equal(got[1].cpu(), wanted[1])


def test_batches_that_are_kept_stay_what_they_are(shared: Any) -> None:
    for backing_refused in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if backing_refused:
                patch.setattr(cuda_calls_for_gather, "_FLAGS", (0,))
            kept = list(shared.batches(BATCH, shuffle=True, epoch=1, device="cuda"))
        for batch, expected in zip(kept, shared.batches(BATCH, shuffle=True, epoch=1), strict=True):
            same(batch, expected)


def test_memory_stays_bounded_when_the_gpu_is_behind(shared: Any) -> None:
    matrix = torch.rand(4096, 4096, device="cuda")
    product = torch.mm(matrix, matrix)
    batches = shared.batches(300, shuffle=True, device="cuda", keys=("images",))
    one = 300 * 3 * 64 * 64
    next(iter(batches))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # Active, and not allocated: memory that was dropped and is still in use on some stream counts.
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    for _ in range(30):
        for _batch in batches:
            for _ in range(3):
                torch.mm(matrix, matrix, out=product)
    torch.cuda.synchronize()
    # Handed out, the one before it, begun; 90 batches went by.
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    assert peak - before <= 4 * one + (16 << 20)


def test_two_loops_at_once(shared: Any) -> None:
    options: dict[str, Any] = {"shuffle": True, "keys": ("images", "labels")}
    batches = shared.batches(BATCH, epoch=2, device="cuda", **options)
    other = shared.batches(50, epoch=4, device="cuda", **options)
    loops = [batches, batches, other]
    wanted = [shared.batches(BATCH, epoch=2, **options)] * 2 + [shared.batches(50, epoch=4, **options)]
    for step in zip(*loops, *wanted, strict=False):
        for batch, expected in zip(step[:3], step[3:], strict=True):
            same(batch, expected)


def test_an_epoch_left_early_and_begun_again(shared: Any) -> None:
    batches = shared.batches(BATCH, shuffle=True, epoch=0, device="cuda")
    for _ in range(10):
        for batch in batches:  # noqa: B007
            break
    same(batch, next(iter(shared.batches(BATCH, shuffle=True, epoch=0))))


# One copy, registered and let go.


def entry_maps(pid: int | str = "self") -> str:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return "\n".join(line for line in lines if "legroom-gpu-test-" in line)


@pytest.mark.parametrize("path", [*REGISTERED, "cuda-pinned", "cuda-resident"])
def test_an_interruption_at_any_line_loses_no_batch(stores: Path, source: Path, path: str) -> None:
    folder = Path(legroom.__file__).parent / "loader" / "batches"
    files = [os.fspath(file) for file in folder.glob("*.py") if not file.name.startswith("cpu_")]
    options: dict[str, Any] = {"path": path} if path in REGISTERED else {"resident": path == "cuda-resident"}
    interruptions = 0
    with legroom.open(source, backing="disk" if path == "cuda-pinned" else "shm") as data:
        expected = {name: torch.from_numpy(np.array(data[name])) for name in ("labels", "odd", "images")}
        on_gpu = data.batches(BATCH, shuffle=True, seed=5, epoch=0, device="cuda", **options)
        assert on_gpu.path == path, on_gpu.why
        order = [
            row for batch in data.batches(BATCH, shuffle=True, seed=5, epoch=0) for row in batch["labels"].tolist()
        ]
        for number in range(1, 900, 2):
            loop, found, kept, ends = iter(on_gpu), list[int](), list[Any](), InterruptedAt(number, *files)
            while True:
                try:
                    with ends:
                        batch = next(loop)
                except Interrupted:
                    interruptions += 1
                    assert on_gpu.state_dict()["position"] % ROWS == len(found) % ROWS  # or the next epoch's
                    continue
                except StopIteration:
                    break
                found += batch["labels"].tolist()
                assert on_gpu.state_dict()["position"] == len(found)
                kept.append(batch)
                if number % 4 == 1:  # a batch is dropped while the next is made, or all are kept
                    del kept[:-1], batch
            assert found == order, number
            for one in kept:
                rows = one["labels"].cpu()
                assert all(torch.equal(one[name].cpu(), expected[name][rows]) for name in expected), number
        del on_gpu, loop, kept, batch, one
    assert interruptions > 100


def test_registered_once_and_let_go_with_the_data(stores: Path, source: Path) -> None:
    for _ in range(3):
        data = legroom.open(source, backing="shm")
        first = data.batches(BATCH, device="cuda")
        second = data.batches(BATCH, shuffle=True, device="cuda")
        assert {first.path, second.path} <= set(REGISTERED)
        maps = entry_maps().count("r--s")
        assert maps == len(data) - 1  # rows without bytes have no map
        batch = next(iter(second))
        del first, second
        gc.collect()
        third = data.batches(BATCH, device="cuda")
        assert entry_maps().count("r--s") == maps
        data.close()
        next(iter(third))
        del third
        end = time.monotonic() + 5  # a batch may just be queued in a thread
        while len(RESOURCES) and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        assert "r--s" not in entry_maps() and len(RESOURCES) == 0
        assert batch["labels"].sum() >= 0


def test_nothing_is_left_registered_when_one_array_is_refused(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Driver.register, []

    def second_fails(driver: Driver, address: int, length: int) -> None:
        calls.append(address)
        if len(calls) == 2:
            raise CudaRefused("refused by the test")
        real(driver, address, length)

    monkeypatch.setattr(Driver, "register", second_fails)
    gatherer_path = shared.batches(BATCH, device="cuda", keys=("images", "odd", "labels")).path
    assert gatherer_path == "cuda-pinned"
    gc.collect()
    monkeypatch.undo()
    equal_epochs(shared, "cuda-registered")


CHILD = """
import sys, json, legroom, torch
data = legroom.open(sys.argv[1], backing="shm")
data.ready()
batches = data.batches(64, shuffle=True, device="cuda")
total = sum(int(b["labels"].sum()) for b in batches)
print(json.dumps([batches.path, batches.why, total]), flush=True)
sys.stdin.readline()
"""


def test_six_processes_hold_one_copy(stores: Path, source: Path) -> None:
    with legroom.open(source, backing="shm") as data:
        size = data.info.bytes
    env = {**os.environ, "PYTHONPATH": os.fspath(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", CHILD, os.fspath(source)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    children = [subprocess.Popen(command, **pipes) for _ in range(6)]
    try:
        for child in children:
            line = child.stdout.readline()
            assert line, "a child died"
            path, why, total = json.loads(line)
            assert path in REGISTERED, why
            assert total == ROWS * (ROWS - 1) // 2
        pss = anonymous = registered = 0
        for child in children:
            ours = False
            for line in Path(f"/proc/{child.pid}/smaps").read_text().splitlines():
                first, *rest = line.split()
                if "-" in first and not first.endswith(":"):
                    ours = "legroom-gpu-test-" in line and line.endswith(".npy")
                    registered += ours and "r--s" in line
                elif ours and first == "Pss:":
                    pss += int(rest[0]) << 10
                elif ours and first == "Anonymous:":
                    anonymous += int(rest[0]) << 10
        assert registered == 6 * (len(columns()) - 1)
        # PSS is of whole pages, and every array's file ends in the middle of one.
        assert 0.5 * size <= pss <= 1.02 * size + len(columns()) * 4096
        assert anonymous == 0
    finally:
        for child in children:
            child.communicate("\n", timeout=120)
    assert all(child.returncode == 0 for child in children)


# What cannot be.


def test_a_forked_child_gives_the_reason(shared: Any) -> None:
    batches = shared.batches(BATCH, device="cuda")
    next(iter(batches))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for attempt in (lambda: next(iter(batches)), lambda: shared.batches(BATCH, device="cuda")):
            try:
                attempt()
                said.append("nothing")
            except UsageError as problem:
                said.append(str(problem))
            except BaseException as problem:
                said.append(repr(problem))
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert all("cannot use CUDA" in line and "spawn" in line for line in said), said
    next(iter(batches))


def test_resident_data_larger_than_gpu_memory_is_refused(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "memory", lambda self: (1 << 30, 80 << 30))
    with pytest.raises(NoRoom, match="stay reserved"):
        shared.batches(BATCH, device="cuda", resident=True)


def test_devices_that_are_not_there(shared: Any) -> None:
    with pytest.raises(UsageError, match="cuda:99 does not exist"):
        shared.batches(BATCH, device="cuda:99")
    equal = shared.batches(BATCH, device=torch.device("cuda", 0))
    assert next(iter(equal))["labels"].device == torch.device("cuda", 0)


def test_every_gpu(shared: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for number in range(torch.cuda.device_count()):
        batches = shared.batches(BATCH, device=f"cuda:{number}")
        batch = next(iter(batches))
        assert batches.path in REGISTERED and batch["images"].device.index == number
        assert torch.equal(batch["images"].cpu(), next(iter(shared.batches(BATCH)))["images"])


def test_page_locked_memory_is_given_back(stores: Path, source: Path) -> None:
    with legroom.open(source, backing="disk") as data:
        batches = data.batches(BATCH, device="cuda")
        for _ in batches:
            pass
        staged = batches._gatherer
        assert isinstance(staged, cuda_pinned.PinnedGatherer)
        assert all(buffer._bytes.is_pinned() for maker in staged._makers for buffer in maker.buffers)
        staged.close()
        with pytest.raises(UsageError, match="closed"):
            next(iter(batches))

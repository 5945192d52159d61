"""legroom.gpu on a real GPU: limits hold, the search matches brute force, accounts add up, steps continue after OOM."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import legroom  # noqa: E402  (only where there is something to test)
from legroom.errors import BadLimit, DoesNotFit  # noqa: E402
from legroom.gpu.batch_trial_on_gpu import GpuTrialRunner  # noqa: E402
from legroom.gpu.oom_retry import BatchNormWarning  # noqa: E402
from legroom.gpu.torch_cuda_device import CudaDevice  # noqa: E402

pytestmark = pytest.mark.gpu
SCRIPTS = Path(__file__).with_name("scripts")
SOURCE = Path(__file__).parents[2] / "src"
from gpu_models import MODELS  # noqa: E402

MB, GB = 1 << 20, 1 << 30
MARGIN = 0.05


@pytest.fixture(autouse=True)
def _remove_limit() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def small() -> Iterator[Any]:
    """8 GB for this process: brute force takes seconds then."""
    gc.collect()
    torch.cuda.empty_cache()
    yield legroom.gpu.limit(min(8 * GB, torch.cuda.mem_get_info()[1] // 2))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SCRIPTS}", "PYTHONDONTWRITEBYTECODE": "1"}


def _nvidia_smi_used() -> tuple[int, int]:
    """(used, total) of torch's GPU, as NVML and nvidia-smi report it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetUUID(handle)
            if uuid in (name.decode() if isinstance(name, bytes) else name):
                info = pynvml.nvmlDeviceGetMemoryInfo(handle)
                return int(info.used), int(info.total)
    finally:
        pynvml.nvmlShutdown()
    pytest.skip("NVML does not list torch's GPU")


def _allocated() -> int:
    """Bytes in tensors. torch keeps a workspace of cuBLAS for each stream that multiplied matrices: not counted."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return int(torch.cuda.memory_allocated())


def _tensor_sizes() -> list[int]:
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    return sorted(block["size"] for block in blocks if block["state"].startswith("active"))


# limit.


def test_four_processes_stay_within_their_limits() -> None:
    before, total = _nvidia_smi_used()
    if before > 0.1 * total:
        pytest.skip("other processes use the GPU")
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "fill_gpu.py"), "0.2"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(),
        )
        for _ in range(4)
    ]  # fmt: skip
    reports, highest = [], 0
    try:
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr.read()[-3000:] if process.stderr else ""
            reports.append(json.loads(line))
            highest = max(highest, _nvidia_smi_used()[0])
        highest = max(highest, _nvidia_smi_used()[0])
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)
    # Memory in use before these four started (this process's own context included) is not theirs.
    assert highest - before <= 0.8 * total, (reports, highest, before, total)
    for one in reports:
        assert one["reserved"] <= one["allowed"], one
        assert one["reserved"] >= 0.9 * one["allowed"], one  # it took all it could
        assert one["overhead"] > 50 * MB, one


def test_limit_holds_and_reads_back() -> None:
    made = legroom.gpu.limit("4GB")
    assert made.read_back is None or made.read_back == pytest.approx(made.fraction)
    assert made.overhead.bytes is not None and 50 * MB < made.overhead.bytes < 3 * GB, made.overhead
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(made.allowed + 64 * MB, dtype=torch.uint8, device="cuda")
    block = torch.empty(made.allowed // 2, dtype=torch.uint8, device="cuda")
    assert made.recheck().allowed <= made.allowed
    del block


@pytest.mark.parametrize("amount", [0, 1.5, 10**15, "nonsense", 100 * MB])
def test_invalid_amounts(amount: Any) -> None:
    with pytest.raises(BadLimit):
        legroom.gpu.limit(amount)


def test_environment_limit() -> None:
    code = """
import torch
from legroom.gpu.set_memory_limit import apply_from_environment
assert apply_from_environment()
assert not torch.cuda.is_initialized()
torch.ones(1, device="cuda")
free, total = torch.cuda.mem_get_info()
try:
    torch.empty(int(total * 0.3), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("held")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240,
        env={**_environment(), "LEGROOM_GPU_LIMIT": "0.25"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == "held"
    assert "context included" in ran.stderr


def test_tf32_uses_one_set_of_flags() -> None:
    convolutions = torch.backends.cudnn.allow_tf32  # on by default, unlike products
    try:
        made = legroom.gpu.tf32()
        assert made.capable is (torch.cuda.get_device_capability()[0] >= 8)
        # Reading either family must not raise.
        assert torch.backends.cuda.matmul.allow_tf32 in (True, False)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        legroom.gpu.tf32(False)
        torch.backends.cudnn.allow_tf32 = convolutions


# find_batch_size.


def _brute(step: Any, worst_case: Any, around: int) -> int:
    """The largest batch that fits under the same cap, by bisection of whole trials around an answer."""
    runner = GpuTrialRunner(CudaDevice(torch, 0), step, MARGIN, worst_case=worst_case)
    try:
        low, high = 1, around * 2
        assert not runner.try_batch(high).trial.fits
        while high - low > max(1, around // 200):
            middle = (low + high) // 2
            if runner.try_batch(middle).trial.fits:
                low = middle
            else:
                high = middle
        return low
    finally:
        runner.close()


@pytest.mark.parametrize("name", list(MODELS))
def test_search_matches_brute_force_and_trains_at_its_answer(name: str, small: Any) -> None:
    make, worst_case = MODELS[name]
    step = make()
    found = legroom.gpu.find_batch_size(step, margin=MARGIN, worst_case=worst_case)
    assert len(found.trials) <= 6, found
    best = _brute(step, worst_case, found.batch)
    # Brute force stops half a percent short of the border.
    assert abs(best - found.batch) <= max(1, 0.03 * best) + max(1, found.batch // 200), (best, found)
    held = found.batch
    for number in range(200):
        step(held)
        if number % 50 == 25 and hasattr(step, "model"):  # evaluation in between
            step.model.eval()
            with torch.no_grad():
                step.model(step.data(held))
            step.model.train()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= small.allowed


def test_isolated_trials_leave_nothing_on_the_gpu(small: Any) -> None:
    before = torch.cuda.memory_reserved()
    found = legroom.gpu.find_batch_size(isolate="gpu_models:conv", margin=MARGIN, max_batch=64)
    assert found.batch == 64 and len(found.trials) <= 6
    assert torch.cuda.memory_reserved() == before


def test_one_sample_does_not_fit(small: Any) -> None:
    def step(batch: int) -> None:
        torch.empty(9 * GB, dtype=torch.uint8, device="cuda")

    before = _allocated()
    with pytest.raises(DoesNotFit):
        legroom.gpu.find_batch_size(step)
    assert _allocated() <= before + MB, _tensor_sizes()


def test_step_error_is_raised(small: Any) -> None:
    def step(batch: int) -> None:
        block = torch.empty(GB, dtype=torch.uint8, device="cuda")
        raise ValueError(f"labels {block.shape}")

    before = torch.cuda.memory_allocated()
    fraction = small.read_back
    with pytest.raises(ValueError, match="labels"):
        legroom.gpu.find_batch_size(step)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + MB
    if fraction is not None:
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(fraction)


# account.


def test_account_adds_up() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    weights = sum(one.numel() * 4 for one in model.parameters())
    for found in (legroom.gpu.account(model=model, optimizer=optimizer), legroom.gpu.account()):
        assert found.weights == pytest.approx(weights, rel=0.01)
        assert found.gradients == pytest.approx(weights, rel=0.01)
        assert found.optimizer == pytest.approx(2 * weights, rel=0.01)
        assert found.unknown <= 0.02 * found.size, found
        parts = found.weights + found.gradients + found.optimizer + found.activations + found.cached
        assert parts == torch.cuda.memory_reserved()
        assert found.used + found.free == found.size


# on_oom.


def _net(norm: bool) -> Any:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(512, 2048), *([torch.nn.BatchNorm1d(2048)] if norm else []), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 4)).cuda()


def test_epoch_completes_in_micro_batches() -> None:
    """Activations of a batch are several times what is allowed; gradients are as without a limit."""
    rows = 200_000
    data = torch.randn(2, rows, 512, device="cuda")
    labels = torch.randint(0, 4, (rows,), device="cuda")
    model = _net(norm=False)

    def loss_of(batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    loss_of((data[0], labels)).backward()
    wanted = [one.grad.clone() for one in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 2 * GB
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of((data[0], labels)).backward()
    gc.collect()
    model.zero_grad(set_to_none=True)
    loss_step = legroom.gpu.on_oom(model)(loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_step((data[0], labels))
    assert loss_step.halvings >= 1
    for one, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(one.grad, gradient, atol=1e-5)
    for part in data:  # the rest of the epoch
        optimizer.zero_grad(set_to_none=True)
        loss_step((part, labels))
        optimizer.step()


def test_batch_norm_warning() -> None:
    rows = 200_000
    batch = (torch.randn(rows, 512, device="cuda"), torch.randint(0, 4, (rows,), device="cuda"))
    model = _net(norm=True)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 2 * GB
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    loss_step = legroom.gpu.on_oom(model)(lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1]))
    with pytest.warns(BatchNormWarning):
        loss_step(batch)


# estimate.


@pytest.mark.parametrize("name", ["conv", "transformer"])
def test_estimate_is_within_its_error(name: str) -> None:
    gc.collect()
    held = torch.cuda.memory_allocated()  # cuBLAS workspaces of earlier tests, 32 MB each
    step: Any = MODELS[name][0]()
    batch = 64
    sample = step.data(batch)
    found = legroom.gpu.estimate(step.model, sample, torch.optim.AdamW(step.model.parameters()))
    del sample
    step(batch)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    assert abs(found.peak - peak) <= found.error * peak, (found, peak, before)
    advice = legroom.gpu.advise(step.model, step.data(batch))
    half = advice.get("smaller-batch")
    assert half is not None and 0 < half.frees < advice.peak

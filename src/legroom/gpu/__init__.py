"""Measure, limit and predict GPU memory.

    set_memory_limit.py                 limit: keep this process within a share of the GPU; LEGROOM_GPU_LIMIT
    account_gpu_memory.py               account: what uses GPU memory now, by category; the size of the CUDA context
    search_batch_size.py                find_batch_size: search for the largest batch that fits
    batch_trial_on_gpu.py               run one trial of that search in this process, on the GPU
    batch_trial_in_child.py             run one trial in a child process, and measure host memory on the CPU
    oom_retry.py                        is_oom, on_oom: recognise out-of-memory errors; retry a step in micro-batches
    estimate_step_memory.py             estimate, advise: predict a step's memory without running it
    fake_tensor_trace.py                trace a training step with fake tensors (imports torch)
    model_call_loss_and_batch_split.py  call a user's model on a batch, its loss; count and split the batch
    rank_consensus.py                   minimum and maximum of a number over all distributed ranks
    torch_cuda_device.py                every torch.cuda call of this package, for one device
    cuda_driver_api.py                  libcuda calls that torch lacks: batched copies, kernels, shareable memory
    allow_tf32.py                       tf32: switch TF32 on or off

``plot`` draws a search's result (charts/batch_size_chart.py). Names are imported on first use, torch on the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.system.lazy_and_optional_imports import lazy_import

if TYPE_CHECKING:
    from legroom.charts.batch_size_chart import plot
    from legroom.gpu.account_gpu_memory import account
    from legroom.gpu.allow_tf32 import tf32
    from legroom.gpu.estimate_step_memory import advise, estimate
    from legroom.gpu.oom_retry import is_oom, on_oom
    from legroom.gpu.search_batch_size import find_batch_size
    from legroom.gpu.set_memory_limit import limit

__all__ = ["account", "advise", "estimate", "find_batch_size", "is_oom", "limit", "on_oom", "plot", "tf32"]

_MODULES = {
    "account": "legroom.gpu.account_gpu_memory",
    "advise": "legroom.gpu.estimate_step_memory",
    "estimate": "legroom.gpu.estimate_step_memory",
    "find_batch_size": "legroom.gpu.search_batch_size",
    "is_oom": "legroom.gpu.oom_retry",
    "limit": "legroom.gpu.set_memory_limit",
    "on_oom": "legroom.gpu.oom_retry",
    "plot": "legroom.charts.batch_size_chart",
    "tf32": "legroom.gpu.allow_tf32",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'legroom.gpu' has no attribute {name!r}")
    value = globals()[name] = getattr(lazy_import(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

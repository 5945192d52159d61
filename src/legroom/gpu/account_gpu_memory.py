"""legroom.gpu.account: what uses a GPU's memory, by category; how much the CUDA context takes.

Without ``model`` and ``optimizer`` arguments, the ones alive in this process are found through the garbage collector.

The context, with loaded kernels and libraries' own memory, is outside torch's allocator. NVML's figure for this process
measures it. Where NVML lists host pids, a block is allocated here, and probe/nvml.py finds the entry that grew by as
much.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

from legroom.gpu.torch_cuda_device import CudaDevice, allocator_size, open_device
from legroom.messages import say
from legroom.probe.nvml import bytes_by_pid, bytes_of_grown, own_bytes
from legroom.records.gpu_results import Account, Overhead
from legroom.records.machine import Gpu
from legroom.units import format_size

# A context with cuBLAS and cuDNN loaded lies between these. A difference outside them means that another process
# allocated or freed memory meanwhile.
_LEAST_CONTEXT, _MOST_CONTEXT = 100 << 20, 2 << 30
_ASSUMED_CONTEXT = 1 << 30
_TEST_BLOCK = 46 << 20  # torch requests this size from CUDA unchanged: a multiple of 2 MB, above 20 MB


def used_before_context(device: CudaDevice) -> int | None:
    """Bytes in use on the GPU before this process creates its context; None: it has one, or NVML does not report it."""
    if device.has_context():
        return None
    nvml = device.nvml()
    return None if nvml is None else nvml.used


def measure_overhead(device: CudaDevice, used_before: int | None = None, *, test_block: bool = True) -> Overhead:
    """The best figure available and where it comes from. The context must exist.

    Args:
        device: The GPU.
        used_before: From ``used_before_context``.
        test_block: Allocate a block to find this process in NVML's list; empties the allocator's cache.
    """
    device.synchronize()
    nvml = device.nvml()
    reserved = device.reserved()
    own = own_bytes(nvml)
    if own is not None and own >= reserved:
        return Overhead(
            _without_shared(device, own - reserved),
            "measured",
            say("NVML's figure for this process, less what torch reserves"),
        )
    own = _own_bytes_by_growth(device, nvml) if test_block and nvml is not None else None
    if own is not None and own >= reserved:
        source = say(
            "NVML's figure for the process that grew with this one (NVML lists host pids), less what torch reserves"
        )
        return Overhead(_without_shared(device, own - reserved), "measured", source)
    if used_before is not None and nvml is not None and nvml.used is not None:
        grown = _without_shared(device, nvml.used - used_before - reserved)
        if _LEAST_CONTEXT <= grown <= _MOST_CONTEXT:
            source = say(
                "growth of GPU memory in use while this process created its context; other processes may have changed "
                "meanwhile"
            )
            return Overhead(grown, "bounded", source)
    free, size = device.memory()
    rest = _without_shared(device, size - free - reserved)
    if rest <= _MOST_CONTEXT:
        return Overhead(max(0, rest), "bounded", say("all GPU memory that is neither free nor reserved by torch"))
    source = say(
        "NVML does not list this process, and other processes use the GPU: {assumed} is assumed",
        assumed=format_size(_ASSUMED_CONTEXT),
    )
    return Overhead(_ASSUMED_CONTEXT, "assumed", source)


def _without_shared(device: CudaDevice, size: int) -> int:
    """Without the copies that this process shares, if they are in it: not every driver counts them for a process."""
    rest = size - sum(length for _, length in device.shared_maps())
    return rest if rest >= _LEAST_CONTEXT else size


def _own_bytes_by_growth(device: CudaDevice, nvml: Gpu) -> int | None:
    """NVML's figure for the entry that grows when this process allocates; None if that is not exactly one."""
    before = bytes_by_pid(nvml)
    if not before:
        return None
    reserved = device.reserved()
    try:
        block = device.torch.empty(_TEST_BLOCK, dtype=device.torch.uint8, device=device.name)
    except RuntimeError:  # no room: an active limit, or a full GPU
        return None
    if device.reserved() - reserved != _TEST_BLOCK:  # served from the cache: nothing changed in NVML
        return None
    device.synchronize()
    after = device.nvml()
    del block
    device.empty_cache()
    return bytes_of_grown(before, bytes_by_pid(after), _TEST_BLOCK)


def account(device: Any = None, model: Any = None, optimizer: Any = None) -> Account:
    """What uses the GPU's memory now: weights, gradients, optimizer, other tensors, cache, context, other processes.

    Raises NoCuda without a GPU. A figure that cannot be determined is None, and ``reasons`` holds why.

    Args:
        device: The GPU; None is the current one.
        model: The model whose weights and gradients to count; None finds the models alive in this process.
        optimizer: The optimizer whose state to count; None finds those alive.
    """
    return account_device(open_device(device, say("show what uses GPU memory")), model, optimizer)


def account_device(device: CudaDevice, model: Any = None, optimizer: Any = None) -> Account:
    """``account`` for a device that is open."""
    reasons: dict[str, str] = {}
    parameters, states = _parameters_and_states(device.torch, model, optimizer)
    counted: set[int] = set()
    weights = _storage_bytes(device, parameters, counted)
    gradients = _storage_bytes(
        device, (one.grad for one in parameters if getattr(one, "grad", None) is not None), counted
    )
    state = _storage_bytes(device, states, counted)
    device.synchronize()
    stats = device.stats()
    allocated, reserved = device.allocated(), device.reserved()
    free, size = device.memory()
    used = size - free
    shared = sum(length for _, length in device.shared_maps())
    nvml = device.nvml()
    overhead, others = _outside_allocator(device, nvml, used - reserved - shared, reasons)
    unknown = used - reserved - shared - (overhead.bytes or 0) - (others or 0)
    pinned, spilled = device.pinned(), None if nvml is None else nvml.spilled
    if pinned is None:
        reasons["pinned"] = say("torch has not pinned memory yet, or is too old to count it")
    if spilled is None:
        reasons["spilled"] = say("only Windows moves GPU memory to RAM on its own")
    return Account(
        device=device.name,
        size=size,
        used=used,
        free=free,
        weights=weights,
        gradients=gradients,
        optimizer=state,
        activations=max(0, allocated - weights - gradients - state),
        cached=reserved - allocated,
        overhead=overhead,
        others=others,
        unknown=max(0, unknown),
        stuck=int(stats.get("inactive_split_bytes.all.current", 0)),
        largest_free=device.largest_free(),
        retries=int(stats.get("num_alloc_retries", 0)),
        ooms=int(stats.get("num_ooms", 0)),
        spilled=spilled,
        pinned=pinned,
        reasons=reasons,
        shared=shared,
    )


def _outside_allocator(
    device: CudaDevice, nvml: Gpu | None, rest: int, reasons: dict[str, str]
) -> tuple[Overhead, int | None]:
    """The overhead of this process, and what other processes hold."""
    overhead = measure_overhead(device, test_block=False)  # reading must not empty the allocator's cache
    if overhead.how == "assumed":
        overhead = Overhead(None, "assumed", overhead.source)
        reasons["overhead"] = overhead.source
    own = own_bytes(nvml)
    listed = None if nvml is None else nvml.processes
    if own is not None and listed is not None and all(process.used is not None for process in listed):
        held = sum(process.used or 0 for process in listed if process.pid != os.getpid())
        # NVML counts a copy that processes share in each of them.
        return overhead, min(held, max(0, rest - (overhead.bytes or 0))) if device.shared_maps() else held
    if overhead.how == "measured":
        return overhead, max(0, rest - (overhead.bytes or 0))
    reasons["others"] = say("NVML does not separate this process from others: {source}", source=overhead.source)
    return overhead, None


def _parameters_and_states(torch: Any, model: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Parameters and buffers; the tensors of optimizer states."""
    models = [] if model is None else [model]
    optimizers = [] if optimizer is None else [optimizer]
    if model is None or optimizer is None:
        for thing in gc.get_objects():
            kind = type(thing)
            if model is None and issubclass(kind, torch.nn.Module):
                models.append(thing)
            elif optimizer is None and issubclass(kind, torch.optim.Optimizer):
                optimizers.append(thing)
    parameters = {
        id(one): one
        for owner in models
        for one in (*owner.parameters(recurse=model is not None), *owner.buffers(recurse=model is not None))
    }
    for owner in optimizers:
        parameters |= {id(one): one for group in owner.param_groups for one in group["params"]}
    states = [
        leaf
        for owner in optimizers
        for state in owner.state.values()
        for leaf in state.values()
        if torch.is_tensor(leaf)
    ]
    return list(parameters.values()), states


def _storage_bytes(device: CudaDevice, tensors: Iterable[Any], counted: set[int]) -> int:
    """Bytes of these tensors on the device, each storage once."""
    total = 0
    shared = device.shared_maps()
    for one in tensors:
        if one.device.type != "cuda" or (one.device.index or 0) != device.index or one.layout != device.torch.strided:
            continue
        storage = one.untyped_storage()
        if any(start <= storage.data_ptr() < start + length for start, length in shared):
            continue  # in a copy that processes share, which is counted as such
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += allocator_size(storage.nbytes())
    return total

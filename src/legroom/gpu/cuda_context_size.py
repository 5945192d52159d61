"""How much GPU memory the CUDA context of this process takes, with loaded kernels and libraries' own memory.

They are outside torch's allocator. NVML's figure for this process measures them. Where NVML lists host pids, a block is
allocated here, and probe/nvml.py finds the entry that grew by as much.
"""

from __future__ import annotations

from legroom.gpu.torch_cuda_device import CudaDevice
from legroom.messages import say
from legroom.probe.nvml import bytes_by_pid, bytes_of_grown, own_bytes
from legroom.records.gpu_results import Overhead
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

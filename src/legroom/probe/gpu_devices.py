"""NVIDIA GPUs: memory, processes, GPUs on the PCI bus that have no driver, and GPU memory that Windows moved to RAM.

The size of a GPU is what CUDA can allocate. The driver's reserve is subtracted, so used + free = size, as in
torch.cuda.mem_get_info(). nvidia-smi's total includes the reserve (0.4 % on an H200).

Indices are nvidia-smi's, unless a GPU is divided into MIG instances: each of those is listed as one. CUDA numbers GPUs
after CUDA_VISIBLE_DEVICES, which ``source`` shows.

Inside a container NVML may report pids of the host. A pid without a process here has no command. If another process
has that pid here, its command is not used either.

What Windows moved to RAM ("shared GPU memory") is read from performance counters, by their English names, because a
localized Windows has others. On other systems a full GPU is an error, and nothing moves. PdhCounters has been tested
against a fake pdh.dll only, never on Windows. An amount above zero need not be a problem: pinned host memory and the
desktop's surfaces are included.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from legroom.messages import joined, say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.nvml import NOT_FOUND, NOT_SUPPORTED, NvmlError, call, memory_info, running, text
from legroom.probe.process_and_limits import plain, process_at
from legroom.probe.runtime_environment import in_initial_namespace
from legroom.records.machine import Gpu, GpuProcess, Gpus, Pool

_PCI = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI base class: display controllers, of which 0x0302 are compute GPUs
_DRIVER_SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_MODULE = re.compile(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+(?:\.\d+)+)", re.A)


def gpus(host: Host, nvml: Any = None, counters: PdhCounters | None = None) -> Gpus:
    """Every GPU that NVML lists; ``nvml`` is the pynvml module unless a test passes its own."""
    on_bus = gpus_on_bus(host)
    module = module_version(host.text("/proc/driver/nvidia/version") or "")
    source = _source(host)
    if nvml is None:
        nvml, why_none = _bindings(host, on_bus)
        if nvml is None:
            return Gpus((), on_bus, module, source, why_none)
    try:
        call(nvml, "nvmlInit")
    except NvmlError as trouble:
        why = str(trouble)
        if module:
            why = say("{trouble} (kernel module {version})", trouble=trouble, version=module)
        return Gpus((), on_bus, module, source, why)
    try:
        driver = _or_none(nvml, "nvmlSystemGetDriverVersion") or module
        try:
            cards = tuple(_cards(host, nvml))
        except NvmlError as trouble:
            return Gpus((), on_bus, driver, source, str(trouble))
    finally:
        try:
            call(nvml, "nvmlShutdown")
        except NvmlError:
            pass  # keep what was read so far
    if host.platform == "win32":
        spilled = spill(host, counters)
        cards = tuple(_with_spill(gpu, spilled) for gpu in cards)
    return Gpus(cards, on_bus, driver, source, None if cards else say("the driver lists no GPU"))


def gpu_pools(gpus: Gpus) -> tuple[Pool, ...]:
    """One pool per GPU: gpu0, gpu1, …"""
    return tuple(Pool(f"gpu{gpu.index}", gpu.size, gpu.used, gpu.free, gpus.source, gpu.reason) for gpu in gpus.cards)


def bytes_by_process(gpus: Gpus) -> dict[int, int]:
    """GPU memory on all GPUs by pid, of the processes that are visible here."""
    held: dict[int, int] = {}
    for gpu in gpus.cards:
        for user in gpu.processes or ():
            if user.used is not None and user.command is not None:
                held[user.pid] = held.get(user.pid, 0) + user.used
    return held


def gpus_on_bus(host: Host) -> int | None:
    """NVIDIA display controllers on the PCI bus, driver or not; None where the bus cannot be read."""
    if not host.exists(_PCI):
        return None
    devices = [f"{_PCI}/{name}" for name in host.names(_PCI)]
    return sum(
        1
        for device in devices
        if (host.text(f"{device}/vendor") or "").strip() == _NVIDIA
        and (host.text(f"{device}/class") or "").strip().startswith(_DISPLAY)
    )


def module_version(text: str) -> str | None:
    """The version of the loaded kernel module, from /proc/driver/nvidia/version."""
    found = _MODULE.search(text)
    return found[1] if found else None


def _source(host: Host) -> str:
    visible = host.env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return "NVML"
    if not visible.strip():
        return say("NVML; CUDA_VISIBLE_DEVICES is empty: CUDA programs find no GPU")
    return say("NVML; CUDA_VISIBLE_DEVICES={visible}: CUDA programs see only these GPUs", visible=visible)


def _bindings(host: Host, on_bus: int | None) -> tuple[Any, str]:
    """The pynvml module, or None and why it is not used."""
    if not host.live:
        return None, say("NVML cannot read a recording")
    if host.platform != "win32" and not any(host.exists(sign) for sign in _DRIVER_SIGNS):
        if on_bus:
            return None, say("no NVIDIA driver is loaded, or the container has no access to the GPU")
        return None, say("no NVIDIA driver is loaded") if on_bus is None else say("no NVIDIA GPU and no driver")
    try:
        import pynvml
    except Exception as problem:  # not installed, or a package of that name that breaks on import
        return None, say("cannot import pynvml (nvidia-ml-py): {problem}", problem=problem)
    return pynvml, ""


def _cards(host: Host, nvml: Any) -> Iterator[Gpu]:
    index = 0
    for number in range(call(nvml, "nvmlDeviceGetCount")):
        for handle, mig in _devices(nvml, number):
            yield (
                _dead(index, handle, mig) if isinstance(handle, NvmlError) else _card(host, nvml, handle, index, mig)
            )
            index += 1


def _devices(nvml: Any, number: int) -> Iterator[tuple[Any, bool]]:
    """(handle or error, is a MIG instance): the GPU itself, or its instances where MIG is on."""
    try:
        gpu = call(nvml, "nvmlDeviceGetHandleByIndex", number)
    except NvmlError as trouble:
        yield trouble, False
        return
    try:
        sliced = bool(call(nvml, "nvmlDeviceGetMigMode", gpu)[0])
        most = call(nvml, "nvmlDeviceGetMaxMigDeviceCount", gpu) if sliced else 0
    except NvmlError:  # most GPUs have no MIG
        sliced, most = False, 0
    if not sliced:
        yield gpu, False
        return
    some = False
    for place in range(most):
        try:
            yield call(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, place), True
        except NvmlError as trouble:
            if trouble.code == NOT_FOUND:  # an unused instance slot
                continue
            yield trouble, True
        some = True
    if not some:
        yield (NvmlError(None, say("MIG mode is on but no MIG instance exists: CUDA cannot use this GPU")), False)


def _dead(index: int, trouble: NvmlError, mig: bool) -> Gpu:
    return Gpu(index, say("unknown"), "", None, None, None, None, mig=mig, reason=str(trouble))


def _card(host: Host, nvml: Any, handle: Any, index: int, mig: bool) -> Gpu:
    reasons: list[str] = []
    size = used = free = None
    try:
        info, apart = memory_info(nvml, handle)
        # NVML's `used` is not used: releases differ in whether it includes the reserve.
        size, free = info.total - (info.reserved if apart else 0), info.free
        used = size - free
        if not apart:
            reasons.append(say("the driver is too old to report its reserve, which is counted as used"))
    except NvmlError as trouble:
        reasons.append(
            say(
                "memory unknown: {trouble} (the GPU may use the machine's RAM)"
                if trouble.code == NOT_SUPPORTED
                else "memory unknown: {trouble}",
                trouble=trouble,
            )
        )
    processes = processes_on(host, nvml, handle, reasons)
    return Gpu(
        index=index,
        name=_or_none(nvml, "nvmlDeviceGetName", handle) or say("unknown"),
        uuid=_or_none(nvml, "nvmlDeviceGetUUID", handle) or "",
        size=size,
        used=used,
        free=free,
        processes=processes,
        mig=mig,
        reason=joined(reasons) or None,
    )


def _or_none(nvml: Any, name: str, *arguments: Any) -> str | None:
    try:
        return text(call(nvml, name, *arguments))
    except NvmlError:
        return None


def _with_spill(gpu: Gpu, spilled: Spill) -> Gpu:
    amount, why = spilled.of_card([process.pid for process in gpu.processes or ()])
    if amount is not None:
        return replace(gpu, spilled=amount)
    reasons = [gpu.reason] if gpu.reason else []
    return replace(gpu, reason=joined([*reasons, say("GPU memory moved to RAM unknown: {why}", why=why)]))


_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, where the bindings let it through


def processes_on(host: Host, nvml: Any, handle: Any, reasons: list[str]) -> tuple[GpuProcess, ...] | None:
    """All processes on a GPU, by pid; None where that is unknown. Reasons for gaps go to ``reasons``."""
    try:
        found = running(nvml, handle, "Compute")
    except NvmlError as trouble:
        reasons.append(say("processes unknown: {trouble}", trouble=trouble))
        return None
    for which in ("Graphics", "MPSCompute"):
        try:
            found += running(nvml, handle, which)
        except NvmlError:
            continue  # GPUs without graphics, drivers without MPS
    held: dict[int, int | None] = {}
    for process in found:
        amount = _amount(process.usedGpuMemory)
        before = held.get(process.pid)
        # A process in two lists is listed with its whole memory in each.
        held[process.pid] = before if amount is None else max(amount, before or 0)
    listed = tuple(GpuProcess(pid, held[pid], _command(host, pid)) for pid in sorted(held))
    _say_what_is_missing(host, listed, reasons)
    return listed


def _amount(used: int | None) -> int | None:
    # A process on a GPU uses at least a context; some drivers report 0 inside a container.
    return None if not used or used == _NOT_AVAILABLE else used


def _command(host: Host, pid: int) -> str | None:
    if host.platform != "linux":
        return _command_elsewhere(pid) if host.live else None
    process = process_at(host, pid)
    if process is None:
        return None
    if in_initial_namespace(host, "pid") is False:
        # Some drivers report the host's pids here, and another process may have that pid. A process on a GPU maps it.
        maps = host.text(f"/proc/{pid}/maps") or ""
        if "/dev/nvidia" not in maps and "libcuda" not in maps:
            return None
    return process.command


def _command_elsewhere(pid: int) -> str | None:
    import psutil

    try:
        return plain(psutil.Process(pid).name())
    except (psutil.Error, ValueError, OverflowError):
        return None


def _say_what_is_missing(host: Host, listed: tuple[GpuProcess, ...], reasons: list[str]) -> None:
    if any(process.used is None for process in listed):
        reasons.append(
            say("Windows (WDDM) does not report GPU memory per process to NVML")
            if host.platform == "win32"
            else say("the driver does not report GPU memory per process here")
        )
    hidden = sum(1 for process in listed if process.command is None)
    if hidden:
        reasons.append(
            say(
                "{hidden} of {count} pids match no process here: NVML reports the host's pids",
                hidden=hidden,
                count=len(listed),
            )
        )


PROCESS_COUNTER = r"\GPU Process Memory(*)\Non Local Usage"
ADAPTER_COUNTER = r"\GPU Adapter Memory(*)\Shared Usage"

# pid_4711_luid_0x00000000_0x0000D1B4_phys_0, the adapter's without the pid; a second of the same name ends in #1.
_INSTANCE = re.compile(r"(?:pid_(\d+)_)?luid_(0x[0-9a-f]+_0x[0-9a-f]+)_phys_\d+(?:#\d+)?", re.I | re.A)

_FMT_LARGE = 0x00000400
_MORE_DATA = 0x800007D2
_VALID = (0, 1)  # PDH_CSTATUS_VALID_DATA, PDH_CSTATUS_NEW_DATA
_TRIES = 5  # the list may grow between the two calls


class CounterError(Exception):
    """Performance counters cannot be read."""


@dataclass(frozen=True, slots=True)
class Spill:
    """Bytes in the host's RAM by (pid, adapter) and by adapter; None where they could not be read."""

    processes: Mapping[tuple[int, str], int] | None
    adapters: Mapping[str, int] | None
    source: str
    reason: str | None = None

    def of_card(self, pids: Iterable[int]) -> tuple[int | None, str]:
        """What was moved to RAM from the GPU that these processes use, or None and why.

        No counter names its GPU. But every process on a GPU has a counter on its adapter, so the adapter
        is known where the processes have exactly one in common.
        """
        if self.processes is None or self.adapters is None:
            return None, self.reason or say("cannot read the performance counters")
        seen = [{luid for owner, luid in self.processes if owner == pid} for pid in pids]
        common = set.intersection(*(luids for luids in seen if luids)) if any(seen) else set()
        if len(common) != 1:
            return None, (
                say("{count} adapters may be this GPU", count=len(common))
                if common
                else say("no adapter matches this GPU")
            )
        luid = common.pop()
        if luid in self.adapters:
            return self.adapters[luid], ""
        return sum(size for (_, of), size in self.processes.items() if of == luid), ""


def spill(host: Host, counters: PdhCounters | None = None) -> Spill:
    """What has spilled on this machine; None with a reason on other systems than Windows."""
    source = f"PDH: {PROCESS_COUNTER}, {ADAPTER_COUNTER}"
    if host.platform != "win32":
        return Spill(None, None, source, say("only Windows moves GPU memory to RAM on its own"))
    if not host.live and counters is None:
        return Spill(None, None, source, say("a recording has no performance counters"))
    try:
        counters = counters or PdhCounters()
        by_process, by_adapter = counters.read(PROCESS_COUNTER), counters.read(ADAPTER_COUNTER)
    except CounterError as trouble:
        return Spill(None, None, source, str(trouble))
    processes: dict[tuple[int, str], int] = {}
    for name, size in by_process.items():
        pid, luid = parse_instance(name)
        if pid is not None and luid is not None:
            processes[pid, luid] = processes.get((pid, luid), 0) + size
    adapters: dict[str, int] = {}
    for name, size in by_adapter.items():
        _, luid = parse_instance(name)
        if luid is not None:
            adapters[luid] = adapters.get(luid, 0) + size
    return Spill(processes, adapters, source)


def parse_instance(name: str) -> tuple[int | None, str | None]:
    """(pid, adapter) of an instance's name; None for what is not in it."""
    match = _INSTANCE.fullmatch(name.strip())
    if match is None:
        return None, None
    return (int(match[1]) if match[1] else None), match[2].lower()


class _Value(ctypes.Structure):  # PDH_FMT_COUNTERVALUE, with only the 64-bit member of its union
    _fields_ = (("status", ctypes.c_uint32), ("large", ctypes.c_longlong))


class _Item(ctypes.Structure):  # PDH_FMT_COUNTERVALUE_ITEM_W
    _fields_ = (("name", ctypes.c_wchar_p), ("value", _Value))


class PdhCounters:
    """Performance counters through pdh.dll; ``library`` is the loaded DLL unless a test passes a fake."""

    def __init__(self, library: Any = None) -> None:
        self._pdh = _load_pdh() if library is None else library

    def read(self, path: str) -> Mapping[str, int]:
        """One reading of a counter; these are amounts and not rates, so one is enough."""
        query, counter = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("PdhOpenQueryW", None, ctypes.c_size_t(0), ctypes.byref(query))
        try:
            self._check("PdhAddEnglishCounterW", query, path, ctypes.c_size_t(0), ctypes.byref(counter))
            self._check("PdhCollectQueryData", query)
            return self._values(counter)
        finally:
            self._pdh.PdhCloseQuery(query)

    def _values(self, counter: ctypes.c_void_p) -> dict[str, int]:
        size, count = ctypes.c_uint32(0), ctypes.c_uint32(0)

        def get(buffer: Any) -> int:
            form, sizes = ctypes.c_uint32(_FMT_LARGE), (ctypes.byref(size), ctypes.byref(count))
            return int(self._pdh.PdhGetFormattedCounterArrayW(counter, form, *sizes, buffer)) & 0xFFFFFFFF

        status = 0
        for _ in range(_TRIES):
            size.value = 0  # the length is reliable only if no buffer is passed
            status = get(None)
            if status != _MORE_DATA:
                break
            buffer = ctypes.create_string_buffer(size.value)  # names follow the items in the same buffer
            status = get(buffer)
            if status == 0:
                return _by_name(buffer, count.value)
            if status != _MORE_DATA:
                break
        if status:
            raise _counter_error("PdhGetFormattedCounterArrayW", status)
        return {}

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._pdh, name)(*arguments)
        if status:
            raise _counter_error(name, status)


def _by_name(buffer: Any, count: int) -> dict[str, int]:
    items = ctypes.cast(buffer, ctypes.POINTER(_Item))
    found: dict[str, int] = {}
    for number in range(count):
        name, value = items[number].name, items[number].value
        if name and value.status in _VALID:
            found[name] = found.get(name, 0) + value.large
    return found


def _counter_error(name: str, status: int) -> CounterError:
    return CounterError(f"{name} returned {status & 0xFFFFFFFF:#010x}")


def _load_pdh() -> Any:
    loader: Any = vars(ctypes).get("WinDLL")
    if loader is None:
        raise CounterError(say("this system has no pdh.dll"))
    try:
        return loader("pdh.dll")
    except OSError as problem:
        raise CounterError(say("cannot load pdh.dll: {problem}", problem=problem)) from problem

r"""GPU memory that Windows moved to RAM ("shared GPU memory"), from performance counters.

Reads ``\GPU Process Memory(pid_N_*)\Non Local Usage`` and ``\GPU Adapter Memory(*)\Shared Usage``. On other systems a
full GPU is an error, and nothing moves.

PdhCounters has been tested against a fake pdh.dll only, never on Windows. Counters are added by their English names,
because a localized Windows has others.

An amount above zero need not be a problem: pinned host memory and the desktop's surfaces are included.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host

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
        self._pdh = _load() if library is None else library

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
            raise _failed("PdhGetFormattedCounterArrayW", status)
        return {}

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._pdh, name)(*arguments)
        if status:
            raise _failed(name, status)


def _by_name(buffer: Any, count: int) -> dict[str, int]:
    items = ctypes.cast(buffer, ctypes.POINTER(_Item))
    found: dict[str, int] = {}
    for number in range(count):
        name, value = items[number].name, items[number].value
        if name and value.status in _VALID:
            found[name] = found.get(name, 0) + value.large
    return found


def _failed(name: str, status: int) -> CounterError:
    return CounterError(f"{name} returned {status & 0xFFFFFFFF:#010x}")


def _load() -> Any:
    loader: Any = vars(ctypes).get("WinDLL")
    if loader is None:
        raise CounterError(say("this system has no pdh.dll"))
    try:
        return loader("pdh.dll")
    except OSError as problem:
        raise CounterError(say("cannot load pdh.dll: {problem}", problem=problem)) from problem

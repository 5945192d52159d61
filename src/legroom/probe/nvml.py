"""Calls of NVML (nvidia-ml-py): every failure is an NvmlError with a readable reason. Which entry is this process.

The ``pynvml`` module is always an argument: tests pass a fake, and importing this module does not import pynvml.

nvmlInit opens every GPU and takes tens of milliseconds; while one session is open, further calls only count up.

In a container NVML may list pids of the host, among which this process cannot be found by its own. Then the caller
allocates a block, and the one entry that grew by exactly that much is this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from legroom.messages import phrase, say
from legroom.records.machine import Gpu

NOT_SUPPORTED = 3
NOT_FOUND = 6
TOO_OLD = 13  # FUNCTION_NOT_FOUND
_INVALID_ARGUMENT = 2
_OTHER_VERSION = 25  # ARGUMENT_VERSION_MISMATCH
# Errors after which an older version of the call is tried.
_ASK_OLDER = (_INVALID_ARGUMENT, NOT_SUPPORTED, TOO_OLD, _OTHER_VERSION)
_GROWTH_TOLERANCE = 2 << 20

# By NVML's own numbers, which are part of its binary interface.
_WORDS = {
    1: phrase("NVML is not initialized"),
    NOT_SUPPORTED: phrase("not supported by this GPU or driver"),
    4: phrase("no permission to use the driver; a container also needs access to the device files"),
    NOT_FOUND: phrase("not found"),
    9: phrase("the NVIDIA driver is not loaded"),
    10: phrase("the driver timed out"),
    11: phrase("the driver reports an interrupt problem with the GPU"),
    12: phrase(
        "NVML (libnvidia-ml.so.1, nvml.dll) was not found; in a container NVIDIA_DRIVER_CAPABILITIES must "
        "include utility"
    ),
    TOO_OLD: phrase("the installed driver or its library is too old for this call"),
    15: phrase("the GPU is lost: it fell off the bus or no longer responds"),
    16: phrase("the GPU must be reset before it can be used again"),
    17: phrase("the operating system blocked the call"),
    18: phrase("driver and library versions differ, as after an upgrade without a reboot"),
    20: phrase("the driver is out of memory"),
    _OTHER_VERSION: phrase("the library does not support this version of the call"),
    999: phrase("the driver reported an unknown error"),
}


class NvmlError(Exception):
    """A failed call: NVML's error code if there is one, and the reason."""

    def __init__(self, code: int | None, words: str) -> None:
        super().__init__(words)
        self.code = code


def call(nvml: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of pynvml; every failure becomes an NvmlError."""
    function = getattr(nvml, name, None)
    if function is None:
        raise NvmlError(TOO_OLD, say("the installed nvidia-ml-py is too old: it has no {name}", name=name))
    try:
        return function(*arguments, **options)
    except Exception as problem:  # bindings also raise TypeError, OSError and other errors
        raise _trouble(problem) from problem


def memory_info(nvml: Any, handle: Any) -> tuple[Any, bool]:
    """The memory of a GPU, and whether the driver's reserve is a separate field."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            return call(nvml, "nvmlDeviceGetMemoryInfo", handle, version=version), True
        except NvmlError as trouble:
            if trouble.code not in _ASK_OLDER:
                raise
    return call(nvml, "nvmlDeviceGetMemoryInfo", handle), False


def running(nvml: Any, handle: Any, which: str) -> list[Any]:
    """The processes of one kind (Compute, Graphics, MPSCompute) on a GPU, by the newest call that works."""
    name = f"nvmlDeviceGet{which}RunningProcesses"
    last = NvmlError(TOO_OLD, say(_WORDS[TOO_OLD]))
    for version in ("_v3", "_v2", ""):
        try:
            return list(call(nvml, name + version, handle))
        except NvmlError as trouble:
            last = trouble
            if trouble.code not in _ASK_OLDER:
                break
    raise last


def text(value: Any) -> str:
    """A string from NVML; older bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _trouble(problem: Exception) -> NvmlError:
    code = getattr(problem, "value", None)
    if isinstance(code, int):
        if code in _WORDS:
            return NvmlError(code, say(_WORDS[code]))
        return NvmlError(code, say("NVML error {code}: {problem}", code=code, problem=problem))
    if isinstance(problem, (TypeError, AttributeError)):  # bindings without this argument or version
        return NvmlError(TOO_OLD, say("the installed nvidia-ml-py is too old: {problem}", problem=problem))
    return NvmlError(None, say("{kind}: {problem}", kind=type(problem).__name__, problem=problem))


def own_bytes(nvml: Gpu | None) -> int | None:
    """NVML's figure for this pid; None if it is not listed, has no figure, or the pid is another namespace's."""
    for process in () if nvml is None else nvml.processes or ():
        if process.pid == os.getpid() and process.command is not None:
            return process.used
    return None


def bytes_of_grown(before: Mapping[int, int], after: Mapping[int, int], amount: int) -> int | None:
    """What the one process that grew by ``amount`` held before; None if none or several did."""
    grew = [pid for pid, held in before.items() if abs(after.get(pid, 0) - held - amount) <= _GROWTH_TOLERANCE]
    return before[grew[0]] if len(grew) == 1 else None


def bytes_by_pid(nvml: Gpu | None) -> dict[int, int]:
    """NVML's figure for each pid that has one."""
    processes = () if nvml is None else nvml.processes or ()
    return {process.pid: process.used for process in processes if process.used is not None}


class NvmlSession:
    """One open NVML session."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self.held = False

    def open(self) -> None:
        """Open a session that makes later calls faster; a failure is ignored."""
        if self.held:
            return
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        try:
            call(self._nvml, "nvmlInit")
            self.held = True
        except NvmlError:
            pass  # the next call reports the reason

    def close(self) -> None:
        """Close the session."""
        if not self.held:
            return
        self.held = False
        try:
            call(self._nvml, "nvmlShutdown")
        except NvmlError:
            pass  # the process is ending, or the driver went away

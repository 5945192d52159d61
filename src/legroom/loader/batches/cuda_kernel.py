"""Gather kernels of few blocks: they read rows from registered memory and leave most of the GPU to the training step.

``index_select`` starts as many blocks as the GPU can hold, although two are nearly as fast. The kernels are compiled on
their first use by NVRTC, which torch ships; where that fails, ``CudaRefused`` says why and index_select is used.
Blocks are few and large. Each multiprocessor that a block occupies is missing to the kernels of the training step, and
a matrix product that fills the GPU exactly then takes one round more.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from legroom.gpu.cuda_driver_api import CudaRefused, DriverApi
from legroom.messages import say

_NAME = "gather_rows"
# Every thread has several loads in flight: a load over PCIe takes more than a microsecond.
_ROWS_SOURCE = b"""
extern "C" __global__ void __launch_bounds__(1024) gather_rows(
    const WORD* __restrict__ source, const long long* __restrict__ rows, WORD* __restrict__ target,
    unsigned int total, unsigned int words)
{
    const unsigned int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
    const unsigned int part = 32 * IN_FLIGHT, parts = (words + part - 1) / part, count = total / words * parts;
    for (unsigned int n = (blockIdx.x * blockDim.x + threadIdx.x) / 32; n < count; n += warps) {
        const unsigned int row = n / parts, first = (n - row * parts) * part + lane;
        const WORD* from = source + rows[row] * words;
        WORD* to = target + (unsigned long long)row * words;
        WORD loaded[IN_FLIGHT];
        #pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + 32 * i < words) loaded[i] = from[first + 32 * i];
        #pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + 32 * i < words) to[first + 32 * i] = loaded[i];
    }
}
"""
# For rows that would leave most threads of a warp without work.
_WORDS_SOURCE = b"""
extern "C" __global__ void __launch_bounds__(1024) gather_rows(
    const WORD* __restrict__ source, const long long* __restrict__ rows, WORD* __restrict__ target,
    unsigned int total, unsigned int words)
{
    const unsigned int step = gridDim.x * blockDim.x;
    for (unsigned int at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += IN_FLIGHT * step) {
        WORD loaded[IN_FLIGHT];
        #pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const unsigned int here = at + i * step;
            if (here < total) {
                const unsigned int row = here / words;
                loaded[i] = source[rows[row] * words + (here - row * words)];
            }
        }
        #pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (at + i * step < total) target[at + i * step] = loaded[i];
    }
}
"""
_LEAST_WORDS = 32  # of a row that a warp copies
_BYTES_IN_FLIGHT = 64  # of each thread; more read faster on a slow host, and training was no faster (decision 0018)
_MOST_BLOCKS = 32  # over PCIe
_MOST_WORDS = 1 << 31  # per launch: the kernels count in 32 bits, with room for the words in flight
_WORDS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


class Grid(NamedTuple):
    """How many blocks of how many threads gather."""

    blocks: int
    threads: int


OVER_PCIE = Grid(2, 1024)  # an H200 reads 39 to 50 GB/s so, and 54 GB/s with its copy engines
IN_GPU_MEMORY = Grid(528, 128)


class GatherKernel:
    """The kernels on one device, each compiled on its first use."""

    def __init__(self, api: DriverApi, capability: tuple[int, int], cuda_version: str | None) -> None:
        self._api, self._capability, self._cuda_version = api, capability, cuda_version
        self._kernels: dict[tuple[bytes, tuple[str, ...]], Any] = {}

    def of_column(self, source: int, row_bytes: int, grid: Grid = OVER_PCIE) -> ColumnGather:
        """The kernel for the rows of one column, which begins at the device address ``source``."""
        width = next(w for w in _WORDS if row_bytes % w == 0 and source % w == 0)
        words = row_bytes // width
        code = _ROWS_SOURCE if words >= _LEAST_WORDS else _WORDS_SOURCE
        in_flight = 4 if code is _WORDS_SOURCE else min(32, _BYTES_IN_FLIGHT // width)
        kernel = self._compiled(code, f"-DWORD={_WORDS[width]}", f"-DIN_FLIGHT={in_flight}")
        if code is _ROWS_SOURCE:  # narrow words need more threads for as many bytes
            grid = Grid(min(grid.blocks * 16 // width, max(_MOST_BLOCKS, grid.blocks)), grid.threads)
        return ColumnGather(self._api, kernel, source, row_bytes, words, grid)

    def _compiled(self, source: bytes, *options: str) -> Any:
        key = (source, options)
        if key not in self._kernels:
            image = compile_kernel(source, options, self._capability, self._cuda_version)
            self._kernels[key] = self._api.load_kernel(image, _NAME)
        return self._kernels[key]


class ColumnGather:
    """``target[i] = source[rows[i]]`` for one column, with everything ready that stays the same from batch to batch."""

    def __init__(self, api: DriverApi, kernel: Any, source: int, row_bytes: int, words: int, grid: Grid) -> None:
        self._row_bytes, self._words = row_bytes, words
        self._rows, self._target, self._total = c_uint64(), c_uint64(), c_uint()
        arguments = [c_uint64(source), self._rows, self._target, self._total, c_uint(words)]
        self._launch = api.prepare_launch(kernel, grid.blocks, grid.threads, arguments)

    def __call__(self, rows: int, target: int, count: int, stream: int) -> None:
        """Queue the gather of ``count`` rows; their numbers and the target are at device addresses.

        The target is memory of torch's allocator, which is aligned for every word.
        """
        most = max(1, _MOST_WORDS // self._words)
        for first in range(0, count, most):
            self._rows.value = rows + 8 * first
            self._target.value = target + first * self._row_bytes
            self._total.value = min(most, count - first) * self._words
            self._launch(stream)


@cache
def compile_kernel(
    source: bytes, options: tuple[str, ...], capability: tuple[int, int], cuda_version: str | None
) -> bytes:
    """A kernel, compiled for the device's architecture."""
    nvrtc = _load_nvrtc(cuda_version)
    program = c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(byref(program), c_char_p(source), None, c_int(0), None, None))
    try:
        options = (f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *options)
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        _check(nvrtc, nvrtc.nvrtcCompileProgram(program, c_int(len(options)), given))
        size = c_size_t()
        _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program, byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, image))
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _check(nvrtc: Any, code: int) -> None:
    if code != 0:
        nvrtc.nvrtcGetErrorString.restype = c_char_p
        raise CudaRefused(say("NVRTC: {words} ({code})", words=nvrtc.nvrtcGetErrorString(code).decode(), code=code))


def _load_nvrtc(cuda_version: str | None) -> Any:
    """The NVRTC of torch's CUDA version: already loaded, on the library path, or among torch's own packages."""
    major = (cuda_version or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [Path(folder) for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    shipped = [str(found) for folder in folders for found in sorted(folder.glob(f"nvidia/*/lib/{name}*"))]
    problem: OSError | None = None
    for candidate in (name, *shipped):
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            problem = problem or error
    raise CudaRefused(say("{library} cannot be loaded: {problem}", library=name, problem=problem))

"""A gather kernel of few blocks: it reads rows from registered memory and leaves most of the GPU to the training step.

``index_select`` starts as many blocks as the GPU can hold, although a few saturate PCIe. The kernel is compiled once
per process by NVRTC, which torch ships; where that fails, ``CudaRefused`` says why and index_select is used.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from legroom.gpu.cuda_driver_api import CudaRefused, DriverApi
from legroom.messages import say

BLOCKS, THREADS = 8, 256
_NAME = "gather_rows"
# Eight loads are in flight per thread: a load over PCIe takes more than a microsecond.
_SOURCE = b"""
#define IN_FLIGHT 8
extern "C" __global__ void gather_rows(
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
_MOST_WORDS = 1 << 31  # per launch: the kernel counts in 32 bits, with room for the words in flight
_WORDS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


class GatherKernel:
    """The kernel on one device, compiled for each word size on its first use."""

    def __init__(self, api: DriverApi, capability: tuple[int, int], cuda_version: str | None) -> None:
        self._api, self._capability, self._cuda_version = api, capability, cuda_version
        self._kernels: dict[int, Any] = {}

    def gather(
        self, source: int, rows: int, target: int, *, count: int, row_bytes: int, stream: int, blocks: int = BLOCKS
    ) -> None:
        """Queue ``target[i] = source[rows[i]]`` for ``count`` rows; the first three are device addresses."""
        width = next(w for w in _WORDS if row_bytes % w == 0 and source % w == 0 and target % w == 0)
        kernel = self._kernels.get(width)
        if kernel is None:
            image = compile_kernel(_WORDS[width], self._capability, self._cuda_version)
            kernel = self._kernels[width] = self._api.load_kernel(image, _NAME)
        words = row_bytes // width
        piece = max(1, _MOST_WORDS // words)
        for first in range(0, count, piece):
            part = min(piece, count - first)
            arguments = [
                c_uint64(source),
                c_uint64(rows + 8 * first),
                c_uint64(target + first * row_bytes),
                c_uint(part * words),
                c_uint(words),
            ]
            self._api.launch(kernel, blocks, THREADS, arguments, stream)


@cache
def compile_kernel(word: str, capability: tuple[int, int], cuda_version: str | None) -> bytes:
    """The kernel for one word type, compiled for the device's architecture."""
    nvrtc = _load_nvrtc(cuda_version)
    program = c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(byref(program), c_char_p(_SOURCE), None, c_int(0), None, None))
    try:
        options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", f"-DWORD={word}"]
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

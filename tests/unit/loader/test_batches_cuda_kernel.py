"""Which gather kernel a column gets, and what its launches are given. The kernels themselves run in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from legroom.loader.batches import cuda_kernel
from legroom.loader.batches.cuda_kernel import IN_GPU_MEMORY, OVER_PCIE, GatherKernel, Grid


class Launches:
    """Stands in for DriverApi: remembers kernels, grids, and the arguments of each launch."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.grids: list[Grid] = []
        self.launched: list[list[int]] = []

    def load_kernel(self, image: bytes, name: str) -> int:
        self.loaded.append(image)
        return len(self.loaded)

    def prepare_launch(self, kernel: int, blocks: int, threads: int, arguments: list[Any]) -> Callable[[int], None]:
        self.grids.append(Grid(blocks, threads))

        def launch(stream: int) -> None:
            self.launched.append([kernel, stream, *(argument.value for argument in arguments)])

        return launch


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Launches:
    def compiled(source: bytes, options: tuple[str, ...], *_: object) -> bytes:
        kind = b"rows" if source is cuda_kernel._ROWS_SOURCE else b"words"
        return kind + " ".join(options).encode()

    monkeypatch.setattr(cuda_kernel, "compile_kernel", compiled)
    return Launches()


@pytest.mark.parametrize(
    ("source", "row_bytes", "image", "blocks"),
    [
        (1 << 20, 150_528, b"rows-DWORD=uint4 -DIN_FLIGHT=4", 2),
        ((1 << 20) + 8, 150_528, b"rows-DWORD=uint2 -DIN_FLIGHT=8", 4),
        (1 << 20, 3 * 1001 * 4, b"rows-DWORD=unsigned int -DIN_FLIGHT=16", 8),
        (1 << 20, 1001, b"rows-DWORD=unsigned char -DIN_FLIGHT=32", 32),
        (1 << 20, 512, b"rows-DWORD=uint4 -DIN_FLIGHT=4", 2),
        (1 << 20, 256, b"words-DWORD=uint4 -DIN_FLIGHT=4", 2),
        (1 << 20, 8, b"words-DWORD=uint2 -DIN_FLIGHT=4", 2),
        (1 << 20, 3, b"words-DWORD=unsigned char -DIN_FLIGHT=4", 2),
    ],
)
def test_wide_words_and_one_warp_per_row_where_rows_allow_it(
    api: Launches, source: int, row_bytes: int, image: bytes, blocks: int
) -> None:
    kernel = GatherKernel(api, (9, 0), "13.0")  # type: ignore[arg-type]
    kernel.of_column(source, row_bytes)
    assert api.loaded == [image] and api.grids == [Grid(blocks, OVER_PCIE.threads)]
    kernel.of_column(source, row_bytes)
    assert len(api.loaded) == 1
    kernel.of_column(source, row_bytes, IN_GPU_MEMORY)
    assert api.grids[-1] == IN_GPU_MEMORY


def test_a_launch_gets_the_addresses_and_counts_of_its_batch(api: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernel, "_MOST_WORDS", 1000)
    gather = GatherKernel(api, (9, 0), "13.0").of_column(1 << 20, 16 * 300)  # type: ignore[arg-type]
    gather(4096, 8192, 7, 5)
    # Three rows have 900 words: more would be counted beyond the limit.
    assert api.launched == [
        [1, 5, 1 << 20, 4096, 8192, 900, 300],
        [1, 5, 1 << 20, 4096 + 3 * 8, 8192 + 3 * 4800, 900, 300],
        [1, 5, 1 << 20, 4096 + 6 * 8, 8192 + 6 * 4800, 300, 300],
    ]
    gather(4096, 8192, 0, 5)
    assert len(api.launched) == 3

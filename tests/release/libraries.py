"""Compares the readers with the libraries of their formats: the tests that `make test` skips without these libraries.

    make test-libraries
    .venv-peers/bin/python tests/release/libraries.py

The libraries require other versions of numpy and torch than the pinned ones, so they are in the environment of the
benchmarks. A test that is skipped here is a failure: its library is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "bench"))
from formats_peers import declare_vision_operators  # noqa: E402

READERS = ("hf_datasets", "image_folder", "lmdb", "mds", "megatron", "tar")


class Skips:
    """Collects the tests that were skipped, and why."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.found.append(f"{report.nodeid}: {report.longrepr[2]}")


def main() -> int:
    declare_vision_operators()  # before mosaicml-streaming imports torchvision
    skips = Skips()
    files = [str(REPO / f"tests/unit/formats/test_formats_{name}_reader.py") for name in READERS]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *files], [skips])
    for one in skips.found:
        print(f"skipped: {one}")
    return int(status) or len(skips.found) > 0


if __name__ == "__main__":
    sys.exit(main())

"""What pages say about a GPU is run on one: the whole of every page with a block that needs CUDA."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_folder import copy, furnish
from doc_pages import blocks_of, original, pages
from doc_runner import Runner, scripts

pytestmark = pytest.mark.gpu


def _for_a_gpu(page: str) -> bool:
    return original(page) is None and any({"needs", "elsewhere"} & block.marks.keys() for block in blocks_of(page))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    process = Runner()
    yield process
    process.close()


@pytest.mark.parametrize("page", [page for page in pages() if _for_a_gpu(page)])
def test_python_for_a_gpu(page: str, runner: Runner, tmp_path: Path) -> None:
    furnish(tmp_path)
    with tempfile.TemporaryDirectory(prefix="legroom-doc-") as folder:
        environment = copy(tmp_path, Path(folder))
        for name, text in scripts(blocks_of(page), cuda=True):
            script = Path(folder) / name
            script.write_text(text, encoding="utf-8")
            status, output = runner.run(script, Path(folder), environment)
            assert status == 0, f"{page}: {name} ended with {status}\n{output}"

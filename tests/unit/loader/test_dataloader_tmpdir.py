"""A temporary directory whose path is too long for sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from legroom.errors import LoaderError
from legroom.loader.dataloader import explain_start_failure
from legroom.loader.dataloader.explain_start_failure import use_short_tmpdir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bound of Linux")

# Workers by forkserver first, which needs a socket to start them; then batches that torch sends, through sockets.
SCRIPT = """
import multiprocessing.util, os, tempfile

def main():
    import torch
    import legroom

    data = torch.utils.data.TensorDataset(torch.arange(4096).reshape(4, 1024))
    for method, off in (("forkserver", ""), ("fork", "1")):
        os.environ["LEGROOM_DISABLE"] = off
        loader = legroom.DataLoader(data, 2, num_workers=1, multiprocessing_context=method)
        print(loader.transport, sum(int(batch.sum()) for batch, in loader))
    print(tempfile.gettempdir() == os.environ["TMPDIR"])
    print(multiprocessing.util.get_temp_dir())

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    return folder


def test_batches_arrive_although_the_path_is_too_long(tmp_path: Path, long_folder: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(long_folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    whole = sum(range(4096))
    *told, sockets = done.stdout.splitlines()
    assert told == [f"arena {whole}", f"torch {whole}", "True"], done.stderr
    assert "AF_UNIX" not in done.stderr
    assert sockets.startswith("/tmp/pymp-") and not Path(sockets).exists()


@pytest.mark.parametrize("required", [True, False])
def test_no_short_folder_is_an_error_only_if_sockets_are_required(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    monkeypatch.setattr(explain_start_failure, "_SHORT_FOLDERS", ())
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: f"{tempfile.gettempdir()}/pymp-12345678")
    if not required:
        use_short_tmpdir(required=False)
        return
    with pytest.raises(LoaderError, match="the limit is 107") as caught:
        use_short_tmpdir(required=True)
    assert "TMPDIR" in caught.value.fix[0] and tempfile.gettempdir() == str(long_folder)


def test_a_short_folder_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: pytest.fail("nothing is to be made"))
    use_short_tmpdir(required=True)

"""A producer of shared batches that cannot start its thread: its trainer gets the reason, and no file is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd")

SITE = "import legroom.system.processes_and_threads as control\ncontrol.room_for_threads = lambda count: False\n"
PROGRAM = """
import time, warnings
import torch, legroom
warnings.simplefilter("ignore")

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.full((4,), float(index))

if __name__ == "__main__":
    from legroom.loader.dataloader.sharing.group_folder import GroupFiles, group_folder
    from legroom.loader.dataloader.sharing.group_settings import group_key
    files = GroupFiles(group_folder(), group_key("train", None))
    if {late}:  # the trainer gets no core until the producer has ended
        import select
        from legroom.loader.dataloader.sharing.producer_client import Group
        greet = Group._greet
        def greet_late(self, connection, **how):
            ended = select.poll()
            ended.register(connection.fileno(), 0)
            ended.poll()
            return greet(self, connection, **how)
        Group._greet = greet_late
    another = files.stand_alone()  # a trainer that is alone needs no producer
    try:
        for batch in legroom.DataLoader(Rows(), 2, num_workers=1, share="train"):
            pass
    except legroom.LegroomError as problem:
        print(problem.code, problem.why)
    files.release_alone(another)
"""


@pytest.mark.parametrize("late", [False, True])
def test_a_producer_without_its_thread_reports_why(tmp_path: Path, late: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("{late}", str(late)))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)  # in the producer's interpreter too
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": paths, "LEGROOM_SHM": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.stdout.startswith("producer-failed the limit on processes and threads"), ran
    assert ".log" in files_left(tmp_path)  # the error names it
    until = time.monotonic() + 60
    while files_left(tmp_path) != [".log"] and time.monotonic() < until:
        time.sleep(0.05)  # the producer removes the others after it has sent the error
    assert files_left(tmp_path) == [".log"]


def files_left(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / f"legroom-{os.geteuid()}" / "share").iterdir())

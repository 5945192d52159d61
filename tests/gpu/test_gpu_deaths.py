"""Deaths of GPU memory and of pinned memory, brought about for real and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LOGS = os.environ.get("LEGROOM_DEATH_LOGS")  # a folder, to keep as recorded logs; no test has this variable

DEATHS = {
    "gpu_oom": ("gpu-oom", "import torch\nheld = []\nwhile True: held.append(torch.empty(1 << 30, dtype=torch.uint8, device='cuda'))\n"),
    "gpu_oom_one": ("gpu-oom", "import torch\ntorch.empty(1 << 44, dtype=torch.uint8, device='cuda')\n"),
    # More than any host has: refused at once, and nothing of the machine's memory is taken.
    "pinned": ("pinned-exhausted", "import torch\ntorch.cuda.init()\nheld = torch.empty(1 << 44, dtype=torch.uint8, pin_memory=True)\n"),
    "exception": ("not-memory", "import torch\ntorch.zeros(2, device='cuda') @ torch.zeros(3, device='cuda')\n"),
}  # fmt: skip


def _run(folder: Path, script: str, *options: str) -> tuple[dict[str, Any], str, int]:
    path = folder / "train.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "legroom", "run", "--json", "--quiet", *options, "--", sys.executable, str(path), "--batch", "8", "--accum_iter", "1"],
        capture_output=True, text=True, timeout=200, check=False, cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder)},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, done.returncode


@pytest.mark.parametrize("name", DEATHS)
def test_the_death_is_named_live_and_from_its_log(name: str, tmp_path: Path) -> None:
    truth, script = DEATHS[name]
    report, text, status = _run(tmp_path, script)
    if LOGS:
        Path(LOGS, f"{name}.log").write_text(text)
    assert report["verdict"] == truth, (report["evidence"], text[-3000:])
    assert status == report["exit"] == 1
    log = tmp_path / "death.log"
    log.write_text(text)
    said = subprocess.run(
        [sys.executable, "-m", "legroom", "explain", "--json", str(log)], capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout)["verdict"] == truth


def test_a_batch_too_large_for_the_gpu_is_halved_until_it_fits(tmp_path: Path) -> None:
    free = torch.cuda.mem_get_info()[0]
    script = (
        "import argparse, torch\n"
        "p = argparse.ArgumentParser(); p.add_argument('--batch', type=int); p.add_argument('--accum_iter', type=int)\n"
        f"a = p.parse_args(); torch.empty(a.batch * {free // 3}, dtype=torch.uint8, device='cuda')\n"
        "print('fits', a.batch, a.accum_iter)\n"
    )
    report, text, status = _run(tmp_path, script, "--retries", "4", "--fresh")
    assert status == 0, text
    assert [one["settings"]["batch"] for one in report["attempts"]] == [8, 4, 2]
    assert "fits 2 4" in text

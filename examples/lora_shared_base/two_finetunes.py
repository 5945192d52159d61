"""Two LoRA fine-tunes of one base model: one after the other with a copy each, then together on one copy.

    python two_finetunes.py [--device cuda] [--width 1024] [--layers 8] [--steps 30] [--peft]

The losses are the same. On a GPU there is one copy of the base, whichever process made it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from model import Transformer

TASKS = (1, 3)
HERE = Path(__file__).parent


def start(base: Path, task: int, asked: argparse.Namespace, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "finetune.py"), str(base), "--task", str(task), "--device", asked.device]
    command += ["--steps", str(asked.steps), *(["--peft"] if asked.peft else []), *flags]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a fine-tune ended with {process.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def losses(process: subprocess.Popen[str]) -> list[float]:
    said, _ = process.communicate("train\n")
    found: list[float] = json.loads(said)["losses"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peft", action="store_true", help="adapters of PEFT, which must be installed")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.pt"
        torch.manual_seed(0)
        model = Transformer(256, asked.width, asked.layers)
        size = sum(one.nbytes for one in model.parameters())
        torch.save(model.state_dict(), base)
        del model
        apart = []
        for task in TASKS:
            process = start(base, task, asked, "--own")
            alone = ready(process)
            apart.append(losses(process))
        print(f"base {size / 1e6:.0f} MB, apart: {alone['allocated'] / 1e6:.0f} MB allocated by each; {alone['why']}")
        both = [start(base, task, asked) for task in TASKS]
        for task, process in zip(TASKS, both, strict=True):
            told = ready(process)
            print(f"task {task}, together: {told['allocated'] / 1e6:.0f} MB allocated; {told['why']}")
        if asked.device != "cpu":
            subprocess.run([sys.executable, "-m", "legroom", "cache", "list"], check=True, env=os.environ)
        together = [losses(process) for process in both]
    off = max(
        abs(one - other) / other
        for left, right in zip(together, apart, strict=True)
        for one, other in zip(left, right, strict=True)
    )
    for task, found in zip(TASKS, together, strict=True):
        print(f"task {task}: loss {found[0]:.3f} -> {found[-1]:.3f}")
    print(f"largest difference between together and apart: {off:.1e}")
    if off > 1e-3:
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()

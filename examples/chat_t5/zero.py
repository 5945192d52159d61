"""What is different under DeepSpeed's ZeRO.

Covers: asking for it, what this training cannot have of it, states that are divided among the ranks.
Does not cover: its files, which `legroom tune --emit` writes (README.md has the commands).
"""

from __future__ import annotations

import argparse
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs

from legroom.errors import MissingPackage, UsageError


def started(flags: argparse.Namespace) -> dict[str, Any]:
    """What an Accelerator is made with: DeepSpeed as `--deepspeed FILE` or the launcher asks for it, or none."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    card = torch.cuda.is_available()
    if not (flags.deepspeed or launched):
        return {"cpu": not card}  # or ranks without a card would be one rank, several times
    if find_spec("deepspeed") is None:
        raise MissingPackage(
            "ZeRO needs DeepSpeed",
            why="the package deepspeed is not installed",
            fix=("pip install deepspeed", "or train without it: Adafactor's states are small as they are"),
        )
    if "LOCAL_RANK" not in os.environ:
        # Nobody launched it in a group: here is one of a single rank, for which DeepSpeed would ask MPI.
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        os.environ |= {name: str(value) for name, value in alone.items()}
    asked: dict[str, Any] = {}
    if flags.deepspeed:
        asked["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=str(flags.deepspeed))
    if not card:
        # With cpu=True accelerate drops DeepSpeed without a word; without a backend every rank is the only one to it.
        asked["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    return asked


def in_use(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def prepare(accelerator: Accelerator, batch: int) -> None:
    """Tell DeepSpeed the batch, which it asks of a DataLoader otherwise, and refuse what would change the training."""
    if not in_use(accelerator):
        return
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    if offload.get("device", "none") != "none" and config.get("zero_force_ds_cpu_optimizer", True):
        raise UsageError(
            "Adafactor cannot be offloaded",
            why="accelerate would put DeepSpeed's CPU Adam in its place: 8 bytes a parameter more in host memory",
            fix=("use a file without offload",),
        )
    # As without ZeRO, and whatever the file says: Adafactor clips its updates itself. Silence would mean 1.
    config["gradient_clipping"] = 0.0
    ours = {
        "train_micro_batch_size_per_gpu": batch,
        "train_batch_size": batch * accelerator.gradient_accumulation_steps * accelerator.num_processes,
    }
    for name, value in ours.items():
        if config.get(name, "auto") not in ("auto", value):
            raise UsageError(
                f"DeepSpeed's file is for another training: its {name} is {config[name]}, and here it is {value}",
                why=f"{accelerator.num_processes} ranks, {accelerator.gradient_accumulation_steps} batches to a step",
                fix=("write the file for this training: README.md has the command", "or give the flags it is for"),
            )  # fmt: skip
    config |= ours


def save(accelerator: Accelerator, folder: Path, name: str) -> None:
    """Every rank's part of weights and optimizer; the checkpoint that names it is written afterwards."""
    accelerator.save_state(str(folder / name))
    accelerator.wait_for_everyone()


def load(accelerator: Accelerator, folder: Path, name: str) -> None:
    accelerator.load_state(str(folder / name))


def forget(folder: Path, but: str) -> None:
    """Remove the parts of earlier checkpoints."""
    for old in folder.glob("zero-*"):
        if old.name != but:
            shutil.rmtree(old)

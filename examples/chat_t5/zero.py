"""DeepSpeed's ZeRO: starting it, and saving and loading states that are divided among the ranks.

Configurations that cannot be trained with are refused earlier, in zero_check.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs


def started(flags: argparse.Namespace) -> dict[str, Any]:
    """Arguments for Accelerator: DeepSpeed as `--deepspeed FILE` or the launcher asks for it, or without."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    gpu = torch.cuda.is_available()
    if not (flags.deepspeed or launched):
        return {"cpu": not gpu}  # without it, each rank of a machine without a GPU would take itself for the only one
    if "LOCAL_RANK" not in os.environ:
        # Started without a launcher: form a group of one rank. DeepSpeed would ask MPI for it.
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        os.environ |= {name: str(value) for name, value in alone.items()}
    asked: dict[str, Any] = {}
    if flags.deepspeed:
        asked["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=str(flags.deepspeed))
    if not gpu:
        # cpu=True would make accelerate drop DeepSpeed silently. Without a backend each rank would be alone.
        asked["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    return asked


def in_use(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def prepare(accelerator: Accelerator, batch: int) -> None:
    """Give DeepSpeed the batch, which it would ask of a DataLoader otherwise."""
    if not in_use(accelerator):
        return
    accumulation = accelerator.gradient_accumulation_steps
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    # As without ZeRO, and whatever the file has: Adafactor clips its updates itself. The default would be 1.
    config["gradient_clipping"] = 0.0
    config |= {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": batch * accumulation * accelerator.num_processes,
    }


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

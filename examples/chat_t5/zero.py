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

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType

from legroom.errors import MissingPackage, UsageError


def plugin(flags: argparse.Namespace) -> DeepSpeedPlugin | None:
    """DeepSpeed as `--deepspeed FILE` asks for it; None where nobody does, or the launcher has."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if (flags.deepspeed or launched) and find_spec("deepspeed") is None:
        raise MissingPackage(
            "ZeRO needs DeepSpeed",
            why="the package deepspeed is not installed",
            fix=("pip install deepspeed", "or train without it: Adafactor's states are small as they are"),
        )
    return DeepSpeedPlugin(hf_ds_config=str(flags.deepspeed)) if flags.deepspeed else None


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
    if config.get("train_micro_batch_size_per_gpu", "auto") == "auto":
        config["train_micro_batch_size_per_gpu"] = batch


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

"""Other ways to load a safetensors file or a torch checkpoint to a device, one function each, for weights.py.

Each returns tensors that stay valid and that nothing writes to any more. Their options are the defaults, except where
a default would not read the page cache, from which all others read.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Peer:
    """One of the contenders. Once it has failed it is not run again, and ``failed`` has the reason."""

    package: str  # what is imported
    load: Callable[[], Tensors]
    setting: str = ""  # where it is not the default
    failed: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            self.failed = "not installed"

    def attempt(self, work: Callable[[], float]) -> float:
        """What ``work`` returns; not a number where it fails, or something failed before."""
        if self.failed:
            return math.nan
        try:
            return work()
        except Exception as problem:
            lines = str(problem).strip().splitlines() or ["no message"]
            self.failed = f"{type(problem).__name__}: {lines[0]}"
            return math.nan


def require_same(found: Tensors, expected: Tensors) -> None:
    """Names, types, shapes, device and bits."""
    if found.keys() != expected.keys():
        raise ValueError(f"{len(found)} tensors, of which {len(found.keys() & expected.keys())} have the right name")
    for name, tensor in expected.items():
        other = found[name]
        if (other.dtype, other.shape, other.device) != (tensor.dtype, tensor.shape, tensor.device):
            raise ValueError(f"{name} is {other.dtype} {tuple(other.shape)} on {other.device}")
        if not torch.equal(_bytes(other), _bytes(tensor)):
            raise ValueError(f"{name} has other bytes than the file")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def safetensors(path: Path, device: str) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path, device=device)


def torch_load(path: Path, device: str) -> Tensors:
    found = torch.load(path, mmap=True, weights_only=True)
    return {name: tensor.to(device) for name, tensor in found.items()}


def fastsafetensors(path: Path, device: str) -> Tensors:
    """Without GPUDirect Storage and O_DIRECT, its defaults for local disks: they do not read from the page cache."""
    from fastsafetensors import fastsafe_open

    os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    with fastsafe_open(os.fspath(path), device=device, nogds=True) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a mapping


def runai_model_streamer(path: Path, device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(os.fspath(path), device=device)
        return dict(streamer.get_tensors())

"""Runs at the start of a Python child of `legroom run` with `--loader legroom` or `--gpu-limit`.

Covers: waiting until torch is imported; then replacing its DataLoader with ours, and having a limit put on the card
when CUDA starts; handing over to the sitecustomize this one hides. Does not cover: anything that LEGROOM_LOADER and
LEGROOM_GPU_LIMIT do not ask for. It imports nothing of Legroom's before torch is there; a failure is told on standard
error and leaves torch as it is.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_LOADER = os.environ.get("LEGROOM_LOADER") == "legroom"
_LIMIT = bool(os.environ.get("LEGROOM_GPU_LIMIT"))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be found as ever, and acts once its import is complete."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            if _LOADER:
                _replace()
            if _LIMIT:
                _limit()

        loader.exec_module = exec_module
        return spec


def _replace() -> None:
    try:
        data: Any = importlib.import_module("torch.utils.data")
        ours = importlib.import_module(
            "legroom"
        ).DataLoader  # its base is torch's own class, taken before this
        data.DataLoader = data.dataloader.DataLoader = ours
    except Exception as problem:  # the script must run, with torch's loader if need be
        sys.stderr.write(f"legroom: torch's DataLoader stays: {problem}\n")


def _limit() -> None:
    try:
        importlib.import_module("legroom.gpu.memory_limit").apply_from_environment()
    except Exception as problem:  # the script must run, without the limit if need be
        sys.stderr.write(f"legroom: no limit on the card: {problem}\n")


def _hand_over() -> None:
    """Run the sitecustomize that ours hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _LOADER or _LIMIT:
    sys.meta_path.insert(0, _AfterTorch())
_hand_over()

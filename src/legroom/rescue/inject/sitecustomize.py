"""Runs when a Python process starts under `legroom leak` or `legroom run` with `--loader legroom` or `--gpu-limit`.

After torch is imported, replaces its DataLoader with Legroom's (LEGROOM_LOADER) and limits GPU memory when CUDA starts
(LEGROOM_GPU_LIMIT). Under `legroom leak` (LEGROOM_LEAK) the process records its memory from the start; else nothing of
Legroom is imported before torch. Then runs the sitecustomize that this one hides. A failure is printed on stderr and
leaves the script as it is.
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
_LEAK = os.environ.get("LEGROOM_LEAK")


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be found as usual, and acts once its import is complete.

    Packages look for torch without importing it, some more than once, so this stays until the import.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        others = (finder for finder in tuple(sys.meta_path) if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            if self not in sys.meta_path:  # another finder had looked here, too, and wrapped what it got
                return
            sys.meta_path.remove(self)
            if _LOADER:
                _replace()
            if _LIMIT:
                _limit()
            if _recorder is not None:
                _recorder.torch.install(imported=True)

        loader.exec_module = exec_module
        return spec


def _replace() -> None:
    try:
        data: Any = importlib.import_module("torch.utils.data")
        ours = importlib.import_module("legroom").DataLoader  # its base is torch's own class, taken before this
        data.DataLoader = data.dataloader.DataLoader = ours
    except Exception as problem:  # the script must run, with torch's loader if need be
        sys.stderr.write(f"legroom: keeping torch's DataLoader: {problem}\n")


def _limit() -> None:
    try:
        importlib.import_module("legroom.gpu.set_memory_limit").apply_from_environment()
    except Exception as problem:  # the script must run, without the limit if need be
        sys.stderr.write(f"legroom: could not set the limit on GPU memory: {problem}\n")


_recorder: Any = None


def _record(directory: str) -> None:
    global _recorder
    try:
        _recorder = importlib.import_module("legroom.leak.memory_recorder").record_process(directory)
        _recorder.start()
    except Exception as problem:  # the script must run, unrecorded if need be
        sys.stderr.write(f"legroom: could not record the growth of memory: {problem}\n")


def _hand_over() -> None:
    """Run the sitecustomize that ours hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _LEAK:
    _record(_LEAK)
if _LOADER or _LIMIT or _LEAK:
    sys.meta_path.insert(0, _AfterTorch())
_hand_over()

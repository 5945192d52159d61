"""NVML kept started between two looks at the cards.

Covers: holding one of NVML's counted starts, so that the ones inside every look cost nothing.
Does not cover: asking anything (gpu.py).

Starting NVML opens every card and takes tens of milliseconds; a second start while one is held only counts up.
"""

from __future__ import annotations

from typing import Any

from legroom.probe.nvml import NvmlTrouble, call


class NvmlHold:
    """One counted start, given back by ``release``."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self.held = False

    def take(self) -> None:
        """Start NVML and keep it; where that fails the looks go on without, only slower."""
        if self.held:
            return
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        try:
            call(self._nvml, "nvmlInit")
            self.held = True
        except NvmlTrouble:
            pass  # the next look will say why

    def release(self) -> None:
        """Give it back."""
        if not self.held:
            return
        self.held = False
        try:
            call(self._nvml, "nvmlShutdown")
        except NvmlTrouble:
            pass  # the process is ending, or the driver went away

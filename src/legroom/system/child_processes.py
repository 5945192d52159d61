"""Child processes: how one ended, and what one asks of the kernel for itself.

legroom.rescue diagnoses why a job ended; here an exit status is only named.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

from legroom.words import say

_PR_SET_PDEATHSIG = 1


def signal_name(number: int) -> str:
    """``SIGBUS``; ``signal 40`` for one that has no name on this system."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return say("signal {number}", number=number)


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process that signal when its parent ends. Does nothing where that is not Linux."""
    if sys.platform == "linux":
        from legroom.system.libc import libc  # ctypes takes milliseconds

        libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def prefer_oom_kill() -> None:
    """Ask the kernel's OOM killer to take this process, and its children, before any other."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass  # not Linux, or a sandbox: the largest is killed, which is most likely this process


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The wait status of a process."""

    status: int | None = None  # the exit code
    signal: int | None = None  # the signal that killed it

    @classmethod
    def of(cls, returncode: int) -> ExitStatus:
        """From what subprocess and multiprocessing give: a signal is a negative number."""
        return cls(signal=-returncode) if returncode < 0 else cls(returncode)

    @property
    def shell_status(self) -> int:
        """As a shell shows it: the exit code, or 128 + the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.status or 0

    @property
    def success(self) -> bool:
        """Whether the exit code is 0."""
        return self.signal is None and self.status == 0

    def __str__(self) -> str:
        """For people: ``killed by signal 9 (SIGKILL)``, ``exit code 1``."""
        if self.signal is not None:
            return say(
                "killed by signal {number} ({name})", number=self.signal, name=signal_name(self.signal)
            )
        return say("exit code {status}", status=self.status)

"""`legroom.leak.watch`: find out in a script or notebook which line makes memory grow.

Errors of the recording never reach the script. Forked DataLoader workers are recorded too; spawned ones only under
`legroom leak`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType

from legroom.errors import UsageError
from legroom.leak import memory_recorder
from legroom.leak.find_leaking_lines import diagnose
from legroom.leak.leak_report import leak_page, report_lines
from legroom.leak.record_files import read_directory
from legroom.messages import say
from legroom.records.memory_growth import GrowingSite, LeakReport
from legroom.system.argument_checks import check_arguments
from legroom.system.atomic_file import replace_file


def watch() -> LeakWatch:
    """Follow the memory of this process while the ``with`` block runs, and name the lines that make it grow.

    Steps are seen by themselves where the block calls ``optimizer.step()`` or takes batches from a DataLoader;
    otherwise call ``legroom.step()`` in each step.

    Example:
        >>> with legroom.leak.watch() as growth:
        ...     train()
        >>> print(growth)
    """
    return LeakWatch()


class LeakWatch:
    """A recording of this process and the workers that it forks."""

    def __init__(self) -> None:
        self._recorder: memory_recorder.Recorder | None = None
        self._directory: str | None = None
        self._own = False
        self._report: LeakReport | None = None
        self._pid = os.getpid()

    def __enter__(self) -> LeakWatch:
        if self._recorder is not None or self._report is not None:
            raise UsageError(
                say("this recording was already started"), fix=(say("create a new one: with legroom.leak.watch(): …"),)
            )
        running = memory_recorder.running_recorder()
        if running is not None:  # under `legroom leak`: one recording is enough
            self._recorder, self._directory = running, running.directory
            return self
        self._directory, self._own = tempfile.mkdtemp(prefix="legroom-leak-"), True
        self._recorder = memory_recorder.record_process(self._directory)
        self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid or self._recorder is None or self._directory is None:
            return  # a forked child must not end its parent's recording
        if self._own:
            self._recorder.stop()
        self._report = self.report()
        if self._own:
            memory_recorder.forget_recorder()
            shutil.rmtree(self._directory, ignore_errors=True)

    def report(self) -> LeakReport:
        """What is known so far, or at the end of the block."""
        if self._report is not None or self._directory is None:
            return self._report or LeakReport(())
        return diagnose(read_directory(self._directory))

    @property
    def sites(self) -> tuple[GrowingSite, ...]:
        """The lines that make memory grow, the fastest first."""
        return self.report().sites

    def page(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page with a chart over steps."""
        check_arguments(LeakWatch.page, locals())
        replace_file(path, leak_page(self.report()))

    def __str__(self) -> str:
        return "\n".join(report_lines(self.report()))

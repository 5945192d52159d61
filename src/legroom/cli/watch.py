"""`legroom watch`: memory over time, and what is about to go wrong. Parses, wires, renders; decides nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import click

from legroom.cli.options import DURATION
from legroom.cli.streams import write_line
from legroom.errors import MissingPackage
from legroom.words import say

if TYPE_CHECKING:
    from legroom.model import Moment, Sample
    from legroom.monitor.sampler import Sampler
    from legroom.monitor.tui import TerminalView
    from legroom.monitor.watch_loop import MomentStream, Output
    from legroom.monitor.web_view import WebView


@click.command()
@click.option("--pid", type=int, metavar="PID", help="One process and its children.")
@click.option("--match", metavar="REGEX", help="Those whose command line matches.")
@click.option("--interval", type=DURATION, default="1s", show_default=True, help="Between samples.")
@click.option("--once", is_flag=True, help="One sample, then end; 1 if it is critical.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line on stdout.")
@click.option("--log", metavar="FILE", help="Append every sample to FILE (JSON lines).")
@click.option("--replay", metavar="FILE", help="Look at a finished watch instead.")
@click.option(
    "--prometheus",
    is_flag=False,
    flag_value="",
    metavar="[HOST:PORT]",
    help="Serve metrics; 127.0.0.1:9464 unless said.",
)
@click.option(
    "--web",
    is_flag=False,
    flag_value="",
    metavar="[HOST:PORT]",
    help="Serve a page; 127.0.0.1:9465 unless said.",
)
@click.option("--plot", metavar="FILE", help="Draw the watch when it ends: .png, .svg or .html.")
@click.option("--plain", is_flag=True, help="Lines, on a terminal too.")
@click.option(
    "--top",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    metavar="N",
    help="List the N largest processes every 10 s (lines only).",
)
@click.option("--on-alarm", metavar="CMD", help="Run CMD for each alarm (JSON on its stdin).")
@click.option("--webhook", metavar="URL", help="Post each alarm there as JSON.")
@click.option("--root", default="/", metavar="DIR", help="Read the machine below DIR: /host.")
def command(
    pid: int | None,
    match: str | None,
    interval: float,
    once: bool,
    as_json: bool,
    log: str | None,
    replay: str | None,
    prometheus: str | None,
    web: str | None,
    plot: str | None,
    plain: bool,
    top: int,
    on_alarm: str | None,
    webhook: str | None,
    root: str,
) -> int:
    """Watch memory: what fills up, how fast, by whom, and when it will be full.

    Watches everything of yours unless --pid or --match says otherwise. Alarms
    come on levels, on trends, on swap that moves, and on the kernel's own
    counters. Ends with the process it watches, or with Ctrl-C. Full screen on
    a terminal, lines elsewhere.
    """
    from legroom.monitor.script import checked_interval
    from legroom.monitor.watch_loop import (
        BackgroundOutput,
        MomentStream,
        StopEvent,
        feed_outputs,
        sample_periodically,
    )

    if sum(option is not None for option in (pid, match, replay)) > 1:
        raise click.UsageError(say("--pid, --match and --replay each say what to look at: give one of them"))
    if log is not None and replay is not None and _same(log, replay):
        raise click.UsageError(say("--log and --replay name the same file"))
    stop = StopEvent()
    drawn_only = replay is not None and plot is not None
    screen = None if as_json or once or plain or drawn_only else screen_if_any(_tell)
    tell = _tell if screen is None else screen.tell
    sampler: Sampler | None = None
    samples: Iterator[Sample]
    if replay is not None:
        from legroom.monitor.watch_log import read_samples

        samples = read_samples(replay, tell)
    else:
        sampler = _sampler(pid, match, checked_interval(interval), root, wait=not once)
        if match is not None and not sampler.targets.kept:
            tell(say("no process matches {pattern!r} yet: waiting for one", pattern=match))
        samples = sample_periodically(sampler.take, sampler.interval, stop)
    outputs = _outputs(tell, log, prometheus, on_alarm, webhook)
    if plot is not None:
        outputs.append(plot_to(plot, tell))
    page = None if web is None else page_at(web, tell)
    if page is not None:
        outputs.append(page)
    if replay is not None:
        samples = replayed(samples, stop, page)
    stream = MomentStream(_first(samples) if once else samples)
    if as_json:
        outputs.append(_JsonLines())
    elif screen is None and not drawn_only:
        outputs.append(_lines(stream, top))
    if sampler is not None:
        # A reader that pauses costs itself samples, never the other outputs. A replay can wait for its reader.
        outputs = [BackgroundOutput(one, stop, tell) if _may_block(one) else one for one in outputs]
    try:
        # A replay needs no gentle end: Ctrl-C stops it as it stops anything.
        with nullcontext() if sampler is None and screen is None and page is None else _ending(stop, screen):
            last = (
                feed_outputs(stream, outputs)
                if screen is None
                else full_screen(stream, outputs, screen, stop, _tell)
            )
    finally:
        if sampler is not None:
            sampler.close()
    if sampler is not None and not once and not stop.is_set():
        _tell(say("what was watched has ended"))
    critical = last is not None and any(alarm.level == "critical" for alarm in last.alarms)
    return 1 if once and critical else 0


def _sampler(pid: int | None, match: str | None, interval: float, root: str, *, wait: bool) -> Sampler:
    from legroom.monitor.annotations import AnnotationReader
    from legroom.monitor.process_selection import matching_processes, process_tree, user_processes
    from legroom.monitor.sampler import Sampler, cache_entries
    from legroom.probe.host import Host
    from legroom.probe.process import ProcessTable

    host = Host.at(root)
    table = ProcessTable(host)
    everybody = table.refresh()
    if pid is not None:
        targets = process_tree(pid, everybody)
    elif match is not None:
        targets = matching_processes(host, match, everybody, wait=wait)
    else:
        targets = user_processes(host)
    targets.choose(everybody)
    return Sampler(
        targets,
        host=host,
        interval=interval,
        table=table,
        said=AnnotationReader(host).said,
        entries=cache_entries if root == "/" else None,
    )


def _outputs(
    tell: Callable[[str], object],
    log: str | None,
    prometheus: str | None,
    on_alarm: str | None,
    webhook: str | None,
) -> list[Output]:
    from legroom.monitor.notify import Notifier, command_sender, webhook_sender

    carriers = [command_sender(on_alarm)] if on_alarm is not None else []
    carriers += [webhook_sender(webhook)] if webhook is not None else []
    outputs: list[Output] = []
    if prometheus is not None:
        from legroom.monitor.prometheus import PORT, Prometheus

        served = Prometheus(prometheus or str(PORT))
        tell(say("metrics at {url}", url=served.url))
        outputs.append(served)
    if log is not None:
        from legroom.monitor.watch_log import WatchLog

        outputs.append(WatchLog(log, tell))
    return [*outputs, *(Notifier(carry, tell) for carry in carriers)]


def _lines(stream: MomentStream, top: int) -> Output:
    from legroom.monitor.text_output import TextOutput

    return TextOutput(write_line, stream.history, _columns, top)


def _columns() -> int | None:
    """The terminal's, looked at each time; a pipe or a file has none, and lines there are whole."""
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def _may_block(output: Output) -> bool:
    from legroom.monitor.text_output import TextOutput
    from legroom.monitor.watch_log import WatchLog

    return isinstance(output, (_JsonLines, TextOutput, WatchLog))


class _JsonLines:
    """Every moment as one object a line on stdout."""

    def show(self, moment: Moment) -> None:
        from legroom.monitor.watch_log import json_line

        write_line(json_line(moment))

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def _ending(stop: threading.Event, screen: object) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the watch after the sample under way, with its log whole; a second one at once."""

    def end(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGINT and screen is None and os.isatty(2):
            os.write(2, b"\n")  # the terminal has just shown ^C: what is said next gets a line of its own
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first(samples: Iterator[Sample]) -> Iterator[Sample]:
    for sample in samples:
        yield sample
        return


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _tell(text: str) -> None:
    click.echo(f"legroom: {text}", err=True)


def page_at(where: str, tell: Callable[[str], object]) -> WebView:
    """The watch as a page; its address is told."""
    from legroom.monitor.web_view import PORT, WebView

    served = WebView(where or str(PORT))
    tell(say("a page at {url}", url=served.url))
    return served


def plot_to(path: str, tell: Callable[[str], object]) -> Output:
    """A picture at the end."""
    from legroom.monitor.plot import Plot

    return Plot(path, tell)


def screen_if_any(tell: Callable[[str], object]) -> TerminalView | None:
    """The full-screen view, where there is a screen and Textual to draw on it."""
    from legroom.monitor.tui import TerminalView, require_textual, why_no_screen

    if why_no_screen() is not None:
        return None
    try:
        require_textual()
    except MissingPackage as problem:
        tell(say("{name}: {why}", name=problem.what, why=problem.fix[0]))
        return None
    return TerminalView()


def full_screen(
    stream: Iterable[Moment],
    outputs: Sequence[Output],
    screen: TerminalView,
    stop: threading.Event,
    tell: Callable[[str], object],
) -> Moment | None:
    """Drive the watch behind the screen; what was said meanwhile is told when the screen is left."""
    from legroom.monitor.tui import run_full_screen

    try:
        return run_full_screen(stream, outputs, screen, stop)
    finally:
        for note in screen.notes:  # what was said while the screen was drawn over
            tell(note)


def replayed(samples: Iterable[Sample], stop: threading.Event, page: WebView | None) -> Iterator[Sample]:
    """A replay's samples until it is stopped; a page that shows it stays open to the end."""
    for sample in samples:
        if stop.is_set():
            return
        yield sample
    if page is not None:
        page.finish()
        stop.wait()

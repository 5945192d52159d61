"""`legroom watch`: options, outputs, signals and exit status. What it does is in monitor/."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING

import click

from legroom.cli.help import columns_of
from legroom.cli.language_and_streams import remark_text, write_line
from legroom.cli.options import AT_LEAST_0, AT_LEAST_1, DURATION, refuse_beside, root_option, typed
from legroom.errors import EXIT_USAGE, MissingPackage
from legroom.messages import say
from legroom.system.processes_and_threads import handling_signals

if TYPE_CHECKING:
    from legroom.monitor.serve_web_page import WebView
    from legroom.monitor.take_watch_sample import Sampler
    from legroom.monitor.tui import TerminalView
    from legroom.monitor.watch_loop import MomentStream, Output
    from legroom.records.watch_sample import Moment, Sample


@click.command()
@click.option("--pid", type=AT_LEAST_1, metavar="PID", help="Watch one process and its children.")
@click.option("--match", metavar="REGEX", help="Watch processes whose command line matches, and their children.")
@click.option(
    "--interval", type=DURATION, default="1s", show_default=True, metavar="TIME", help="Time between readings."
)
@click.option("--once", is_flag=True, help="Take one reading and exit; status 1 if an alarm is critical.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("--log", metavar="FILE", help="Append every reading and its alarms to FILE, one JSON object per line.")
@click.option("--replay", metavar="FILE", help="Show a log written with --log instead of monitoring this machine.")
@click.option(
    "--prometheus",
    is_flag=False,
    flag_value="",
    metavar="[HOST:PORT]",
    help="Serve Prometheus metrics (default 127.0.0.1:9464).",
)
@click.option(
    "--web", is_flag=False, flag_value="", metavar="[HOST:PORT]", help="Serve a web page (default 127.0.0.1:9465)."
)
@click.option(
    "--plot",
    metavar="FILE",
    help="Write a chart to FILE at the end; FILE must end in .png (needs matplotlib), .svg or .html.",
)
@click.option("--plain", is_flag=True, help="Print plain lines even on a terminal.")
@click.option(
    "--top",
    type=AT_LEAST_0,
    default=5,
    show_default=True,
    metavar="N",
    help="In plain output, every 10 s list the N processes that use the most memory.",
)
@click.option(
    "--on-alarm", metavar="CMD", help="Run the shell command CMD for each alarm, with the alarm as JSON on stdin."
)
@click.option("--webhook", metavar="URL", help="Send each alarm as JSON to URL (HTTP POST).")
@root_option
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
    """Watch memory over time and warn before it runs out.

    Shows what is filling up, how fast, which processes grow, and when it will
    be full. Watches all your processes unless --pid or --match is given. Prints
    an alarm when something is nearly full or will be full soon, when memory is
    being swapped, and after an OOM kill. Runs until Ctrl-C. With --pid, it also
    stops when that process and its children have exited. The output is full
    screen on a terminal (with the package textual), and plain lines elsewhere.
    """
    from legroom.monitor.watch_in_script import checked_interval
    from legroom.monitor.watch_loop import BackgroundOutput, MomentStream, StopEvent, feed_outputs, sample_periodically

    refuse_beside("pid", {"match", "replay"})
    refuse_beside("match", {"replay"})
    if log is not None and replay is not None and os.path.realpath(log) == os.path.realpath(replay):
        raise click.UsageError(say("--log and --replay name the same file"))
    refuse_beside("replay", {"interval", "root", "prometheus"})  # nothing is sampled
    refuse_beside("once", {"prometheus", "web"})
    refuse_beside("as_json", {"top", "plain"})
    chart_only = replay is not None and plot is not None and not plain
    if chart_only and "top" in typed():
        raise click.UsageError(say("{option} needs {other}", option="--top", other="--plain"))
    stop = StopEvent()
    screen = None if as_json or once or plain or chart_only else _screen()
    report = _report if screen is None else screen.report
    sampler: Sampler | None = None
    samples: Iterator[Sample]
    if replay is not None:
        from legroom.monitor.watch_log import read_samples

        samples = _begun(read_samples(replay, report))
    else:
        sampler = _sampler(pid, match, checked_interval(interval), root, wait=not once)
        if match is not None and not sampler.selection.watched:
            report(say("no process matches {pattern!r} yet; waiting", pattern=match))
        samples = sample_periodically(sampler.take, sampler.interval, stop)
    outputs = _outputs(report, prometheus, on_alarm, webhook, plot)
    page = None if web is None else _web_view(web, report)
    if log is not None:  # made last: a watch that is refused leaves no empty file
        from legroom.monitor.watch_log import WatchLog

        outputs.append(WatchLog(log, report))
    files = list(outputs)  # --log and --plot, before they are wrapped
    if page is not None:
        outputs.insert(0, page)  # closed last: it waits for browsers, and the files of the others must not
    if replay is not None:
        samples = _replayed(samples, stop, page)
    moments = MomentStream(islice(samples, 1) if once else samples)
    if as_json:
        outputs.append(_JsonLines())
    elif screen is None and not chart_only:
        outputs.append(_text_output(moments, top))
    if sampler is not None:
        # A slow reader loses samples itself and does not delay the other outputs. A replay can wait for its reader.
        outputs = [BackgroundOutput(one, stop, report) if _may_block(one) else one for one in outputs]
    try:
        # A replay needs no orderly end: Ctrl-C may interrupt it anywhere.
        gentle = sampler is not None or screen is not None or page is not None
        with _stop_on_signal(stop, screen) if gentle else nullcontext():
            if screen is None:
                last = feed_outputs(moments, outputs)
            else:
                last = _full_screen(moments, outputs, screen, stop)
    finally:
        if sampler is not None:
            sampler.close()
    if sampler is not None and not once and not stop.is_set():
        _report(say("the watched processes have ended"))
    if any(getattr(one, "failed", False) for one in files):
        return EXIT_USAGE
    critical = last is not None and any(alarm.level == "critical" for alarm in last.alarms)
    return 1 if once and critical else 0


def _sampler(pid: int | None, match: str | None, interval: float, root: str, *, wait: bool) -> Sampler:
    from legroom.cache.list_gpu_copies import gpu_copies
    from legroom.loader.dataloader.sharing.group_folder import group_rows
    from legroom.monitor.process_selection import matching_processes, process_tree, user_processes
    from legroom.monitor.script_marks_and_steps import AnnotationReader
    from legroom.monitor.take_watch_sample import Sampler, cache_entries
    from legroom.probe.host_files_and_syscalls import Host
    from legroom.probe.process_and_limits import ProcessTable

    host = Host.at(root)
    table = ProcessTable(host)
    processes = table.refresh()
    if pid is not None:
        selection = process_tree(pid, processes, host)
    elif match is not None:
        selection = matching_processes(host, match, processes, wait=wait)
    else:
        selection = user_processes(host)
    selection.choose(processes)
    return Sampler(
        selection,
        host=host,
        interval=interval,
        table=table,
        annotations=AnnotationReader(host).read,
        entries=cache_entries if root == "/" else None,
        groups=group_rows if root == "/" else None,
        gpu_copies=gpu_copies if root == "/" else None,
    )


def _outputs(
    report: Callable[[str], object], prometheus: str | None, on_alarm: str | None, webhook: str | None, plot: str | None
) -> list[Output]:
    from legroom.monitor.notify import Notifier, command_sender, webhook_sender

    senders = [command_sender(on_alarm)] if on_alarm is not None else []
    senders += [webhook_sender(webhook)] if webhook is not None else []
    outputs: list[Output] = []
    if prometheus is not None:
        from legroom.monitor.prometheus import PORT, Prometheus

        served = Prometheus(prometheus or str(PORT))
        report(say("serving metrics at {url}", url=served.url))
        outputs.append(served)
    outputs += [Notifier(send, report) for send in senders]
    if plot is not None:
        from legroom.monitor.watch_plot import Plot

        outputs.append(Plot(plot, report))
    return outputs


def _web_view(where: str, report: Callable[[str], object]) -> WebView:
    from legroom.monitor.serve_web_page import PORT, WebView

    served = WebView(where or str(PORT))
    report(say("serving a page at {url}", url=served.url))
    return served


def _text_output(moments: MomentStream, top: int) -> Output:
    from legroom.monitor.watch_text import TextOutput

    return TextOutput(write_line, moments.history, _columns, top)


def _columns() -> int | None:
    """The width of the terminal now; None for a pipe or a file, where lines are not cut."""
    if not sys.stdout.isatty():
        return None
    return columns_of(sys.__stdout__) or 80


class _JsonLines:
    """Prints every moment as one JSON object per line."""

    def show(self, moment: Moment) -> None:
        from legroom.monitor.watch_log import json_line

        write_line(json_line(moment))

    def close(self) -> None:
        pass


def _may_block(output: Output) -> bool:
    from legroom.monitor.watch_log import WatchLog
    from legroom.monitor.watch_text import TextOutput

    return isinstance(output, (_JsonLines, TextOutput, WatchLog))


def _begun(samples: Iterator[Sample]) -> Iterator[Sample]:
    """The samples, of which the first is read now: a file that is not a log is refused before others are written."""
    return chain([next(samples)], samples)


def _replayed(samples: Iterable[Sample], stop: threading.Event, page: WebView | None) -> Iterator[Sample]:
    """The samples of a replay until it is stopped; then the page stays open until Ctrl-C."""
    for sample in samples:
        if stop.is_set():
            return
        yield sample
    if page is not None:
        page.finish()
        stop.wait()


def _screen() -> TerminalView | None:
    """The full-screen view, where there is a terminal that can show it and Textual is installed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "") in ("", "dumb"):
        return None
    from legroom.monitor.tui import THREADS, TerminalView, require_textual
    from legroom.system.processes_and_threads import room_for_threads, why_no_thread

    try:
        require_textual()
    except MissingPackage as problem:
        _report(say("{name}: {why}", name=problem.what, why=problem.fix[0]))
        return None
    if not room_for_threads(THREADS):
        _report(say("plain lines instead of the full-screen view: {why}", why=why_no_thread(THREADS)))
        return None
    return TerminalView()


def _full_screen(
    moments: Iterable[Moment], outputs: Sequence[Output], screen: TerminalView, stop: threading.Event
) -> Moment | None:
    """Run the watch behind the screen; print its notes when the user leaves."""
    from legroom.monitor.tui import run_full_screen

    try:
        return run_full_screen(moments, outputs, screen, stop)
    finally:
        for note in screen.notes:
            _report(note)


def _stop_on_signal(stop: threading.Event, screen: TerminalView | None) -> AbstractContextManager[None]:
    """Ctrl-C and SIGTERM end the watch after the current sample, with its log complete; a second one at once."""

    def end(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGINT and screen is None and os.isatty(2):
            os.write(2, b"\n")  # the terminal has just shown ^C
        stop.set()

    return handling_signals((signal.SIGINT, signal.SIGTERM), end)


def _report(text: str) -> None:
    click.echo(remark_text(text), err=True)

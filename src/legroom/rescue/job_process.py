"""The job's process and its output: start it in its cgroup and process group, pass output and signals on, kill it.

Output goes through a pipe, or through a pseudo-terminal where ours is a terminal, so that progress bars work. Both
streams share one channel where both go to the same file, so that their order stays. Bytes are passed on unchanged and
the end is kept. When our reader closes its end, or the output cannot be written, the channel is closed: the job gets
SIGPIPE or EPIPE, and fails as it would without us.

Injection (`--loader legroom`, `--gpu-limit`, `legroom leak`) puts inject/sitecustomize.py on the job's PYTHONPATH. It
misses children that are not Python or run with -S, -I or -E.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import stat_fields
from legroom.rescue.cgroup_and_oom_victims import JobCgroup
from legroom.rescue.find_failures_in_log import LogTail
from legroom.system.processes_and_threads import ExitStatus, legroom_disabled, start_daemon_thread, why_no_thread

LOADER = "LEGROOM_LOADER"  # variable: which DataLoader a script gets
_POSIX = os.name == "posix"
# A shell that moves itself into the cgroup, raises its limit and execs the command. (Python code between fork and exec
# is not safe with threads.)
_MOVE = 'echo $$ > "$0" 2>/dev/null; '
_RAISE = 'ulimit -n "$(ulimit -Hn)" 2>/dev/null; '
_BECOME = 'exec "$@"'
_GONE_WITHIN = 10.0
_CHUNK = 1 << 16
_STEP = 0.1  # seconds of forwarding before a deadline is checked


@dataclass
class JobProcess:
    """The running command."""

    process: subprocess.Popen[bytes]
    cgroup: JobCgroup
    pidfd: int | None = None
    others: frozenset[int] = frozenset()  # children of ours that are not the job's
    foreground: int | None = None  # the terminal that it was given
    handed_over: bool = False  # it is that terminal's foreground group

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int],
        cgroup: JobCgroup,
        *,
        raise_descriptors: bool = False,
    ) -> JobProcess:
        """Start it in the cgroup and its own process group."""
        words = list(command)
        moves = cgroup.own and cgroup.path is not None
        if _POSIX and (moves or raise_descriptors):
            script = (_MOVE if moves else "") + (_RAISE if raise_descriptors else "") + _BECOME
            words = ["/bin/sh", "-c", script, f"{cgroup.path}/cgroup.procs", *words]
        others = frozenset(_children(Host(), os.getpid()))
        process = subprocess.Popen(
            words, env=dict(environment), stdout=streams[0], stderr=streams[1], process_group=0 if _POSIX else None
        )
        child = cls(process, cgroup, others=others)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                child.pidfd = os.pidfd_open(process.pid)
        child._hand_over_terminal()
        return child

    def wait(self, seconds: float, output: JobOutput | None = None) -> ExitStatus | None:
        """Wait up to that time and forward output that has no thread; its exit status, or None if it still runs."""
        if output is not None and not output.threaded:
            output.forward(seconds, self.pidfd)
        elif self.pidfd is not None:
            with contextlib.suppress(InterruptedError):
                select.select([self.pidfd], [], [], seconds)
        elif self.process.poll() is None:
            time.sleep(seconds)
        return self._poll()

    def _poll(self) -> ExitStatus | None:
        if not _POSIX:
            status = self.process.poll()
            return None if status is None else ExitStatus(status=status)
        try:
            pid, status = os.waitpid(self.process.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:  # another thread waited for it
            return ExitStatus.of(1 if self.process.returncode is None else self.process.returncode)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            self._stopped(os.WSTOPSIG(status))
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return ExitStatus.of(self.process.returncode)

    def _stopped(self, number: int) -> None:
        """After Ctrl-Z, stop our process group as well, as the shell expects, and continue together."""
        if self.foreground is None or number not in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            return
        if number == signal.SIGTSTP or not self.handed_over:  # else it used the terminal before it was given to it
            self._take_back()
            os.killpg(os.getpgrp(), number)  # has no effect where nobody could continue us
        else:
            _set_foreground(self.foreground, self.process.pid)
        self.resume()

    def resume(self) -> None:
        """Continue it, in the foreground if we are: after fg, not after bg."""
        if self.process.returncode is not None:
            return
        if self.foreground is not None and not self.handed_over:
            self._hand_over_terminal()
        self.signal_group(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Forward a signal to the process itself; its ID may be another's once it has been waited for."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self.process.send_signal(number) if not _POSIX else os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.process.pid, number)

    def kill_all(self, host: Host) -> None:
        """Kill all of its processes, those in other sessions included, and wait until they are gone."""
        if not _POSIX:
            self.process.kill()
            return
        deadline = time.monotonic() + _GONE_WITHIN
        self.signal_group(signal.SIGKILL)
        while [pid for pid in self.pids(host) if _kill(host, pid)] and time.monotonic() < deadline:
            time.sleep(0.02)
            self.reap(host)

    def reap(self, host: Host) -> None:
        """Wait for processes of the job that have ended and whose parent has not: they became our children."""
        for pid in self._adopted(host):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def close(self, host: Host) -> None:
        """Take the terminal back and close the pidfd."""
        self.reap(host)
        had_terminal = self.handed_over
        self._take_back()
        self.foreground = None
        if had_terminal:
            os.killpg(os.getpgrp(), signal.SIGCONT)  # a pager beside us may have stopped for want of the terminal
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def pids(self, host: Host) -> list[int]:
        """The process IDs of the job and its descendants."""
        if self.cgroup.own:
            return self.cgroup.pids()
        found = [self.process.pid] if self.process.returncode is None else []
        found += self._adopted(host)
        for pid in found:  # grows during the loop
            found += [child for child in _children(host, pid) if child not in found]
        return found

    def _adopted(self, host: Host) -> list[int]:
        """Our children whose parent in the job has ended."""
        return [pid for pid in _children(host, os.getpid()) if pid not in self.others and pid != self.process.pid]

    def _hand_over_terminal(self) -> None:
        """Make it the terminal's foreground group, if ours was, so that it reads the keyboard and gets Ctrl-C."""
        if sys.platform == "win32":
            return
        with contextlib.suppress(OSError):
            if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                _set_foreground(0, self.process.pid)
                self.foreground, self.handed_over = 0, True

    def _take_back(self) -> None:
        if self.foreground is not None and self.handed_over:
            _set_foreground(self.foreground, os.getpgrp())
            self.handed_over = False


def _children(host: Host, pid: int) -> list[int]:
    texts = (host.text(f"/proc/{pid}/task/{thread}/children") for thread in host.names(f"/proc/{pid}/task"))
    return [int(word) for text in texts if text for word in text.split()]


def _kill(host: Host, pid: int) -> bool:
    """Kill it; False if it has ended, or must not be killed."""
    if stat_fields(host, pid)[:1] in ([], ["Z"], ["X"]):
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def in_foreground() -> bool:
    """Whether we are the terminal's foreground group: then a SIGINT most likely is Ctrl-C."""
    if sys.platform == "win32":
        return True  # SIGINT comes only from the keyboard there
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _set_foreground(terminal: int, group: int) -> None:
    if sys.platform == "win32":
        return
    # Without ignoring SIGTTOU, this call would stop us in the background.
    old = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(terminal, group)
    finally:
        signal.signal(signal.SIGTTOU, old)


@dataclass
class _Channel:
    source: int  # our end
    end: int  # the job's end; we close our copy once it has started
    target: int
    terminal: bool
    within_line: bool = False  # the last output did not end with a newline, as with a progress bar
    thread: threading.Thread | None = None  # None: forwarded by `JobOutput.forward`
    closed: bool = False
    taken: int = 0  # bytes read from the job
    passed: int = 0  # and of them written to the target


@dataclass
class JobOutput:
    """The two streams of one attempt, each forwarded by a thread.

    Where no thread can be started, `forward` does it between two samples, and ``reason`` says why.
    """

    stdout: int = 1  # where the output goes
    stderr: int = 2
    tail: LogTail = field(default_factory=LogTail)
    count: int = 0  # bytes read from the job
    reason: str | None = None  # why a stream has no thread
    error: OSError | None = None  # why output could not be written; the filename is known for a file
    reader_closed: bool = False  # the program that reads the output closed its end
    give_up_at: float = float("inf")  # when a reader that takes nothing is no longer waited for
    _channels: list[_Channel] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> tuple[int, int]:
        """The descriptors for the job's stdout and stderr."""
        first = self._channel(self.stdout)
        second = first if _same_file(self.stdout, self.stderr) else self._channel(self.stderr)
        return first.end, second.end

    def start(self) -> None:
        """Start forwarding; the job has its own copies of the ends."""
        for channel in self._channels:
            os.close(channel.end)
            channel.thread = start_daemon_thread(partial(self._pump, channel), "legroom-forward")
            if channel.thread is None:
                self.reason = say("output is forwarded between two readings: {why}", why=why_no_thread())

    @property
    def threaded(self) -> bool:
        """Whether threads forward everything."""
        return all(channel.thread is not None for channel in self._channels)

    def forward(self, seconds: float, pidfd: int | None) -> None:
        """Forward streams without a thread for that long, or until the process of ``pidfd`` has ended.

        A stream is read only when its target takes what comes, so that a reader that stops cannot stop the samples.
        """
        deadline = time.monotonic() + seconds
        full: list[_Channel] = []
        while (left := deadline - time.monotonic()) > 0:
            open_ones = self._without_thread()
            if not open_ones and pidfd is None:
                time.sleep(left)
                return
            ready = [channel for channel in open_ones if channel not in full]
            sources: list[int] = [channel.source for channel in ready] + ([] if pidfd is None else [pidfd])
            readable, writable, _ = select.select(sources, [channel.target for channel in full], [], left)
            full = [channel for channel in full if channel.target not in writable]
            for channel in ready:
                if channel.source not in readable:
                    continue
                if select.select([], [channel.target], [], 0)[1]:
                    self._pass(channel, select.PIPE_BUF)  # as much as a writable pipe takes without blocking
                else:
                    full.append(channel)
            if pidfd in readable:
                return

    def _without_thread(self) -> list[_Channel]:
        return [channel for channel in self._channels if channel.thread is None and not channel.closed]

    def abandon(self) -> None:
        """Close everything: the job did not start."""
        for channel in self._channels:
            os.close(channel.end)
            os.close(channel.source)
        self._channels.clear()

    def finish(self, within: float) -> None:
        """Wait until the job's output is forwarded, however long the reader takes; until ``give_up_at`` at most.

        A leftover process may hold the other end, and write to it: its output is forwarded only so many seconds longer.
        """
        deadline = time.monotonic() + within
        with self._lock:
            there = [(one, one.taken + _readable(one.source)) for one in self._channels if not one.closed]
        while True:
            now = time.monotonic()
            limit = deadline if now < deadline else self.give_up_at
            left = [one for one, all_of_it in there if not one.closed and (now < deadline or one.passed < all_of_it)]
            if not left or now >= limit:
                return
            if left[0].thread is not None:
                left[0].thread.join(_STEP)
            else:
                self.forward(_STEP, None)

    def begin_line(self, target: int = 2) -> None:
        """End the job's unfinished line, if it and ``target`` go to the same file.

        Otherwise our message would follow a progress bar on the same line, or be overwritten by it.
        """
        with self._lock:
            for channel in self._channels:
                if channel.within_line and _same_file(channel.target, target):
                    channel.within_line = False
                    with contextlib.suppress(OSError):
                        os.write(target, b"\n")

    def resize(self) -> bool:
        """Copy the terminal's size to the pseudo-terminals; whether one of them changed."""
        terminals = [channel for channel in self._channels if channel.terminal and not channel.closed]
        return bool([one for one in terminals if _copy_size(one.target, one.source)])

    def _channel(self, target: int) -> _Channel:
        terminal = os.isatty(target) and sys.platform != "win32"
        if terminal:
            source, end = _pseudo_terminal(target)
        else:
            source, end = os.pipe()
        channel = _Channel(source, end, target, terminal)
        self._channels.append(channel)
        return channel

    def _pump(self, channel: _Channel) -> None:
        while not channel.closed:
            if _POSIX:
                select.select([channel.source], [], [])
            self._pass(channel)

    def _pass(self, channel: _Channel, most: int = _CHUNK) -> None:
        """Pass on what is there; close the channel at its end, and where its target cannot be written."""
        waited = None if _POSIX else _read(channel.source, most)  # there select does not take pipes
        with self._lock:
            data = _read(channel.source, most) if waited is None else waited
            self.tail.feed(data)
            self.count += len(data)
            channel.taken += len(data)
        view, problem = memoryview(data), None
        while view and problem is None:
            try:
                size = os.write(channel.target, view)
                view = view[size:]
                channel.passed += size
            except BlockingIOError:  # a program that shares it has made it non-blocking
                select.select([], [channel.target], [])
            except OSError as refused:
                problem = refused
        if data and problem is None:
            channel.within_line = not data.endswith(b"\n")
            return
        reader_went = (errno.EPIPE, errno.ECONNRESET)
        if problem is not None and problem.errno in reader_went:
            self.reader_closed = True
            if not data.endswith(b"\n"):  # the job's error, on its other stream, begins a line
                with self._lock:
                    self.tail.feed(b"\n")
        elif problem is not None:
            self.error = OSError(problem.errno, problem.strerror, _file_of(channel.target))
        with self._lock:
            channel.closed = True
            with contextlib.suppress(OSError):
                os.close(channel.source)


def _readable(source: int) -> int:
    """Bytes that can be read without waiting."""
    if sys.platform == "win32":
        return 0
    import fcntl
    import termios

    size = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(source, termios.FIONREAD, size)
    return int.from_bytes(size, sys.byteorder)


def _file_of(descriptor: int) -> str | None:
    """The path of an open file; None for a pipe, a socket or a terminal, and where it is unknown."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return path if path.startswith("/") and not path.startswith("/dev/") else None


def _read(source: int, most: int) -> bytes:
    try:
        return os.read(source, most)
    except OSError:  # EIO: the other side of a pseudo-terminal was closed
        return b""


def _same_file(first: int, second: int) -> bool:
    if first == second:
        return True
    try:
        one, two = os.fstat(first), os.fstat(second)
    except OSError:
        return False
    return (one.st_dev, one.st_ino, one.st_rdev) == (two.st_dev, two.st_ino, two.st_rdev)


def _pseudo_terminal(target: int) -> tuple[int, int]:
    import pty
    import tty

    source, end = pty.openpty()
    tty.setraw(end)  # the real terminal already converts newlines
    _copy_size(target, source)
    return source, end


def _copy_size(from_terminal: int, to_terminal: int) -> bool:
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        new, old = (fcntl.ioctl(one, termios.TIOCGWINSZ, b"\0" * 8) for one in (from_terminal, to_terminal))
        if new != old:
            fcntl.ioctl(to_terminal, termios.TIOCSWINSZ, new)
            return True
    return False


def with_loader(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which torch's DataLoader is replaced with Legroom's."""
    return {**_with_sitecustomize(environment), LOADER: "legroom"}


def loader_replaceable(environment: Mapping[str, str]) -> bool:
    """Whether with_loader changes anything: it is not in use yet, and LEGROOM_DISABLE does not switch it off."""
    return environment.get(LOADER) != "legroom" and not legroom_disabled(environment)


def with_gpu_limit(environment: Mapping[str, str], amount: str) -> dict[str, str]:
    """The environment in which GPU memory is limited once CUDA starts; raises BadLimit for an invalid amount."""
    from legroom.gpu.set_memory_limit import with_limit  # slow to import, and rarely needed

    return with_limit(_with_sitecustomize(environment), amount)


def with_leak(environment: Mapping[str, str], directory: str) -> dict[str, str]:
    """The environment in which every Python process records the growth of its memory in that directory."""
    from legroom.leak.record_files import DIRECTORY  # rarely needed

    return {**_with_sitecustomize(environment), DIRECTORY: directory}


def _with_sitecustomize(environment: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with our sitecustomize first, then the entries that were there."""
    ours = str(Path(__file__).with_name("inject"))
    source = str(Path(__file__).parents[2])  # where this very legroom is imported from
    old = environment.get("PYTHONPATH", "").split(os.pathsep)
    between = [entry for entry in old if entry and entry not in (ours, source)]
    return {**environment, "PYTHONPATH": os.pathsep.join([ours, *between, source])}

"""Removes what a rig has made on this machine, however the test run ends, and fails if something is left.

Everything of a rig has the rig's name: network namespaces, links and files. Its processes have it in their environment,
or are in one of its namespaces. A process beside the test run removes it all: it waits for the end of a pipe, which
comes at the end of the rig as well as when the run is killed.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

MARK = "NAME_OF_RIG"  # in the environment of a rig's processes
_PREFIX = "lgrig"  # of every name; then a process id and a letter. A link's name has 15 characters at most
_NAME = re.compile(rf"({_PREFIX}(\d+)[a-z])")
_REMOVER = [sys.executable, __file__]
_letters = itertools.cycle("abcdefghijklmnopqrstuvwxyz")
_FOLDERS = ("/run", "/tmp", "/var/tmp", "/dev/shm")
_SECONDS = 30  # after which what is still there counts as left: the kernel takes a while to remove a namespace


@contextmanager
def named() -> Iterator[str]:
    """The name of a new rig. At the end everything with this name is removed."""
    remove_left()
    name = f"{_PREFIX}{os.getpid()}{next(_letters)}"
    before = _of_programs()
    remover = subprocess.Popen(
        [*_REMOVER, name], stdin=subprocess.PIPE, start_new_session=True, cwd="/",
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield name
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()
        deadline = time.monotonic() + _SECONDS
        while (left := traces(name) | (_of_programs() - before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"the rig left behind: {sorted(left)}"


def remove_left() -> None:
    """Remove what runs left that were killed together with their remover."""
    found = [*namespaces(_PREFIX), *links(_PREFIX), *map(os.path.basename, _files(_PREFIX))]
    for name, pid in {match.groups() for one in found if (match := _NAME.match(one))}:
        if not os.path.exists(f"/proc/{pid}"):
            remove(name)


def remove(name: str) -> None:
    """Kill the processes of a rig, then remove its namespaces, links and files."""
    deadline = time.monotonic() + _SECONDS
    while (found := processes(name)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for link in links(name):  # now: with its namespace it would go some time later
        subprocess.run(["ip", "link", "del", link], capture_output=True)
    for net in namespaces(name):
        subprocess.run(["ip", "netns", "del", net], capture_output=True)
    for path in _files(name):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)


def traces(name: str) -> set[str]:
    """What there is of a rig, in words."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {
        *(f"process {pid}" for pid in processes(name)),
        *(f"network namespace {one}" for one in namespaces(name)),
        *(f"link {one}" for one in links(name)),
        *(f"mount {one}" for one in mounts if name in one),
        *(f"file {one}" for one in _files(name)),
        *(f"cgroup {one}" for one in _cgroups() if name in one),
    }


def processes(name: str) -> set[int]:
    """The processes of a rig: those with its name in their environment, and all in its network namespaces."""
    found = {pid for net in namespaces(name) for pid in inside(net)}
    wanted = f"{MARK}={name}".encode()
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdecimal() and wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(int(entry))
    return {pid for pid in found if is_running(pid)}


def namespaces(name: str) -> list[str]:
    """Network namespaces whose names begin like this."""
    with suppress(FileNotFoundError):
        return [one for one in os.listdir("/run/netns") if one.startswith(name)]
    return []


def inside(net: str) -> list[int]:
    """The processes in a network namespace."""
    done = subprocess.run(["ip", "netns", "pids", net], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def links(name: str) -> list[str]:
    """Network links whose names begin like this. Limits on their rates go with them."""
    return [one for one in os.listdir("/sys/class/net") if one.startswith(name)]


def _files(name: str) -> list[str]:
    return [path for folder in _FOLDERS for path in glob(f"{folder}/{name}*")]


def _cgroups() -> Iterator[str]:
    for folder, _, _ in os.walk("/sys/fs/cgroup"):
        yield folder


def _of_programs() -> set[str]:
    """What Ray and Slurm would leave on a machine outside of the folders that a rig gives them."""
    places = ("/dev/shm/plasma*", "/dev/shm/ray*", "/tmp/ray*", "~/ray_results")
    found = {path for place in places for path in glob(os.path.expanduser(place))}
    return found | {one for one in _cgroups() if re.search(r"/(slurm|ray)[^/]*$", one)}


def is_running(pid: int) -> bool:
    """Not one that has ended and waits for its parent to ask."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(sys.argv[1])

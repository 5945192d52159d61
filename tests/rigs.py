"""Real rigs: a small /dev/shm, a memory cgroup of one's own, a swap file, another user, a container.

Each function either gives the rig and cleans it up, or says in words why it cannot be had here. They need
root on a disposable Linux machine. Nothing of the machine outside the rig is changed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TREES = Path(__file__).parent / "trees"  # recorded machines
_CGROUP = Path("/sys/fs/cgroup")
_serial = itertools.count()
# Rigs that CI does without: where the package cannot be installed, or where the kernel has no such cgroups.
OPTIONAL = frozenset({"container", "inner_cgroup"})


def why_no_rigs() -> str | None:
    """Why no rig at all can be had here, or None."""
    if sys.platform != "linux":
        return "real rigs need Linux"
    if os.geteuid() != 0:
        return "real rigs need root"
    return None


def why_not_mount() -> str | None:
    """Why a private mount namespace with its own /dev/shm cannot be had, or None."""
    if reason := why_no_rigs():
        return reason
    if shutil.which("unshare") is None:
        return "unshare (util-linux) is not installed"
    probe = subprocess.run(small_shm(["true"], "1m"), capture_output=True, text=True)
    return None if probe.returncode == 0 else f"cannot mount in a namespace: {probe.stderr.strip()}"


def small_shm(command: Sequence[str], size: str = "64m") -> list[str]:
    """The command with a /dev/shm of ``size`` that only it and its children see."""
    script = f'mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]


def why_not_cgroup() -> str | None:
    """Why a memory cgroup of one's own cannot be had, or None."""
    if reason := why_no_rigs():
        return reason
    try:
        with memory_cgroup(64 << 20):
            return None
    except OSError as problem:
        return f"cannot make a memory cgroup: {problem}"


def why_not_inner_cgroup() -> str | None:
    """Why a job cannot limit the memory of a cgroup below its own, or None."""
    if reason := why_not_cgroup():
        return reason
    if (_CGROUP / "cgroup.controllers").exists():
        return "cgroup v2 has no limits below a cgroup in which processes run"
    return None


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup that lives as long as its ``with`` block."""

    path: Path
    version: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, started inside the group."""
        script = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        return ["sh", "-c", script, "sh", *command]

    def oom_kills(self) -> int:
        """Kills in this group itself, by the kernel's own counter."""
        name = "memory.oom_control" if self.version == "v1" else "memory.events.local"
        for line in (self.path / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        raise AssertionError(f"{name} has no oom_kill")


@contextlib.contextmanager
def memory_cgroup(limit: int, *, swap: int | None = 0) -> Iterator[Cgroup]:
    """A memory cgroup with a limit; ``swap`` bytes of swap beyond it (None: no bound)."""
    name = f"legroom-test-{os.getpid()}-{next(_serial)}"
    if (_CGROUP / "cgroup.controllers").exists():
        version, path = "v2", _CGROUP / name
        if "memory" not in (_CGROUP / "cgroup.controllers").read_text().split():
            raise OSError("the memory controller is not in cgroup.controllers")
        (_CGROUP / "cgroup.subtree_control").write_text("+memory")
    else:
        version, path = "v1", _CGROUP / "memory" / name
    path.mkdir()
    group = Cgroup(path, version)
    try:
        if version == "v2":
            (path / "memory.max").write_text(str(limit))
            if swap is not None and (path / "memory.swap.max").exists():
                (path / "memory.swap.max").write_text(str(swap))
        else:
            (path / "memory.limit_in_bytes").write_text(str(limit))
            if swap is not None and (path / "memory.memsw.limit_in_bytes").exists():
                (path / "memory.memsw.limit_in_bytes").write_text(str(limit + swap))
        yield group
    finally:
        _empty_and_remove(path)


def read_only_cgroup(command: Sequence[str], group: Cgroup) -> list[str]:
    """The command in the group, which it sees as the root of a read-only cgroup file system, as in docker."""
    here = _CGROUP if group.version == "v2" else _CGROUP / "memory"
    mount = f"mount --bind {group.path} {here} && mount -o remount,bind,ro {here}"
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if group.version == "v2":  # there the path of one's own cgroup is what tells where the mount begins
        unshare.append("--cgroup")
    return group.command([*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", *command])


def own_pids(command: Sequence[str]) -> list[str]:
    """The command in a PID namespace of its own, which ends with it."""
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--", *command]


def _empty_and_remove(path: Path) -> None:
    """End what still runs in the group and below it (only we can have put it there), then remove it."""
    for inner in path.iterdir():
        if inner.is_dir():
            _empty_and_remove(inner)
    deadline = time.monotonic() + 60
    while True:
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        try:
            path.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def why_not_swap() -> str | None:
    """Why a swap file cannot be had, or None."""
    if reason := why_no_rigs():
        return reason
    if shutil.which("mkswap") is None or shutil.which("swapon") is None:
        return "mkswap and swapon (util-linux) are not installed"
    try:
        with swap_file(1 << 20):
            return None
    except (OSError, subprocess.CalledProcessError) as problem:
        return f"cannot switch swap on: {problem}"


@contextlib.contextmanager
def swap_file(size: int) -> Iterator[Path]:
    """A swap file in use for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="legroom-swap-", dir="/var/tmp") as folder:
        path = Path(folder) / "swap"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        path.chmod(0o600)
        subprocess.run(["mkswap", str(path)], check=True, capture_output=True)
        subprocess.run(["swapon", str(path)], check=True, capture_output=True)
        try:
            yield path
        finally:
            subprocess.run(["swapoff", str(path)], check=True, capture_output=True)


def why_not_user() -> str | None:
    """Why commands cannot be run as somebody else, or None."""
    if reason := why_no_rigs():
        return reason
    if shutil.which("setpriv") is None:
        return "setpriv (util-linux) is not installed"
    probe = subprocess.run(
        as_user(65534, [sys.executable, "-c", "import sys"]), capture_output=True, text=True, cwd="/"
    )
    return None if probe.returncode == 0 else f"{sys.executable} cannot be run by another user: {probe.stderr.strip()}"


def as_user(uid: int, command: Sequence[str]) -> list[str]:
    """The command as an unprivileged user without any group or capability of root's."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", *command]


def open_to_all(folder: Path) -> None:
    """Let another user pass into a test's folder: pytest keeps the ones above it to itself."""
    for part in (folder, *folder.parents):
        if part.stat().st_uid == os.getuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o055)


def why_not_container() -> str | None:
    """Why a real container cannot be had, or None."""
    if reason := why_no_rigs():
        return reason
    for program in ("podman", "runc", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    with container() as box:
        probe = subprocess.run(box.command(["true"]), capture_output=True, text=True)
    return None if probe.returncode == 0 else f"podman cannot start a container: {probe.stderr.strip()}"


@dataclass(frozen=True)
class Container:
    """A podman container that has this machine's files as its own, and ends with its ``with`` block."""

    name: str
    root: Path

    def command(
        self,
        command: Sequence[str],
        *,
        cwd: Path = Path("/"),
        memory: int | None = None,
        swap: int = 0,
        shm: str | None = None,
        tmpfs: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> list[str]:
        """The command in the container, with this environment.

        Everything that docker restricts by default is restricted: a PID namespace, read-only cgroups, no mounts,
        no kernel log. ``tmpfs`` are "path:size=6m" as podman takes them.
        """
        run = [
            *_podman(self.root),
            "run",
            "--rm",
            "--name",
            self.name,
            "--runtime",
            "runc",
            "--network=none",
            "--env-host",
        ]
        # podman's own defaults are above what a machine without CAP_SYS_RESOURCE may give.
        run += ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=10000:10000", "--workdir", str(cwd)]
        if memory is not None:
            run += [f"--memory={memory}b", f"--memory-swap={memory + swap}b"]
        if shm is not None:
            run += [f"--shm-size={shm}"]
        for one in tmpfs:
            run += ["--tmpfs", one]
        # What may lie on another file system than the root.
        mounted = {Path("/"), *(Path(one.partition(":")[0]) for one in tmpfs)}
        for path in {Path(__file__).resolve().parents[1], Path(sys.prefix).resolve(), cwd} - mounted:
            run += ["--volume", f"{path}:{path}"]
        # Bound in a mount namespace of the command's own, the root needs no cleaning up.
        script = f'mount --bind / {self.root} && exec "$@"'
        private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        return [*private, *run, *options, "--rootfs", str(self.root), *command]


def _settings(root: Path) -> Path:
    return root.with_name("containers.conf")


def _podman(root: Path) -> list[str]:
    return ["env", f"CONTAINERS_CONF={_settings(root)}", "podman"]


@contextlib.contextmanager
def container() -> Iterator[Container]:
    """A real container for one command at a time."""
    name = f"legroom-test-{os.getpid()}-{next(_serial)}"
    with tempfile.TemporaryDirectory(prefix="legroom-root-", dir="/var/tmp") as folder:
        root = Path(folder) / "root"
        root.mkdir()
        # Otherwise podman leaves /dev/shm/libpod_lock on the machine.
        _settings(root).write_text('[engine]\nlock_type = "file"\n')
        try:
            yield Container(name, root)
        finally:
            remove = [*_podman(root), "rm", "--force", "--ignore", "--time=0", name]
            subprocess.run(remove, check=True, capture_output=True)


WHY_NOT = {
    "mount": why_not_mount,
    "cgroup": why_not_cgroup,
    "inner_cgroup": why_not_inner_cgroup,
    "swap": why_not_swap,
    "user": why_not_user,
    "container": why_not_container,
}

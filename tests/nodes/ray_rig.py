"""Ray nodes on one machine that see nothing of each other but a network: namespaces, a bridge, a /dev/shm each.

Everything is removed at the end, also after a failure: processes by their ids, then namespaces, then the bridge. What a
run left that was killed is removed by the next. Only programs with the cluster's token can use its Ray.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TEMPORARY = ("/tmp", "/var/tmp")  # each node has its own
PORT = 6399
_PREFIX = "lgnode"  # of every network namespace, link and log of this rig


def why_not() -> str | None:
    """Why there can be no such nodes here, or None."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    try:
        import ray  # noqa: F401
    except ImportError:
        return "ray is not installed: make test-nodes"
    return None


@dataclass
class Node:
    """One node: its address, the process that holds its namespaces, and Ray."""

    number: int
    net: str
    address: str
    holder: subprocess.Popen[bytes] | None = None
    process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in this node."""
        assert self.holder is not None
        return ["nsenter", "-t", str(self.holder.pid), "-m", "-n", *command]

    def kill(self) -> None:
        """Kill Ray and every program in the node. Its /dev/shm stays, as that of a container that is restarted."""
        kept = self.holder.pid if self.holder is not None else 0
        for pid in _inside(self.net):
            if pid != kept:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
            self.process = None

    def object_store_peak(self) -> int:
        """Bytes of memory that Ray's object store has had at most since it was started.

        Its file keeps every page that was ever written.
        """
        found = 0
        for pid in _inside(self.net):
            for one in _open_files(pid):
                with suppress(OSError):
                    if os.readlink(one).startswith("/dev/shm/plasma"):
                        found = max(found, os.stat(one).st_blocks * 512)
        return found

    def remove(self) -> None:
        """Kill everything in the node, and its file systems with it."""
        self.kill()
        if self.holder is not None:
            self.holder.kill()
            self.holder.wait()
            if self.holder.stdout is not None:
                self.holder.stdout.close()
            self.holder = None


@dataclass
class Cluster:
    """The nodes and the machine they share, which is where the storage service runs."""

    name: str
    bridge: str
    host: str  # the address of the storage service
    nodes: list[Node] = field(default_factory=list)
    rate: str | None = None
    shm: str = "2g"
    cpus: int = 1  # of each node, as Ray counts them
    compiled: str = ""  # a folder for compiled modules: each of the many processes would compile them
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def start(self, node: Node) -> None:
        """Start Ray on a node, with file systems of its own."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
               f"--node-ip-address={node.address}", f"--num-cpus={self.cpus}", f"--object-store-memory={400 << 20}"]  # fmt: skip
        ray += (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if node is self.head
            else [f"--address={self.address}"]
        )
        mounts = "; ".join(
            f"mount -t tmpfs -o size={self.shm},mode=1777 tmpfs {place}" for place in ("/dev/shm", *_TEMPORARY)
        )
        if any(ROOT.is_relative_to(place) for place in _TEMPORARY):  # keep this clone visible below it
            root = shlex.quote(str(ROOT))
            mounts = f"mount --bind {root} /mnt; {mounts}; mkdir -p {root}; mount --bind /mnt {root}"
        environment = {
            **os.environ, "RAY_DISABLE_MEMORY_MONITOR": "1", "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120", "RAY_gcs_server_request_timeout_seconds": "120", "RAY_gcs_rpc_server_reconnect_timeout_s": "120", "RAY_enable_metrics_collection": "0", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        environment |= self._environment()
        for name in ("LEGROOM_SHM", "LEGROOM_DIR", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        if node.holder is None:
            node.holder = subprocess.Popen(
                ["ip", "netns", "exec", node.net, "unshare", "-m", "--propagation", "private", "sh", "-ec", f"{mounts}; echo ready; exec sleep 100000"],
                stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/",
            )  # fmt: skip
            assert node.holder.stdout is not None and node.holder.stdout.readline() == b"ready\n"
        with open(f"/tmp/{self.name}-{node.number}.log", "ab") as log:
            node.process = subprocess.Popen(
                node.run(ray), env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, cwd="/",
            )  # fmt: skip

    def limit(self, rate: str) -> None:
        """Give the links of all nodes another rate, in both directions."""
        for node in self.nodes:
            _limit(self, node, rate)

    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT / "src"), "PYTHONPYCACHEPREFIX": self.compiled,
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip

    def driver(self, program: str, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a Python program on the head."""
        return self.on_head([sys.executable, "-c", program, *arguments], timeout=timeout)

    def on_head(
        self, command: Sequence[str], timeout: float = 240, token: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the head, with the cluster's token or another."""
        environment = {**os.environ, **self._environment(), "RAY_ADDRESS": self.address}
        environment["RAY_AUTH_TOKEN"] = token or self.token
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.run(
            self.head.run(command), capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
        )

    def wait(self, count: int, seconds: float = 150) -> None:
        """Wait until that many nodes are alive."""
        program = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        deadline = time.monotonic() + seconds
        said = ""
        while time.monotonic() < deadline:
            done = self.driver(program, self.address, timeout=90)
            said = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-800:]
            if said == str(count):
                return
            time.sleep(1)
        raise TimeoutError(f"{said} instead of {count} nodes")


@contextmanager
def cluster(count: int = 4, rate: str | None = None, cpus: int = 1) -> Iterator[Cluster]:
    """Ray nodes, connected by a bridge; ``rate`` limits each node's link in both directions (tc's notation)."""
    name = f"{_PREFIX}{os.getpid()}"
    found = Cluster(name, f"{name}b", f"{_subnet()}.254", rate=rate, cpus=cpus)
    found.compiled = f"/run/{name}-compiled"  # not in /tmp: each node has its own
    _remove_left()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is below is removed then, too
    try:
        _ip("link", "add", found.bridge, "type", "bridge")
        _ip("addr", "add", f"{found.host}/24", "dev", found.bridge)
        _ip("link", "set", found.bridge, "up")
        for number in range(count):
            found.nodes.append(_node(found, number))
        for node in found.nodes:
            found.start(node)
            if node is found.head:
                found.wait(1)
        found.wait(count)
        yield found
    finally:
        for node in found.nodes:
            node.remove()
            with suppress(subprocess.CalledProcessError):  # now: with its namespace it would go some time later
                _ip("link", "del", f"{name}v{node.number}")
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", node.net)
            with suppress(subprocess.CalledProcessError, OSError):
                os.unlink(f"/tmp/{name}-{node.number}.log")
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", found.bridge)
        shutil.rmtree(found.compiled, ignore_errors=True)


def _subnet() -> str:
    """Addresses that no other run uses at the same time."""
    return f"10.{77 + os.getpid() // 250 % 100}.{os.getpid() % 250}"


def _remove_left() -> None:
    """Remove the namespaces and bridges of runs that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for net, pid in re.findall(rf"^({_PREFIX}(\d+)-\d+)\b", listed, re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            for process in _inside(net):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", net], capture_output=True)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for bridge, pid in re.findall(rf" ({_PREFIX}(\d+)b)\b", links):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _node(found: Cluster, number: int) -> Node:
    node = Node(number, f"{found.name}-{number}", f"{_subnet()}.{number + 1}")
    outside, inside = f"{found.name}v{number}", "eth0"
    _ip("netns", "add", node.net)
    _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", node.net)
    _ip("link", "set", outside, "master", found.bridge, "up")
    for arguments in (
        ("addr", "add", f"{node.address}/24", "dev", inside),
        ("link", "set", inside, "up"),
        ("link", "set", "lo", "up"),
    ):
        _ip("-n", node.net, *arguments)
    if found.rate is not None:
        _limit(found, node, found.rate)
    return node


def _limit(found: Cluster, node: Node, rate: str) -> None:
    for prefix, device in (([], f"{found.name}v{node.number}"), (["-n", node.net], "eth0")):
        limit = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "100ms"]
        subprocess.run(["tc", *prefix, *limit], check=True, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _open_files(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def _inside(net: str) -> list[int]:
    """The processes in a network namespace."""
    done = subprocess.run(["ip", "netns", "pids", net], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]

"""Ray nodes on one machine that see nothing of each other but a network: namespaces, a bridge, a /dev/shm each.

rig_cleanup.py removes everything at the end, also after a failure or a kill. Only programs with the cluster's token can
use its Ray.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import rig_cleanup

ROOT = Path(__file__).parents[2]
_TEMPORARY = ("/tmp", "/var/tmp")  # each node has its own
PORT = 6399
_ALIVE = """
import ray, sys, time
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
until = time.monotonic() + float(sys.argv[3])
while (count := sum(node["Alive"] for node in ray.nodes())) != int(sys.argv[2]) and time.monotonic() < until:
    time.sleep(0.2)
print(count)
"""


def why_no_namespaces() -> str | None:
    """Why there can be no namespaces with a network here, or None."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def why_not() -> str | None:
    """Why there can be no Ray nodes here, or None."""
    if reason := why_no_namespaces():
        return reason
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
        for pid in rig_cleanup.inside(self.net):
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
        for pid in rig_cleanup.inside(self.net):
            for one in _open_files(pid):
                with suppress(OSError):
                    if os.readlink(one).startswith("/dev/shm/plasma"):
                        found = max(found, os.stat(one).st_blocks * 512)
        return found

    def hold(self, shm: str, environment: dict[str, str]) -> None:
        """Start the process that holds its namespaces, with file systems of its own."""
        mounts = "; ".join(
            f"mount -t tmpfs -o size={shm},mode=1777 tmpfs {place}" for place in ("/dev/shm", *_TEMPORARY)
        )
        if any(ROOT.is_relative_to(place) for place in _TEMPORARY):  # keep this clone visible below it
            root = shlex.quote(str(ROOT))
            mounts = f"mount --bind {root} /mnt; {mounts}; mkdir -p {root}; mount --bind /mnt {root}"
        self.holder = subprocess.Popen(
            ["ip", "netns", "exec", self.net, "unshare", "-m", "--propagation", "private", "sh", "-ec", f"{mounts}; echo ready; exec sleep 100000"],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/", env=environment,
        )  # fmt: skip
        assert self.holder.stdout is not None and self.holder.stdout.readline() == b"ready\n"

    def reap(self) -> None:
        """Ask for the exit status of its processes, which have been killed."""
        for process in (self.process, self.holder):
            if process is not None:
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        self.process = self.holder = None


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
        """Start Ray on a node."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
               f"--node-ip-address={node.address}", f"--num-cpus={self.cpus}", f"--object-store-memory={400 << 20}"]  # fmt: skip
        ray += (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if node is self.head
            else [f"--address={self.address}"]
        )
        environment = {
            **os.environ, "RAY_DISABLE_MEMORY_MONITOR": "1", "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120", "RAY_gcs_server_request_timeout_seconds": "120", "RAY_gcs_rpc_server_reconnect_timeout_s": "120", "RAY_enable_metrics_collection": "0", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        environment |= self._environment()
        for name in ("LEGROOM_SHM", "LEGROOM_DIR", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
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
            rig_cleanup.MARK: self.name, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip

    def driver(self, program: str, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a Python program on the head."""
        return self.on_head([sys.executable, "-c", program, *arguments], timeout=timeout)

    def on_head(
        self, command: Sequence[str], timeout: float = 240, token: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the head, with the cluster's token or another."""
        environment = self._environment_of_driver()
        environment["RAY_AUTH_TOKEN"] = token or self.token
        return subprocess.run(
            self.head.run(command), capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
        )

    def on_terminal(self, command: Sequence[str], timeout: float = 240) -> tuple[int, str]:
        """Run a program on the head with a terminal. Returns its exit status and what was drawn."""
        drawn = bytearray()
        ours, theirs = os.openpty()
        process = subprocess.Popen(
            self.head.run(command), stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=ROOT,
            env={**self._environment_of_driver(), "TERM": "xterm", "COLUMNS": "120"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        ends = threading.Timer(timeout, process.kill)
        ends.start()
        with suppress(OSError):  # EIO: no process has the terminal open any more
            while data := os.read(ours, 65536):
                drawn += data
        os.close(ours)
        status = process.wait()
        ends.cancel()
        return status, drawn.decode(errors="replace")

    def _environment_of_driver(self) -> dict[str, str]:
        environment = {**os.environ, **self._environment(), "RAY_ADDRESS": self.address}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment

    def wait(self, count: int, seconds: float = 240) -> None:
        """Wait until that many nodes are alive."""
        deadline = time.monotonic() + seconds
        said = ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                done = self.driver(_ALIVE, self.address, str(count), str(left), timeout=left + 30)
            except subprocess.TimeoutExpired:
                break
            said = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-800:]
            if said == str(count):
                return
            time.sleep(0.5)  # Ray does not answer yet
        logs = {path.name: path.read_text(errors="replace")[-600:] for path in Path("/tmp").glob(f"{self.name}-*.log")}
        raise TimeoutError(f"{said} instead of {count} nodes; their logs end with: {logs}")


@contextmanager
def namespaces(count: int, rate: str | None = None, cpus: int = 1) -> Iterator[Cluster]:
    """Nodes without Ray, connected by a bridge; ``rate`` limits each node's link in both directions (tc's notation)."""
    found = None
    try:
        with rig_cleanup.named() as name:
            found = Cluster(name, f"{name}b", f"{_subnet()}.254", rate=rate, cpus=cpus)
            found.compiled = f"/run/{name}-compiled"  # not in /tmp: each node has its own
            _ip("link", "add", found.bridge, "type", "bridge")
            _ip("addr", "add", f"{found.host}/24", "dev", found.bridge)
            _ip("link", "set", found.bridge, "up")
            for number in range(count):
                node = _node(found, number)
                found.nodes.append(node)
                node.hold(found.shm, {**os.environ, rig_cleanup.MARK: name})
            yield found
    finally:
        for node in found.nodes if found is not None else ():
            node.reap()


@contextmanager
def cluster(count: int = 4, rate: str | None = None, cpus: int = 1) -> Iterator[Cluster]:
    """Ray nodes."""
    with namespaces(count, rate, cpus) as found:
        for node in found.nodes:
            found.start(node)
            if node is found.head:
                found.wait(1)
        found.wait(count)
        yield found


def _subnet() -> str:
    """Addresses that no other run uses at the same time."""
    return f"10.{77 + os.getpid() // 250 % 100}.{os.getpid() % 250}"


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

"""Available memory: the tightest of all limits decides, and is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from fake_host import NAMES, FakeHost, mount, tree

import legroom
from legroom.errors import UsageError
from legroom.probe.legroom_available import available_on
from legroom.probe.ram_swap_and_pressure import free_memory

GB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nCommitLimit: 10485760 kB\nCommitted_AS: 9437184 kB\n"
GROUP = {
    "/proc/self/cgroup": "0::/a/b\n",
    "/proc/self/mountinfo": mount("/sys/fs/cgroup"),
    "/sys/fs/cgroup/a/memory.max": f"{6 * GB}\n",
    "/sys/fs/cgroup/a/memory.current": f"{5 * GB}\n",
    "/sys/fs/cgroup/a/memory.stat": f"inactive_file {GB // 2}\nactive_file 0\nslab_reclaimable 0\n",
    "/sys/fs/cgroup/a/b/memory.max": f"{4 * GB}\n",
    "/sys/fs/cgroup/a/b/memory.current": f"{GB}\n",
    "/sys/fs/cgroup/a/b/memory.stat": "inactive_file 0\nactive_file 0\nslab_reclaimable 0\n",
}


def test_the_machine_decides_without_limits() -> None:
    found = available_on(FakeHost(files={"/proc/meminfo": MEMINFO}), "ram")
    assert found.bytes == int(found) == 8 * GB
    assert found.why == "/proc/meminfo (MemAvailable): 8 GB of 16 GB left"
    assert hex(found) == hex(8 * GB)  # usable as an int


def test_a_parent_that_siblings_fill_decides_and_page_cache_counts_as_free() -> None:
    found = available_on(FakeHost(files={"/proc/meminfo": MEMINFO, **GROUP}), "ram")
    assert found.bytes == GB + GB // 2
    assert found.why == "/sys/fs/cgroup/a/memory.max: 1.5 GB of 6 GB left"


@pytest.mark.parametrize(("name", "line", "option"), [("as", "VmSize", "-v"), ("data", "VmData", "-d")])
def test_ulimit_decides(name: str, line: str, option: str) -> None:
    host = FakeHost(
        files={"/proc/meminfo": MEMINFO, "/proc/self/status": f"{line}: 1048576 kB\n"},
        recording={"rlimits": {name: [3 * GB, -1]}},
    )
    found = available_on(host, "ram")
    assert found.bytes == 2 * GB and found.why == f"ulimit {option}: 1 GB of 3 GB used"


def test_a_strict_commit_limit_decides() -> None:
    host = FakeHost(files={"/proc/meminfo": MEMINFO, "/proc/sys/vm/overcommit_memory": "2\n"})
    assert available_on(host, "ram").bytes == GB
    assert available_on(host, "ram").why == "vm.overcommit_memory=2: 9 GB of 10 GB committed"


def test_shm_is_limited_by_its_size_or_by_ram() -> None:
    small = FakeHost(files={"/proc/meminfo": MEMINFO}, recording={"statvfs": {"/dev/shm": [64 << 20, 60 << 20]}})
    assert available_on(small, "shm").bytes == 60 << 20
    assert available_on(small, "shm").why == "/dev/shm: 60 MB of 64 MB free"
    large = FakeHost(files={"/proc/meminfo": MEMINFO}, recording={"statvfs": {"/dev/shm": [64 * GB, 60 * GB]}})
    assert available_on(large, "shm").bytes == 8 * GB and "MemAvailable" in available_on(large, "shm").why
    unlimited = FakeHost(files={"/proc/meminfo": MEMINFO}, recording={"statvfs": {"/dev/shm": [0, 0]}})
    assert available_on(unlimited, "shm").bytes == 8 * GB
    missing = available_on(FakeHost(files={"/proc/meminfo": MEMINFO}), "shm")
    assert missing.bytes is None and "does not exist" in missing.why


def test_unknown_is_none_with_the_reason() -> None:
    for files in ({}, {"/proc/meminfo": MEMINFO, **GROUP, "/sys/fs/cgroup/a/memory.current": "?"}):
        found = available_on(FakeHost(files=files), "ram")
        assert found.bytes is None and found.why
        with pytest.raises(TypeError):
            int(found)
    assert available_on(FakeHost(files={"/proc/meminfo": MEMINFO}), "gpu3").bytes is None


@pytest.mark.parametrize("pool", ["", "RAM", "gpu", "disk", "gpux"])
def test_other_pools_are_refused(pool: str) -> None:
    with pytest.raises(UsageError, match="unknown resource"):
        legroom.available(pool)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machines_agree_with_the_pool(name: str) -> None:
    """The same rule as `legroom doctor`, read in a cheaper way."""
    host = tree(name)
    pool, _ = free_memory(host)
    found = available_on(host, "ram")
    limited = any(host.rlimit(kind) not in (None, (-1, -1)) for kind in ("as", "data"))
    assert found.why
    if not limited and host.number("/proc/sys/vm/overcommit_memory") != 2:
        assert found.bytes == pool


@pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's /proc")
def test_it_is_light_and_fast_and_follows_this_machine() -> None:
    before, first, after = free_memory()[0], legroom.available(), free_memory()[0]  # others take and free memory
    assert before is not None and first.bytes is not None and after is not None
    assert min(before, after) - GB < first.bytes < max(before, after) + GB
    begin = time.thread_time()
    for _ in range(50):
        legroom.available()
    assert (time.thread_time() - begin) / 50 < 0.01  # ten times the time that the docs give: this only finds blunders
    code = (
        "import sys, legroom; legroom.available('ram'); legroom.available('shm')\n"
        "print([name for name in ('numpy', 'torch', 'h5py', 'psutil', 'pynvml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout == "[]\n"

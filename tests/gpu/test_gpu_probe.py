"""The probe against a real GPU: torch's figures, our own memory, our own pid."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from legroom.probe.gpu_devices import gpu_pools, gpus, gpus_on_bus
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import limits, pinned_pool
from legroom.probe.runtime_environment import in_initial_namespace
from legroom.records.machine import Gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
GIB = 1 << 30
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def cuda() -> Iterator[Any]:
    torch.zeros(1, device="cuda")  # the context
    torch.cuda.synchronize()
    yield torch.cuda
    torch.cuda.empty_cache()


def ours(uuid: str) -> Gpu:
    """The GPU torch uses, by its uuid: torch may number them otherwise."""
    found = gpus(Host())
    assert found.reason is None, found.reason
    return next(card for card in found.cards if uuid in card.uuid)


def uuid_of_torchs_gpu() -> str:
    return str(torch.cuda.get_device_properties(0).uuid)


def test_size_and_room_are_torchs(cuda: Any) -> None:
    free, total = cuda.mem_get_info()
    card = ours(uuid_of_torchs_gpu())
    assert card.size is not None and card.free is not None and card.used is not None
    assert abs(card.size - total) <= total * 0.01
    assert abs(card.free - free) <= total * 0.01
    assert card.used + card.free == card.size
    assert card.name == cuda.get_device_name(0)


def test_what_is_allocated_is_used(cuda: Any) -> None:
    uuid = uuid_of_torchs_gpu()
    before = ours(uuid)
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    cuda.synchronize()
    after = ours(uuid)
    assert before.used is not None and after.used is not None and before.free is not None and after.free is not None
    assert after.used - before.used >= 0.95 * GIB
    assert before.free - after.free >= 0.95 * GIB
    del block
    cuda.empty_cache()
    gone = ours(uuid)
    assert gone.used is not None and gone.used <= after.used - 0.95 * GIB


def test_this_process_is_listed_or_the_reason_is_given(cuda: Any) -> None:
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    cuda.synchronize()
    card = ours(uuid_of_torchs_gpu())
    if card.processes is None:
        assert card.reason
        return
    us = next((process for process in card.processes if process.pid == os.getpid()), None)
    if us is None:  # the pids are the host's, and then some match nobody here
        assert in_initial_namespace(Host(), "pid") is False
        assert any(process.command is None for process in card.processes) and "host's" in (card.reason or "")
        return
    assert us.command and "pytest" in us.command
    assert us.used is None or us.used >= GIB
    assert us.used is not None or "does not report" in (card.reason or "")
    del block


def test_pools_and_bus() -> None:
    found = gpus(Host())
    assert found.driver and len(found.cards) >= torch.cuda.device_count() >= 1
    assert [pool.name for pool in gpu_pools(found)] == [f"gpu{n}" for n in range(len(found.cards))]
    on_bus = gpus_on_bus(Host())
    if on_bus is not None and not any(card.mig for card in found.cards):
        assert on_bus == 0 or on_bus >= len(found.cards)  # 0: WSL and some sandboxes show no such bus


def test_no_context_is_made_and_nvml_is_given_back() -> None:
    """Asking costs no GPU memory, and another user of NVML in the process is not cut off."""
    code = """
import pynvml, json
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
before = used()
from legroom.probe.gpu_devices import gpus
from legroom.probe.host_files_and_syscalls import Host
for _ in range(20):
    assert gpus(Host()).cards
print(json.dumps([before, used()]))
"""
    before, after = json.loads(python(code))
    assert after - before < 64 << 20


def test_a_pid_namespace_is_seen_through_honestly() -> None:
    """As in a container: our memory is either found under a pid of ours, or unknown and said so."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    code = """
import json, os, torch
block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"); torch.cuda.synchronize()
from legroom.probe.gpu_devices import gpus
from legroom.probe.host_files_and_syscalls import Host
cards = gpus(Host()).cards
print(json.dumps([os.getpid(), [[[p.pid, p.used, p.command] for p in c.processes or ()] for c in cards], [c.reason for c in cards]]))
"""
    pid, listed, reasons = json.loads(python(code, "unshare", "--pid", "--fork", "--mount-proc"))
    entries = [entry for card in listed for entry in card]
    mine = [entry for entry in entries if entry[0] == pid and entry[2] and "python" in entry[2]]
    if mine:
        assert mine[0][1] is None or mine[0][1] >= GIB
    else:
        assert any(entry[2] is None for entry in entries) or not entries
    if any(entry[1] is None or entry[2] is None for entry in entries):
        assert any(reasons)


def test_memlock_does_not_bound_pinned_memory(cuda: Any) -> None:
    """What pinned_pool says: cudaHostAlloc succeeds past RLIMIT_MEMLOCK, and no counter of the kernel's shows it."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root to drop CAP_IPC_LOCK, and setpriv")
    code = """
import json, resource, torch
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
block = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True).fill_(1)
other = torch.zeros(256 << 20, dtype=torch.uint8)
registered = int(torch.cuda.cudart().cudaHostRegister(other.data_ptr(), 256 << 20, 0))
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([block.is_pinned(), registered, fields["CapEff"].split()[0], fields["VmLck"].split()[0],
                  fields["VmPin"].split()[0], fields["RssShmem"].split()[0]]))
"""
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    pinned, registered, capabilities, locked, counted, shared = json.loads(python(code, *user))
    assert int(capabilities, 16) == 0
    assert pinned and registered == 0
    assert (int(locked), int(counted)) == (0, 0)
    assert int(shared) >= 256 << 10  # kB: where cudaHostAlloc does show
    assert pinned_pool(gpu_pools(gpus(Host()))[0], limits(Host())).used is None


def python(code: str, *before: str) -> str:
    """What a fresh python prints, without anything of the person's who runs the tests in its way."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
    ran = subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout

"""Cards by NVML: what is asked, and what is said when an answer does not come."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.gpu_devices import gpu_pools, gpus, gpus_on_bus, module_version
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.nvml import NvmlError, call
from legroom.probe.snapshot import snapshot
from legroom.records.machine import Gpu, GpuProcess, Gpus

GIB = 1 << 30
RESERVED = 600 << 20
TREES = Path(__file__).parents[2] / "trees"


def error(code: int) -> pynvml.NVMLError:
    return pynvml.NVMLError(code)


def process(pid: int, used: int | None = GIB) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class Card(SimpleNamespace):
    """What one fake GPU answers; an exception in place of a value is raised."""

    def __init__(self, **given: Any) -> None:
        answers = {
            "name": "NVIDIA H200", "uuid": "GPU-1", "handle": None, "total": 100 * GIB, "free": 70 * GIB,
            "memory_v2": None, "memory": None, "mig": error(pynvml.NVML_ERROR_NOT_SUPPORTED), "slices": [],
            "compute": [], "graphics": [], "mps": [],
        }  # fmt: skip
        super().__init__(**(answers | given))


def answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class FakeNvml:
    """As much of the pynvml module as is asked, with NVML's own rules about starting and ending."""

    nvmlMemory_v2 = pynvml.nvmlMemory_v2  # noqa: N815

    def __init__(self, *cards: Card, init: Exception | None = None, count: Any = None, driver: Any = "580.1") -> None:
        self.cards, self.init, self.driver = cards, init, driver
        self.count = len(cards) if count is None else count
        self.started = 0
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDevice") and not object.__getattribute__(self, "started"):
            raise AssertionError(f"{name} before nvmlInit or after nvmlShutdown")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        answer(self.init)
        self.started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        assert self.started > 0
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:  # noqa: N802
        return answer(self.driver)

    def nvmlDeviceGetCount(self) -> Any:  # noqa: N802
        return answer(self.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        answer(self.cards[index].handle)
        return self.cards[index]

    def nvmlDeviceGetName(self, card: Card) -> Any:  # noqa: N802
        return answer(card.name)

    def nvmlDeviceGetUUID(self, card: Card) -> Any:  # noqa: N802
        return answer(card.uuid)

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> Any:  # noqa: N802
        if version is not None:
            answer(card.memory_v2)
            used = card.total - card.free - RESERVED
            return SimpleNamespace(total=card.total, reserved=RESERVED, used=used, free=card.free)
        answer(card.memory)
        return SimpleNamespace(total=card.total, used=card.total - card.free, free=card.free)

    def nvmlDeviceGetMigMode(self, card: Card) -> Any:  # noqa: N802
        return answer(card.mig)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return len(card.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, place: int) -> Any:  # noqa: N802
        return answer(card.slices[place])

    def nvmlDeviceGetComputeRunningProcesses_v3(self, card: Card) -> Any:  # noqa: N802
        self.asked.append("v3")
        return answer(card.compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, card: Card) -> Any:  # noqa: N802
        return answer(card.graphics)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, card: Card) -> Any:  # noqa: N802
        return answer(card.mps)


def one(nvml: FakeNvml, host: Host | None = None) -> Gpu:
    found = gpus(host or Host(), nvml)
    assert nvml.started == 0, "nvmlShutdown was forgotten"
    assert len(found.cards) == 1
    return found.cards[0]


def test_a_gpu_is_what_can_be_allocated() -> None:
    nvml = FakeNvml(Card())
    card = one(nvml)
    assert (card.size, card.used, card.free) == (100 * GIB - RESERVED, 30 * GIB - RESERVED, 70 * GIB)
    assert (card.name, card.uuid, card.index, card.mig, card.reason) == ("NVIDIA H200", "GPU-1", 0, False, None)
    assert card.processes == ()
    assert gpus(Host(), nvml).driver == "580.1"


@pytest.mark.parametrize("code", [2, 3, 13, 25])
def test_an_old_driver_is_asked_the_old_way_and_its_reserve_is_admitted(code: int) -> None:
    card = one(FakeNvml(Card(memory_v2=error(code))))
    assert (card.size, card.used, card.free) == (100 * GIB, 30 * GIB, 70 * GIB)
    assert card.reason is not None and "reserve" in card.reason


def test_bindings_without_the_new_memory_question_still_answer() -> None:
    class Old(FakeNvml):
        nvmlMemory_v2 = None  # noqa: N815

    assert one(Old(Card())).size == 100 * GIB


def test_names_in_bytes_are_text() -> None:
    card = one(FakeNvml(Card(name=b"Tesla V100", uuid=b"GPU-2")))
    assert (card.name, card.uuid) == ("Tesla V100", "GPU-2")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "was not found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver is not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "versions differ"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "lost"),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, "not supported"),
        (pynvml.NVML_ERROR_UNKNOWN, "unknown error"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "too old"),
        (pynvml.NVML_ERROR_TIMEOUT, "timed out"),
        (4711, "4711"),
    ],
)
def test_every_failure_has_words(code: int, words: str) -> None:
    for nvml in (FakeNvml(init=error(code)), FakeNvml(Card(), count=error(code))):
        found = gpus(Host(), nvml)
        assert found.cards == () and words in (found.reason or "")
        assert nvml.started == 0
    card = one(FakeNvml(Card(memory=error(code), memory_v2=error(code), compute=error(code))))
    assert card.size is card.used is card.free is card.processes is None
    assert words in (card.reason or "")


def test_an_end_that_fails_takes_nothing_away() -> None:
    class Stuck(FakeNvml):
        def nvmlShutdown(self) -> None:  # noqa: N802
            self.started -= 1
            raise error(999)

    assert one(Stuck(Card())).size == 100 * GIB - RESERVED


def test_bindings_that_take_no_version_are_asked_without() -> None:
    class Unversioned(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # type: ignore[override]  # noqa: N802
            return SimpleNamespace(total=card.total, used=1, free=card.free)

    assert one(Unversioned(Card())).size == 100 * GIB


def test_a_failure_of_no_class_of_nvmls_has_words_too() -> None:
    found = gpus(Host(), FakeNvml(init=OSError("no such thing")))
    assert "no such thing" in (found.reason or "")


def test_one_dead_gpu_does_not_hide_the_others() -> None:
    lost = Card(handle=error(pynvml.NVML_ERROR_GPU_IS_LOST))
    found = gpus(Host(), FakeNvml(Card(uuid="GPU-a"), lost, Card(uuid="GPU-c")))
    assert [card.index for card in found.cards] == [0, 1, 2]
    assert [card.size is None for card in found.cards] == [False, True, False]
    assert "lost" in (found.cards[1].reason or "") and found.cards[1].processes is None
    assert found.reason is None


def test_a_gpu_without_a_name_still_has_its_memory() -> None:
    card = one(FakeNvml(Card(name=error(999), uuid=error(999)), driver=error(999)))
    assert card.size == 100 * GIB - RESERVED and card.name == "unknown" and card.uuid == ""


def test_no_gpus_behind_a_working_driver() -> None:
    found = gpus(Host(), FakeNvml())
    assert found.cards == () and found.reason == "the driver lists no GPU"


def test_every_mig_slice_is_a_gpu_of_its_own() -> None:
    hole = error(pynvml.NVML_ERROR_NOT_FOUND)
    sliced = Card(
        mig=[1, 1],
        memory_v2=error(4),
        slices=[Card(uuid="MIG-a", total=10 * GIB, free=9 * GIB), hole, Card(uuid="MIG-b", total=20 * GIB), error(15)],
    )
    found = gpus(Host(), FakeNvml(Card(uuid="GPU-0"), sliced, Card(uuid="GPU-2", mig=[0, 0])))
    assert [(card.index, card.uuid, card.mig) for card in found.cards] == [
        (0, "GPU-0", False),
        (1, "MIG-a", True),
        (2, "MIG-b", True),
        (3, "", True),
        (4, "GPU-2", False),
    ]
    assert found.cards[1].size == 10 * GIB - RESERVED
    assert "lost" in (found.cards[3].reason or "")


def test_mig_mode_without_slices_is_reported() -> None:
    card = one(FakeNvml(Card(mig=[1, 1], slices=[error(pynvml.NVML_ERROR_NOT_FOUND)])))
    assert card.size is None and "no MIG instance" in (card.reason or "")


def test_processes_of_all_kinds_are_joined() -> None:
    us = os.getpid()
    card = one(FakeNvml(Card(compute=[process(us, 3)], graphics=[process(us, 5)], mps=[process(us, None)])))
    assert card.processes is not None
    assert [(entry.pid, entry.used) for entry in card.processes] == [(us, 5)]  # the same memory, seen twice
    assert "python" in (card.processes[0].command or "")  # the command line of this very process
    assert card.reason is None


def test_graphics_may_be_missing_but_not_compute() -> None:
    nothing = error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert one(FakeNvml(Card(compute=[process(os.getpid())], graphics=nothing, mps=nothing))).processes
    card = one(FakeNvml(Card(compute=nothing, graphics=[process(1)])))
    assert card.processes is None and "processes unknown" in (card.reason or "")


class Older(FakeNvml):
    def nvmlDeviceGetComputeRunningProcesses_v2(self, card: Card) -> Any:  # noqa: N802
        self.asked.append("v2")
        return [process(os.getpid(), 7)]


def test_an_older_process_question_is_asked_where_the_newer_is_unknown() -> None:
    nvml = Older(Card(compute=error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)))
    card = one(nvml)
    assert nvml.asked == ["v3", "v2"]
    assert card.processes is not None and card.processes[0].used == 7


def test_no_permission_is_not_asked_again() -> None:
    nvml = Older(Card(compute=error(pynvml.NVML_ERROR_NO_PERMISSION)))
    assert one(nvml).processes is None
    assert nvml.asked == ["v3"]


@pytest.mark.parametrize("nothing", [None, 0, (1 << 64) - 1])
def test_what_a_process_holds_is_unknown_rather_than_zero(nothing: int | None) -> None:
    nvml = FakeNvml(Card(compute=[process(os.getpid(), nothing)]))
    card = one(nvml)
    assert card.processes is not None and card.processes[0].used is None
    assert "does not report" in (card.reason or "")
    windows = gpus(Host(platform="win32"), nvml).cards[0]
    assert "WDDM" in (windows.reason or "")


def proc(root: Path, pid: int, command: str, *, maps: str | None = None) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "status").write_text("Name:\tx\nState:\tS (sleeping)\nPPid:\t1\nUid:\t0\t0\t0\t0\nVmRSS:\t1 kB\n")
    (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
    if maps is not None:
        (folder / "maps").write_text(maps)


def namespace(root: Path, number: int) -> None:
    (root / "proc" / "self" / "ns").mkdir(parents=True)
    (root / "proc" / "self" / "ns" / "pid").symlink_to(f"pid:[{number}]")


def test_pids_that_match_no_process_have_no_command(tmp_path: Path) -> None:
    proc(tmp_path, 10, "python train.py")
    card = one(FakeNvml(Card(compute=[process(10), process(900001)])), Host(root=tmp_path))
    assert card.processes is not None
    assert [entry.command for entry in card.processes] == ["python train.py", None]
    assert "1 of 2 pids" in (card.reason or "") and "host's" in (card.reason or "")


def test_in_a_pid_namespace_a_stranger_of_the_same_number_is_not_named(tmp_path: Path) -> None:
    namespace(tmp_path, 4026532999)
    proc(tmp_path, 10, "bash", maps="7f00 r-xp /usr/bin/bash")
    proc(tmp_path, 11, "python train.py", maps="7f00 rw-s 00:05 /dev/nvidiactl")
    proc(tmp_path, 12, "python hidden.py")
    card = one(FakeNvml(Card(compute=[process(pid) for pid in (10, 11, 12)])), Host(root=tmp_path))
    assert card.processes is not None
    assert [entry.command for entry in card.processes] == [None, "python train.py", None]


def test_on_the_machine_itself_every_pid_is_believed(tmp_path: Path) -> None:
    namespace(tmp_path, 4026531836)
    proc(tmp_path, 10, "Xorg :0", maps="")
    card = one(FakeNvml(Card(graphics=[process(10)])), Host(root=tmp_path))
    assert card.processes is not None and card.processes[0].command == "Xorg :0"


def test_commands_elsewhere_come_from_the_system() -> None:
    card = one(FakeNvml(Card(compute=[process(os.getpid()), process(2**31 - 2)])), Host(platform="win32"))
    assert card.processes is not None
    assert card.processes[0].command and card.processes[1].command is None


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "NVML"), ("1,3", "CUDA_VISIBLE_DEVICES=1,3"), ("", "CUDA programs find no GPU"), ("GPU-8", "=GPU-8")],
)
def test_cuda_visible_devices_is_noted(value: str | None, words: str) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    source = gpus(Host(env=env), FakeNvml(Card())).source
    assert words in source and source.startswith("NVML")
    assert ("CUDA_VISIBLE_DEVICES" in source) == (value is not None)


class Counters:
    """Performance counters of a Windows with an integrated and an NVIDIA adapter."""

    def read(self, path: str) -> dict[str, int]:
        one, two = "luid_0x00000000_0x0000AAAA_phys_0", "luid_0x00000000_0x0000BBBB_phys_0"
        if "Adapter" in path:
            return {one: 5 * GIB, two: 3 * GIB}
        return {f"pid_7_{one}": GIB, f"pid_7_{two}": 2 * GIB, f"pid_8_{two}": GIB, f"pid_9_{one}": GIB}


def test_windows_reports_what_has_spilled() -> None:
    windows = Host(platform="win32")
    card = gpus(windows, FakeNvml(Card(compute=[process(8)], graphics=[process(7)])), Counters()).cards[0]
    assert card.spilled == 3 * GIB  # of the adapter that both processes use
    card = gpus(windows, FakeNvml(Card(graphics=[process(7)])), Counters()).cards[0]
    assert card.spilled is None and "GPU memory moved to RAM unknown: 2 adapters" in (card.reason or "")
    assert gpus(Host(), FakeNvml(Card(compute=[process(8)])), Counters()).cards[0].spilled is None


def device(root: Path, name: str, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")


def test_gpus_on_the_bus_are_counted_without_a_driver(tmp_path: Path) -> None:
    host = Host(root=tmp_path)
    assert gpus_on_bus(host) is None
    device(tmp_path, "0000:00:02.0", "0x8086", "0x030000")
    assert gpus_on_bus(host) == 0
    assert gpus(host).reason == "no NVIDIA GPU and no driver"
    device(tmp_path, "0000:01:00.0", "0x10de", "0x030000")
    device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # its sound
    device(tmp_path, "0000:02:00.0", "0x10de", "0x030200")
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0").mkdir()
    found = gpus(host)
    assert found.on_bus == 2 and found.cards == ()
    assert "no NVIDIA driver is loaded" in (found.reason or "")


def test_without_a_driver_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it would fail
    assert "no NVIDIA driver" in (gpus(Host(root=tmp_path)).reason or "")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert "nvidia-ml-py" in (gpus(Host(root=tmp_path)).reason or "")
    assert "nvidia-ml-py" in (gpus(Host(root=tmp_path / "none", platform="win32")).reason or "")


def test_a_driver_that_answers_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(Card())
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert gpus(Host(root=tmp_path)).cards[0].size == 100 * GIB - RESERVED


def test_the_real_bindings_fail_in_words_where_there_is_no_library() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        found = gpus(Host(), pynvml)
        assert found.cards == () and found.reason
        assert problem.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND or "libnvidia-ml" in found.reason
    else:
        pynvml.nvmlShutdown()
        pytest.skip("NVML works here")


VERSION = "NVRM version: NVIDIA UNIX {kind}  {version}  Tue Jul 1 00:00:00 UTC 2025\nGCC version:  gcc 12.2.0\n"


@pytest.mark.parametrize("kind", ["x86_64 Kernel Module", "Open Kernel Module for x86_64", "aarch64 Kernel Module"])
def test_the_module_names_the_driver_when_nvml_does_not(tmp_path: Path, kind: str) -> None:
    text = VERSION.format(kind=kind, version="580.159.04")
    assert module_version(text) == "580.159.04"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    mismatch = gpus(Host(root=tmp_path), FakeNvml(init=error(18)))
    assert mismatch.driver == "580.159.04" and "kernel module 580.159.04" in (mismatch.reason or "")


@given(st.text())
def test_any_text_may_stand_where_the_version_is(text: str) -> None:
    found = module_version(text)
    assert found is None or found in text


@pytest.mark.parametrize("tree", sorted(path.name for path in TREES.iterdir() if path.is_dir()))
def test_a_recording_is_never_mixed_with_the_machine_it_is_read_on(tree: str) -> None:
    found = gpus(Host.at(TREES / tree))
    assert found.cards == () and "recording" in (found.reason or "")
    assert gpu_pools(found) == ()


def test_pools_are_numbered_and_carry_their_reasons() -> None:
    dead = Card(handle=error(pynvml.NVML_ERROR_GPU_IS_LOST))
    pools = gpu_pools(gpus(Host(env={}), FakeNvml(Card(), dead)))
    assert [pool.name for pool in pools] == ["gpu0", "gpu1"]
    assert (pools[0].size, pools[0].reason, pools[0].source) == (100 * GIB - RESERVED, None, "NVML")
    assert pools[1].size is pools[1].used is pools[1].free is None and "lost" in (pools[1].reason or "")
    assert gpu_pools(Gpus((), 0, None, "NVML")) == ()


def test_bindings_that_lack_a_question_are_too_old() -> None:
    with pytest.raises(NvmlError, match="nvmlNoSuchThing"):
        call(SimpleNamespace(), "nvmlNoSuchThing")


def test_processes_of_a_snapshot_have_their_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    users = (GpuProcess(8101, 3 * GIB, "python"), GpuProcess(8102, None, "python"), GpuProcess(8103, GIB, None))
    cards = tuple(Gpu(n, "card", f"uuid{n}", 80 * GIB, 8 * GIB, 72 * GIB, users) for n in range(2))
    monkeypatch.setattr("legroom.probe.snapshot.gpus", lambda host: Gpus(cards, 2, "580", "NVML"))
    machine = snapshot(Host.at(TREES / "bare-v2"))
    assert {one.pid: one.gpu for one in machine.processes if one.gpu is not None} == {8101: 6 * GIB}

"""Each rule speaks when its numbers say so, stays silent otherwise, and never makes up a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB, healthy, with_pool

from legroom.advice.findings import findings
from legroom.records.finding_and_alarm import Finding
from legroom.records.machine import (
    CgroupLevel,
    Disk,
    Gpu,
    GpuProcess,
    Gpus,
    Leftover,
    Machine,
    Pool,
    Pressure,
    Process,
    Temporary,
)


def _shm(size: int, used: int = 0, **more: object) -> Machine:
    machine = healthy()
    machine = with_pool(machine, "shm", size, used, size - used)
    return replace(machine, shm=replace(machine.shm, size=size, used=used, free=size - used, **more))


def _gpu(used: int | None, size: int | None = 80 * GB, **more: object) -> Machine:
    free = None if used is None or size is None else size - used
    card = Gpu(0, "card", "GPU-0", size, used, free, more.pop("processes", ()), **more)
    return healthy(gpus=Gpus((card,), 1, "580", "NVML"))


def _leftover(**more: object) -> Leftover:
    return replace(Leftover("torch_1_2_3", "torch", 40 * MB, 3600.0, False, 0), **more)


def _memory(**more: object) -> Machine:
    return healthy(memory=replace(healthy().memory, **more))


def _restarted_pod(used: int, own: int | None, size: int = 16 * GB, kind: str = "kubernetes") -> Machine:
    machine = _shm(size, used)
    level = CgroupLevel("/pod/container", limit=16 * GB, usage=2 * GB, shmem=own)
    runtime = replace(machine.runtime, kind=kind)
    return replace(machine, memory=replace(machine.memory, levels=(level,)), runtime=runtime)


CASES: dict[str, tuple[Callable[[], Machine], str]] = {
    "shm-default-64mb": (lambda: _shm(64 * MB), "critical"),
    "shm-small": (lambda: _shm(256 * MB), "warning"),
    "shm-nearly-full": (lambda: _shm(GB, int(0.85 * GB)), "warning"),
    "shm-above-cgroup-limit": (lambda: with_pool(_shm(16 * GB), "ram", 8 * GB, GB, 7 * GB), "warning"),
    "tmpfs-charged-from-earlier-container": (lambda: _restarted_pod(used=6 * GB, own=GB), "warning"),
    "shm-leftovers": (lambda: _shm(32 * GB, files=(_leftover(),)), "info"),
    "shm-permissions": (lambda: _shm(32 * GB, writable=False, mode=0o755), "critical"),
    "shm-removed-at-logout": (lambda: _shm(32 * GB, removed_at_logout=True, removed_how="RemoveIPC=yes"), "info"),
    "ram-near-limit": (lambda: with_pool(healthy(), "ram", 64 * GB, 60 * GB, 4 * GB), "warning"),
    "ram-throttled": (lambda: _memory(levels=(CgroupLevel("/g", high=GB, usage=GB + 1),)), "warning"),
    "oom-kills-seen": (lambda: _memory(events=replace(healthy().memory.events, oom_kills=2)), "warning"),
    "swap-in-use": (lambda: healthy(swap=replace(healthy().swap, total=4 * GB, used=2 * GB)), "info"),
    "memory-pressure": (lambda: healthy(pressure=(Pressure("cgroup", 30.0, 9.0, 3.0, 1.0, "/p"),)), "warning"),
    "cgroup-below-host": (lambda: with_pool(healthy(), "ram", 8 * GB, GB, 7 * GB), "info"),
    "above-cgroup-root-unknown": (lambda: _memory(above_hidden=True), "info"),
    "gpu-nearly-full": (lambda: _gpu(74 * GB), "warning"),
    "gpu-unseen": (lambda: healthy(gpus=Gpus((), 2, None, "NVML", "driver not loaded")), "warning"),
    "gpu-spilling": (lambda: _gpu(70 * GB, spilled=2 * GB), "critical"),
    "fds-low": (lambda: healthy(limits=replace(healthy().limits, nofile_soft=1024)), "info"),
    "disk-low": (lambda: healthy(disks=(Disk("work", "/w", 500 * GB, GB, "ext4"),)), "warning"),
    "cpu-quota-below-affinity": (lambda: healthy(cpu=replace(healthy().cpu, quota=2.5)), "info"),
    "tmpdir-too-long": (lambda: healthy(temporary=Temporary("/" + "x" * 89, "TMPDIR", 122, 107)), "critical"),
}


def _by_code(machine: Machine) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings(machine)}


def test_a_healthy_machine_has_no_finding() -> None:
    assert findings(healthy()) == ()


@pytest.mark.parametrize("code", CASES)
def test_each_finding_fires_with_its_severity(code: str) -> None:
    make, severity = CASES[code]
    finding = _by_code(make())[code]
    assert finding.severity == severity
    assert finding.message and finding.why and finding.fix
    assert "None" not in finding.message + finding.why + " ".join(finding.fix)


@pytest.mark.parametrize("code", sorted(CASES.keys() - {"cgroup-below-host", "above-cgroup-root-unknown"}))
def test_each_fix_ends_with_the_command_that_proves_it(code: str) -> None:
    assert any(step.startswith("check:") for step in _by_code(CASES[code][0]())[code].fix)


@pytest.mark.parametrize(
    ("machine", "code", "severity"),
    [
        (_shm(GB, int(0.96 * GB)), "shm-nearly-full", "critical"),
        (with_pool(healthy(), "ram", 64 * GB, 63 * GB, GB), "ram-near-limit", "critical"),
        (
            healthy(swap=replace(healthy().swap, total=4 * GB, used=GB, in_rate=5.0 * MB, out_rate=0.0)),
            "swap-in-use",
            "critical",
        ),
        (healthy(pressure=(Pressure("machine", 60.0, 9.0, 30.0, 1.0, "/p"),)), "memory-pressure", "critical"),
        (_gpu(79 * GB), "gpu-nearly-full", "critical"),
        (_gpu(None, None, reason="GPU is lost"), "gpu-unseen", "warning"),
        (healthy(limits=replace(healthy().limits, nofile_soft=256)), "fds-low", "warning"),
        (healthy(disks=(Disk("work", "/w", 500 * GB, 100 * MB, None),)), "disk-low", "critical"),
        (_shm(32 * GB, files=(_leftover(size=4 * GB),)), "shm-leftovers", "warning"),
        (_shm(32 * GB, mode=0o777), "shm-permissions", "warning"),
        (_shm(65 * GB), "shm-above-cgroup-limit", "info"),
        (_memory(events=replace(healthy().memory.events, oom_kills=1, scope="machine")), "oom-kills-seen", "info"),
    ],
)
def test_severity_follows_the_numbers(machine: Machine, code: str, severity: str) -> None:
    assert _by_code(machine)[code].severity == severity


@pytest.mark.parametrize(
    "machine",
    [
        _shm(512 * MB),
        _shm(GB, int(0.79 * GB)),
        _shm(32 * GB, files=(_leftover(mapped=True), _leftover(age=5.0), _leftover(kind="other"))),
        _shm(32 * GB, files=(_leftover(size=0),)),  # nothing would be gained
        _shm(32 * GB, files=(_leftover(mapped=None),)),  # cannot be told: never advise to delete it
        healthy(cpu=replace(healthy().cpu, quota=16.0)),
        healthy(gpus=Gpus((), 0, None, "NVML", "no driver")),
        healthy(limits=replace(healthy().limits, nofile_soft=-1)),  # unlimited
        healthy(temporary=Temporary("/" + "x" * 74, "TMPDIR", 107, 107)),
        _gpu(71 * GB),
        _gpu(10 * GB, spilled=2 * GB),  # pinned buffers count too, and the card is not full
        _gpu(70 * GB, spilled=10 * MB),
    ],
)
def test_silent_below_the_thresholds(machine: Machine) -> None:
    assert findings(machine) == ()


def test_the_longest_folder_for_sockets_is_reported() -> None:
    finding = _by_code(CASES["tmpdir-too-long"][0]())["tmpdir-too-long"]
    assert (
        "90 bytes" in finding.message and "122 bytes long, the limit is 107" in finding.why and "75" in finding.fix[-1]
    )


def test_the_machines_shm_is_not_made_smaller_for_one_cgroup() -> None:
    machine = with_pool(_shm(252 * GB), "ram", 8 * GB, GB, 7 * GB)
    for runtime in (machine.runtime, replace(machine.runtime, kind="slurm", root=False, may_mount=False)):
        fix = "\n".join(_by_code(replace(machine, runtime=runtime))["shm-above-cgroup-limit"].fix)
        assert "below 4G" in fix and "remount" not in fix and "too small" not in fix, fix


def test_a_containers_own_shm_is_brought_to_half_of_its_limit() -> None:
    machine = with_pool(_shm(16 * GB), "ram", 8 * GB, GB, 7 * GB)
    machine = replace(machine, runtime=replace(machine.runtime, kind="docker", may_mount=False))
    assert "docker run --shm-size=4G" in _by_code(machine)["shm-above-cgroup-limit"].fix[0]
    shared = replace(machine, shm=_shm(32 * GB).shm)  # half of the machine's RAM: --ipc=host
    assert "--ipc=private --shm-size=4G" in _by_code(shared)["shm-above-cgroup-limit"].fix[0]


def test_a_shm_above_the_machines_ram_may_be_bounded_by_root() -> None:
    finding = _by_code(_shm(252 * GB))["shm-above-cgroup-limit"]
    assert finding.severity == "info" and any("remount,size=32G" in step for step in finding.fix)
    assert not any("too small" in step for step in finding.fix)


@pytest.mark.parametrize(
    ("kind", "tool"),
    [("docker", "docker inspect"), ("podman", "podman inspect"), ("kubernetes", "kubectl"), ("slurm", "scontrol"),
     ("bare", "memory.max")],
)  # fmt: skip
def test_limits_above_are_queried_with_the_tool_of_the_runtime(kind: str, tool: str) -> None:
    machine = healthy()
    machine = replace(
        machine, runtime=replace(machine.runtime, kind=kind), memory=replace(machine.memory, above_hidden=True)
    )
    text = "\n".join(_by_code(machine)["above-cgroup-root-unknown"].fix)
    assert tool in text and (kind == "kubernetes" or "kubectl" not in text)


def test_no_limit_is_raised_beyond_the_machine() -> None:
    machine = with_pool(healthy(), "ram", 48 * GB, 47 * GB, GB // 2)
    machine = replace(machine, runtime=replace(machine.runtime, kind="docker"))
    assert "--memory=64G" in _by_code(machine)["ram-near-limit"].fix[0]  # not 96G: the machine has 64
    unlimited = replace(with_pool(machine, "ram", 64 * GB, 63 * GB, GB // 2))
    assert not any("--memory" in step for step in _by_code(unlimited)["ram-near-limit"].fix)


def test_a_small_shm_is_not_enlarged_to_what_it_has() -> None:
    machine = with_pool(_shm(64 * MB), "ram", 128 * MB, 10 * MB, 118 * MB)
    assert not any("64M" in step for step in _by_code(machine)["shm-default-64mb"].fix)


def test_only_64_mb_is_called_the_container_default() -> None:
    titles = {size: _by_code(_shm(size * MB))["shm-default-64mb"].message for size in (1, 8, 64)}
    assert "64 MB, the container default:" in titles[64]
    assert "8 MB, less than the container default of 64 MB:" in titles[8] and ", the container" not in titles[1]


def test_a_read_only_shm_is_not_a_matter_of_its_mode() -> None:
    machine = healthy()
    fix = _by_code(replace(machine, shm=replace(machine.shm, writable=False)))["shm-permissions"].fix
    assert "remount,rw" in fix[0] and not any("chmod" in step for step in fix)


def test_most_dangerous_first() -> None:
    machine = _shm(64 * MB, removed_at_logout=True)
    machine = replace(machine, limits=replace(machine.limits, nofile_soft=512))
    assert [finding.severity for finding in findings(machine)] == ["critical", "warning", "info"]


def test_sharing_strategy_is_never_offered_for_a_full_shm() -> None:
    for machine in (_shm(64 * MB), _shm(GB, GB), _shm(256 * MB)):
        said = " ".join(step for finding in findings(machine) for step in finding.fix)
        assert "sharing_strategy" not in said


def test_holders_are_named() -> None:
    machine = _shm(GB, int(0.9 * GB))
    machine = replace(machine, processes=(Process(4711, 1, "python train.py", 0, shm=700 * MB),))
    assert "4711 700 MB" in _by_code(machine)["shm-nearly-full"].why
    card = _gpu(78 * GB, processes=(GpuProcess(99, 70 * GB, None),))
    assert "99 70 GB" in _by_code(card)["gpu-nearly-full"].why
    assert "not visible" in _by_code(card)["gpu-nearly-full"].why


_amount = st.none() | st.integers(0, 1 << 40)


@st.composite
def _odd_boxes(draw: st.DrawFn) -> Machine:
    """Boxes in which any number may be missing or strange."""
    machine = healthy()
    pools = tuple(
        Pool(name, draw(_amount), draw(_amount), draw(_amount), "s", "r")
        for name in ("shm", "ram", "swap", "fds", "disk")
    )
    level = CgroupLevel("/g", *(draw(_amount) for _ in fields(CgroupLevel)[1:]))
    events = replace(machine.memory.events, oom_kills=draw(_amount), at_limit=draw(_amount), throttled=draw(_amount))
    card = Gpu(0, "c", "u", draw(_amount), draw(_amount), draw(_amount), None, spilled=draw(_amount))
    return replace(
        machine,
        pools=draw(st.just(pools) | st.just(())),
        shm=replace(machine.shm, size=draw(_amount), mode=draw(st.none() | st.integers(0, 0o7777)), writable=draw(st.none() | st.booleans())),
        memory=replace(machine.memory, total=draw(_amount), levels=(level,), events=events, above_hidden=draw(st.none() | st.booleans())),
        swap=replace(machine.swap, used=draw(_amount), total=draw(_amount), in_rate=draw(st.none() | st.floats(0, 1e9)), out_rate=None),
        gpus=replace(machine.gpus, cards=draw(st.just((card,)) | st.just(())), on_bus=draw(_amount)),
        cpu=replace(machine.cpu, affinity=draw(st.none() | st.integers(1, 256)), quota=draw(st.none() | st.floats(0.01, 256))),
        limits=replace(machine.limits, nofile_soft=draw(st.none() | st.integers(-1, 1 << 20)), nofile_hard=draw(_amount)),
        disks=(Disk("work", "/w", draw(_amount), draw(_amount), None),),
    )  # fmt: skip


@given(_odd_boxes())
def test_findings_for_any_machine_are_valid(machine: Machine) -> None:
    said = findings(machine)
    assert len({(finding.code, finding.message) for finding in said}) == len(said)
    for finding in said:
        assert "None" not in finding.message + finding.why


def test_a_full_shm_is_not_to_grow_beyond_the_memory_behind_it() -> None:
    full = with_pool(_shm(32 * GB, 31 * GB), "ram", 40 * GB, 31 * GB, 9 * GB)
    text = "\n".join(_by_code(full)["shm-nearly-full"].fix)
    assert "remount" not in text and "a larger /dev/shm is not advised: its 32 GB" in text and "40 GB" in text
    assert "remount,size=2G" not in text and "df -h /dev/shm" in text
    roomy = "\n".join(_by_code(_shm(16 * GB, 15 * GB))["shm-nearly-full"].fix)
    assert "remount,size=32G" in roomy


def test_pages_of_an_earlier_container() -> None:
    code = "tmpfs-charged-from-earlier-container"
    found = _by_code(_restarted_pod(used=6 * GB, own=GB))[code]
    assert found.message.startswith("5 GB in /dev/shm") and "legroom cache gc --free 5G" in found.fix[0]
    silent = [
        _restarted_pod(used=6 * GB, own=6 * GB),  # all of it is this container's
        _restarted_pod(used=6 * GB, own=None),
        _restarted_pod(used=6 * GB, own=GB, kind="docker"),  # a new container has a new /dev/shm there
        _restarted_pod(used=6 * GB, own=GB, size=32 * GB),  # the node's: others write to it too
    ]
    assert not any(code in _by_code(machine) for machine in silent)

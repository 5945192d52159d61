"""The fix belongs to the place, and can be pasted as it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB, healthy

from legroom.advice import fix_commands
from legroom.advice.fit_on_machine import relieve
from legroom.records.machine import RuntimeEnvironment

BARE = healthy().runtime


def _at(kind: str, **more: object) -> RuntimeEnvironment:
    return replace(BARE, kind=kind, **more)


def _text(steps: tuple[str, ...]) -> str:
    return "\n".join(steps)


def test_docker_restarts_with_shm_size() -> None:
    text = _text(fix_commands.enlarge_shm(_at("docker", may_mount=False), 8 * GB))
    assert "docker run --shm-size=8G" in text and "shm_size: 8gb" in text and "remount" not in text
    assert "podman run --shm-size=8G" in _text(fix_commands.enlarge_shm(_at("podman", may_mount=False), 8 * GB))


def test_a_privileged_container_may_remount() -> None:
    assert "mount -o remount,size=2G /dev/shm" in fix_commands.enlarge_shm(_at("docker", may_mount=True), 2 * GB)[0]


def test_kubernetes_gets_a_memory_volume_that_is_yaml() -> None:
    line = fix_commands.enlarge_shm(_at("kubernetes", may_mount=False), 8 * GB)[0]
    volumes, mounts = line.splitlines()[1:]
    parsed = yaml.safe_load(volumes)
    assert parsed == {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]}
    assert yaml.safe_load(mounts) == {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}


@pytest.mark.parametrize(
    ("rights", "command"),
    [
        ({"root": True, "may_mount": True}, "now:\nmount -o remount,size=8G /dev/shm"),
        ({"root": False, "may_mount": False, "sudo": True}, "now:\nsudo mount -o remount,size=8G /dev/shm"),
    ],
)
def test_a_bare_machine_remounts(rights: dict[str, bool], command: str) -> None:
    steps = fix_commands.enlarge_shm(_at("bare", **rights), 8 * GB)
    assert steps[0] == command
    assert "tmpfs /dev/shm tmpfs defaults,size=8G 0 0" in steps[1].splitlines() and "mount -a does not" in steps[2]


@pytest.mark.parametrize("kind", ["bare", "slurm", "container"])
def test_without_rights_there_is_a_letter_to_the_administrator(kind: str) -> None:
    text = _text(fix_commands.enlarge_shm(_at(kind, root=False, may_mount=False, sudo=False), 8 * GB))
    assert "num_workers=0" in text and "ask the administrator" in text and "remount,size=8G" in text


@given(st.none() | st.integers(64 * MB, 4096 * GB))
def test_advice_is_a_power_of_two_within_the_memory(ram: int | None) -> None:
    size = fix_commands.advised_shm(ram)
    assert size & (size - 1) == 0
    assert size <= 8 * GB
    if ram is not None and ram >= 128 * MB:
        assert size <= ram // 2
    if ram is not None and ram >= 2 * GB:
        assert 512 * MB <= size <= ram // 4


def test_swap_is_cleared_only_with_rights_and_a_warning() -> None:
    text = _text(fix_commands.settle_swap(_at("bare", root=False, sudo=True), moving=True))
    assert "sudo swapoff -a && sudo swapon -a" in text and "OOM killer" in text
    assert "swapoff" not in _text(fix_commands.settle_swap(_at("bare", root=False, sudo=False), moving=True))
    assert "swapoff" not in _text(fix_commands.settle_swap(_at("docker"), moving=True))


def test_descriptors_up_to_the_hard_limit_need_no_administrator() -> None:
    assert "ulimit -n 65536" in _text(fix_commands.raise_nofile(BARE, 1024, 1 << 20))
    text = _text(fix_commands.raise_nofile(BARE, 1024, 4096))
    assert "ulimit -n 4096" in text and "limits.conf" in text
    assert "ulimit -n 4096" not in _text(fix_commands.raise_nofile(BARE, 4096, 4096))
    assert "--ulimit nofile=65536:65536" in _text(fix_commands.raise_nofile(_at("docker"), 1024, 1024))


def test_leftovers_are_quoted_and_counted() -> None:
    line = fix_commands.remove_leftovers(("torch_1", "a b;c", "x", "y", "z", "w"), 5 * MB)[0]
    assert "rm /dev/shm/torch_1 '/dev/shm/a b;c'" in line or "rm /dev/shm/torch_1 /dev/shm/'a b;c'" in line
    assert "these 6 files (5 MB in total)" in line and line.endswith("/dev/shm/z")


@pytest.mark.parametrize(
    ("kind", "part"), [("docker", "--memory=16G"), ("kubernetes", "16Gi"), ("slurm", "--mem=16G"), ("bare", "ps -eo")]
)
def test_more_ram_by_runtime(kind: str, part: str) -> None:
    assert part in _text(fix_commands.raise_ram_limit(_at(kind), 8 * GB))


def test_without_rights_there_are_other_ways_too() -> None:
    text = _text(fix_commands.enlarge_shm(_at("slurm", root=False, may_mount=False, sudo=False), 8 * GB))
    assert "legroom.DataLoader" in text and 'backing="disk"' in text and "counts against --mem" in text


def test_swap_is_not_emptied_into_ram_that_is_not_there() -> None:
    unsafe = _text(fix_commands.settle_swap(BARE, moving=False, used=4 * GB, free=1 * GB))
    assert "do not run swapoff now" in unsafe and "swapoff -a" not in unsafe
    safe = _text(fix_commands.settle_swap(BARE, moving=False, used=1 * GB, free=4 * GB))
    assert "swapoff -a && swapon -a" in safe and "nothing to do" in safe


def test_a_gpu_too_small_by_platform() -> None:
    assert "nvidia-smi" in _text(fix_commands.use_less_gpu(BARE))
    windows = replace(BARE, platform="win32")
    assert fix_commands.use_less_gpu(windows) == fix_commands.stop_spilling()
    assert "Sysmem Fallback" in _text(fix_commands.stop_spilling())


def test_wsl_gets_more_ram_from_windows() -> None:
    text = _text(fix_commands.raise_ram_limit(_at("wsl"), 8 * GB))
    assert "under [wsl2]" in text and "\nmemory=16GB\n" in text


@pytest.mark.parametrize("kind", ["bare", "docker", "podman", "kubernetes", "slurm", "wsl", "container"])
@pytest.mark.parametrize("pool", ["shm", "ram", "fds", "disk", "gpu0"])
@pytest.mark.parametrize("rights", [True, False])
def test_every_runtime_and_pool_has_a_fix_that_can_be_checked(kind: str, pool: str, rights: bool) -> None:
    machine = replace(healthy(), runtime=_at(kind, root=rights, may_mount=rights, sudo=rights))
    steps = relieve(machine, pool, 3 * GB)
    assert len(steps) >= 2 and steps[-1].startswith("check:")
    assert not any("None" in step for step in steps)


@given(st.integers(MB, 512 * GB), st.none() | st.integers(256 * MB, 4096 * GB))
def test_a_full_shm_is_enlarged_only_as_far_as_the_memory_behind_it_goes(size: int, ram: int | None) -> None:
    wanted = fix_commands.doubled_shm(size, ram)
    if wanted is None:
        return
    assert wanted > size and wanted & (wanted - 1) == 0 and wanted <= 64 * GB
    if ram is not None:
        assert wanted <= ram // 2


def test_a_full_shm_of_half_the_ram_is_not_to_grow() -> None:
    assert fix_commands.doubled_shm(32 * GB, 64 * GB) is None and fix_commands.doubled_shm(8 * GB, 64 * GB) == 16 * GB
    assert fix_commands.doubled_shm(64 * MB, 64 * GB) == 8 * GB


def test_a_shm_beyond_the_memory_behind_it_is_never_advised() -> None:
    machine = healthy()  # 64 GB of RAM
    assert not any("remount" in step for step in relieve(machine, "shm", 100 * GB))
    assert any("remount,size=64G" in step for step in relieve(machine, "shm", 40 * GB))


def test_sudo_in_a_container_does_not_remount() -> None:
    runtime = _at("docker", root=False, may_mount=False, sudo=True)
    assert "remount" not in _text(fix_commands.enlarge_shm(runtime, 8 * GB))


def test_descriptors_of_a_pod_are_the_runtimes() -> None:
    text = _text(fix_commands.raise_nofile(_at("kubernetes"), 1024, 4096))
    assert "container runtime" in text and "limits.conf" not in text


def test_a_pod_with_too_large_a_shm_is_not_given_more_memory() -> None:
    steps = fix_commands.bound_shm(_at("kubernetes"), 8 * GB, own=True, shared=False)
    assert "sizeLimit: 8Gi" in steps[0] and steps[-1].startswith("check:")
    assert "raise that limit" not in _text(steps)
    assert "raise that limit" in _text(fix_commands.enlarge_shm(_at("kubernetes"), 8 * GB))


def test_where_ram_is_short_the_rights_are_not_the_reason() -> None:
    steps = relieve(healthy(), "shm", 100 * GB)  # of 64 GB of RAM
    assert steps[0].startswith("num_workers=0") and "without root" not in _text(steps)
    text = _text(fix_commands.enlarge_shm(_at("bare", root=False, may_mount=False, sudo=False), 8 * GB))
    assert text.startswith("without root: num_workers=0")

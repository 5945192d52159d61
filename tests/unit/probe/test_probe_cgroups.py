"""Finding the cgroup of a process: every layout, what is hidden, and nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import NAMES, TREES, FakeHost, mount, tree
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.filesystems_and_cgroups import UNIFIED, Cgroup, cgroup
from legroom.probe.host_files_and_syscalls import Host

TOP = "/sys/fs/cgroup"
POD = f"{TOP}/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f1c2d3e_4a5b_6c7d_8e9f_a0b1c2d3e4f5.slice"
CONTAINER = "3f4c9b1d5a7e2c8064b1f0d9e8a7c6b5d4e3f2a1908172635445362718090a1b"
APP = f"{TOP}/user.slice/user-1000.slice/user@1000.service/app.slice/train.service"

# tree: (version, own directory, length of the chain, top of the chain, something above is hidden)
EXPECTED = {
    "bare-v2": ("v2", f"{TOP}/user.slice/user-1000.slice/session-3.scope", 4, TOP, False),
    "docker-v1": ("v1", f"{TOP}/memory", 1, f"{TOP}/memory", True),
    "docker-v2": ("v2", TOP, 1, TOP, True),
    "hybrid": ("v1", f"{TOP}/memory/jobs/cbe5e45303d195625ba4d1d4f7dda41e", 3, f"{TOP}/memory", False),
    "kubernetes-ancestor": ("v2", f"{POD}/cri-containerd-{CONTAINER}.scope", 5, TOP, False),
    "masked-proc": ("v2", f"{TOP}/app", 2, TOP, True),
    "podman-v2": ("v2", TOP, 1, TOP, True),
    "slurm": ("v2", f"{TOP}/system.slice/slurmstepd.scope/job_481516/step_0/user/task_0", 7, TOP, False),
    "swap-on": ("v2", APP, 6, TOP, False),
    "v1-unlimited": (
        "v1", f"{TOP}/memory/user.slice/user-1000.slice/session-12.scope", 4, f"{TOP}/memory", False,
    ),
    "wsl": ("v2", f"{TOP}/init.scope", 2, TOP, False),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name != "no-cgroup"])
def test_memory_group_of_every_tree(name: str) -> None:
    version, own, length, top, hidden = EXPECTED[name]
    group = cgroup(tree(name), "memory")
    assert (group.version, group.chain[0], group.chain[-1]) == (version, own, top)
    assert len(group.chain) == length
    assert group.above_hidden is hidden
    assert group.reason is None
    for child, parent in zip(group.chain, group.chain[1:], strict=False):
        assert str(Path(child).parent) == parent


def test_no_cgroup_at_all_has_a_reason() -> None:
    group = cgroup(tree("no-cgroup"), "memory")
    assert group == Cgroup(None, (), None, "/proc/self/cgroup does not exist")


def test_controllers_of_v1_may_live_in_different_groups() -> None:
    host = tree("v1-unlimited")
    assert cgroup(host, "cpu").chain == (f"{TOP}/cpu,cpuacct/user.slice", f"{TOP}/cpu,cpuacct")
    assert cgroup(host, UNIFIED).chain[0].startswith(f"{TOP}/unified/user.slice")


def test_hybrid_keeps_the_hierarchies_apart() -> None:
    host = tree("hybrid")
    assert cgroup(host, "cpu").chain == (f"{TOP}/cpu",)
    unified = cgroup(host, UNIFIED)
    assert (unified.version, unified.chain, unified.is_root) == ("v2", (f"{TOP}/unified",), True)


def test_another_process_s_group() -> None:
    assert cgroup(tree("bare-v2"), "memory", "8101").chain[0].endswith("session-3.scope")
    # systemd's own group is named but was not recorded: its parents are.
    init = cgroup(tree("bare-v2"), "memory", "1")
    assert init.chain == (TOP,)
    assert init.reason is not None and "init.scope does not exist" in init.reason
    gone = cgroup(tree("bare-v2"), "memory", "31337")
    assert gone.version is None and gone.reason == "/proc/31337/cgroup does not exist"


def _v2(path: str, mounts: str, *directories: str) -> Cgroup:
    files = {f"{directory}/cgroup.procs": "" for directory in directories}
    host = FakeHost(files={"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": mounts, **files})
    return cgroup(host, "memory")


def test_the_last_of_several_mounts_on_one_point_is_seen() -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/docker/abc\n",
        "/proc/self/mountinfo": mount("/m", "/", "cgroup", "rw,memory")
        + mount("/m", "/docker/abc", "cgroup", "rw,memory"),
        "/m/memory.limit_in_bytes": "1",
    }
    group = cgroup(FakeHost(files=files), "memory")
    assert group.chain == ("/m",) and group.above_hidden is True and group.reason is None


def test_a_mount_covered_by_something_else_is_not_used() -> None:
    group = _v2("/a", mount("/c") + mount("/c", kind="tmpfs"), "/c/a")
    assert group.version is None and group.reason is not None and "not mounted" in group.reason


def test_of_several_mounts_the_one_that_shows_most_is_taken() -> None:
    group = _v2("/a/b", mount("/part", "/a/b") + mount("/all") + mount("/other", "/x"), "/part", "/all/a/b")
    assert group.chain == ("/all/a/b", "/all/a", "/all")


def test_a_prefix_of_names_is_not_a_prefix_of_letters() -> None:
    group = _v2("/docker-2/x", mount("/c", "/docker"), "/c/x")
    assert group.version is None and group.reason is not None and "is outside the mount" in group.reason


def test_escaped_points_are_read_as_they_are() -> None:
    group = _v2("/a b", mount("/my\\040cg\\134roup"), "/my cg\\roup/a b")
    assert group.chain == ("/my cg\\roup/a b", "/my cg\\roup")


def test_systemd_s_own_escapes_are_part_of_the_name() -> None:
    group = _v2("/system-x\\x2dy.slice", mount("/c"), "/c/system-x\\x2dy.slice")
    assert group.chain[0] == "/c/system-x\\x2dy.slice" and group.reason is None


def test_a_colon_in_the_path_stays_there() -> None:
    assert _v2("/a:b:c", mount("/c"), "/c/a:b:c").chain[0] == "/c/a:b:c"


def test_a_process_outside_the_namespace_has_no_visible_group() -> None:
    group = _v2("/../sibling", mount("/c"), "/c", "/sibling")
    assert group.version is None and group.chain == ()


def test_a_mount_from_above_the_namespace_still_shows_a_group_above() -> None:
    group = _v2("/", mount("/c", "/../.."), "/c/system.slice/x")
    assert group.chain == ("/c",) and group.above_hidden is False
    assert group.reason is not None and "hides the path" in group.reason
    named = _v2("/../../system.slice/x", mount("/c", "/../.."), "/c/system.slice/x")
    assert named.chain == ("/c/system.slice/x", "/c/system.slice", "/c") and named.reason is None


def test_a_removed_group_is_read_from_above() -> None:
    group = _v2("/a/b (deleted)", mount("/c"), "/c/a")
    assert group.chain == ("/c/a", "/c")
    assert group.reason is not None and "(deleted) does not exist" in group.reason


def test_below_another_root_the_mounts_are_inits(tmp_path: Path) -> None:
    for path, content in {
        "proc/1/mountinfo": mount("/sys/fs/cgroup", "/../.."),
        "proc/self/mountinfo": mount("/sys/fs/cgroup"),
        "proc/77/cgroup": "0::/../../job\n",
        "sys/fs/cgroup/job/memory.max": "5",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert cgroup(Host.at(tmp_path), "memory", "77").chain == (f"{TOP}/job", TOP)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_no_content_raises(membership: bytes, mounts: bytes) -> None:
    host = FakeHost(files={"/proc/self/cgroup": membership, "/proc/self/mountinfo": mounts})
    group = cgroup(host, "memory")
    assert group.version is not None or group.reason


_path = st.text("/.ab \\\x00:", max_size=12).map(lambda text: "/" + text)


@given(_path, _path, _path, st.booleans())
def test_odd_paths_never_raise_and_never_leave_the_mount(path: str, point: str, root: str, there: bool) -> None:
    files = {"/proc/self/cgroup": f"0::{path}", "/proc/self/mountinfo": mount(point, root)}
    group = cgroup(FakeHost(files=files | ({f"{point}{path}/x": ""} if there else {})), "memory")
    for directory in group.chain:
        assert directory.startswith(group.chain[-1])
        assert ".." not in directory.removeprefix(group.chain[-1]).split("/")


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="no cgroups here")
def test_the_live_machine() -> None:
    group = cgroup(Host(), "memory")
    if group.version is None:
        assert group.reason
    else:
        assert all(Path(directory).is_dir() for directory in group.chain)


def test_every_tree_is_expected() -> None:
    assert {*EXPECTED, "no-cgroup"} == set(NAMES)
    assert TREES.is_dir()

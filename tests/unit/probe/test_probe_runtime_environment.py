"""Where this runs and what may be changed there, on recorded machines and on made-up ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rigs
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.runtime_environment import environment, has_capability, in_initial_namespace, status_fields
from legroom.records.machine import RuntimeEnvironment

TREES = Path(__file__).parents[2] / "trees"
PLAIN_DOCKER = "00000000a80425fb"  # what docker gives root: no CAP_SYS_ADMIN
ALL = "000001ffffffffff"


def machine(root: Path, files: dict[str, str] | None = None, links: dict[str, str] | None = None, **given: Any) -> Host:
    """A made-up Linux machine below ``root``."""
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, target in (links or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    recording = {"uid": 1000, "groups": [], "kernel": "6.8.0"} | given
    env = recording.pop("env", {})
    return Host(root=root, env=env, platform=recording.pop("platform", "linux"), recording=recording)


@pytest.mark.parametrize(
    ("tree", "kind", "how", "root", "may_mount"),
    [
        ("bare-v2", "bare", "no sign", False, False),
        ("docker-v1", "docker", "docker in /proc/self/cgroup", True, False),
        ("docker-v2", "docker", "/.dockerenv", True, False),
        ("podman-v2", "podman", "/run/.containerenv", True, False),
        ("kubernetes-ancestor", "kubernetes", "KUBERNETES_SERVICE_HOST", False, False),
        ("slurm", "slurm", "SLURM_JOB_ID", False, False),
        ("wsl", "wsl", "WSL_DISTRO_NAME", False, False),
        ("masked-proc", "bare", "no sign", False, False),
    ],
)
def test_recorded_machines(tree: str, kind: str, how: str, root: bool, may_mount: bool) -> None:
    found = environment(Host.at(TREES / tree))
    assert (found.kind, found.root, found.may_mount) == (kind, root, may_mount)
    assert how in found.how
    assert found.platform == "linux"


DOCKER_HOSTS = "1 2 8:1 /var/lib/docker/containers/ab/hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
KUBELET_HOSTS = "1 2 8:1 /var/lib/kubelet/pods/0-1-2/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
OVERLAY_ROOT = "1 0 0:30 / / rw - overlay overlay rw\n"
OWN_PIDS = {"/proc/self/ns/pid": "pid:[4026532700]"}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("a service account", {"files": {"/var/run/secrets/kubernetes.io/serviceaccount/token": ""}}, "kubernetes", "/var/run/secrets"),
    ("kubepods", {"files": {"/proc/self/cgroup": "0::/kubepods.slice/x\n", "/.dockerenv": ""}}, "kubernetes", "kubepods"),
    ("the kubelet's hosts", {"files": {"/proc/self/mountinfo": KUBELET_HOSTS}}, "kubernetes", "kubelet"),
    ("a pod on cri-o", {"env": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "files": {"/run/.containerenv": ""}}, "kubernetes", "KUBER"),
    ("docker's hosts", {"files": {"/proc/self/mountinfo": DOCKER_HOSTS}}, "docker", "/etc/hosts"),
    ("docker on v1", {"files": {"/proc/self/cgroup": "4:memory:/docker/0a1b\n"}}, "docker", "/proc/self/cgroup"),
    ("docker by systemd", {"files": {"/proc/self/cgroup": "0::/system.slice/docker-0a1b.scope\n"}}, "docker", "cgroup"),
    ("docker on Windows", {"files": {"/.dockerenv": ""}, "kernel": "5.15-microsoft-standard-WSL2"}, "docker", "/.dockerenv"),
    ("podman", {"files": {"/proc/self/cgroup": "0::/machine.slice/libpod-0a.scope\n"}}, "podman", "libpod"),
    ("podman's variable", {"env": {"container": "podman"}}, "podman", "container=podman"),
    ("lxc", {"files": {"/proc/1/environ": "A=1\0container=lxc\0"}}, "container", "lxc, by container=lxc in /proc/1/environ"),
    ("lxc's cgroup", {"files": {"/proc/self/cgroup": "0::/lxc.payload.c1/init\n"}}, "container", "lxc"),
    ("nspawn", {"files": {"/run/systemd/container": "systemd-nspawn\n"}}, "container", "systemd-nspawn"),
    ("apptainer", {"env": {"APPTAINER_CONTAINER": "/x.sif"}}, "container", "apptainer, by APPTAINER_CONTAINER"),
    ("singularity", {"files": {"/.singularity.d/runscript": ""}}, "container", "apptainer, by /.singularity.d"),
    ("containerd", {"files": {"/proc/self/cgroup": "0::/system.slice/cri-containerd-1.scope\n"}}, "container", "containerd"),
    ("unknown", {"files": {"/proc/self/mountinfo": OVERLAY_ROOT}, "links": OWN_PIDS}, "container", "overlay"),
    ("an overlay alone", {"files": {"/proc/self/mountinfo": OVERLAY_ROOT}}, "bare", "no sign"),
    ("a pid namespace alone", {"links": OWN_PIDS}, "bare", "no sign"),
    ("wsl by its kernel", {"kernel": "5.15.153.1-microsoft-standard-WSL2"}, "wsl", "5.15.153.1-microsoft"),
    ("wsl as systemd sees it", {"files": {"/run/systemd/container": "wsl\n"}, "kernel": "5.15-Microsoft"}, "wsl", "kernel"),
    ("slurm by its cgroup", {"files": {"/proc/self/cgroup": "4:memory:/slurm/uid_1/job_2/step_0\n"}}, "slurm", "cgroup"),
    ("nothing", {}, "bare", "no sign"),
]  # fmt: skip


@pytest.mark.parametrize(("given_", "kind", "how"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_every_runtime_is_recognised(tmp_path: Path, given_: dict[str, Any], kind: str, how: str) -> None:
    found = environment(machine(tmp_path, **given_))
    assert found.kind == kind
    assert how in found.how


@pytest.mark.parametrize("files", [{"/.dockerenv": ""}, {"/.singularity.d/x": ""}, {"/run/.containerenv": ""}])
def test_slurm_in_a_container_is_the_container_and_names_slurm(tmp_path: Path, files: dict[str, str]) -> None:
    found = environment(machine(tmp_path, files, env={"SLURM_JOB_ID": "7"}))
    assert found.kind != "slurm" and found.kind != "bare"
    assert "slurm job (SLURM_JOB_ID)" in found.how


OWN = {"pid": 4026531836, "ipc": 4026531839, "uts": 4026531838}
OWN_NAMESPACES = {f"/proc/self/ns/{kind}": f"{kind}:[{number}]" for kind, number in OWN.items()}


@pytest.mark.parametrize(
    ("given_", "sign"),
    [
        ({"files": {"/.dockerenv": ""}}, "/.dockerenv"),
        ({"files": {"/run/systemd/container": "docker\n"}}, "/run/systemd/container"),
        ({"files": {}, "env": {"container": "oci"}}, "container=oci"),
    ],
)
def test_a_sign_in_the_machines_own_namespaces_is_an_images_leftover(
    tmp_path: Path, given_: dict[str, Any], sign: str
) -> None:
    found = environment(machine(tmp_path / "vm", links=OWN_NAMESPACES, **given_))
    assert found.kind == "bare"
    assert sign in found.how and "in the host's namespaces" in found.how
    for kind in OWN:
        links = OWN_NAMESPACES | {f"/proc/self/ns/{kind}": f"{kind}:[4026532000]"}
        assert environment(machine(tmp_path / kind, links=links, **given_)).kind in ("docker", "container")


@pytest.mark.parametrize(
    ("mountinfo", "kind"),
    [
        (DOCKER_HOSTS, "docker"),
        (DOCKER_HOSTS.replace("docker/containers/ab", "containers/storage/overlay-containers/ab/userdata"), "podman"),
    ],
)
def test_a_container_with_all_the_hosts_namespaces_is_still_one(tmp_path: Path, mountinfo: str, kind: str) -> None:
    assert environment(machine(tmp_path, {"/proc/self/mountinfo": mountinfo}, OWN_NAMESPACES)).kind == kind


def test_apptainer_keeps_the_hosts_namespaces(tmp_path: Path) -> None:
    found = environment(machine(tmp_path, links=OWN_NAMESPACES, env={"APPTAINER_CONTAINER": "/x.sif"}))
    assert found.kind == "container"


def rights(root: Path, status: str | None = None, sudo: bool = False, **given: Any) -> RuntimeEnvironment:
    files = {} if status is None else {"/proc/self/status": status}
    return environment(machine(root, files | ({"/usr/bin/sudo": ""} if sudo else {}), **given))


def test_root_in_a_plain_container_may_not_mount(tmp_path: Path) -> None:
    found = rights(tmp_path, f"CapEff:\t{PLAIN_DOCKER}\n", uid=0)
    assert found.root and not found.may_mount and found.rights_how == "root without CAP_SYS_ADMIN"


def test_root_with_everything_may_mount(tmp_path: Path) -> None:
    found = rights(tmp_path, f"CapEff:\t{ALL}\n", uid=0)
    assert found.root and found.may_mount and found.rights_how == "root with CAP_SYS_ADMIN"


def test_a_user_namespace_is_reported(tmp_path: Path) -> None:
    files, links = {"/proc/self/status": f"CapEff:\t{ALL}\n"}, {"/proc/self/ns/user": "user:[4026532001]"}
    assert (
        environment(machine(tmp_path, files, links, uid=0)).rights_how == "root with CAP_SYS_ADMIN in a user namespace"
    )


@pytest.mark.parametrize("status", [None, "", "CapEff:\tnonsense\n", "CapEff:\n", "\xff\0"])
def test_unreadable_capabilities_are_not_claimed(tmp_path: Path, status: str | None) -> None:
    found = rights(tmp_path, status, uid=0)
    assert not found.may_mount and "unknown" in found.rights_how


@pytest.mark.parametrize(
    ("sudo", "groups", "status", "expected", "words"),
    [
        (True, ["sudo"], "", True, "group sudo"),
        (True, ["wheel", "users"], "", True, "group wheel"),
        (True, ["admin"], "NoNewPrivs:\t0\n", True, "group admin"),
        (True, ["users"], "", None, "sudo is installed"),
        (False, ["sudo"], "", False, "no sudo"),
        (True, ["sudo"], "NoNewPrivs:\t1\n", False, "no_new_privs"),
    ],
)
def test_sudo(tmp_path: Path, sudo: bool, groups: list[str], status: str, expected: bool | None, words: str) -> None:
    found = rights(tmp_path, status, sudo, groups=groups)
    assert found.sudo is expected and words in found.rights_how and not found.root


def test_sudo_is_looked_for_on_the_path(tmp_path: Path) -> None:
    files = {"/opt/bin/sudo": ""}
    assert environment(machine(tmp_path, files, env={"PATH": "relative:/opt/bin"})).sudo is None
    assert environment(machine(tmp_path, files)).sudo is False


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_bare_and_have_no_capabilities(tmp_path: Path, platform: str) -> None:
    found = environment(machine(tmp_path, platform=platform, uid=None, kernel=None))
    assert (found.kind, found.platform, found.root, found.may_mount, found.kernel) == (
        "bare",
        platform,
        False,
        False,
        None,
    )
    assert f"no capabilities on {platform}" in found.rights_how


class Nonsense(Host):
    """A machine on which every file exists and holds the same text."""

    def text(self, path: str) -> str | None:
        return str(self.env.get("text"))

    def exists(self, path: str) -> bool:
        return False

    def link(self, path: str) -> str | None:
        return self.env.get("text")


@given(st.text())
def test_nonsense_in_every_file_raises_nothing(text: str) -> None:
    found = environment(Nonsense(env={"text": text}, recording={}))
    assert found.how and found.rights_how


@given(st.text())
def test_any_text_may_be_a_status(text: str) -> None:
    assert all(":" not in name for name in status_fields(text))


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_capability_bits(mask: int, number: int) -> None:
    assert has_capability(f"{mask:016x}", number) == bool(mask & (1 << number))


@given(st.text())
def test_any_text_may_be_a_mask(text: str) -> None:
    assert has_capability(text, 21) in (True, False, None)


LOOK = """
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.runtime_environment import environment
found = environment(Host())
print(found.root, found.may_mount)
"""


@pytest.mark.real("user")
def test_the_real_process_has_the_rights_it_reports() -> None:
    if in_initial_namespace(Host(), "user"):  # where root is not root of everything, the mask is the container's affair
        assert environment(Host()).root == (os.geteuid() == 0)
    command = [sys.executable, "-c", LOOK]
    plain = subprocess.run(rigs.as_user(65534, command), capture_output=True, text=True, check=True)
    assert plain.stdout.split() == ["False", "False"]
    bounded = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *command]
    less = subprocess.run(bounded, capture_output=True, text=True, check=True)
    assert less.stdout.split() == ["True", "False"]  # root, as in a plain docker container

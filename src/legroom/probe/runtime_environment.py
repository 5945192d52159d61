"""Where this process runs (bare, docker, podman, Kubernetes, Slurm, WSL, other container) and what it may change.

Every answer comes with the file or variable it was read from. Rights are root, CAP_SYS_ADMIN and sudo; sudo is never
run.

The order of the checks matters. A pod also looks like a container, and docker on Windows also looks like WSL. A Slurm
job in a container is configured where the container is started.
"""

from __future__ import annotations

from collections.abc import Iterator

from legroom.messages import joined, listed, say
from legroom.probe.filesystems_and_cgroups import Mount, mounted_at, mounts
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.machine import RuntimeEnvironment, RuntimeKind

CAP_SYS_ADMIN = 21
SUDO_GROUPS = frozenset({"sudo", "wheel", "admin"})
_SUDO_PLACES = ("/usr/bin", "/bin", "/usr/local/bin", "/usr/sbin", "/sbin")
_CGROUP, _MOUNTS = "/proc/self/cgroup", "/proc/self/mountinfo"

# The kernel gives the first namespace of each kind a fixed number (include/linux/proc_ns.h).
_INITIAL = {"uts": 4026531838, "ipc": 4026531839, "pid": 4026531836, "user": 4026531837}


def environment(host: Host) -> RuntimeEnvironment:
    """Where this process runs and what it may change."""
    kind, how = _where(host)
    job = _slurm(host)
    if kind == "bare" and job is not None:
        kind, how = "slurm", job
    elif job is not None:
        how = say("{how}; in a slurm job ({job})", how=how, job=job)
    status = status_fields(host.text("/proc/self/status") or "")
    capable = has_capability(status.get("CapEff"), CAP_SYS_ADMIN)
    sudo, sudo_how = _sudo(host, status)
    return RuntimeEnvironment(
        kind=kind,
        how=how,
        platform=host.platform,
        root=host.uid == 0,
        may_mount=capable is True,
        sudo=sudo,
        rights_how=_rights(host, capable, sudo_how),
        kernel=host.kernel,
    )


def in_initial_namespace(host: Host, kind: str) -> bool | None:
    """Whether this process is in the machine's own namespace of that kind; None where that is unknown."""
    link = host.link(f"/proc/self/ns/{kind}")
    return None if link is None else link == f"{kind}:[{_INITIAL[kind]}]"


def status_fields(text: str) -> dict[str, str]:
    """The ``Name: value`` lines of a /proc/<pid>/status."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def has_capability(mask: str | None, number: int) -> bool | None:
    """Whether a hexadecimal capability mask has that capability; None if it is not a mask."""
    try:
        return None if mask is None else bool(int(mask, 16) >> number & 1)
    except ValueError:
        return None


def _where(host: Host) -> tuple[RuntimeKind, str]:
    cgroups = host.text("/proc/self/cgroup") or ""
    found = mounts(host)
    if how := _kubernetes(host, cgroups, found):
        return "kubernetes", how
    if sure := _engine_by_kernel(cgroups, found):
        return sure
    # The following files and variables can also be part of a virtual machine's image.
    signs = list(_engine_signs(host))
    leftover = []
    if signs and all(in_initial_namespace(host, kind) for kind in ("pid", "ipc", "uts")):
        leftover.append(say("{sign} exists, but this process is in the host's namespaces", sign=signs[0][1]))
        signs = []
    for engine, how in signs:
        if engine == "podman":
            return "podman", how
        if engine == "docker":
            return "docker", how
    if how := _other_container(host, cgroups, signs):
        return "container", how
    if how := _wsl(host):
        return "wsl", how
    root = mounted_at(found, "/")
    if root is not None and root.kind == "overlay" and in_initial_namespace(host, "pid") is False:
        return "container", say("unknown container: separate pid namespace, overlay at /")
    return "bare", joined((say("no sign of a container, WSL or a scheduler"), *leftover))


def _found(sign: str, file: str) -> str:
    return say("{sign} in {file}", sign=sign, file=file)


def _hosts_root(found: list[Mount]) -> str:
    """Which file is mounted at /etc/hosts: engines mount their own."""
    mount = mounted_at(found, "/etc/hosts")
    return mount.root if mount else ""


def _kubernetes(host: Host, cgroups: str, found: list[Mount]) -> str | None:
    if host.env.get("KUBERNETES_SERVICE_HOST"):
        return "KUBERNETES_SERVICE_HOST"
    for path in ("/var/run/secrets/kubernetes.io", "/run/secrets/kubernetes.io"):
        if host.exists(path):
            return path
    if "kubepods" in cgroups:
        return _found("kubepods", _CGROUP)
    if "/pods/" in _hosts_root(found) and _hosts_root(found).endswith("/etc-hosts"):
        return _found("kubelet: /etc/hosts", _MOUNTS)
    return None


def _engine_by_kernel(cgroups: str, found: list[Mount]) -> tuple[RuntimeKind, str] | None:
    """docker or podman, by signs that no image can contain."""
    if "/libpod" in cgroups:
        return "podman", _found("libpod", _CGROUP)
    if "/docker/" in cgroups or "/docker-" in cgroups:
        return "docker", _found("docker", _CGROUP)
    if "/docker/containers/" in _hosts_root(found):
        return "docker", _found("docker: /etc/hosts", _MOUNTS)
    if "-containers/" in _hosts_root(found) and "/userdata/" in _hosts_root(found):
        return "podman", _found("podman: /etc/hosts", _MOUNTS)
    return None


def _engine_signs(host: Host) -> Iterator[tuple[str, str]]:
    """(engine, how) from the marks that container managers leave."""
    if host.exists("/.dockerenv"):
        yield "docker", "/.dockerenv"
    if host.exists("/run/.containerenv"):
        yield "podman", "/run/.containerenv"
    if engine := host.env.get("container"):
        yield engine, _found(f"container={engine}", "/proc/self/environ")
    if engine := (host.text("/run/systemd/container") or "").strip():
        yield engine, "/run/systemd/container"
    for entry in (host.text("/proc/1/environ") or "").split("\0"):  # readable by root only
        if entry.startswith("container=") and (engine := entry.partition("=")[2]):
            yield engine, _found(f"container={engine}", "/proc/1/environ")


def _other_container(host: Host, cgroups: str, signs: list[tuple[str, str]]) -> str | None:
    for name in ("APPTAINER_CONTAINER", "APPTAINER_NAME", "SINGULARITY_CONTAINER", "SINGULARITY_NAME"):
        if host.env.get(name):
            return say("{engine}, by {how}", engine="apptainer", how=name)
    if host.exists("/.singularity.d"):
        return say("{engine}, by {how}", engine="apptainer", how="/.singularity.d")
    for engine, how in signs:
        if engine != "wsl":  # systemd lists WSL as a container
            return say("{engine}, by {how}", engine=engine, how=how)
    for sign, engine in (("/lxc", "lxc"), ("/lxd", "lxc"), ("containerd", "containerd")):
        if sign in cgroups:
            return say("{engine}, by {how}", engine=engine, how=_found(sign.lstrip("/"), _CGROUP))
    return None


def _wsl(host: Host) -> str | None:
    if host.env.get("WSL_DISTRO_NAME"):
        return "WSL_DISTRO_NAME"
    release = host.kernel or host.text("/proc/sys/kernel/osrelease") or ""
    return say("the kernel {release}", release=release.strip()) if "microsoft" in release.lower() else None


def _slurm(host: Host) -> str | None:
    if host.env.get("SLURM_JOB_ID"):
        return "SLURM_JOB_ID"
    return _found("slurm", _CGROUP) if "slurm" in (host.text(_CGROUP) or "") else None


def _sudo(host: Host, status: dict[str, str]) -> tuple[bool | None, str]:
    if host.platform == "win32":
        return False, say("no sudo")
    folders = [*_SUDO_PLACES, *(part for part in host.env.get("PATH", "").split(":") if part.startswith("/"))]
    if not any(host.exists(f"{folder}/sudo") for folder in folders):
        return False, say("no sudo")
    if status.get("NoNewPrivs") == "1":
        return False, say("sudo has no effect here (no_new_privs is set)")
    allowed = sorted(host.groups & SUDO_GROUPS)
    if allowed:
        return True, say("may use sudo (in group {group})", group=allowed[0])
    return None, say(
        "sudo is installed, but this user is in none of the groups {names}", names=listed(sorted(SUDO_GROUPS))
    )


def _rights(host: Host, capable: bool | None, sudo_how: str) -> str:
    who = say("user unknown") if host.uid is None else "root" if host.uid == 0 else f"uid {host.uid}"
    if capable is None:
        power = say("capabilities unknown ({why})", why=host.why("/proc/self/status"))
        if host.platform != "linux":
            power = say("no capabilities on {platform}", platform=host.platform)
    else:
        power = say("with CAP_SYS_ADMIN") if capable else say("without CAP_SYS_ADMIN")
    if in_initial_namespace(host, "user") is False:
        power = say("{power} in a user namespace", power=power)
    return (
        say("{who} {power}", who=who, power=power)
        if host.uid == 0
        else say("{who}, {power}, {sudo}", who=who, power=power, sudo=sudo_how)
    )

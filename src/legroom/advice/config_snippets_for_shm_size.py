"""Configuration that sets the size of /dev/shm: docker, compose, kubernetes, slurm, fstab; a DaemonSet that loads.

The snippets are complete and valid. A memory limit is included only if the need of the processes is known. Comments are
wrapped at 80 columns: a message is written as one line, and `emit` breaks it.
"""

from __future__ import annotations

from legroom.messages import cells, fill, say
from legroom.records.workload import Need
from legroom.units import exact_size

KINDS = ("docker", "compose", "kubernetes", "kubernetes-warm", "slurm", "fstab")
_PROCESS = 1 << 30  # of the process that downloads and builds, besides the pages of /dev/shm
_COLUMNS = 80
_COMMENT = "# "
_STEP = 256 << 20  # limits are rounded up to it
KUBERNETES_MOUNT = "{name: shm, mountPath: /dev/shm}"  # in the volumeMounts of a container


def kubernetes_volume(size: int) -> str:
    """A volume in memory, for the volumes of a pod; `KUBERNETES_MOUNT` mounts it."""
    return f"{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {_binary(size)}}}}}"


def emit(kind: str, size: int, *, need: Need | None = None, gpus: int | None = None) -> str:
    """The snippet that sets /dev/shm to ``size``; the memory limit in it follows from ``need``."""
    return "\n".join(map(_wrapped, _emit(kind, size, need, gpus).split("\n")))


def _wrapped(line: str) -> str:
    """A line with its comment in lines of 80 columns; one that does not fit behind a setting stands above it."""
    setting, mark, comment = line.partition(_COMMENT)
    if not mark or (setting.strip(" ") and not setting.endswith(" ")) or cells(line) <= _COLUMNS:
        return line
    indent = " " * (len(setting) - len(setting.lstrip(" "))) + _COMMENT
    lines = fill(comment, _COLUMNS, indent, indent)
    return f"{lines}\n{setting.rstrip()}" if setting.strip(" ") else lines


def _emit(kind: str, size: int, need: Need | None, gpus: int | None) -> str:
    memory, known = _memory(size, need), _known(size, need)
    if kind == "docker":
        return _docker(size, memory, known)
    if kind == "compose":
        return _compose(size, memory, known)
    if kind == "kubernetes":
        return _kubernetes(size, memory, known)
    if kind == "kubernetes-warm":
        return _kubernetes_warm(size)
    if kind == "slurm":
        return _slurm(size, memory, known, need, gpus)
    return f"tmpfs /dev/shm tmpfs defaults,size={exact_size(size)} 0 0"


def _memory(size: int, need: Need | None) -> int | None:
    """The limit for the processes plus a full /dev/shm; None if the need of the processes is unknown."""
    if need is None or "ram" in need.at_least or need.ram <= need.shm:
        return None
    return _known(size, need)


def _known(size: int, need: Need | None) -> int:
    """A full /dev/shm, and what is known of other RAM."""
    ram = need.ram - need.shm if need is not None else 0
    return -(-(ram + size) // _STEP) * _STEP


def _no_limit(option: str, memory: int | None, known: str, indent: str = "") -> list[str]:
    """Comments that say why a snippet has no memory limit, and what one must hold."""
    if memory is not None:
        return []
    return [
        indent + say("# No memory limit: the RAM of the processes is unknown. --process-ram or --measure gives it."),
        indent
        + say("# To add one, set {option} to the RAM of the processes plus {known} for /dev/shm and batches.",
              option=option, known=known),
    ]  # fmt: skip


def _docker(size: int, memory: int | None, known: int) -> str:
    limit = f" --memory={exact_size(memory).lower()}" if memory is not None else ""
    return "\n".join(
        (
            say("# Pass more options, the image and the command as arguments: --gpus all IMAGE …"),
            *_no_limit("--memory", memory, exact_size(known).lower()),
            f'docker run --shm-size={exact_size(size).lower()}{limit} "$@"',
        )
    )


def _compose(size: int, memory: int | None, known: int) -> str:
    lines = ["services:", say("  training: # the name of your service"), f"    shm_size: {exact_size(size).lower()}b"]
    if memory is not None:
        lines.append(f"    mem_limit: {exact_size(memory).lower()}b")
    return "\n".join((*lines, *_no_limit("mem_limit", memory, exact_size(known).lower() + "b", "    ")))


def _kubernetes(size: int, memory: int | None, known: int) -> str:
    limit = (
        [
            "      resources:",
            "        limits:",
            say("          memory: {memory} # includes the content of /dev/shm", memory=_binary(memory)),
        ]
        if memory is not None
        else _no_limit("resources.limits.memory", memory, _binary(known), "      ")
    )
    return "\n".join(
        (
            "apiVersion: v1",
            "kind: Pod",
            "metadata:",
            say("  name: training # replace"),
            "spec:",
            "  containers:",
            say("    - name: training # replace"),
            say("      image: training # replace"),
            *limit,
            "      volumeMounts:",
            f"        - {KUBERNETES_MOUNT}",
            "  volumes:",
            f"    - {kubernetes_volume(size)}",
        )
    )


def _kubernetes_warm(size: int) -> str:
    """A DaemonSet that loads sources on every node into the node's own /dev/shm, for the pods that train there.

    Pages of a tmpfs are charged to the pod that writes them first: here the DaemonSet's, so its limit counts them.
    """
    memory = -(-(size + _PROCESS) // _STEP) * _STEP
    return "\n".join(
        (
            "apiVersion: apps/v1",
            "kind: DaemonSet",
            "metadata:",
            "  name: legroom-warm",
            "spec:",
            "  selector:",
            "    matchLabels: {app: legroom-warm}",
            "  template:",
            "    metadata:",
            "      labels: {app: legroom-warm}",
            "    spec:",
            "      containers:",
            "        - name: load",
            say("          image: training # replace: with Legroom and your credentials"),
            "          command: [sh, -c]",
            "          args:",
            "            - |",
            say("              legroom cache load s3://bucket/key # replace"),
            "              exec sleep infinity",
            "          resources:",
            "            limits:",
            say("              memory: {memory} # {size} in /dev/shm, charged here, and the process",
                memory=_binary(memory), size=_binary(size)),
            "            requests:",
            f"              memory: {_binary(memory)}",
            "          volumeMounts:",
            f"            - {KUBERNETES_MOUNT}",
            "      volumes:",
            say("        # The node's own /dev/shm: it outlives this pod, and pods that train mount it the same way."),
            say("        # They run as the same user. Their own limits need not count these pages."),
            "        - name: shm",
            "          hostPath: {path: /dev/shm, type: Directory}",
            say("        # Without hostPath, each pod has a copy of its own. It survives a restart of the container."),
            say("        # Its pages then still fill the pod's limit:"),
            f"        # - {kubernetes_volume(size)}",
        )
    )  # fmt: skip


def _slurm(size: int, memory: int | None, known: int, need: Need | None, gpus: int | None) -> str:
    """Slurm has no option for /dev/shm: the job requests memory, and checks /dev/shm before it starts."""
    wanted = need.shm if need is not None else size
    lines = ["#!/bin/bash", "#SBATCH --nodes=1"]
    if gpus:
        lines.append(f"#SBATCH --gpus-per-node={gpus}")
    if memory is not None:
        lines.append(f"#SBATCH --mem={memory >> 20}M")
    return "\n".join(
        (
            *lines,
            *_no_limit("--mem", memory, f"{known >> 20}M"),
            say("# /dev/shm belongs to the node; this job needs {bytes} bytes of it.", bytes=wanted),
            "free=$(df --output=avail -B1 /dev/shm | tail -n 1)",
            f'if [ "$free" -lt {wanted} ]; then',
            say('    echo "/dev/shm has $free bytes free on $(hostname), {bytes} needed" >&2', bytes=wanted),
            "    exit 1",
            "fi",
        )
    )


def _binary(size: int) -> str:
    """A kubernetes quantity: 1Gi, 512Mi, or bytes."""
    text = exact_size(size)
    return text if text.isdecimal() else text + "i"

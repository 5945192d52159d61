"""A size for /dev/shm as the file or command that sets it, whole and valid as it stands.

Covers: docker, compose, kubernetes, slurm, fstab. Does not cover: steps for people (remedy.py).

Pure. A memory limit is written only where what the processes need is known.
"""

from __future__ import annotations

from legroom.errors import UsageError
from legroom.records import Need
from legroom.units import exact_size
from legroom.words import listed, say

KINDS = ("docker", "compose", "kubernetes", "slurm", "fstab")
_STEP = 256 << 20  # limits are rounded up to it


def emit(kind: str, size: int, *, need: Need | None = None, gpus: int | None = None) -> str:
    """The snippet that gives a /dev/shm of ``size``; ``need`` tells the memory limit to go with it."""
    if kind not in KINDS:
        raise UsageError(
            say("nothing can be written for {kind!r}", kind=kind),
            fix=(say("give one of: {kinds}", kinds=listed(KINDS)),),
        )
    memory = _memory(size, need)
    if kind == "docker":
        return _docker(size, memory)
    if kind == "compose":
        return _compose(size, memory)
    if kind == "kubernetes":
        return _kubernetes(size, memory)
    if kind == "slurm":
        return _slurm(size, memory, need, gpus)
    return say("tmpfs /dev/shm tmpfs defaults,size={size} 0 0", size=exact_size(size))


def _memory(size: int, need: Need | None) -> int | None:
    """The limit that leaves room for the processes beside a full /dev/shm; None where their need is unknown."""
    if need is None or need.ram <= need.shm:
        return None
    return -(-(need.ram - need.shm + size) // _STEP) * _STEP


def _docker(size: int, memory: int | None) -> str:
    limit = say(" --memory={memory}", memory=exact_size(memory).lower()) if memory is not None else ""
    return "\n".join(
        (
            say(
                "# Give the image and the command as arguments, after options of your own: --gpus all IMAGE …"
            ),
            say('docker run --shm-size={size}{limit} "$@"', size=exact_size(size).lower(), limit=limit),
        )
    )


def _compose(size: int, memory: int | None) -> str:
    lines = [
        "services:",
        say("  training: # the name of your service"),
        say("    shm_size: {size}b", size=exact_size(size).lower()),
    ]
    if memory is not None:
        lines.append(say("    mem_limit: {memory}b", memory=exact_size(memory).lower()))
    return "\n".join(lines)


def _kubernetes(size: int, memory: int | None) -> str:
    binary = _binary(size)
    limit = (
        [
            "      resources:",
            "        limits:",
            say(
                "          memory: {memory} # what lies in /dev/shm counts against it", memory=_binary(memory)
            ),
        ]
        if memory is not None
        else [say("      # resources.limits.memory must leave room for {size} in /dev/shm", size=binary)]
    )
    return "\n".join(
        (
            "apiVersion: v1",
            "kind: Pod",
            "metadata:",
            say("  name: training # yours"),
            "spec:",
            "  containers:",
            say("    - name: training # yours"),
            say("      image: training # yours"),
            *limit,
            "      volumeMounts:",
            "        - name: shm",
            "          mountPath: /dev/shm",
            "  volumes:",
            "    - name: shm",
            "      emptyDir:",
            "        medium: Memory",
            say("        sizeLimit: {size}", size=binary),
        )
    )


def _slurm(size: int, memory: int | None, need: Need | None, gpus: int | None) -> str:
    """Slurm has no option for /dev/shm: the job asks for its memory, and looks before it starts."""
    wanted = need.shm if need is not None else size
    lines = ["#!/bin/bash", "#SBATCH --nodes=1"]
    if gpus:
        lines.append(say("#SBATCH --gpus-per-node={gpus}", gpus=gpus))
    if memory is not None:
        lines.append(say("#SBATCH --mem={memory}M", memory=memory >> 20))
    return "\n".join(
        (
            *lines,
            say("# /dev/shm is the node's own; this job needs {bytes} bytes of it.", bytes=wanted),
            "free=$(df --output=avail -B1 /dev/shm | tail -n 1)",
            say('if [ "$free" -lt {bytes} ]; then', bytes=wanted),
            say(
                '    echo "/dev/shm has $free bytes free on $(hostname), {bytes} are needed" >&2',
                bytes=wanted,
            ),
            "    exit 1",
            "fi",
        )
    )


def _binary(size: int) -> str:
    """A kubernetes quantity: 1Gi, 512Mi, or bytes."""
    text = exact_size(size)
    return text if text.isdecimal() else text + "i"

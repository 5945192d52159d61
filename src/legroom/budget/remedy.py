"""The fix for this place: what to type here, and the command that proves it worked.

Covers: more /dev/shm, more RAM, swap, descriptors, disk, CPU quota, GPU, TMPDIR: for docker, podman, kubernetes,
slurm, bare machines with and without rights. Does not cover: finding out what is wrong (findings.py).

Pure functions of a Place and numbers. A fix is a tuple of steps in the order to try them; one that proves the change
begins with ``check:``. What is to be typed stands in a step's further lines, one command a line and nothing else on it:
whoever shows a step wraps its first line alone, so that commands can be pasted.
"""

from __future__ import annotations

from legroom.model import Place
from legroom.units import exact_size, format_size
from legroom.words import say

# Above a quarter of the memory the data in /dev/shm would crowd out the processes that use them.
SHM_SHARE = 4
_SHM_TOP = 8 << 30
_SHM_FLOOR = 512 << 20
_SHM_LAST = 64 << 30  # beyond it, what fills it is no batch on its way

_SHM = "/dev/shm"


def check_room(path: str) -> str:
    """The step that proves there is room at a path."""
    return say("check:\ndf -h {path}", path=path)


def advised_shm(ram: int | None) -> int:
    """A size for /dev/shm when nothing is known of the workload: a power of two, 512 MB to 8 GB.

    At most a quarter of the memory that is really there: tmpfs pages count against it.
    """
    if ram is None:
        return 1 << 30
    bound = max(ram // SHM_SHARE, 64 << 20)
    size = _SHM_TOP
    while size > bound and size > _SHM_FLOOR:
        size //= 2
    while size > ram // 2 and size > 64 << 20:  # a box too small even for the floor
        size //= 2
    return size


def doubled_shm(size: int, ram: int | None) -> int | None:
    """A larger size for a /dev/shm that fills up; None where more would leave the processes less than half the memory.

    About twice what it has, and no less than anybody is advised to have.
    """
    bound = min(2 * size, _SHM_LAST, *(() if ram is None else (ram // 2,)))
    doubled = 1 << max(0, bound.bit_length() - 1)
    wanted = max(advised_shm(ram), doubled)
    return wanted if wanted > size else None


def _privilege(place: Place) -> str | None:
    """What a command that needs rights is prefixed with here; None where no prefix would help."""
    if place.may_mount:
        return ""
    return "sudo " if place.sudo and not place.root else None


def enlarge_shm(place: Place, size: int) -> tuple[str, ...]:
    """How to get a /dev/shm of ``size`` here."""
    wanted = exact_size(size)
    remount = _privilege(place)
    if place.kind in ("docker", "podman"):
        lines = [
            say(
                "start the container again with:\n{tool} run --shm-size={size} …",
                tool=place.kind,
                size=wanted,
            ),
            say("or in compose, under the service:\nshm_size: {size}", size=wanted.lower() + "b"),
        ]
        if remount is not None:
            lines.insert(
                0, say("now, without a restart:\nmount -o remount,size={size} /dev/shm", size=wanted)
            )
        return (*lines, check_room(_SHM))
    if place.kind == "kubernetes":
        return (
            say(
                "give the pod a memory volume, and its container the mount of it:\n"
                "volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {size}i}}}}]\n"
                "volumeMounts: [{{name: shm, mountPath: /dev/shm}}]",
                size=wanted,
            ),
            say("what lies in it counts against the container's memory limit: raise that by as much"),
            say("check:\nkubectl exec POD -- df -h /dev/shm"),
        )
    if place.kind in ("bare", "wsl", "slurm") and remount is not None:
        return (
            say("now:\n{sudo}mount -o remount,size={size} /dev/shm", sudo=remount, size=wanted),
            say(
                "for good, this line in /etc/fstab:\ntmpfs /dev/shm tmpfs defaults,size={size} 0 0",
                size=wanted,
            ),
            say(
                "then this, as mount -a does not enlarge what is mounted:\n{sudo}mount -o remount /dev/shm",
                sudo=remount,
            ),
            check_room(_SHM),
        )
    return (*_without_rights(place, wanted), check_room(_SHM))


def _without_rights(place: Place, wanted: str) -> list[str]:
    """What is left to somebody who may not mount: other settings, another way for the batches, a letter."""
    lines = [
        say("without rights: num_workers=0 uses no shared memory; smaller batches, fewer workers use less"),
        say("or legroom.DataLoader instead of torch's: its batches do not lie in /dev/shm"),
        say('datasets shared by legroom.open may lie on disk:\nlegroom.open(…, backing="disk")'),
    ]
    if place.kind == "slurm":
        lines.append(
            say(
                "or ask for a node with more: /dev/shm is the node's own, half of its RAM where nobody set it, and "
                "what lies in it counts against --mem"
            )
        )
    lines.append(
        say(
            "ask the administrator: /dev/shm on this machine is too small for PyTorch's data loaders; please set "
            "size={size} for it in /etc/fstab, and run:\nmount -o remount,size={size} /dev/shm",
            size=wanted,
        )
    )
    return lines


def raise_ram_limit(place: Place, limit: int | None) -> tuple[str, ...]:
    """How to get more memory, or use less, where the ram pool runs short."""
    use_less = say("or use less: fewer workers, smaller batches, one shared copy of the data")
    more = exact_size(2 * limit) if limit else "16G"
    if place.kind in ("docker", "podman"):
        return (
            say("start the container again with:\n{tool} run --memory={size} …", tool=place.kind, size=more),
            use_less,
            say("check:\nlegroom doctor"),
        )
    if place.kind == "kubernetes":
        return (
            say("raise resources.limits.memory of the container, to {size}i say", size=more),
            use_less,
            say("check:\nlegroom doctor"),
        )
    if place.kind == "slurm":
        return (
            say("ask for more:\nsbatch --mem={size} …", size=more),
            use_less,
            say("check:\nlegroom doctor"),
        )
    if place.kind == "wsl":
        return (
            say("in Windows, under [wsl2] in %UserProfile%\\.wslconfig:\nmemory={size}B", size=more),
            say("then, in Windows:\nwsl --shutdown"),
            use_less,
            say("check:\nfree -h"),
        )
    return (
        say("see who holds it:\nps -eo pid,user,rss,args --sort=-rss | head"),
        use_less,
        say("check:\nlegroom doctor"),
    )


def settle_swap(
    place: Place, moving: bool, *, used: int | None = None, free: int | None = None
) -> tuple[str, ...]:
    """What to do about swap: it is the symptom; the working set is the cause.

    Emptying swap is safe only where what lies in it fits into free RAM: ``used`` and ``free`` tell.
    """
    lines = []
    if moving:
        lines.append(
            say("shrink the working set: fewer workers, smaller prefetch, one shared copy of the data")
        )
        lines.append(say("see who is swapped out:\ngrep VmSwap /proc/[0-9]*/status | sort -k2 -n | tail"))
    elif used:
        lines.append(say("nothing need be done: pages that stay in swap cost nothing until they are wanted"))
    prefix = "" if place.root else "sudo "
    if used is not None and free is not None and free < used:
        lines.append(
            say(
                "do not empty it now (swapoff): {used} would have to fit into {free} of free RAM, and the OOM killer "
                "would make the room",
                used=format_size(used), free=format_size(free),
            )
        )  # fmt: skip
    elif place.kind in ("bare", "wsl") and (place.root or place.sudo):
        lines.append(
            say(
                "to bring pages back once there is free RAM for them (with too little of it this calls the OOM "
                "killer):\n{sudo}swapoff -a && {sudo}swapon -a",
                sudo=prefix,
            )
        )
    return (*lines, say("check: columns si and so stay 0 in:\nvmstat 1 5"))


def stop_spilling() -> tuple[str, ...]:
    """What to do where Windows keeps GPU memory in the host's RAM."""
    return (
        say("smaller batches, mixed precision or smaller images until nothing spills"),
        say("cap torch below the card:\ntorch.cuda.set_per_process_memory_fraction(0.8)"),
        say(
            "or have an error instead of a spill: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback "
            "Policy: Prefer No Sysmem Fallback"
        ),
        say("check: Task Manager, Performance, GPU: 'Shared GPU memory' goes back to its idle value"),
    )


def raise_nofile(place: Place, soft: int, hard: int | None) -> tuple[str, ...]:
    """How to get more open files."""
    unlimited = hard is None or hard < 0
    wanted = 65536 if unlimited or hard is None or hard >= 65536 else hard
    lines = []
    if wanted > soft:
        lines.append(say("in the shell that starts the training:\nulimit -n {count}", count=wanted))
    if not unlimited and (hard or 0) < 65536:
        if place.kind in ("docker", "podman"):
            lines.append(
                say(
                    "start the container again with:\n{tool} run --ulimit nofile=65536:65536 …",
                    tool=place.kind,
                )
            )
        else:
            lines.append(
                say(
                    "for more than {hard}: a nofile line in /etc/security/limits.conf, by the administrator",
                    hard=hard,
                )
            )
    lines.append(
        say(
            "or, for fewer descriptors and the same /dev/shm:\n"
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
    )
    return (*lines, say("check:\nulimit -n"))


def free_disk(path: str) -> tuple[str, ...]:
    """How to get room on a disk."""
    return (
        say("see what takes it:\ndu -xh --max-depth=1 {path} | sort -h | tail", path=path),
        check_room(path),
    )


def shorten_temporary(name: str, longest: int) -> tuple[str, ...]:
    """What to do where the path for temporary files is too long for sockets."""
    return (
        say(
            "in the shell that starts the training:\nmkdir -p /tmp/$USER && export {name}=/tmp/$USER",
            name=name,
        ),
        say("or legroom.DataLoader instead of torch's: its workers need no such socket"),
        say('check: {longest} or less come out of:\nprintf %s "${name}" | wc -c', name=name, longest=longest),
    )


def use_less_gpu(place: Place) -> tuple[str, ...]:
    """What to do where a card is too small."""
    if place.platform == "win32":
        return stop_spilling()
    return (
        say(
            "fewer jobs on a card, or a smaller batch with gradient accumulation (the effective batch is kept)"
        ),
        say("mixed precision, activation checkpointing, smaller images or shorter sequences"),
        say("check:\nnvidia-smi"),
    )


def unpin() -> tuple[str, ...]:
    """What to do where pinned memory is too much: it cannot be reclaimed or swapped."""
    return (
        say("pin_memory=False: copies to the GPU are slower and wait, and host memory is free again"),
        say("or fewer batches in flight (prefetch, workers): each is pinned, rounded up to a power of two"),
        say("check:\ngrep RssShmem /proc/PID/status"),
    )


def remove_leftovers(names: tuple[str, ...], total: int) -> tuple[str, ...]:
    """How to remove files in /dev/shm that no process uses."""
    listed = " ".join(f"/dev/shm/{_quoted(name)}" for name in names[:5])
    return (
        say(
            "no process maps them, and all {count} together hold {total}; the largest go with:\nrm {names}"
            if len(names) > 5
            else "no process maps them, so this frees {total}:\nrm {names}",
            total=format_size(total),
            names=listed,
            count=len(names),
        ),
        check_room(_SHM),
    )


def _quoted(name: str) -> str:
    import shlex

    return shlex.quote(name)

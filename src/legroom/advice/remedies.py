"""The fix for this place: what to type here, and the command that proves it worked.

Covers: more /dev/shm, more RAM, swap, descriptors, disk, CPU quota, GPU, TMPDIR: for docker, podman, kubernetes,
slurm, bare machines with and without rights. Does not cover: finding out what is wrong (findings.py).

Pure functions of a Place and numbers. A fix is a tuple of steps in the order to try them; one that proves the change
begins with ``check:``. What is to be typed stands in a step's further lines, one command a line and nothing else on it:
whoever shows a step wraps its first line alone, so that commands can be pasted.
"""

from __future__ import annotations

from legroom.records import Place
from legroom.units import exact_size, format_size
from legroom.words import phrase, say

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
        if place.may_mount:  # sudo in a container does not bring the right to mount
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


def use_less_shm() -> tuple[str, ...]:
    """Other settings, and another way for the batches, where /dev/shm stays as it is."""
    return (
        say("without rights: num_workers=0 uses no shared memory; smaller batches, fewer workers use less"),
        say("or legroom.DataLoader instead of torch's: its batches do not lie in /dev/shm"),
        say('datasets shared by legroom.open may lie on disk:\nlegroom.open(…, backing="disk")'),
    )


def bound_shm(place: Place, size: int, *, own: bool, shared: bool) -> tuple[str, ...]:
    """What to do where /dev/shm may grow beyond the memory behind it; ``size`` leaves half of that to processes.

    ``own``: the limit is one cgroup's. ``shared``: that cgroup uses the machine's /dev/shm, which others use too: it is
    not made smaller for the sake of one of them.
    """
    wanted = exact_size(size)
    if place.kind in ("docker", "podman"):
        start = phrase("start the container again with:\n{tool} run --shm-size={size} …")
        if shared:
            start = phrase(
                "start the container again with a /dev/shm of its own:\n{tool} run --ipc=private --shm-size={size} …"
            )
        return (say(start, tool=place.kind, size=wanted), check_room(_SHM))
    if place.kind == "kubernetes":
        return enlarge_shm(place, size)
    keep = say(
        "keep what the job has in /dev/shm below {size}: legroom check tells what a loader takes", size=wanted
    )
    if own:
        return (keep, *raise_ram_limit(place, None))
    remount = _privilege(place)
    if remount is None:
        return (keep, check_room(_SHM))
    return (
        keep,
        say(
            "or have an error in place of an OOM kill: bound it now, and by size={size} in /etc/fstab:\n"
            "{sudo}mount -o remount,size={size} /dev/shm",
            sudo=remount, size=wanted,
        ),
        check_room(_SHM),
    )  # fmt: skip


def _without_rights(place: Place, wanted: str) -> list[str]:
    """What is left to somebody who may not mount: other settings, another way for the batches, a letter."""
    lines = [*use_less_shm()]
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


def raise_ram_limit(
    place: Place, limit: int | None, machine: int | None = None, *, running: bool = True
) -> tuple[str, ...]:
    """How to get more memory, or use less, where the ram pool runs short.

    ``limit`` is the cgroup's. ``machine`` is all the RAM of the machine: no limit is raised beyond it, and where there
    is no limit below it there is nothing to raise. Where neither is known no figure is given. ``running``: what holds
    the memory can still be looked at.
    """
    see_who = _see_who(place) if running else ()
    if running:
        use_less = say("or use less: fewer workers, smaller batches, one shared copy of the data")
    else:
        use_less = say("use less: fewer workers, smaller batches, one shared copy of the data")
    most = None if machine is None else machine // (1 << 30) * (1 << 30)  # as it is written: whole gigabytes
    if limit and most is not None and 2 * limit > most:
        more = exact_size(most) if most > limit else None
    else:
        more = exact_size(2 * limit) if limit else "SIZE" if machine is None else None
    if (
        place.kind == "wsl"
    ):  # what Windows has is not known here; half of it is what Linux gets where nothing is set
        larger = (
            exact_size(2 * limit)
            if limit
            else "16G"
            if machine is None
            else exact_size(machine // (1 << 30) * 3 // 2 << 30)
        )
        return (
            say("in Windows, under [wsl2] in %UserProfile%\\.wslconfig:\nmemory={size}B", size=larger),
            say("then, in Windows:\nwsl --shutdown"),
            use_less,
            say("check:\nfree -h"),
        )
    if more is None:
        return (*see_who, use_less, say("check:\nlegroom doctor"))
    if place.kind in ("docker", "podman"):
        return (
            say("start the container again with:\n{tool} run --memory={size} …", tool=place.kind, size=more),
            use_less,
            say("check:\nlegroom doctor"),
        )
    if place.kind == "kubernetes":
        return (
            say("raise resources.limits.memory of the container, to {size}i say", size=more)
            if more != "SIZE"
            else say("raise resources.limits.memory of the container"),
            use_less,
            say("check:\nlegroom doctor"),
        )
    if place.kind == "slurm":
        return (
            say("ask for more:\nsbatch --mem={size} …", size=more),
            use_less,
            say("check:\nlegroom doctor"),
        )
    return (*see_who, use_less, say("check:\nlegroom doctor"))


def _see_who(place: Place) -> tuple[str, ...]:
    """How to find out who holds memory: in a container its own processes are all that show."""
    return (say("see who holds it:\nps -eo pid,user,rss,args --sort=-rss | head"),)


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
        elif place.kind == "kubernetes":
            lines.append(
                say(
                    "for more than {hard}: LimitNOFILE of the container runtime on the node, by the cluster's "
                    "administrator",
                    hard=hard,
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


def ask_above(place: Place) -> tuple[str, ...]:
    """How to learn of limits above the container, which cannot be seen from inside it."""
    if place.kind in ("docker", "podman"):
        return (
            say(
                "on the machine itself, 0 means no limit:\n{tool} inspect --format '{form}' CONTAINER",
                tool=place.kind, form="{{.HostConfig.Memory}}",
            ),
        )  # fmt: skip
    if place.kind == "kubernetes":
        return (say("the limits of the pod and its containers:\nkubectl describe pod POD"),)
    if place.kind == "slurm":
        return (say("what the job was given:\nscontrol show job $SLURM_JOB_ID"),)
    return (say("ask from outside: read memory.max of the parent cgroups on the machine itself"),)


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

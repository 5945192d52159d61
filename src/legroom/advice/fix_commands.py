"""Fixes for findings in this environment: the commands to run, and the command that verifies the result.

For docker, podman, kubernetes, slurm and bare machines, with and without root. A fix is a tuple of steps in the order
to try them; the step that verifies it begins with ``check:``. Commands stand on further lines of a step, one per
line: only the first line may be wrapped, so that commands can be copied.
"""

from __future__ import annotations

from legroom.advice.config_snippets_for_shm_size import KUBERNETES_MOUNT, kubernetes_volume
from legroom.messages import phrase, say
from legroom.records.machine import RuntimeEnvironment
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.units import exact_size, format_size

# Data in /dev/shm above a quarter of RAM leaves too little for the processes that use it.
SHM_SHARE = 4
_SHM_TOP = 8 << 30
_SHM_FLOOR = 512 << 20
_SHM_LAST = 64 << 30  # batches in flight do not fill more than that

_SHM = "/dev/shm"


def check_room(path: str) -> str:
    """The step that verifies free space at a path."""
    return say("check:\ndf -h {path}", path=path)


def advised_shm(ram: int | None) -> int:
    """A size for /dev/shm for an unknown workload: a power of two, 512 MB to 8 GB.

    At most a quarter of the available RAM: tmpfs pages count against it.
    """
    if ram is None:
        return 1 << 30
    bound = max(ram // SHM_SHARE, 64 << 20)
    size = _SHM_TOP
    while size > bound and size > _SHM_FLOOR:
        size //= 2
    while size > ram // 2 and size > 64 << 20:  # a machine too small even for the floor
        size //= 2
    return size


def doubled_shm(size: int, ram: int | None) -> int | None:
    """A larger size for a /dev/shm that fills up; None if processes would be left with less than half the RAM.

    About twice its size, and at least the size advised for an unknown workload.
    """
    bound = min(2 * size, _SHM_LAST, *(() if ram is None else (ram // 2,)))
    doubled = 1 << max(0, bound.bit_length() - 1)
    wanted = max(advised_shm(ram), doubled)
    return wanted if wanted > size else None


def _privilege(runtime: RuntimeEnvironment) -> str | None:
    """The prefix of commands that need root: empty, or sudo; None if neither helps."""
    if runtime.may_mount:
        return ""
    return "sudo " if runtime.sudo and not runtime.root else None


def enlarge_shm(runtime: RuntimeEnvironment, size: int) -> tuple[str, ...]:
    """How to get a /dev/shm of ``size`` here."""
    wanted = exact_size(size)
    remount = _privilege(runtime)
    if runtime.kind in ("docker", "podman"):
        lines = [
            say("restart the container with:\n{tool} run --shm-size={size} …", tool=runtime.kind, size=wanted),
            say("or in the service of a compose file:\nshm_size: {size}", size=wanted.lower() + "b"),
        ]
        if runtime.may_mount:  # sudo in a container does not grant the right to mount
            lines.insert(0, say("now, without a restart:\nmount -o remount,size={size} /dev/shm", size=wanted))
        return (*lines, check_room(_SHM))
    if runtime.kind == "kubernetes":
        volume, check = _memory_volume(size)
        return (
            volume,
            say("its content counts against the container's memory limit: raise that limit by the same amount"),
            check,
        )
    if runtime.kind in ("bare", "wsl", "slurm") and remount is not None:
        return (
            say("now:\n{sudo}mount -o remount,size={size} /dev/shm", sudo=remount, size=wanted),
            say(
                "permanently, with this line in /etc/fstab:\ntmpfs /dev/shm tmpfs defaults,size={size} 0 0", size=wanted
            ),
            say(
                "then remount (mount -a does not resize a mounted filesystem):\n{sudo}mount -o remount /dev/shm",
                sudo=remount,
            ),
            check_room(_SHM),
        )
    return (*_without_rights(runtime, wanted), check_room(_SHM))


def _memory_volume(size: int) -> tuple[str, str]:
    """A pod's /dev/shm of that size, and how to verify it."""
    volume = say(
        "add a memory volume to the pod and mount it in the container:\nvolumes: [{volume}]\nvolumeMounts: [{mount}]",
        volume=kubernetes_volume(size), mount=KUBERNETES_MOUNT,
    )  # fmt: skip
    return volume, say("check:\nkubectl exec POD -- df -h /dev/shm")


def use_less_shm(*, rights: bool = True) -> tuple[str, ...]:
    """Settings that need less of /dev/shm, if it cannot be enlarged: for want of ``rights``, or of RAM."""
    return (
        say("num_workers=0 uses no shared memory; fewer workers or smaller batches use less")
        if rights
        else say("without root: num_workers=0 uses no shared memory; fewer workers or smaller batches use less"),
        say("or use legroom.DataLoader instead of torch's: its batches are not in /dev/shm"),
        say('keep datasets of legroom.open on disk:\nlegroom.open(…, backing="disk")'),
    )


def bound_shm(runtime: RuntimeEnvironment, size: int, *, own: bool, shared: bool) -> tuple[str, ...]:
    """What to do if /dev/shm can grow beyond RAM; ``size`` leaves half of RAM to the processes.

    ``own``: the limit is one cgroup's. ``shared``: that cgroup uses the machine's /dev/shm, which others use too, so it
    is not made smaller for this cgroup.
    """
    wanted = exact_size(size)
    if runtime.kind in ("docker", "podman"):
        start = phrase("restart the container with:\n{tool} run --shm-size={size} …")
        if shared:
            start = phrase("restart the container with its own /dev/shm:\n{tool} run --ipc=private --shm-size={size} …")
        return (say(start, tool=runtime.kind, size=wanted), check_room(_SHM))
    if runtime.kind == "kubernetes":
        return _memory_volume(size)
    keep = say(
        "keep the job's use of /dev/shm below {size}; legroom check predicts what a DataLoader needs", size=wanted
    )
    if own:
        return (keep, *raise_ram_limit(runtime, None))
    remount = _privilege(runtime)
    if remount is None:
        return (keep, check_room(_SHM))
    return (
        keep,
        say(
            "or limit its size, to get an error instead of an OOM kill (permanently: size={size} in "
            "/etc/fstab):\n{sudo}mount -o remount,size={size} /dev/shm",
            sudo=remount, size=wanted,
        ),
        check_room(_SHM),
    )  # fmt: skip


def _without_rights(runtime: RuntimeEnvironment, wanted: str) -> list[str]:
    """Steps without the right to mount: other settings, legroom.DataLoader, a request to the administrator."""
    lines = [*use_less_shm(rights=False)]
    if runtime.kind == "slurm":
        lines.append(
            say(
                "or request a node with more: /dev/shm belongs to the node (by default half its RAM) and "
                "its content counts against --mem"
            )
        )
    lines.append(
        say(
            "ask the administrator: /dev/shm on this machine is too small for PyTorch DataLoaders; "
            "please set size={size} for it in /etc/fstab, and run:\nmount -o remount,size={size} /dev/shm",
            size=wanted,
        )
    )
    return lines


def raise_ram_limit(
    runtime: RuntimeEnvironment,
    limit: int | None,
    total: int | None = None,
    *,
    running: bool = True,
    use_less: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """How to get more memory, or use less, if RAM runs out.

    ``limit`` is the cgroup's. ``total`` is the machine's RAM: no limit is raised beyond it, and without a limit below
    it there is nothing to raise. If neither is known, no figure is given. ``running``: the processes still run and can
    be inspected. ``use_less``: how to use less, if more is known than that RAM ran out.
    """
    # In a container only its own processes are visible.
    see_who = (say("list the largest processes:\nps -eo pid,user,rss,args --sort=-rss | head"),) if running else ()
    less = use_less or (say("use fewer workers, smaller batches, or one shared copy of the data"),)
    most = None if total is None else total // (1 << 30) * (1 << 30)  # as it is written: whole gigabytes
    if limit and most is not None and 2 * limit > most:
        more = exact_size(most) if most > limit else None
    else:
        more = exact_size(2 * limit) if limit else "SIZE" if total is None else None
    if runtime.kind == "wsl":  # the RAM of Windows is unknown here; by default Linux gets half of it
        larger = (
            exact_size(2 * limit)
            if limit
            else "16G"
            if total is None
            else exact_size(total // (1 << 30) * 3 // 2 << 30)
        )
        return (
            say("in Windows, under [wsl2] in %UserProfile%\\.wslconfig:\nmemory={size}B", size=larger),
            say("then, in Windows:\nwsl --shutdown"),
            *less,
            say("check:\nfree -h"),
        )
    if more is None:
        return (*see_who, *less, say("check:\nlegroom doctor"))
    if runtime.kind in ("docker", "podman"):
        return (
            say("restart the container with:\n{tool} run --memory={size} …", tool=runtime.kind, size=more),
            *less,
            say("check:\nlegroom doctor"),
        )
    if runtime.kind == "kubernetes":
        return (
            say("raise resources.limits.memory of the container, for example to {size}i", size=more)
            if more != "SIZE"
            else say("raise resources.limits.memory of the container"),
            *less,
            say("check:\nlegroom doctor"),
        )
    if runtime.kind == "slurm":
        return (say("request more memory:\nsbatch --mem={size} …", size=more), *less, say("check:\nlegroom doctor"))
    return (*see_who, *less, say("check:\nlegroom doctor"))


def settle_swap(
    runtime: RuntimeEnvironment, moving: bool, *, used: int | None = None, free: int | None = None
) -> tuple[str, ...]:
    """What to do about swap: it is the symptom; the working set is the cause.

    Emptying swap is safe only if ``used`` fits into ``free``.
    """
    lines = []
    if moving:
        lines.append(say("reduce the working set: fewer workers, lower prefetch, one shared copy of the data"))
        lines.append(say("list processes by swap use:\ngrep VmSwap /proc/[0-9]*/status | sort -k2 -n | tail"))
    elif used:
        lines.append(say("nothing to do: swapped-out pages cost nothing until they are accessed"))
    prefix = "" if runtime.root else "sudo "
    if used is not None and free is not None and free < used:
        lines.append(
            say(
                "do not run swapoff now: {used} would not fit into {free} of free RAM, and the OOM "
                "killer would kill processes",
                used=format_size(used), free=format_size(free),
            )
        )  # fmt: skip
    elif runtime.kind in ("bare", "wsl") and (runtime.root or runtime.sudo):
        lines.append(
            say(
                "to move pages back into RAM (needs enough free RAM, or the OOM killer kills "
                "processes):\n{sudo}swapoff -a && {sudo}swapon -a",
                sudo=prefix,
            )
        )
    return (*lines, say("check: columns si and so stay 0 in:\nvmstat 1 5"))


def stop_spilling() -> tuple[str, ...]:
    """What to do if Windows keeps GPU memory in the host's RAM."""
    return (
        say("use smaller batches, mixed precision or smaller images until nothing spills"),
        say("limit torch to a share of the GPU:\ntorch.cuda.set_per_process_memory_fraction(0.8)"),
        say(
            "or get an error instead of a spill: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem "
            "Fallback Policy: Prefer No Sysmem Fallback"
        ),
        say("check: Task Manager, Performance, GPU: 'Shared GPU memory' goes back to its idle value"),
    )


def raise_nofile(runtime: RuntimeEnvironment, soft: int, hard: int | None, *, tensors: bool = True) -> tuple[str, ...]:
    """How to get more open files; ``tensors``: workers that send tensors may use them."""
    unlimited = hard is None or hard < 0
    wanted = 65536 if unlimited or hard is None or hard >= 65536 else hard
    lines = []
    if wanted > soft:
        lines.append(say("in the shell that starts the training run:\nulimit -n {count}", count=wanted))
    if not unlimited and (hard or 0) < 65536:
        if runtime.kind in ("docker", "podman"):
            lines.append(
                say("restart the container with:\n{tool} run --ulimit nofile=65536:65536 …", tool=runtime.kind)
            )
        elif runtime.kind == "kubernetes":
            lines.append(
                say(
                    "for more than {hard}, ask the cluster administrator to raise LimitNOFILE of the container runtime",
                    hard=hard,
                )
            )
        else:
            lines.append(
                say(
                    "for more than {hard}, ask the administrator to raise nofile in /etc/security/limits.conf",
                    hard=hard,
                )
            )
    if tensors:
        lines.append(
            say(
                "or use fewer file descriptors and the same "
                "/dev/shm:\ntorch.multiprocessing.set_sharing_strategy('file_system')"
            )
        )
    return (*lines, say("check:\nulimit -n"))


def ask_above(runtime: RuntimeEnvironment) -> tuple[str, ...]:
    """How to read limits above the container, which are not visible inside it."""
    if runtime.kind in ("docker", "podman"):
        return (
            say(
                "on the host, print the container's limit (0 means none):\n{tool} inspect --format "
                "'{form}' CONTAINER",
                tool=runtime.kind, form="{{.HostConfig.Memory}}",
            ),
        )  # fmt: skip
    if runtime.kind == "kubernetes":
        return (say("print the limits of the pod and its containers:\nkubectl describe pod POD"),)
    if runtime.kind == "slurm":
        return (say("print the job's allocation:\nscontrol show job $SLURM_JOB_ID"),)
    return (say("read memory.max of the parent cgroups on the host"),)


def free_disk(*paths: str) -> tuple[str, ...]:
    """How to free space on the disks of these directories; without one, how to find the disk that is full."""
    if not paths:
        return (
            say("find the disk that is full, in bytes or in number of files:\ndf -h\ndf -i"),
            say("list its largest directories:\ndu -xh --max-depth=1 DIRECTORY | sort -h | tail"),
        )
    named = " ".join(map(shell_word, paths))
    return (
        say("list the largest directories:\ndu -xh --max-depth=1 {path} | sort -h | tail", path=named),
        check_room(named),
    )


def shorten_temporary(name: str, longest: int) -> tuple[str, ...]:
    """What to do if the path of the temporary directory is too long for sockets."""
    return (
        say("in the shell that starts the training run:\nmkdir -p /tmp/$USER && export {name}=/tmp/$USER", name=name),
        say("or use legroom.DataLoader instead of torch's: its workers need no such socket"),
        say('check: this prints {longest} or less:\nprintf %s "${name}" | wc -c', name=name, longest=longest),
    )


def use_less_gpu(runtime: RuntimeEnvironment) -> tuple[str, ...]:
    """What to do if GPU memory is too small."""
    if runtime.platform == "win32":
        return stop_spilling()
    return (
        say("run fewer jobs per GPU, or use a smaller batch with gradient accumulation (same effective batch size)"),
        say("use mixed precision, activation checkpointing, smaller images or shorter sequences"),
        say("check:\nnvidia-smi"),
    )


def remove_leftovers(names: tuple[str, ...], total: int) -> tuple[str, ...]:
    """How to remove files in /dev/shm that no process uses."""
    listed = " ".join(f"/dev/shm/{shell_word(name)}" for name in names[:5])
    return (
        say(
            "no process maps these {count} files ({total} in total); remove the largest:\nrm {names}"
            if len(names) > 5
            else "no process maps them; removing them frees {total}:\nrm {names}",
            total=format_size(total),
            names=listed,
            count=len(names),
        ),
        check_room(_SHM),
    )


def shell_word(name: str) -> str:
    """A path as one word of a command: a directory of systemd has backslashes, and of a user spaces."""
    with import_lock:
        import shlex

    return shlex.quote(name)

"""Read facts about this machine. Nothing here judges a number or changes anything.

Every function takes a Host: this machine, another root such as ``/host``, or a recording.

- legroom_available: bytes of a memory pool that can be taken now (``legroom.available()``)
- copy_on_write: what forked workers have copied of the memory they inherited, at once or now and then
- runtime_environment: container, Kubernetes, Slurm or WSL; root, capabilities and sudo
- filesystems_and_cgroups: mounts; disks of the store, of the working directory and of a job, with their peaks; the
  cgroups of a process, v1 and v2
- gpu_devices: NVIDIA GPUs with their memory and processes; GPU memory that Windows moved to RAM
- host_files_and_syscalls: files and system calls of the machine that is read
- memory_of_running_jobs: training jobs that run now: what each holds, what several share
- ram_swap_and_pressure: RAM under every cgroup limit, swap and its traffic, memory pressure (PSI)
- nvml: calls of NVML, with a reason for each failure; which entry is this process, also where NVML lists host pids
- process_and_limits: processes, their memory and command lines; limits: descriptors, CPU quota, pinned memory, TMPDIR
- shm: /dev/shm: size, files and leftovers, what holds them, whether logout deletes them
- shm_segments: which process maps or opens which shared-memory segment
- snapshot: everything above at one moment (``legroom.snapshot()``)
"""

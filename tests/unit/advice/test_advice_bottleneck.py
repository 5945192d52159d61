"""Of what a job draws on, the pool nearest its end binds."""

from __future__ import annotations

from machines import GB, healthy, with_pool

from legroom.advice.fit_on_machine import bind
from legroom.records.machine import Gpu, GpuProcess, Gpus, Process
from legroom.records.workload import Job

JOB = Job(1, "python train.py", (Process(1, 0, "python train.py", 0, fds=100, fd_limit=1024),), held={"gpu": None})


def test_ram_is_the_bottleneck_when_it_is_fullest() -> None:
    machine = with_pool(healthy(), "ram", 32 * GB, 30 * GB, 2 * GB)
    bound = bind(machine, JOB)
    assert bound.binds == "ram" and "94% used, 2 GB of 32 GB free" in bound.binds_why


def test_a_gpu_counts_only_when_the_job_is_on_it() -> None:
    users = (GpuProcess(1, 12 * GB, "python train.py"), GpuProcess(99, 7 * GB, None))
    card = Gpu(0, "card", "u", 20 * GB, 19 * GB, GB, users)
    machine = with_pool(healthy(gpus=Gpus((card,), 1, "580", "NVML")), "gpu0", 20 * GB, 19 * GB, GB)
    bound = bind(machine, JOB)
    assert bound.binds == "gpu0" and bound.held["gpu0"] == 12 * GB
    elsewhere = bind(machine, Job(2, "x", (Process(2, 0, "x", 0),)))
    assert elsewhere.binds != "gpu0" and "gpu0" not in elsewhere.held


def test_a_driver_without_per_process_figures_leaves_the_share_unknown() -> None:
    card = Gpu(0, "card", "u", 20 * GB, 19 * GB, GB, (GpuProcess(1, None, "python train.py"),))
    assert bind(healthy(gpus=Gpus((card,), 1, "580", "NVML")), JOB).held["gpu0"] is None


def test_descriptors_of_one_process_can_bind() -> None:
    job = Job(1, "x", (Process(7, 1, "x", 0, fds=1000, fd_limit=1024),))
    bound = bind(healthy(), job)
    assert bound.binds == "fds" and "pid 7 has 1000 of 1024" in bound.binds_why


def test_without_figures_there_is_no_bottleneck() -> None:
    from dataclasses import replace

    bound = bind(replace(healthy(), pools=()), Job(1, "x", ()))
    assert bound.binds is None and "are unknown" in bound.binds_why

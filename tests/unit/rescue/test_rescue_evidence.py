"""What is gathered about a death: readings, counters, the kernel's log, daemons' traces, a cgroup of one's own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from legroom.probe.filesystems_and_cgroups import DiskLevels
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import client_name
from legroom.records.failure import Reading
from legroom.records.machine import Gpu, GpuProcess, Gpus, Level
from legroom.rescue import job_attempt, job_sampling
from legroom.rescue.cgroup_and_oom_victims import JobCgroup, KernelLog, OomVictims, _unused, make_job_cgroup
from legroom.rescue.find_failures_in_log import facts_of, named_paths
from legroom.rescue.job_attempt import (
    EvidenceCollector,
    RunningAttempt,
    RunOptions,
    hangs_on_shm,
    held_shm,
    recent_rate,
    refused_shm,
    seconds_unread,
    worst_stall,
)
from legroom.rescue.job_sampling import GpuLevels, JobSampler, StallDetector, cpu_seconds
from legroom.rescue.verdict import classify
from legroom.system.processes_and_threads import ExitStatus

MB = 1 << 20


def _reading(when: float, **known: float) -> Reading:
    return Reading(when, {}, **known)  # type: ignore[arg-type]


def test_the_rate_of_swap_is_of_the_last_seconds() -> None:
    history = [_reading(t, swapped_back=0) for t in range(50)]
    history += [_reading(50 + t, swapped_back=t * 4 * MB) for t in range(11)]
    assert recent_rate(history) == pytest.approx(4 * MB)
    assert recent_rate(history[:1]) is None and recent_rate([]) is None
    assert recent_rate([_reading(1), _reading(2)]) is None  # unknown is not zero


def test_the_worst_stall_is_of_the_last_seconds() -> None:
    history = [_reading(0, stalled=90.0), _reading(100, stalled=3.0), _reading(101)]
    assert worst_stall(history) == 3.0
    assert worst_stall([]) is None and worst_stall([_reading(1)]) is None


def test_a_day_of_samples_stays_small_and_keeps_the_peak() -> None:
    clock = [0.0]

    class Small(Host):
        def disk_space(self, path: str):  # type: ignore[no-untyped-def]
            from legroom.probe.host_files_and_syscalls import DiskSpace

            used = 60 * MB if clock[0] == 5000.0 else MB
            return DiskSpace(64 * MB, 64 * MB - used, used)

    host = Small(root=Path("/nowhere"), recording={})
    readings = JobSampler(host, JobCgroup(None, None, False), list, clock=lambda: clock[0])
    readings.begin()
    for second in range(20_000):
        clock[0] = float(second)
        readings.sample()
    assert len(readings.history) <= 4001
    assert readings.peaks["shm"] == Level(60 * MB, 64 * MB)
    assert readings.history[-1].when == 19_999
    assert readings.pause > 0.05  # an old run is looked at less often
    assert readings.shm_unread() == 1.0


def test_the_longest_time_without_a_reading_of_dev_shm_near_the_end_is_known(tmp_path: Path) -> None:
    clock = [0.0]
    (tmp_path / "dev/shm").mkdir(parents=True)
    sampler = JobSampler(Host(root=tmp_path), JobCgroup(None, None, False), list, clock=lambda: clock[0])
    sampler.begin()
    assert sampler.shm_unread() == 0.0
    for clock[0] in (0.1, 0.2, 1.5, 1.6):
        sampler.sample()
    sampler.sample_at_end()
    assert sampler.shm_unread() == pytest.approx(1.3)
    for tenth in range(17, 130):
        clock[0] = tenth / 10
        sampler.sample()
    assert sampler.shm_unread() == pytest.approx(0.1)  # it was long before the end


class _Disks(Host):
    """Two local disks and a read-only image; ``used`` bytes of 100 each."""

    used: dict[str, int]

    def disk_space(self, path: str):  # type: ignore[no-untyped-def]
        from legroom.probe.host_files_and_syscalls import DiskSpace

        return DiskSpace(100, 100 - self.used[path], self.used[path]) if path in self.used else None


@pytest.mark.parametrize(("before", "filled"), [(40, True), (100, False)])
def test_a_disk_that_became_full_is_known_wherever_it_is(tmp_path: Path, before: int, filled: bool) -> None:
    """torch.save writes and fails between two readings, to a disk that is not the current directory's."""
    lines = (("/scratch", "rw", "tmpfs"), ("/image", "ro", "ext4"), ("/dev/shm", "rw", "tmpfs"), ("/net", "rw", "nfs4"))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "".join(
            f"{n} 1 0:{n} / {point} {how},relatime - {kind} src {how}\n" for n, (point, how, kind) in enumerate(lines)
        )
    )
    for point, _, _ in lines:
        (tmp_path / point[1:]).mkdir(parents=True)
    host = _Disks(root=tmp_path)
    object.__setattr__(host, "used", {point: 100 for point, _, _ in lines} | {"/scratch": before})
    disks = DiskLevels(host, ())
    disks._before = {device: level.used for device, (_, level) in disks._local_disks().items()}
    host.used["/scratch"] = 100
    disks._stop.set()
    disks._finish_reading()
    full = {"/scratch": Level(100, 100)}
    assert (disks.finish(), disks.full_before) == ((full, {}) if filled else ({}, full))


def test_programs_that_start_processes_elsewhere() -> None:
    assert client_name(["sudo", "-E", "/usr/bin/docker", "run", "image"]) == "docker"
    assert client_name(["env", "A=1", "timeout", "30", "ssh", "node1", "python train.py"]) == "ssh"
    assert client_name(["python", "ssh.py"]) is client_name(["python", "docker"]) is client_name([]) is None
    victims = OomVictims(Host(), JobCgroup(None, None, False), client="ssh")
    victims.measure([os.getpid()])
    assert victims.client is None, "it is no longer running"


def test_the_disk_of_a_path_in_the_message_is_read(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    log = facts_of(f"OSError: [Errno 28] No space left on device: '{tmp_path}/runs/none/c.pt'\n".encode())
    disks = DiskLevels(Host(), ())
    disks.start()
    assert list(disks.finish(60.0, named_paths(log))) == [str(tmp_path / "runs")]
    assert named_paths(facts_of(b"OSError: [Errno 28] No space left on device: '/dev/shm/x'\n")) == ()


def test_the_kernel_s_log_is_read_from_the_mark_on_and_only_about_the_job(tmp_path: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text("6,1,1,-;Out of memory: Killed process 7 (old)\n")
    log = KernelLog.mark(str(kmsg), (str(tmp_path / "syslog"),))
    with kmsg.open("a") as file:
        file.write("3,2,2,-;Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB\n")
    assert log.kills({7}, None) == ("Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB",)
    log.close()
    log = KernelLog.mark(str(kmsg))
    with kmsg.open("a") as file:
        file.write("3,3,3,-;oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a/legroom-run-1,task=python,pid=9,uid=0\n")
    assert log.kills({7}, "/legroom-run-1") != () and log.kills({7}, "/legroom-run-1") == ()
    log.close()
    closed = KernelLog.mark(str(tmp_path / "none"))
    assert closed.kills({7}, None) is None and "none" in (closed.reason or "")


@pytest.mark.parametrize(("line", "ours"), [("run.sh: line 1: 4711 Killed   python", True), ("no kill", False)])
def test_a_process_that_no_sample_saw_is_known_by_the_job_s_own_report(tmp_path: Path, line: str, ours: bool) -> None:
    """It moved into a cgroup of its own at once, so the job's counter did not rise."""
    kmsg = tmp_path / "kmsg"
    kmsg.touch()
    host = Host()
    sampler = JobSampler(host, JobCgroup(None, None, False), list)
    collector = EvidenceCollector(host, JobCgroup(None, None, False), sampler)
    collector.log = KernelLog.mark(str(kmsg), ())
    kmsg.write_text("3,2,2,-;Memory cgroup out of memory: Killed process 4711 (python) anon-rss:1000kB\n")
    try:
        found = collector.evidence(ExitStatus(137, None), facts_of(line.encode()), None)
    finally:
        collector.close()
    assert bool(found.kernel) is ours
    assert (classify(found).cause == "ram-oom-kill") is ours


def test_daemons_that_kill_for_memory_are_found_by_the_pid(tmp_path: Path) -> None:
    syslog = tmp_path / "syslog"
    syslog.write_text("earlyoom[1]: sending SIGTERM to process 7 old\n")
    log = KernelLog.mark(str(tmp_path / "none"), (str(syslog),))
    with syslog.open("a") as file:
        file.write('h earlyoom[1]: sending SIGKILL to process 7 uid 0 "python": badness 900\n')
        file.write('h earlyoom[1]: sending SIGKILL to process 8 uid 0 "other": badness 900\n')
    found = log.killers({7}, 0.0)
    assert len(found) == 1 and "process 7 uid" in found[0]


def test_a_size_in_a_daemon_s_line_is_no_process(tmp_path: Path) -> None:
    syslog = tmp_path / "syslog"
    syslog.touch()
    log = KernelLog.mark(str(tmp_path / "none"), (str(syslog),))
    syslog.write_text('earlyoom[900]: sending SIGTERM to process 8 uid 0 "x": badness 7, VmRSS 1200 MiB\n')
    assert log.killers({900, 7, 1200}, 0.0) == () and len(log.killers({8}, 0.0)) == 1


def test_a_group_that_a_killed_supervisor_left_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup/legroom-run-1").mkdir(parents=True)
    assert _unused(str(tmp_path / "sys/fs/cgroup"), "legroom-run-1") == "legroom-run-1-2"
    (tmp_path / "sys/fs/cgroup/legroom-run-1-2-supervisor").mkdir()
    assert _unused(str(tmp_path / "sys/fs/cgroup"), "legroom-run-1") == "legroom-run-1-3"


def test_no_cgroup_is_no_reason_to_fail(tmp_path: Path) -> None:
    host = Host(root=tmp_path, recording={}, platform="linux")
    made = make_job_cgroup(host, "legroom-run-1")
    assert not made.own and made.reason and made.pids() == []
    assert made.counters(host)[0] is None
    made.close()
    elsewhere = make_job_cgroup(Host(root=tmp_path, recording={}, platform="darwin"), "x")
    assert elsewhere.path is None and elsewhere.reason


def test_a_job_that_works_or_writes_does_not_stall() -> None:
    watch = StallDetector(limit=10)
    assert not any(watch.stalled(float(t), cpu=t * 0.5, written=0) for t in range(60))
    assert not any(watch.stalled(float(60 + t), cpu=30, written=t) for t in range(60))
    assert any(watch.stalled(float(120 + t), cpu=30 + t * 0.001, written=60) for t in range(12))
    assert not any(StallDetector(limit=0).stalled(float(t), 0, 0) for t in range(100))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_refused_request_is_a_segment_with_a_size_and_no_pages() -> None:
    path = f"/dev/shm/legroom-test-{os.getpid()}"
    gc.collect()  # what an earlier test has left to the collector may be such a segment, too
    before = refused_shm(Host(), [os.getpid()])
    with open(path, "w+b") as file:
        os.unlink(path)
        file.truncate(before + 96 * MB)
        assert refused_shm(Host(), [os.getpid()]) == before + 96 * MB
    assert refused_shm(Host(), [os.getpid(), 1 << 22]) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_a_job_whose_own_bytes_fill_dev_shm_now_and_whose_loader_waits_hangs() -> None:
    level = Level(60 * MB, 64 * MB)
    refused = facts_of(b"RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left\n")
    assert hangs_on_shm(level, 48 * MB, refused, loader=True)
    assert not hangs_on_shm(level, 48 * MB, refused, loader=False)
    assert not hangs_on_shm(level, 1 * MB, refused, loader=True)  # another process filled it
    assert not hangs_on_shm(Level(0, 64 * MB), 0, refused, loader=True)  # it was full, and is not now
    assert not hangs_on_shm(level, 48 * MB, facts_of(b"step 1\n"), loader=True)  # batches that wait their turn
    assert not hangs_on_shm(level, None, refused, loader=True)
    # One batch larger than all of /dev/shm: nothing of it is there, and the request stays.
    assert hangs_on_shm(Level(0, 64 * MB), 0, refused, loader=True, refused=96 * MB)
    assert not hangs_on_shm(Level(0, 64 * MB), 0, refused, loader=True, refused=32 * MB)  # it would fit now
    assert not hangs_on_shm(Level(0, 64 * MB), 0, refused, loader=False, refused=96 * MB)
    assert not hangs_on_shm(Level(0, 64 * MB), 0, facts_of(b"step 1\n"), loader=True, refused=96 * MB)
    long_ago = facts_of(b"unable to allocate shared memory(shm)\n" + b"step\n" * 500)
    assert not hangs_on_shm(level, 48 * MB, long_ago, loader=True)


def test_the_level_of_dev_shm_counts_that_it_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was full once, whoever filled it; what the job was refused would fit now."""
    attempt = RunningAttempt(RunOptions(("true",)), None, None, Host(), print)  # type: ignore[arg-type]
    attempt._output.tail.feed(b"RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space\n")
    monkeypatch.setattr(job_attempt, "held_shm", lambda host, pids: 0)
    monkeypatch.setattr(job_attempt, "refused_shm", lambda host, pids: 32 * MB)
    child = SimpleNamespace(pids=lambda host: [1])
    peaks, victims = {"shm": Level(64 * MB, 64 * MB)}, SimpleNamespace(loader=True)
    for used, hangs in ((0, False), (60 * MB, True)):
        now = Level(used, 64 * MB)
        sampler = SimpleNamespace(shm=lambda now=now: now, peaks=peaks, victims=victims)
        assert attempt._hangs(child, sampler) is hangs  # type: ignore[arg-type]
    sampler.victims = SimpleNamespace(loader=False)  # on the same full /dev/shm
    assert not attempt._hangs(child, sampler)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
def test_bytes_of_dev_shm_are_the_job_s_own() -> None:
    code = (
        "import mmap, os, sys, tempfile\nf = tempfile.TemporaryFile(dir='/dev/shm')\n"
        "os.ftruncate(f.fileno(), 1 << 20)\nm = mmap.mmap(f.fileno(), 1 << 20)\nm[:] = bytes(1 << 20)\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    one, another = (subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2))
    try:
        for process in (one, another):
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert held_shm(Host(), [one.pid]) == 1 << 20
        assert held_shm(Host(), [one.pid, another.pid]) == 2 << 20
        assert held_shm(Host(), []) == 0
    finally:
        for process in (one, another):
            process.communicate()


def test_cpu_time_of_processes() -> None:
    assert cpu_seconds(Host(), [os.getpid()]) > 0
    assert cpu_seconds(Host(), [2**22 + 1]) == 0


@pytest.mark.parametrize(("version", "name"), [("v1", "memory.max_usage_in_bytes"), ("v2", "memory.peak")])
def test_the_kernel_s_peak_counts_where_it_is_of_this_attempt(version: str, name: str, tmp_path: Path) -> None:
    group = tmp_path / "sys" / "job"
    group.mkdir(parents=True)
    peak = group / name
    peak.write_text(f"{50 * MB}\n")

    def looked(made: JobCgroup) -> JobSampler:
        readings = JobSampler(Host(root=tmp_path), made, list)
        readings.begin()
        readings.peaks["ram"] = Level(18 * MB, 120 * MB)
        return readings

    own = JobCgroup("/sys/job", version, True)  # type: ignore[arg-type]
    readings, shared = looked(own), looked(JobCgroup("/sys/job", version, False))  # type: ignore[arg-type]
    assert readings.ram_peak() is None  # what an attempt before this one took
    peak.write_text(f"{119 * MB}\n")
    assert readings.ram_peak() == Level(119 * MB, 120 * MB)
    assert shared.ram_peak() is None  # somebody else may have taken it
    readings.peaks["ram"] = Level(120 * MB, 120 * MB)
    assert readings.ram_peak() is None  # the looks saw more
    peak.unlink()
    assert readings.ram_peak() is None


def test_how_long_ago_a_pool_was_looked_at() -> None:
    history = [Reading(1.0, {"ram": Level(1, 2)}), Reading(1.5, {"shm": Level(1, 2)}), Reading(1.9, {})]
    assert seconds_unread(history, "ram") == pytest.approx(0.9)
    assert seconds_unread(history, "swap") is None and seconds_unread([], "ram") is None


def test_a_gpu_that_does_not_answer_blocks_nothing_and_an_old_reading_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), threading.Event()
    card = Gpu(0, "fake", "", 100, 40, 60, (GpuProcess(7, 30, "python"), GpuProcess(8, 5, None)))

    def gpus(host: Host) -> Gpus:
        asked.set()
        answers.wait(60)
        return Gpus((card,), 1, None, "NVML")

    class Nvidia(Host):
        def exists(self, path: str) -> bool:
            return path == "/dev/nvidiactl" or super().exists(path)

    monkeypatch.setattr(job_sampling, "gpus", gpus)
    monkeypatch.setattr(job_sampling, "NvmlSession", lambda: SimpleNamespace(open=int, close=int))
    host = Nvidia()
    sampler = JobSampler(host, JobCgroup(None, None, False), list)
    collector = EvidenceCollector(host, JobCgroup(None, None, False), sampler)
    collector.begin()
    try:
        assert asked.wait(60)
        reading = sampler.sample()
        assert reading is not None and "gpu0" not in reading.levels
        answers.set()
        deadline = time.monotonic() + 60
        while not sampler.read_gpus().levels and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sampler.read_gpus() == GpuLevels({"gpu0": Level(40, 100)}, {7: 30})
        collector.gpus._read_at -= 60
        assert sampler.read_gpus() == GpuLevels()
    finally:
        collector.close()


def test_pages_are_of_the_machine_s_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_text("7 (python) S 1 7 7\n")
    (tmp_path / "proc/7/statm").write_text("100 10 0 0 0 0 0\n")
    monkeypatch.setattr("mmap.PAGESIZE", 65536)
    victims = OomVictims(Host(root=tmp_path), JobCgroup(None, None, False))
    victims.measure([7])
    assert victims._known[7].rss == 10 * 65536


@pytest.mark.parametrize("hidden", [False, True])
def test_ram_is_that_of_the_tightest_limit_also_above_what_a_container_shows(hidden: bool, tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n" if hidden else "4:memory:/job\n",
        "proc/self/mountinfo": "30 1 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "proc/meminfo": f"MemTotal: {64 * MB} kB\nMemAvailable: {60 * MB} kB\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 62}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{300 * MB}\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\ntotal_active_file 0\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{400 * MB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{300 * MB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 0\ntotal_active_file 0\n",
    }
    if hidden:
        files["sys/fs/cgroup/memory/memory.stat"] += f"hierarchical_memory_limit {400 * MB}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sampler = JobSampler(Host(root=tmp_path, recording={}, platform="linux"), JobCgroup(None, None, False), list)
    sampler.begin()
    reading = sampler.sample()
    assert reading is not None and reading.levels["ram"] == Level(300 * MB, 400 * MB)

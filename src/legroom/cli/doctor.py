"""`legroom doctor`: check the memory limits on this machine; its text and JSON output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from legroom.advice.choose_settings import safe_settings
from legroom.advice.findings import findings
from legroom.advice.fit_on_machine import bind
from legroom.cli.options import AT_LEAST_1, WithEarlierNames, json_option, refuse_beside, root_option
from legroom.cli.text_layout import (
    finding_lines,
    labelled,
    paragraph,
    pool_line,
    print_result,
    process_lines,
    runtime_line,
)
from legroom.errors import LegroomError
from legroom.messages import counted, listed, phrase, say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.snapshot import snapshot
from legroom.records.finding_and_alarm import Finding
from legroom.records.loader_settings_and_flags import SafeSettings
from legroom.records.machine import Machine, Process
from legroom.records.watch_sample import GpuCopyRow
from legroom.records.workload import Job
from legroom.units import format_size

_MOST_HOLDERS = 5


@click.command()
@json_option
@click.option("--plain", is_flag=True, help="Print plain text without bars, for screen readers.")
@click.option(
    "--pid",
    "--job",
    "job",
    cls=WithEarlierNames,
    type=AT_LEAST_1,
    metavar="PID",
    help="Also inspect this process and its children.",
)
@click.option(
    "--match", metavar="REGEX", help="Also inspect every process whose command line matches REGEX, and its children."
)
@root_option
def command(as_json: bool, plain: bool, job: int | None, match: str | None, root: str) -> int:
    """Check the memory limits on this machine and suggest fixes.

    Changes nothing on the machine and needs no privileges. Exits 1 if a finding is critical.
    """
    refuse_beside("job", {"match"})
    refuse_beside("as_json", {"plain"})
    host = Host.at(root)
    found = _jobs(host, job, match)
    machine = snapshot(host, pid=str(found[0].pid) if found else "self")
    found = [bind(machine, one) for one in found]
    said, settings = (*_copied(host, found), *findings(machine)), safe_settings(machine)
    copies = _gpu_copies(host, machine)
    print_result(
        as_json, "doctor", lambda: as_object(machine, said, settings, found, copies),
        lambda: as_text(machine, said, settings, found, plain, copies),
    )  # fmt: skip
    return 1 if any(finding.severity == "critical" for finding in said) else 0


def _jobs(host: Host, pid: int | None, pattern: str | None) -> list[Job]:
    """The requested job, or every job that matches, largest first."""
    if pid is None and pattern is None:
        return []
    from legroom.probe.memory_of_running_jobs import job, jobs

    found = [job(host, pid)] if pid is not None else jobs(host, pattern or "")
    return sorted(found, key=lambda one: -(one.held.get("ram") or 0))


def _gpu_copies(host: Host, machine: Machine) -> tuple[GpuCopyRow, ...]:
    """Copies in GPU memory that processes share: of a live machine with a GPU only."""
    if not host.live or not machine.gpus.cards:
        return ()
    from legroom.cache.list_gpu_copies import gpu_copies

    try:
        return gpu_copies()
    except (LegroomError, OSError):
        return ()


def _copied(host: Host, jobs: Sequence[Job]) -> tuple[Finding, ...]:
    """Forked workers that copy their parent's memory, seen in a few readings: of a live machine only."""
    if not jobs or not host.live:
        return ()
    from legroom.advice.findings_copy_on_write import finding_of_readings
    from legroom.probe.memory_of_running_jobs import copies_over_time

    found = (finding_of_readings(*one) for one in copies_over_time(host, jobs))
    return tuple(one for one in found if one is not None)


def as_object(
    machine: Machine,
    said: tuple[Finding, ...],
    settings: tuple[SafeSettings, ...],
    jobs: Sequence[Job],
    gpu_copies: Sequence[GpuCopyRow] = (),
) -> dict[str, Any]:
    """The report for JSON."""
    report: dict[str, Any] = {
        "place": dataclasses.asdict(machine.runtime),
        "pools": [dataclasses.asdict(pool) for pool in machine.pools],
        "shm": dataclasses.asdict(machine.shm),
        "holders": [_holder_object(process) for process in _holders(machine)],
        "gpu_copies": [dataclasses.asdict(copy) for copy in gpu_copies],
        "settings": [dataclasses.asdict(row) for row in settings],
        "findings": [dataclasses.asdict(finding) for finding in said],
    }
    if jobs:
        report["job"] = dataclasses.asdict(jobs[0])
        report["jobs"] = [dataclasses.asdict(one) for one in jobs]
    return report


def as_text(
    machine: Machine,
    said: tuple[Finding, ...],
    settings: tuple[SafeSettings, ...],
    jobs: Sequence[Job],
    plain: bool,
    gpu_copies: Sequence[GpuCopyRow] = (),
) -> str:
    """The report as text."""
    lines = [
        runtime_line(machine.runtime),
        "",
        *(pool_line(pool, plain) for pool in machine.pools),
        "",
        *_holder_lines(machine),
        *_gpu_copy_lines(gpu_copies),
        *_jobs_lines(jobs),
        *_settings_lines(settings),
        "",
    ]
    if not said:
        blind = [pool.name for pool in machine.pools if pool.name in ("shm", "ram") and pool.free is None]
        lines.append(
            say("No findings, but {names} could not be read.", names=listed(blind))
            if blind
            else say("No findings: no resource is running out.")
        )
    for finding in said:
        lines += [*finding_lines(finding), ""]
    return "\n".join(lines).rstrip()


def _holders(machine: Machine) -> list[Process]:
    """Processes that use /dev/shm, largest first."""
    holding = [process for process in machine.processes if process.shm]
    return sorted(holding, key=lambda process: -(process.shm or 0))


def _holder_object(process: Process) -> dict[str, Any]:
    names = ("pid", "command", "uid", "shm", "shm_mapped", "rss_shmem")
    return {name: getattr(process, name) for name in names}


def _holder_lines(machine: Machine) -> list[str]:
    holders = _holders(machine)
    if not holders:
        return []
    rows = [(process.pid, process.shm, process.rss_shmem, process.command) for process in holders]
    head = say("Processes using /dev/shm (shared files count for each process)")
    return [head, *process_lines(rows, _MOST_HOLDERS), ""]


def _gpu_copy_lines(copies: Sequence[GpuCopyRow]) -> list[str]:
    if not copies:
        return []
    from legroom.monitor.watch_text import gpu_copy_line

    head = say("Copies in GPU memory that processes share (each counts once)")
    return [head, *(paragraph(gpu_copy_line(copy), "  ", "    ") for copy in copies), ""]


def _settings_lines(settings: tuple[SafeSettings, ...]) -> list[str]:
    lines = [say("torch DataLoader settings that fit now")]
    for row in settings:
        if row.num_workers == 0:
            size = say("any batch size: uses no shared memory")
        elif row.max_batch_bytes is None:
            size = say("batch size unknown: {why}", why=row.why)
        else:
            size = say("batches up to {size}", size=format_size(row.max_batch_bytes))
        prefetch = "" if row.prefetch_factor is None else f", prefetch_factor={row.prefetch_factor}"
        lines.append(paragraph(size, f"  num_workers={row.num_workers}{prefetch}".ljust(36), " " * 36))
    if any(row.max_batch_bytes is not None for row in settings):
        text = say(
            "these sizes leave 20% of the free memory for other processes; legroom check measures your own settings, "
            "and leaves no such reserve"
        )
        lines.append(paragraph(text, "  ", "  "))
    lines.append(paragraph(settings[-1].pin_why, "  ", "  "))
    return lines


def _jobs_lines(jobs: Sequence[Job]) -> list[str]:
    lines = []
    if len(jobs) > 1:
        ram = [one.held.get("ram") for one in jobs]
        known = [amount for amount in ram if amount is not None]
        total = format_size(sum(known)) if len(known) == len(ram) else say("an unknown amount")
        lines = [
            paragraph(
                say("{count} jobs match, {total} of RAM in total, largest first", count=len(jobs), total=total),
                "",
                "  ",
            ),
            "",
        ]
    return [*lines, *(line for one in jobs for line in _job_lines(one))]


def _job_lines(job: Job) -> list[str]:
    count = len(job.processes)
    held = listed(f"{name} {_amount(name, amount)}" for name, amount in job.held.items())
    flags = listed(f"{name} {value}" for name, value in job.flags.items())
    return [
        paragraph(
            say(
                "Job {pid} ({processes}): {command}",
                pid=job.pid,
                processes=counted(count, phrase("{count} process"), phrase("{count} processes")),
                command=job.command,
            ),
            "",
            "  ",
        ),
        labelled(say("  memory: "), held),
        labelled(say("  flags: "), flags or say("none recognised on its command line")),
        *(labelled(say("  note: "), note) for note in job.notes),
        labelled(say("  limited by: "), job.binds_why),
        "",
    ]


def _amount(name: str, amount: int | None) -> str:
    if amount is None:
        return say("unknown")
    return str(amount) if name == "fds" else format_size(amount)

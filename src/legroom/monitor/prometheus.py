"""Prometheus metrics of a watch, and ``/metrics`` over HTTP.

Base units: bytes, seconds, ratios from 0 to 1. Counters end in ``_total``. An unknown value is left out, never zero.
The dashboard and alert rules are in share/.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from legroom.monitor.http_server import TEXT, Handler, parse_address, serve
from legroom.records.watch_sample import Moment, ProcessRow, Sample

PORT = 9464
MOST_PROCESSES = 64  # the largest: Prometheus stores a series for every process that is ever exported
_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus:
    """Serves the newest moment as metrics."""

    def __init__(self, where: str = str(PORT)) -> None:
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._totals = Totals()
        handler = type("_BoundHandler", (_MetricsHandler,), {"metrics": self})
        # Scrapers use service names that this machine does not know.
        self._server = serve(parse_address(where, PORT), handler, any_host=True)

    @property
    def url(self) -> str:
        """The address for the Prometheus configuration."""
        return f"{self._server.url}/metrics"

    def show(self, moment: Moment) -> None:
        with self._lock:
            seconds = moment.sample.clock - self._moment.sample.clock if self._moment else 0.0
            self._totals = self._totals.after(moment, max(0.0, seconds))
            self._moment = moment

    def close(self) -> None:
        self._server.stop()

    def text(self) -> str | None:
        """The metrics now; None before the first sample."""
        with self._lock:
            moment, totals = self._moment, self._totals
        return None if moment is None else metrics_text(moment, totals)


class _MetricsHandler(Handler):
    metrics: Prometheus

    def page(self, path: str) -> None:
        if path not in ("/", "/metrics"):
            self.respond(404, TEXT, b"see /metrics\n")
        elif (text := self.metrics.text()) is None:
            self.respond(503, TEXT, b"no sample yet\n")
        else:
            self.respond(200, _FORMAT, text.encode("utf-8", "replace"))


class Value(NamedTuple):
    """One value of a metric."""

    metric: str  # without legroom_
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the watch began."""

    swapped_in: float = 0.0
    swapped_out: float = 0.0
    alarms: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (code, pool): how often it began

    def after(self, moment: Moment, seconds: float) -> Totals:
        """The sums with a moment added that came ``seconds`` after the one before."""
        alarms = dict(self.alarms)
        for alarm in moment.begun:
            key = (alarm.code, alarm.pool or "")
            alarms[key] = alarms.get(key, 0) + 1
        return Totals(
            self.swapped_in + (moment.sample.swap_in or 0.0) * seconds,
            self.swapped_out + (moment.sample.swap_out or 0.0) * seconds,
            alarms,
        )


METRICS = {  # without legroom_: type and help
    "pool_size_bytes": ("gauge", "Size of a pool; ram is limited by the cgroup."),
    "pool_used_bytes": ("gauge", "Used bytes of a pool, without what can be reclaimed."),
    "pool_free_bytes": ("gauge", "Free bytes of a pool."),
    "pool_used_ratio": ("gauge", "Used share of a pool, 0 to 1."),
    "pool_full_in_seconds": ("gauge", "Seconds until a pool that is filling up is full."),
    "swap_in_bytes_total": ("counter", "Bytes the machine swapped in since the watch began."),
    "swap_out_bytes_total": ("counter", "Bytes the machine swapped out since the watch began."),
    "memory_pressure_ratio": ("gauge", "Share of the last 10 s in which some or all tasks stalled on memory."),
    "oom_kills_total": ("counter", "Processes killed by the OOM killer, as the kernel counts them."),
    "memory_limit_hits_total": ("counter", "Hits of the cgroup's memory limit."),
    "memory_throttled_total": ("counter", "Times the cgroup was throttled at memory.high."),
    "processes": ("gauge", "Watched processes."),
    "process_resident_memory_bytes": ("gauge", "RSS of a process."),
    "process_shared_memory_bytes": ("gauge", "RssShmem of a process: /dev/shm, memfd, pinned memory."),
    "process_swap_bytes": ("gauge", "VmSwap of a process."),
    "process_proportional_memory_bytes": ("gauge", "PSS of a process, read less often than RSS."),
    "process_proportional_memory_age_seconds": ("gauge", "Age of the PSS reading."),
    "process_gpu_memory_bytes": ("gauge", "GPU memory of a process, on all GPUs."),
    "process_open_fds": ("gauge", "Open file descriptors of a process."),
    "process_max_fds": ("gauge", "File descriptor limit of a process."),
    "component_bytes": ("gauge", "Host memory by component, as the script reports it."),
    "steps_total": ("counter", "Training steps, as the script counts them."),
    "cache_entry_bytes": ("gauge", "Size of a dataset in the shared cache."),
    "alarm": ("gauge", "1 for each active alarm."),
    "alarms_total": ("counter", "Times each alarm began."),
    "sample_timestamp_seconds": ("gauge", "Time of the sample."),
    "sample_cost_seconds": ("gauge", "CPU time spent on the sample."),
}


def metrics_text(moment: Moment, totals: Totals) -> str:
    """The moment in the Prometheus text format."""
    by_metric: dict[str, list[Value]] = {}
    for value in metric_values(moment, totals):
        by_metric.setdefault(value.metric, []).append(value)
    lines: list[str] = []
    for name, (kind, text) in METRICS.items():
        if found := by_metric.get(name):
            lines += [f"# HELP legroom_{name} {_escape(text)}", f"# TYPE legroom_{name} {kind}"]
            lines += [f"legroom_{name}{_labels(one.labels)} {_number(one.value)}" for one in found]
    return "\n".join(lines) + "\n"


def metric_values(moment: Moment, totals: Totals) -> Iterator[Value]:
    """Every known value."""
    sample = moment.sample
    yield from _pools(sample)
    for alarm in moment.alarms:
        labels = {"code": alarm.code, "pool": alarm.pool or "", "level": alarm.level}
        yield Value("alarm", labels, 1)
        left = alarm.evidence.get("full_in_seconds")
        if alarm.pool and isinstance(left, (int, float)):
            yield Value("pool_full_in_seconds", {"pool": alarm.pool}, left)
    for (code, pool), count in totals.alarms.items():
        yield Value("alarms_total", {"code": code, "pool": pool}, count)
    if sample.swap_in is not None or totals.swapped_in:
        yield Value("swap_in_bytes_total", {}, totals.swapped_in)
    if sample.swap_out is not None or totals.swapped_out:
        yield Value("swap_out_bytes_total", {}, totals.swapped_out)
    for one in sample.pressure:
        for kind, average in (("some", one.some_avg10), ("full", one.full_avg10)):
            yield Value("memory_pressure_ratio", {"scope": one.scope, "kind": kind}, average / 100)
    events = sample.events
    yield from _known({"scope": events.scope}, oom_kills_total=events.oom_kills,
                      memory_limit_hits_total=events.at_limit, memory_throttled_total=events.throttled)  # fmt: skip
    yield Value("processes", {}, len(sample.processes))
    for row in sorted(sample.processes, key=lambda row: -(row.host or 0))[:MOST_PROCESSES]:
        yield from _process(row, sample.clock)
    for name, size in sample.said.components.items():
        yield Value("component_bytes", {"component": name}, size)
    yield from _known({}, steps_total=sample.said.steps, sample_cost_seconds=sample.cost)
    sizes: dict[tuple[str, str, str], int] = {}  # entries without a key may agree in all labels: one series
    for entry in sample.entries or ():
        identity = entry.key, entry.source, entry.backing
        sizes[identity] = sizes.get(identity, 0) + entry.bytes
    for (key, source, backing), size in sizes.items():
        yield Value("cache_entry_bytes", {"key": key, "source": source, "backing": backing}, size)
    yield Value("sample_timestamp_seconds", {}, sample.when)


def _pools(sample: Sample) -> Iterator[Value]:
    for pool in sample.pools:
        yield from _known({"pool": pool.name}, pool_size_bytes=pool.size, pool_used_bytes=pool.used,
                          pool_free_bytes=pool.free, pool_used_ratio=pool.used_share)  # fmt: skip


def _process(row: ProcessRow, clock: float) -> Iterator[Value]:
    age = None if row.pss is None or row.pss_at is None else clock - row.pss_at
    yield from _known(
        {"pid": str(row.pid), "command": row.command},
        process_resident_memory_bytes=row.rss, process_shared_memory_bytes=row.rss_shmem, process_swap_bytes=row.swap,
        process_proportional_memory_bytes=row.pss, process_proportional_memory_age_seconds=age,
        process_gpu_memory_bytes=row.gpu, process_open_fds=row.fds, process_max_fds=row.fd_limit,
    )  # fmt: skip


def _known(labels: Mapping[str, str], **values: float | None) -> Iterator[Value]:
    return (Value(name, labels, value) for name, value in values.items() if value is not None)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escape(value, quotes=True)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escape(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else format(value, ".17g")

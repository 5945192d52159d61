"""The latest moment, served to Prometheus.

Covers: ``/metrics`` on this machine's own address unless another is named. Does not cover: the metrics (metrics.py),
the dashboard and alert rules (share/).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from legroom.model import Moment, ProcessRow, Sample
from legroom.monitor.http_server import Handler, handler_for, parse_address, serve

PORT = 9464
_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus:
    """An output that others come and fetch."""

    def __init__(self, where: str = str(PORT)) -> None:
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._totals = Totals()
        self._server = serve(parse_address(where, PORT), handler_for(self._page))

    @property
    def url(self) -> str:
        """What to give to Prometheus."""
        return f"{self._server.url}/metrics"

    def show(self, moment: Moment) -> None:
        with self._lock:
            seconds = moment.sample.clock - self._moment.sample.clock if self._moment else 0.0
            self._totals = self._totals.after(moment, max(0.0, seconds))
            self._moment = moment

    def close(self) -> None:
        self._server.stop()

    def text(self) -> str | None:
        """What is served now; None before the first sample."""
        with self._lock:
            moment, totals = self._moment, self._totals
        return None if moment is None else metrics_text(moment, totals)

    def _page(self, handler: Handler, path: str) -> None:
        text = self.text() if path in ("/", "/metrics") else None
        if text is not None:
            handler.give(200, _FORMAT, text.encode("utf-8", "replace"))
        elif path in ("/", "/metrics"):
            handler.give(503, "text/plain; charset=utf-8", b"no sample yet\n")
        else:
            handler.give(404, "text/plain; charset=utf-8", b"see /metrics\n")


MOST_PROCESSES = 64  # of those that hold most: every process that ever was is a series for ever


class Metric(NamedTuple):
    """One metric's name, kind and help."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str


class Value(NamedTuple):
    """One figure of a metric."""

    metric: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Totals:
    """What the metrics need and one moment does not tell: sums since the watch began."""

    swapped_in: float = 0.0
    swapped_out: float = 0.0
    alarms: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (code, pool) → how often it began

    def after(self, moment: Moment, seconds: float) -> Totals:
        """The sums with that moment added, which came so long after the one before."""
        alarms = dict(self.alarms)
        for alarm in moment.begun:
            key = (alarm.code, alarm.pool or "")
            alarms[key] = alarms.get(key, 0) + 1
        return Totals(
            self.swapped_in + (moment.sample.swap_in or 0.0) * seconds,
            self.swapped_out + (moment.sample.swap_out or 0.0) * seconds,
            alarms,
        )


METRICS = (
    Metric("legroom_pool_size_bytes", "gauge", "How large a pool is; ram is bounded by the cgroup."),
    Metric("legroom_pool_used_bytes", "gauge", "How much of a pool is used and cannot be reclaimed."),
    Metric("legroom_pool_free_bytes", "gauge", "How much of a pool is left."),
    Metric("legroom_pool_used_ratio", "gauge", "The share of a pool that is used, 0 to 1."),
    Metric("legroom_pool_full_in_seconds", "gauge", "When a pool that is being filled will be full."),
    Metric("legroom_swap_in_bytes_total", "counter", "Bytes the machine swapped in since the watch began."),
    Metric("legroom_swap_out_bytes_total", "counter", "Bytes the machine swapped out since the watch began."),
    Metric(
        "legroom_memory_pressure_ratio",
        "gauge",
        "Share of 10 s in which some or all tasks waited for memory.",
    ),
    Metric("legroom_oom_kills_total", "counter", "Processes ended by the OOM killer, as the kernel counts."),
    Metric("legroom_memory_limit_hits_total", "counter", "How often the cgroup's memory limit was hit."),
    Metric("legroom_memory_throttled_total", "counter", "How often memory.high slowed the cgroup down."),
    Metric("legroom_processes", "gauge", "Processes that are watched."),
    Metric("legroom_process_resident_memory_bytes", "gauge", "A process's RSS."),
    Metric(
        "legroom_process_shared_memory_bytes",
        "gauge",
        "A process's RssShmem: /dev/shm, memfd, pinned memory.",
    ),
    Metric("legroom_process_swap_bytes", "gauge", "A process's VmSwap."),
    Metric("legroom_process_proportional_memory_bytes", "gauge", "A process's PSS, read sparingly."),
    Metric("legroom_process_proportional_memory_age_seconds", "gauge", "How old the PSS is."),
    Metric("legroom_process_gpu_memory_bytes", "gauge", "What a process holds on all cards."),
    Metric("legroom_process_open_fds", "gauge", "Descriptors a process has open."),
    Metric("legroom_process_max_fds", "gauge", "Descriptors a process may open."),
    Metric("legroom_component_bytes", "gauge", "Host memory by component, as the script marks it."),
    Metric("legroom_steps_total", "counter", "Training steps, as the script counts them."),
    Metric("legroom_cache_entry_bytes", "gauge", "A dataset in the shared cache."),
    Metric("legroom_alarm", "gauge", "1 for each alarm that stands."),
    Metric("legroom_alarms_total", "counter", "How often each alarm began."),
    Metric("legroom_sample_timestamp_seconds", "gauge", "When the sample was taken."),
    Metric("legroom_sample_cost_seconds", "gauge", "CPU time that taking the sample took."),
)


def metrics_text(moment: Moment, totals: Totals) -> str:
    """The moment in Prometheus's text format."""
    by_metric: dict[str, list[Value]] = {}
    for value in metric_values(moment, totals):
        by_metric.setdefault(value.metric, []).append(value)
    lines: list[str] = []
    for metric in METRICS:
        found = by_metric.pop(metric.name, [])
        if found:
            lines += [f"# HELP {metric.name} {_escape(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
            lines += [f"{metric.name}{_labels(one.labels)} {_number(one.value)}" for one in found]
    return "\n".join(lines) + "\n"


def metric_values(moment: Moment, totals: Totals) -> Iterator[Value]:
    """Every figure that is known."""
    sample = moment.sample
    yield from _pools(sample)
    for alarm in moment.alarms:
        labels = {"code": alarm.code, "pool": alarm.pool or "", "level": alarm.level}
        yield Value("legroom_alarm", labels, 1)
        left = alarm.evidence.get("full_in_seconds")
        if alarm.pool and isinstance(left, (int, float)):
            yield Value("legroom_pool_full_in_seconds", {"pool": alarm.pool}, left)
    for (code, pool), count in totals.alarms.items():
        yield Value("legroom_alarms_total", {"code": code, "pool": pool}, count)
    if sample.swap_in is not None or totals.swapped_in:
        yield Value("legroom_swap_in_bytes_total", {}, totals.swapped_in)
    if sample.swap_out is not None or totals.swapped_out:
        yield Value("legroom_swap_out_bytes_total", {}, totals.swapped_out)
    for one in sample.pressure:
        for kind, average in (("some", one.some_avg10), ("full", one.full_avg10)):
            yield Value("legroom_memory_pressure_ratio", {"scope": one.scope, "kind": kind}, average / 100)
    events = sample.events
    yield from _known("legroom_oom_kills_total", {"scope": events.scope}, events.oom_kills)
    yield from _known("legroom_memory_limit_hits_total", {"scope": events.scope}, events.at_limit)
    yield from _known("legroom_memory_throttled_total", {"scope": events.scope}, events.throttled)
    yield Value("legroom_processes", {}, len(sample.processes))
    for row in _largest(sample.processes):
        yield from _process(row, sample.clock)
    for name, size in sample.said.components.items():
        yield Value("legroom_component_bytes", {"component": name}, size)
    yield from _known("legroom_steps_total", {}, sample.said.steps)
    for entry in sample.entries or ():
        labels = {"key": entry.key, "source": entry.source, "backing": entry.backing}
        yield Value("legroom_cache_entry_bytes", labels, entry.bytes)
    yield Value("legroom_sample_timestamp_seconds", {}, sample.when)
    yield from _known("legroom_sample_cost_seconds", {}, sample.cost)


def _pools(sample: Sample) -> Iterator[Value]:
    for pool in sample.pools:
        labels = {"pool": pool.name}
        yield from _known("legroom_pool_size_bytes", labels, pool.size)
        yield from _known("legroom_pool_used_bytes", labels, pool.used)
        yield from _known("legroom_pool_free_bytes", labels, pool.free)
        yield from _known("legroom_pool_used_ratio", labels, pool.used_share)


def _process(row: ProcessRow, clock: float) -> Iterator[Value]:
    labels = {"pid": str(row.pid), "command": row.command}
    yield from _known("legroom_process_resident_memory_bytes", labels, row.rss)
    yield from _known("legroom_process_shared_memory_bytes", labels, row.rss_shmem)
    yield from _known("legroom_process_swap_bytes", labels, row.swap)
    yield from _known("legroom_process_proportional_memory_bytes", labels, row.pss)
    if row.pss is not None and row.pss_at is not None:
        yield Value("legroom_process_proportional_memory_age_seconds", labels, clock - row.pss_at)
    yield from _known("legroom_process_gpu_memory_bytes", labels, row.gpu)
    yield from _known("legroom_process_open_fds", labels, row.fds)
    yield from _known("legroom_process_max_fds", labels, row.fd_limit)


def _largest(rows: Iterable[ProcessRow]) -> list[ProcessRow]:
    return sorted(rows, key=lambda row: -(row.host or 0))[:MOST_PROCESSES]


def _known(metric: str, labels: Mapping[str, str], value: float | None) -> Iterator[Value]:
    if value is not None:
        yield Value(metric, labels, value)


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

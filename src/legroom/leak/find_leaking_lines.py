"""From the records of a process to the lines that make its memory grow. Pure, but for reading the source files.

A name needs two things: a holder whose amount grows in the shape of a leak, and a memory pool that grows with it. What
a pool grows beyond its holders is named by tracemalloc's windows, or is called what it is: outside Python, or unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from legroom.leak.leak_or_plateau import FEWEST, SeriesTrend, trend
from legroom.leak.lines_that_fill_containers import items_made, lines_of, shares_of_lines
from legroom.leak.record_files import CounterSample, CreatedItems, HolderRecord, ProcessRecord, TraceWindow
from legroom.leak.user_source_files import is_user_file
from legroom.messages import counted, phrase, say
from legroom.monitor.history_and_trend import theil_sen
from legroom.records.memory_growth import (
    Certainty,
    GrowingSite,
    Kind,
    LeakReport,
    Per,
    PoolGrowth,
    ProcessGrowth,
    SourceLine,
)
from legroom.units import format_duration

LEAST_PER_STEP = 1024  # bytes; slower growth is listed apart
LEAST_PER_SECOND = 16 << 10
_LEAST_GROWTH = 192 << 10  # bytes in the judged half, of a holder
_LEAST_NATIVE = 4 << 20  # of growth that no holder explains
_NATIVE_SHARE = 0.2  # of the pool's growth
_SMALL_OBJECT = 64  # bytes of a small Python object, about
_LARGEST_SMALL_OBJECT = 512
_TOO_MUCH = 2.5  # a holder's growth relative to the pool's: more cannot be
_CONSISTENT = 0.3  # a holder's share of the pool's growth from which the pool confirms it
_LEAST_COPIED = 8 << 20
_MOST_LINES = 3
_EVEN = 0.55
_MOSTLY_SEEN = 0.8  # of the newest items' bytes: then it is known which of several lines adds how much
_LEAST_SHARE = 0.1  # of the bytes, from which a line is named


@dataclass
class _Series:
    """What a process used, by step or by second."""

    per: Per
    samples: list[CounterSample]
    xs: list[float] = field(default_factory=list)

    def of(self, read: Callable[[CounterSample], float | None]) -> list[tuple[float, float]]:
        pairs = [(x, read(sample)) for x, sample in zip(self.xs, self.samples, strict=True)]
        return [(x, value) for x, value in pairs if value is not None]

    @property
    def half(self) -> float:
        """Steps or seconds of the second half, which is judged."""
        return (self.xs[-1] - self.xs[0]) / 2

    @property
    def per_second(self) -> float:
        """Steps per second in the second half of the run."""
        if self.per == "second":
            return 1.0
        half = len(self.samples) // 2
        steps = self.xs[-1] - self.xs[half]
        seconds = self.samples[-1].time - self.samples[half].time
        return steps / seconds if seconds > 0 else 0.0


def diagnose(records: Iterable[ProcessRecord], command: Sequence[str] = ()) -> LeakReport:
    """The growth of every process."""
    return LeakReport(tuple(diagnose_process(record) for record in records), tuple(command))


def diagnose_process(record: ProcessRecord) -> ProcessGrowth:
    """The growth of one process."""
    series = _series(record)
    seconds = record.samples[-1].time if record.samples else 0.0
    steps = None if record.source is None else max((s.step or 0 for s in record.samples), default=0)
    result = ProcessGrowth(
        pid=record.pid, parent=record.parent, command=record.command, role=record.role, rank=record.rank,
        per=series.per, steps=steps, seconds=seconds, notes=tuple(record.notes),
    )  # fmt: skip
    copied = _copied(record, series)
    if len(series.samples) < 2 * FEWEST:
        return replace(result, sites=tuple(copied), reason=_too_short(series, steps, seconds))
    free = _free(record.samples)
    pools = _Pools(series)
    sites, small = _held(record, series, pools)
    sites += _unexplained(record, series, pools, sites)
    sites = [_with_time(site, series, free) for site in (*sites, *copied)]
    late = _in_second_half(series, steps, seconds)
    return replace(
        result,
        reason=_too_sparse(late) if not sites and late < FEWEST else None,
        sites=tuple(sorted(sites, key=lambda site: -site.rate)),
        small=tuple(_with_time(site, series, free) for site in small),
        pools=tuple(pools.growth(name, sites) for name in pools.names()),
    )


def _series(record: ProcessRecord) -> _Series:
    walked = [sample for sample in record.samples if sample.walked]  # not the one at the exit, when variables are gone
    stepped = [sample for sample in walked if sample.step is not None]
    if record.source is not None and len(stepped) >= 2 * FEWEST:
        return _Series("step", stepped, [float(sample.step or 0) for sample in stepped])
    timed = walked if record.source is None else stepped
    return _Series("second" if record.source is None else "step", timed, [sample.time for sample in timed])


def _too_short(series: _Series, steps: int | None, seconds: float) -> str:
    if steps is None:
        return say("it made no steps, and ran for {time}: too short to tell", time=format_duration(seconds))
    return counted(steps, phrase("{count} step is too few to tell"), phrase("{count} steps are too few to tell"))


def _in_second_half(series: _Series, steps: int | None, seconds: float) -> int:
    """Samples in the half of the run that is judged; a busy machine leaves time for few."""
    end = seconds if series.per == "second" else steps or 0
    return sum(one >= end / 2 for one in series.xs)


def _too_sparse(count: int) -> str:
    return say("readings in the second half of the run: {count}, which are too few to tell", count=count)


class _Pools:
    """The pools of a process over its steps."""

    def __init__(self, series: _Series) -> None:
        self.series = series
        self.malloc_known = any(sample.counters.malloc is not None for sample in series.samples)
        self._trends: dict[str, SeriesTrend] = {}

    def names(self) -> list[str]:
        gpus = max((len(sample.counters.gpus) for sample in self.series.samples), default=0)
        shm = any(sample.counters.shmem for sample in self.series.samples)
        return ["ram", *(["shm"] if shm else []), *(f"gpu{number}" for number in range(gpus))]

    def points(self, pool: str) -> list[tuple[float, float]]:
        """Bytes in use; for RAM what malloc and Python gave out, where that is known."""
        if pool == "ram":
            return self.given_out(_SMALL_OBJECT) if self.malloc_known else self.resident()
        if pool == "shm":
            return self.series.of(lambda sample: sample.counters.shmem)
        number = int(pool[3:])
        return self.series.of(lambda s: s.counters.gpus[number] if number < len(s.counters.gpus) else None)

    def given_out(self, small_object: int) -> list[tuple[float, float]]:
        return self.series.of(
            lambda s: None if s.counters.malloc is None else s.counters.malloc + small_object * s.counters.blocks
        )

    def resident(self) -> list[tuple[float, float]]:
        return self.series.of(
            lambda s: None if s.counters.anonymous is None else s.counters.anonymous + (s.counters.swap or 0)
        )

    def mapped(self) -> list[tuple[float, float]]:
        """Resident memory beyond what malloc and Python's small objects take: mapped by libraries themselves."""
        return self.series.of(_mapped)

    def reserved(self) -> list[tuple[float, float]]:
        """Address space beyond malloc's. A buffer that is filled bit by bit adds to `mapped`, but not here."""
        return self.series.of(
            lambda s: (
                None
                if s.counters.data is None or s.counters.malloc_system is None
                else float(s.counters.data - s.counters.malloc_system)
            )
        )

    def trend(self, pool: str) -> SeriesTrend:
        if pool not in self._trends:
            self._trends[pool] = trend(self.points(pool), least=_LEAST_GROWTH)
        return self._trends[pool]

    def slope(self, pool: str) -> float | None:
        """Bytes per step in the second half, whatever the shape; for RAM the most that may be. None: unknown."""
        if pool == "shm":  # of a batch that no process has read yet, only /dev/shm knows
            used = _slope(self.series.of(lambda sample: sample.counters.dev_shm))
            return max((one for one in (_slope(self.points(pool)), used) if one is not None), default=None)
        if pool != "ram":
            return _slope(self.points(pool))
        known = [_slope(self.given_out(_LARGEST_SMALL_OBJECT)), _slope(self.resident())]
        return max((one for one in known if one is not None), default=None)

    def rest(self, pool: str, named: Mapping[str, float]) -> float:
        """Bytes per step that a pool grows beyond what was named; 0 if it has no shape of a leak."""
        found = self.trend(pool)
        return max(0.0, found.rate - named.get(pool, 0.0)) if found.leaks else 0.0

    def growth(self, pool: str, sites: Sequence[GrowingSite]) -> PoolGrowth:
        points, found = self.points(pool), self.trend(pool)
        named = sum(site.rate for site in sites if site.pool == pool and site.kind != "unknown")
        explained = min(1.0, named / found.rate) if found.leaks and found.rate > 0 else None
        return PoolGrowth(pool, _slope(points) or 0.0, found.leaks, explained, tuple(points))


def _mapped(sample: CounterSample) -> float | None:
    counters = sample.counters
    if counters.anonymous is None or counters.malloc_system is None:
        return None
    return max(
        0.0, counters.anonymous + (counters.swap or 0) - counters.malloc_system - _SMALL_OBJECT * counters.blocks
    )


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The median slope of the second half."""
    if len(points) < 2 * FEWEST:
        return None
    middle = (points[0][0] + points[-1][0]) / 2
    half = [point for point in points if point[0] >= middle]
    thinned = half[:: max(1, len(half) // 24)]
    xs = [x for x, _ in thinned]
    return theil_sen(xs, [value for _, value in thinned]) if len(set(xs)) == len(xs) and len(xs) > 2 else None


@dataclass
class _Candidate:
    """A holder that grows in the shape of a leak."""

    holder: HolderRecord
    trend: SeriesTrend
    points: list[tuple[float, float]]
    pools: dict[str, float]  # bytes per step

    @property
    def graph(self) -> bool:
        return self.holder.unit == "nodes" or self.holder.graphs > 0


def _held(record: ProcessRecord, series: _Series, pools: _Pools) -> tuple[list[GrowingSite], list[GrowingSite]]:
    """Holders that grow: those that matter, and those that are too slow."""
    candidates = _without_parts([one for holder in record.holders.values() if (one := _candidate(holder, series))])
    sites: list[GrowingSite] = []
    small: list[GrowingSite] = []
    named: dict[str, float] = {}
    for one in sorted(candidates, key=_made_before):
        for pool, rate in one.pools.items():
            slope = pools.slope(pool)
            if pool != "shm" and slope is not None and rate > _TOO_MUCH * max(slope, 0.0):
                continue  # it refers to what exists anyway: the pool does not grow with it
            if pool != "shm" and _made_before(one) and rate > _TOO_MUCH * pools.rest(pool, named):
                continue  # its new items had been made before, and the other holders explain the pool
            for site in _sites(one, pool, rate, series, pools):
                if _matters(site, series.per):
                    sites.append(site)
                    named[pool] = named.get(pool, 0.0) + site.rate
                elif site.rate >= 8:
                    small.append(site)
    for graph in _graphs([one for one in candidates if one.graph], named, series, pools):
        own = [one for one in sites if (one.holder, one.pool, one.line) == (graph.holder, graph.pool, graph.line)]
        sites = [one for one in sites if one not in own]
        rate = graph.rate + sum(one.rate for one in own)
        growth = graph.growth + sum(one.growth for one in own)
        sites.append(_scaled(replace(graph, growth=growth), rate))
    return sites, small


def _made_before(one: _Candidate) -> bool:
    """Whether new items were seen in windows of tracemalloc, and none had been made in its window."""
    return one.holder.existing > 0 and not one.holder.created


def _scaled(site: GrowingSite, rate: float) -> GrowingSite:
    """The site with another rate, and its points in proportion."""
    scale = rate / site.rate if site.rate else 1.0
    return replace(site, rate=rate, points=tuple((x, value * scale) for x, value in site.points))


def _candidate(holder: HolderRecord, series: _Series) -> _Candidate | None:
    points = _amounts(holder, series)
    if len(points) < 2 * FEWEST:
        return None
    found = trend(points, exact=True)
    if not found.leaks or holder.limit is not None:
        return None
    if holder.unit == "items":
        rates = {pool: found.rate * size for pool, size in holder.item.items() if size > 0}
    elif holder.unit == "nodes":
        rates = {}
    elif holder.unit == "files":
        rates = {"shm": found.rate}
    else:
        largest = max(holder.item, key=lambda pool: holder.item[pool], default="ram")
        rates = {largest: found.rate}
    return _Candidate(holder, found, points, rates)


def _amounts(holder: HolderRecord, series: _Series) -> list[tuple[float, float]]:
    """The holder's amount at each sample since it was first seen; empty if it is gone."""
    if not holder.amounts or holder.amounts[-1][2] is None:
        return []
    points: list[tuple[float, float]] = []
    waiting = list(holder.amounts)
    amount: int | None = None
    for x, sample in zip(series.xs, series.samples, strict=True):
        while waiting and waiting[0][1] <= sample.time + 1e-6:
            amount = waiting.pop(0)[2]
        if not sample.walked:
            continue
        if amount is not None:
            points.append((x, float(amount)))
        else:
            points.clear()  # it was gone in between: the variable of another call
    return points


def _without_parts(candidates: list[_Candidate]) -> list[_Candidate]:
    """Without those that grow only because they are inside another one: ``history[…]`` of ``history``."""
    names = {(one.holder.file, one.holder.name) for one in candidates if one.holder.unit == "items"}
    return [
        one
        for one in candidates
        if not (one.holder.name.endswith("[…]") and (one.holder.file, one.holder.name[: -len("[…]")]) in names)
    ]


def _graphs(candidates: list[_Candidate], named: dict[str, float], series: _Series, pools: _Pools) -> list[GrowingSite]:
    """Autograd graphs: they take what their pool grows beyond the other holders."""
    sites: list[GrowingSite] = []
    lists = [one for one in candidates if one.holder.unit == "items"]
    chosen = lists or candidates
    for pool in pools.names():
        if pool == "shm" or not chosen:
            continue
        grows = pools.trend(pool)
        # The graph itself is counted exactly: where the pool is too noisy for a shape, its slope is enough.
        rest = (grows.rate if grows.leaks else _slope(pools.points(pool)) or 0.0) - named.get(pool, 0.0)
        if rest < LEAST_PER_STEP:
            continue
        for one in _one_per_line(chosen):
            rate = rest / len(_one_per_line(chosen))
            found = _sites(one, pool, rate, series, pools, kind="graph")
            sites += [site for site in found if _matters(site, series.per)]
    return sites


def _one_per_line(candidates: list[_Candidate]) -> list[_Candidate]:
    """Of variables that grow by the same line, one: a chain of sums is visible in several."""
    found: dict[tuple[str, tuple[int, ...]], _Candidate] = {}
    for one in candidates:
        lines = tuple(line.line for line in lines_of(one.holder))
        found.setdefault((one.holder.file, lines or (-one.holder.number - 1,)), one)
    with_lines = {key: one for key, one in found.items() if key[1][0] >= 0}
    return list((with_lines or found).values())


def _matters(site: GrowingSite, per: Per) -> bool:
    least = LEAST_PER_STEP if per == "step" else LEAST_PER_SECOND
    return site.rate >= least and site.growth >= _LEAST_GROWTH


def _sites(
    one: _Candidate, pool: str, rate: float, series: _Series, pools: _Pools, kind: Kind | None = None
) -> list[GrowingSite]:
    """A holder's site; where several lines fill it and it was seen what each adds, one for each that adds much."""
    holder, lines = one.holder, lines_of(one.holder)
    shares = shares_of_lines(holder, lines, pool, graph=kind == "graph")
    known = sum(shares.values())
    ordered = sorted(lines, key=lambda line: -shares.get(line, 0.0))
    if len(lines) < 2 or known < _MOSTLY_SEEN:
        made = items_made(holder, pool, lines, graph=kind == "graph", line=None)
        return [_site(one, pool, rate, series, pools, lines, made, kind)]
    adding = [line for line in ordered if shares.get(line, 0.0) >= _LEAST_SHARE * known]
    all_of_them = sum(shares[line] for line in adding)
    sites = []
    for line in adding:
        part = shares[line] / all_of_them
        made, others = (
            items_made(holder, pool, lines, graph=kind == "graph", line=line),
            tuple(one for one in ordered if one != line),
        )
        site = _site(one, pool, rate * part, series, pools, (line, *others), made, kind, share=shares[line])
        sites.append(site)
    return sites


def _site(
    one: _Candidate,
    pool: str,
    rate: float,
    series: _Series,
    pools: _Pools,
    lines: Sequence[SourceLine],
    made: Sequence[CreatedItems],
    kind: Kind | None = None,
    *,
    share: float | None = None,
) -> GrowingSite:
    holder = one.holder
    if kind is None:
        tensors = any(items.tensors for items in made) if share is not None else holder.tensors
        kind = "shm-files" if holder.unit == "files" else "tensors" if tensors else "python"
    slope = pools.slope(pool)
    scale = rate / one.trend.rate if one.trend.rate else 0.0
    whole = rate if share is None else one.pools.get(pool, rate)
    confirmed = slope is not None and (
        holder.unit == "files" or whole >= _CONSISTENT * slope or pools.trend(pool).leaks
    )
    span = series.xs[-1] - max(one.trend.since, (series.xs[0] + series.xs[-1]) / 2)
    return GrowingSite(
        kind=kind,
        pool=pool,
        rate=rate,
        per=series.per,
        since=one.trend.since,
        growth=int(rate * span),
        certainty=_certainty(one.trend, confirmed=confirmed, lines=lines[:1] if share is not None else lines),
        holder=None if holder.unit == "files" else holder.name,
        items=holder.item_type or (holder.name if holder.unit == "files" else None),
        lines=tuple(lines[:_MOST_LINES]),
        created=SourceLine(made[0].file, made[0].line) if made else None,
        share=share,
        why=_why(one, series.per, confirmed=confirmed),
        points=tuple((x, amount * scale) for x, amount in one.points),
    )


def _certainty(found: SeriesTrend, *, confirmed: bool, lines: Sequence[SourceLine]) -> Certainty:
    if confirmed and found.evenness >= _EVEN:
        return "high" if len(lines) == 1 else "medium"
    return "medium" if confirmed and lines else "low"


def _why(one: _Candidate, per: Per, *, confirmed: bool) -> tuple[str, ...]:
    holder, rate = one.holder, f"{one.trend.rate:.3g}"
    more = say("{rate} more per step", rate=rate) if per == "step" else say("{rate} more per second", rate=rate)
    reasons = []
    if holder.unit == "items":
        reasons.append(
            say("{name} has {count:.0f} items, {more}", name=holder.name, count=one.points[-1][1], more=more)
        )
    elif holder.unit == "nodes":
        text = say("the autograd graph of {name} reaches back {count:.0f} nodes, {more}", name=holder.name,
                   count=one.points[-1][1], more=more)  # fmt: skip
        reasons.append(text)
    if not confirmed:
        reasons.append(say("the growth of memory use does not confirm it"))
    return tuple(reasons)


def _unexplained(
    record: ProcessRecord, series: _Series, pools: _Pools, sites: Sequence[GrowingSite]
) -> list[GrowingSite]:
    """What a pool grows beyond the named sites: by tracemalloc, else outside Python or unknown."""
    found: list[GrowingSite] = []
    lines = {line for site in sites for line in (*site.lines, site.created)}
    for pool in pools.names():
        grows = pools.trend(pool)
        named = sum(site.rate for site in sites if site.pool == pool)
        rest = grows.rate - named
        if not grows.leaks or rest < _NATIVE_SHARE * grows.rate or rest < LEAST_PER_STEP:
            continue
        # A line that is named already is not what is missing: its blocks are what its variable keeps.
        by_line = [one for one in _by_windows(record.windows, rest, pool, series, grows) if one.created not in lines]
        found += by_line
        rest -= sum(site.rate for site in by_line)
        if rest < max(_NATIVE_SHARE * grows.rate, LEAST_PER_STEP) or rest * series.half < _LEAST_NATIVE:
            continue
        found.append(_nameless(pool, rest, series, pools, grows))
    if pools.malloc_known and not pools.trend("ram").leaks:
        mapped, reserved = trend(pools.mapped(), least=_LEAST_NATIVE), trend(pools.reserved(), least=_LEAST_NATIVE)
        rate = min(mapped.rate, reserved.rate)
        if mapped.leaks and reserved.leaks and mapped.growth >= _LEAST_NATIVE and rate >= LEAST_PER_STEP:
            found.append(_nameless("ram", rate, series, pools, mapped, mapped=True))
    return found


def _by_windows(
    windows: Sequence[TraceWindow], rest: float, pool: str, series: _Series, grows: SeriesTrend
) -> list[GrowingSite]:
    """Lines whose blocks or tensors stay alive in every window in proportion to its steps."""
    rates: dict[tuple[str, int], list[float]] = {}
    kinds: dict[tuple[str, int], Kind] = {}
    usable = [window for window in windows if window.steps >= 6]
    if len(usable) < 2:
        return []
    for window in usable:
        if pool == "ram":
            for file, line, blocks, size, later_blocks, later_size in window.sites:
                half = window.steps / 2
                if later_blocks >= 0.5 * half and 0.5 <= 2 * later_size / max(1, size) <= 1.6 and blocks:
                    rates.setdefault((file, line), []).append(later_size / half)
                    kinds[(file, line)] = "python"
        for file, line, count, by_pool in window.tensors or ():
            if count >= 0.6 * window.steps and by_pool.get(pool):
                rates.setdefault((file, line), []).append(by_pool[pool] / window.steps)
                kinds[(file, line)] = "tensors"
    found = []
    for (file, line), seen in rates.items():
        seen.sort()
        rate = seen[len(seen) // 2]
        if len(seen) < 0.6 * len(usable) or not 0.2 * rest <= rate <= 1.7 * rest or rate * series.half < _LEAST_GROWTH:
            continue
        if not is_user_file(file):
            continue
        found.append(
            GrowingSite(
                kind=kinds[(file, line)], pool=pool, rate=rate, per=series.per, since=grows.since,
                growth=int(rate * series.half), certainty="medium", lines=(), created=SourceLine(file, line),
                why=(say("what this line made stayed alive in {count} of {all} windows of tracemalloc",
                         count=len(seen), all=len(usable)),),
                points=tuple((x, (x - series.xs[0]) * rate) for x in series.xs),
            )
        )  # fmt: skip
    return sorted(found, key=lambda site: -site.rate)[:_MOST_LINES]


def _nameless(
    pool: str, rate: float, series: _Series, pools: _Pools, grows: SeriesTrend, *, mapped: bool = False
) -> GrowingSite:
    blocks = _slope(series.of(lambda sample: sample.counters.blocks)) or 0.0
    kind: Kind = "native"
    if pool == "ram" and blocks * _LARGEST_SMALL_OBJECT >= rate and blocks >= 1:
        kind = "unknown"
        why = say(
            "Python holds {count:.0f} more objects per step, and no variable was found that keeps them", count=blocks
        )
    elif pool == "ram" and not series.samples[-1].counters.collects:
        kind = "unknown"
        why = say("Python's garbage collection is switched off (gc.disable): reference cycles are never freed")
    elif pool != "ram":
        kind = "unknown"
        why = say("{pool} grows, and no variable was found that keeps it", pool=pool)
    elif mapped:
        why = say("mapped memory grows that neither malloc nor Python has given out")
    elif pools.malloc_known:
        why = say("malloc has given out more in every part of the run, and no variable was found that keeps it")
    else:
        why = say("resident memory grows, and no variable was found that keeps it")
    points = pools.mapped() if mapped else pools.points(pool)
    low = points[0][1] if points else 0.0
    return GrowingSite(
        kind=kind, pool=pool, rate=rate, per=series.per, since=grows.since, growth=int(rate * series.half),
        certainty="medium" if grows.evenness >= _EVEN and pools.malloc_known else "low", why=(why,),
        points=tuple((x, value - low) for x, value in points),
    )  # fmt: skip


def _copied(record: ProcessRecord, series: _Series) -> list[GrowingSite]:
    """A dataset that a forked worker copies by reading it; this ends when all of it is copied."""
    if not record.copied:
        return []
    last = record.copied[-1]
    name, copied, size, share = last["attribute"], last["copied"], last["size"], last["share"]
    if name is None or copied < _LEAST_COPIED or share < 0.1 or share * size < 0.3 * copied:
        return []
    if last.get("only_read") is not None and last["only_read"] < copied / 2:
        return []  # most of it was written to: memory that the parent had freed, and the worker uses
    steps = max(1, last["step"] - record.copied[0]["step"])
    seconds = max(0.001, last["time"] - record.copied[0]["time"])
    return [
        GrowingSite(
            kind="copy-on-write", pool="ram", rate=copied / (steps if record.source else seconds), per=series.per,
            since=float(record.copied[0]["step"]), growth=copied,
            certainty="high" if share >= 0.2 else "medium",
            holder=name, items=counted(last["items"], phrase("{count} item"), phrase("{count} items")),
            why=(say("{share} of the items of {name} lie on pages that this worker has copied", share=f"{share:.0%}",
                     name=name),),
            points=tuple((float(one["step"]), float(one["copied"])) for one in record.copied),
        )
    ]  # fmt: skip


def _with_time(site: GrowingSite, series: _Series, free: dict[str, int]) -> GrowingSite:
    per_second = site.rate * series.per_second
    left = free.get(site.pool)
    full = left / per_second if left is not None and per_second > 0 and site.kind != "copy-on-write" else None
    return replace(site, rate_per_second=per_second, full_in=full)


def _free(samples: Sequence[CounterSample]) -> dict[str, int]:
    """Free bytes of each pool at the last reading."""
    found: dict[str, int] = {}
    for sample in samples:
        found.update(sample.free)
    return found

"""`legroom tune`: find DataLoader and batch settings for a dataset; print them as text, JSON or launcher files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import click

from legroom.advice.zero_and_deepspeed import Precision, ZeroRow, emit_training
from legroom.cli.language_and_streams import remark_text
from legroom.cli.memory_need_output import arguments
from legroom.cli.options import (
    AT_LEAST_1,
    COUNT,
    DURATION,
    WithEarlierNames,
    json_option,
    refuse_beside,
    require_options,
    timeout_option,
    typed,
)
from legroom.cli.text_layout import labelled, paint, paragraph, print_result, steps
from legroom.errors import UsageError
from legroom.messages import left, listed, phrase, right, say
from legroom.records.machine import Pool
from legroom.records.settings_and_overrides import Settings
from legroom.records.workload import Measured
from legroom.system.argument_checks import check_integer
from legroom.units import format_size, size_or_unknown


@click.command()
@click.option(
    "--dataset",
    "spec",
    required=True,
    metavar="MODULE:OBJECT",
    help="Dataset, function that returns one, or DataLoader: data:train_set or data.py:train_set.",
)
@click.option(
    "--batch",
    type=AT_LEAST_1,
    metavar="N",
    help="Batch size per rank (per device). Required unless --dataset names a DataLoader; then its batch size is the "
    "default.",
)
@click.option(
    "--effective-batch",
    type=AT_LEAST_1,
    metavar="N",
    help="Samples per optimizer step over all ranks; set --world-size too. If tune lowers the batch size, it raises "
    "gradient accumulation to match.",
)
@click.option(
    "--step-seconds",
    type=DURATION,
    metavar="TIME",
    help="How long one training step takes (forward, backward, optimizer), not counting the wait for data: for example "
    "0.018 or 18ms.",
)
@click.option(
    "--world-size",
    "--ranks",
    "ranks",
    cls=WithEarlierNames,
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    metavar="N",
    help="Number of ranks that train together, on all machines. If some run on other machines, set the environment "
    "variable LOCAL_WORLD_SIZE to the number of ranks on this machine.",
)
@click.option(
    "--collate",
    metavar="MODULE:FUNCTION",
    help="collate_fn. Default: if --dataset names a DataLoader, its collate_fn; otherwise torch's default.",
)
@click.option("--loader", type=click.Choice(["legroom", "torch"]), default="legroom", show_default=True,
              help="Which DataLoader the script will use. If --dataset names a DataLoader, the default is its "
                   "kind.")  # fmt: skip
@click.option(
    "--preset",
    type=click.Choice(["development", "production", "cluster"]),
    help="How much of the free RAM and /dev/shm to use. development: 25% and at most 1 worker; choose it if you also "
    "work on this machine. production: 60%; for long runs, whose peaks a short measurement does not show. "
    "cluster: 90%; choose it if a scheduler's memory limit applies to this job alone. Default: 80%.",
)
@click.option(
    "--benchmark",
    "--climb",
    "climb",
    cls=WithEarlierNames,
    is_flag=True,
    help="Time the DataLoader with different settings instead of estimating: raise workers, then prefetch, until a run "
    "fails or two runs in a row are no faster.",
)
@click.option(
    "--set",
    "by_hand",
    multiple=True,
    metavar="NAME=VALUE",
    help="Keep a setting fixed, for example workers=4. NAME is batch, accumulation, workers, prefetch or pin_memory. "
    "Can be given several times.",
)
@click.option(
    "--last",
    is_flag=True,
    help="Print, without measuring, the settings that --benchmark last found for this dataset in this directory. "
    "Can be combined only with --dataset, --json, --emit and the options of --emit, and --params (with --world-size).",
)
@click.option(
    "--emit",
    type=click.Choice(["deepspeed", "accelerate"]),
    help="Print only a configuration file for DeepSpeed or Accelerate.",
)
@click.option(
    "--zero",
    type=click.Choice(["2", "3"]),
    help="ZeRO stage to write into the file (with --emit).  [default: deepspeed 2, accelerate none]",
)
@click.option(
    "--offload",
    is_flag=True,
    help="Enable CPU offload in the file: optimizer state, and with --zero 3 also the parameters. Needs --emit; --emit "
    "accelerate also needs --zero.",
)
@click.option("--precision", type=click.Choice(["bf16", "fp16", "no"]), default="bf16", show_default=True,
              help="Mixed precision to write into the file (with --emit).")  # fmt: skip
@click.option(
    "--params",
    type=COUNT,
    metavar="N",
    help="Also print the memory that each ZeRO stage saves for a model with N parameters, for example 7B. Set "
    "--world-size too.",
)
@timeout_option
@json_option
def command(
    spec: str,
    batch: int | None,
    effective_batch: int | None,
    step_seconds: float | None,
    ranks: int,
    collate: str | None,
    loader: Literal["legroom", "torch"],
    preset: str | None,
    climb: bool,
    by_hand: tuple[str, ...],
    last: bool,
    emit: str | None,
    zero: str | None,
    offload: bool,
    precision: Precision,
    params: int | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Estimate the fastest DataLoader settings that fit in the free /dev/shm and RAM.

    The settings are for Legroom's DataLoader, unless you give --loader torch or --dataset names a DataLoader of torch.

    With --step-seconds, tune picks the settings that use the least memory and still keep the GPU busy.

    To estimate, tune loads a few samples and one batch in a child process, which takes a few seconds. With --benchmark,
    tune does not estimate: it times the DataLoader with different settings. Exits 1 if no settings fit.
    """
    from legroom.advice.zero_and_deepspeed import Shape, zero_rows
    from legroom.loader.tune import legroom_tune
    from legroom.loader.tune.remembered_settings import last_named
    from legroom.probe.host_files_and_syscalls import Host
    from legroom.probe.ram_swap_and_pressure import memory, ram_pool

    require_options(_NEEDS)
    if params is not None:
        Shape(params, ranks, legroom_tune.nodes_of(ranks))  # an error before anything is measured
    if last:
        refuse_beside("last", _MEASURING if params is not None else _MEASURING | {"ranks"})
        found = last_named(spec)
        if found is None:
            told = say("no settings stored for {spec} in this directory; tune --benchmark stores them", spec=spec)
            click.echo(remark_text(told), err=True)
            if as_json:
                print_result(True, "tune", lambda: {"verdict": "unknown", "settings": None}, str)
            return 1
        ranks = ranks if "ranks" in typed() else found.ranks  # for --params
    else:
        found = legroom_tune.tune_named(
            spec,
            batch_size=batch,
            effective_batch=effective_batch,
            step_seconds=step_seconds or 0.0,
            ranks=ranks,
            collate=collate,
            preset=preset,
            climbing=climb,
            kind=loader if "loader" in typed() else None,
            by_hand=_pairs(by_hand, ranks),
            timeout=timeout,
        )
    rows = () if params is None else zero_rows(Shape(params, ranks, legroom_tune.nodes_of(ranks)))
    show(
        found,
        emit=emit,
        zero=None if zero is None else int(zero),
        offload=offload,
        precision=precision,
        rows=rows,
        ram=ram_pool(memory(Host())),
        nodes=legroom_tune.nodes_of(found.ranks),
        as_json=as_json,
    )
    return 1 if found.plan is not None and found.plan.verdict == "too-big" else 0


_NEEDS = {"zero": ("emit",), "offload": ("emit",), "precision": ("emit",)}
# What has no effect where nothing is measured.
_MEASURING = {
    "batch", "effective_batch", "step_seconds", "collate", "loader", "preset", "climb", "by_hand", "timeout",
}  # fmt: skip

# The settings of --set, as its help names them, each with the least number. The library's long names work as well.
_SET = {"batch": 1, "accumulation": 1, "workers": 0, "prefetch": 1, "pin_memory": None}


def _pairs(texts: tuple[str, ...], ranks: int) -> dict[str, Any]:
    from legroom.records.loader_settings_and_flags import ALIASES, NAMES, read_word

    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise click.UsageError(say("--set {text}: write NAME=VALUE, like workers=2", text=text))
        word = read_word(name, value)
        if name == "ranks" and word != ranks:
            raise _wrong_set(
                say("--set {text}: the number of ranks is {ranks}", text=text, ranks=ranks), f"--world-size {value}"
            )
        if ALIASES.get(name, name) not in NAMES:
            near = difflib.get_close_matches(name, _SET, 1) or ["workers"]
            value = "on" if _SET[near[0]] is None else "2"
            raise _wrong_set(
                say("--set {text}: unknown setting {name!r}", text=text, name=name), f"--set {near[0]}={value}"
            )
        least = _SET.get(name)
        if least is not None:
            check_integer(f"--set {name}", word, least)
        elif name == "pin_memory" and not isinstance(word, bool):
            raise _wrong_set(say("--set {text}: the value must be on or off", text=text), "--set pin_memory=on")
        pairs[name] = word
    return pairs


def _wrong_set(what: str, example: str) -> UsageError:
    return UsageError(
        what,
        why=say("the settings are {names}", names=listed(_SET)),
        fix=(say("for example: {example}", example=example),),
    )


# Printed in full: settings that fit with ours may crash torch's.
_LOADERS = {"legroom": "legroom.DataLoader", "torch": "torch.utils.data.DataLoader"}


def _as_object(settings: Settings) -> dict[str, Any]:
    """The settings for JSON."""
    plan, measured = settings.plan, settings.measured
    return {
        "verdict": plan.verdict if plan else "unknown",
        "settings": settings.values(),
        "effective_batch": settings.effective_batch,
        "why": dict(settings.why),
        "loader": settings.loader(),
        "training_arguments": settings.training_arguments(),
        "lightning": settings.lightning(),
        "environment": settings.environment(),
        "levers": [asdict(lever) for lever in settings.levers],
        "need": {name: getattr(plan.need, name) for name in ("shm", "ram", "pinned", "fds")} if plan else None,
        "problems": [asdict(problem) for problem in plan.problems] if plan else [],
        "measured": asdict(measured) if measured else None,
        "before": dict(settings.before),
    }


def _taken(settings: Settings, given: set[str]) -> dict[str, Any]:
    """What was taken from the DataLoader that the dataset was given as; ``given``: the options that were typed."""
    own = settings.measured.loader if settings.measured is not None else None
    names = {"batch_size": "batch", "loader": "loader", "collate_fn": "collate"}
    return {
        name: own[name] for name, option in names.items()
        if own is not None and option not in given and own[name] is not None
    }  # fmt: skip


def as_text(settings: Settings, taken: Mapping[str, Any]) -> str:
    """The settings as text, one reason per line; ``taken``: those that are of a DataLoader."""
    call = ", ".join(f"{name}={value!r}" for name, value in settings.loader().items())
    lines = [
        *_measured_lines(settings.measured),
        *([labelled(say("  from the DataLoader: ").lstrip(), arguments(taken))] if taken else []),
        paragraph(f"{_LOADERS[settings.loader_kind]}(dataset, {call})", "", "  "),
        say("gradient accumulation {steps}", steps=settings.accumulation),
        *(f"{name}={value}" for name, value in settings.environment().items()),
        "",
        say("Why"),
        *(paragraph(line, "  ", "    ") for line in settings.why.values()),
        "",
        *_need_lines(settings),
    ]
    if settings.levers:
        lines += ["", say("Further options, and what they save")]
    for lever in settings.levers:
        saves = size_or_unknown(lever.saves)
        lines.append(paragraph(lever.what, f"  {lever.name:<25}{lever.pool:<5}{right(saves, 8)}  ", " " * 42))
    return "\n".join(lines).rstrip()


def _measured_lines(measured: Measured | None) -> list[str]:
    if measured is None:
        return []
    from legroom.advice.explain_settings import milliseconds

    waiting = measured.wait_seconds / measured.sample_seconds if measured.sample_seconds else 0.0
    text = say(
        "batch of {count}: {batch}; sample: {each}, {time} ({waiting:.0%} waiting); {source}",
        batch=format_size(measured.batch_bytes), count=measured.batch_size, source=measured.source,
        each=format_size(measured.sample_bytes), time=milliseconds(measured.sample_seconds), waiting=waiting,
    )  # fmt: skip
    return [paragraph(text, "", "  "), ""]


def _need_lines(settings: Settings) -> list[str]:
    plan = settings.plan
    if plan is None:
        return []
    lines = [
        say(
            "Needs {ram} of RAM, {shm} of it in /dev/shm",
            ram=format_size(plan.need.ram),
            shm=format_size(plan.need.shm),
        )
    ]
    for problem in plan.problems:
        lines.append(paragraph(problem.message, paint(say("  too big: "), "critical", bold=True), "    "))
        lines += steps(problem.fix)
    lines += [
        paragraph(say("{name}: {why}", name=pool, why=why), say("  unknown: "), "    ")
        for pool, why in plan.unknown.items()
    ]
    return lines


_OFFLOADS = {"none": "", "optimizer": phrase(", optimizer offloaded"), "all": phrase(", all offloaded")}


def show(
    settings: Settings,
    *,
    emit: str | None,
    zero: int | None,
    offload: bool,
    precision: Precision,
    rows: tuple[ZeroRow, ...],
    ram: Pool,
    nodes: int,
    as_json: bool,
) -> None:
    """Print the settings or the launcher's file, and the ZeRO table."""
    taken = _taken(settings, typed())
    text = emit and emit_training(emit, settings, zero=zero, offload=offload, precision=precision, nodes=nodes)
    more: dict[str, Any] = {"emit": {"kind": emit, "text": text}} if emit else {}
    more |= {"zero": [asdict(row) for row in rows]} if rows else {}
    print_result(
        as_json, "tune", lambda: {**_as_object(settings), "from_loader": taken, **more},
        lambda: text or as_text(settings, taken),
    )  # fmt: skip
    if rows and not as_json:
        # Not part of the file on stdout.
        click.echo("\n" + zero_text(rows, ram), err=bool(emit))


def zero_text(rows: tuple[ZeroRow, ...], ram: Pool) -> str:
    """The ZeRO table, and a warning where a row needs more host memory than is free."""
    lines = [
        say("Weights, gradients and Adam state of this model"),
        " ".join((" " * 29, *(right(head, 9) for head in (say("per GPU"), say("saves"), say("per host"))))),
    ]
    for row in rows:
        name = f"ZeRO {row.stage}" if row.stage else say("plain torch")
        more, less = ("≥", "≤") if row.at_least else ("", "")
        lines.append(
            f"  {left(name + say(_OFFLOADS[row.offload]), 27)} {more + format_size(row.gpu):>9} "
            f"{less + format_size(row.saves):>9} {format_size(row.host):>9}  {row.formula}"
        )
    if ram.free is not None:
        over = [row for row in rows if row.host > ram.free]
        if over:
            lines.append(
                say(
                    "rows that need more host memory than the {free} free here: {count}",
                    free=format_size(ram.free), count=len(over),
                )
            )  # fmt: skip
    return "\n".join(lines)

"""`legroom nodes`: doctor, warm, list and drop on every node of a Ray cluster; their text and JSON output."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import click

from legroom.cli.options import (
    backing_option,
    force_option,
    json_option,
    keys_option,
    names,
    revalidate_option,
    translated,
)
from legroom.cli.text_layout import paragraph, print_result, progress_bars
from legroom.messages import cells, counted, left, listed, phrase, say, shown
from legroom.records.finding_and_alarm import heading
from legroom.records.node_results import NodeAnswer, NodeError, NodeLoad
from legroom.units import format_duration, format_size

_ray = click.option(
    "--ray", "address", metavar="ADDRESS", default="auto", show_default=True,
    help="Address of the Ray cluster: host:port of its head node, or auto for the cluster that runs on this machine.",
)  # fmt: skip
_node = click.option("--node", "nodes", multiple=True, metavar="NODE",
                     help="Run only on this node (IP address or Ray node ID). Can be given several times."
                     )  # fmt: skip


@click.group("nodes", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Load, list and remove cached data, and check memory limits, on every node of a Ray cluster.

    Ray and Legroom must be installed on every node. Every subcommand has --json. SOURCE is the path or URL that was
    loaded. ID is the hash that legroom nodes list prints, or its first digits, six or more.
    """


@command.command()
@_ray
@_node
@json_option
def doctor(address: str, nodes: tuple[str, ...], as_json: bool) -> int:
    """Check memory limits on every node, worst node first.

    Exits 1 if a finding is critical or a node failed.
    """
    from legroom.integrations.ray_cluster_commands import connect, worst
    from legroom.integrations.ray_cluster_commands import doctor as ask

    with connect(address):
        found = ask(nodes or None)
    _print(as_json, "doctor", found, doctor_text)
    return 1 if any(worst(one) >= 2 for one in found) else 0


@command.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@keys_option
@backing_option
@revalidate_option
@_ray
@_node
@json_option
def warm(
    sources: tuple[str, ...],
    keys: str | None,
    backing: str,
    revalidate: bool,
    address: str,
    nodes: tuple[str, ...],
    as_json: bool,
) -> int:
    """Load files or URLs into the cache of every node.

    Like legroom cache load, but on every node. SOURCE is a path or URL. Data at a URL is downloaded only once in
    total: each node downloads a part, and the nodes exchange the parts. Each node reads the data itself if SOURCE is a
    path, if --keys is given, or if the server gives no version (such as an ETag) for the URL. Exits 1 if a node failed.
    """
    from legroom.integrations.ray_cluster_commands import connect
    from legroom.integrations.ray_cluster_commands import warm as load

    with connect(address), progress_bars() as draw:

        def told(address: str, source: str, done: int, total: int) -> None:
            if draw is not None:
                draw((address, source), address, done, total)

        found = load(
            sources, nodes or None, keys=names(keys), backing=backing, revalidate=revalidate,
            told=None if draw is None else told,
        )  # fmt: skip
    found = tuple(_in_options(one) for one in found)
    _print(as_json, "warm", found, warm_text)
    return 1 if any(one.error is not None for one in found) else 0


@command.command("list")
@click.argument("what", nargs=-1, metavar="[SOURCE|ID]…")
@_ray
@_node
@json_option
def list_(what: tuple[str, ...], address: str, nodes: tuple[str, ...], as_json: bool) -> int:
    """List the cache entries of every node.

    With SOURCE or ID, lists only those entries. Exits 1 if a node failed.
    """
    from legroom.integrations.ray_cluster_commands import connect, entries

    with connect(address):
        found = entries(list(what) or None, nodes or None)
    _print(as_json, "list", found, list_text)
    return 1 if any(one.error is not None for one in found) else 0


@command.command()
@click.argument("what", nargs=-1, metavar="[SOURCE|ID]…")
@click.option("--all", "everything", is_flag=True, help="Remove every entry that is not in use.")
@force_option
@_ray
@_node
@json_option
def drop(
    what: tuple[str, ...], everything: bool, force: bool, address: str, nodes: tuple[str, ...], as_json: bool
) -> int:
    """Remove entries on every node; with --all, every unused entry.

    Without --force, an entry in use is kept. Exits 1 if an entry was kept, also with --all, or if a node failed.
    """
    from legroom.integrations.ray_cluster_commands import connect
    from legroom.integrations.ray_cluster_commands import drop as remove

    if what and everything:
        others = shlex.join(what)
        raise click.UsageError(say("{option} cannot be combined with {others}", option="--all", others=others))
    if not what and not everything:
        raise click.UsageError(say("pass a file, an ID or --all"))
    with connect(address):
        found = remove(list(what) or None, nodes or None, force=force)
    _print(as_json, "drop", found, drop_text)
    return 1 if any(one.error is not None or one.answer.get("kept") for one in found) else 0


def _in_options(load: NodeLoad) -> NodeLoad:
    """The load with the options of `warm` in its error, which another process has worded."""
    error = load.error
    if error is None:
        return load
    what, why, fix = translated(warm, error.message, error.why, error.fix)
    return dataclasses.replace(load, error=NodeError(error.code, what, why, fix))


def _print(as_json: bool, name: str, found: Sequence[Any], text: Callable[[Any], str]) -> None:
    nodes = [dataclasses.asdict(one) for one in found]
    print_result(as_json, f"nodes.{name}", lambda: {"nodes": nodes}, lambda: text(found))


def doctor_text(found: Sequence[NodeAnswer]) -> str:
    """A line for each node, then its findings."""
    lines = [_count(len(found)), ""]
    width = max((cells(one.address) for one in found), default=0)
    for one in found:
        lines.append(f"{left(one.address, width)}  {_pools(one)}")
        if one.error is not None:
            lines += _error_lines(one.error)
        for finding in one.answer.get("findings", ()):
            if finding["severity"] != "info":
                text = say("{severity}: {message} [{code}]", severity=heading(finding["severity"]),
                           message=finding["message"], code=finding["code"])  # fmt: skip
                lines.append(paragraph(text, "  ", "    "))
    return "\n".join(lines)


def _pools(one: NodeAnswer) -> str:
    parts = [
        f"{pool['name']} "
        + say("{free} of {size} free", free=format_size(pool["free"]), size=format_size(pool["size"]))
        for pool in one.answer.get("pools", ())
        if pool["name"] in ("shm", "ram") and pool.get("free") is not None and pool.get("size") is not None
    ]  # fmt: skip
    return ", ".join(parts) or say("no answer")


def warm_text(found: Sequence[NodeLoad]) -> str:
    """A line for each node and source, and how often each source was read."""
    lines: list[str] = []
    width = max((cells(one.address) for one in found), default=0)
    for source in dict.fromkeys(one.source for one in found):
        own = [one for one in found if one.source == source]
        lines.append(shown(source))
        for one in sorted(own, key=lambda one: (one.state != "failed", one.address)):
            lines.append(f"  {left(one.address, width)}  {_load_text(one)}")
            if one.error is not None:
                lines += _error_lines(one.error)
        size = max((one.bytes for one in own), default=0)
        read = sum(one.read for one in own)
        if size and read:
            lines.append(
                say("  read from its source: {read} ({times:.2f} times its size)", read=format_size(read),
                    times=read / size)
            )  # fmt: skip
    return "\n".join(lines)


def _load_text(one: NodeLoad) -> str:
    if one.state == "failed":
        return say("failed")
    if one.state == "attached":
        return say("already in the cache")
    return say(
        "loaded in {time}: {read} read, {received} from other nodes",
        time=format_duration(one.seconds), read=format_size(one.read), received=format_size(one.received),
    )  # fmt: skip


def list_text(found: Sequence[NodeAnswer]) -> str:
    """The entries by source, with the nodes that have each; then the nodes that failed."""
    holders: dict[tuple[str, str, int], list[str]] = {}
    for one in found:
        for entry in one.answer.get("entries", ()):
            name = entry["sources"][0] if entry["sources"] else say("source unknown")
            holders.setdefault((name, entry["key"], entry["bytes"]), []).append(one.address)
    lines = [] if holders else [say("no node has an entry")]
    for (name, key, size), addresses in sorted(holders.items()):
        where = (
            counted(len(found), phrase("on the only node"), phrase("on all {count} nodes"))
            if len(addresses) == len(found)
            else say(
                "on {count} of {all} nodes: {names}", count=len(addresses), all=len(found), names=listed(addresses)
            )
        )
        lines += [shown(name), paragraph(f"{key[:12]}  {format_size(size)}  {where}", "  ", "    ")]
    for one in found:
        if one.error is not None:
            lines += [say("{name}: failed", name=one.address), *_error_lines(one.error)]
    return "\n".join(lines)


def drop_text(found: Sequence[NodeAnswer]) -> str:
    """A line for each node."""
    lines = []
    for one in found:
        if one.error is not None:
            lines += [say("{name}: failed", name=one.address), *_error_lines(one.error)]
            continue
        lines.append(
            say("{name}: removed {count}, freed {size}, in use {kept}", name=one.address,
                count=len(one.answer["removed"]), size=format_size(one.answer["freed"]), kept=len(one.answer["kept"]))
        )  # fmt: skip
    return "\n".join(lines)


def _error_lines(error: NodeError) -> list[str]:
    lines = [paragraph(f"{error.message} [{error.code}]", "    ", "      ")]
    if error.why:
        lines.append(paragraph(say("why: {why}", why=error.why), "    ", "      "))
    return lines + [paragraph(say("do: {step}", step=step), "    ", "      ") for step in error.fix]


def _count(nodes: int) -> str:
    return counted(nodes, phrase("{count} node"), phrase("{count} nodes"))

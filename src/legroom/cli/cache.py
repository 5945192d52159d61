"""`legroom cache`: load, list, info, drop, gc and verify entries of the cache; their text and JSON output."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from legroom.cli.language_and_streams import error_columns, error_text, message_printer
from legroom.cli.options import (
    DURATION_WITH_UNIT,
    SIZE,
    EntryName,
    backing_option,
    force_option,
    in_options,
    json_option,
    keys_option,
    names,
    require_options,
    revalidate_option,
)
from legroom.cli.text_layout import Draw, paragraph, print_result, progress_bars, row
from legroom.errors import LegroomError
from legroom.messages import cells, counted, left, listed, phrase, say, shown
from legroom.records.cache_entry import Entry, Reaped, Verification
from legroom.remote.remote_object import without_credentials
from legroom.system.processes_and_threads import legroom_disabled
from legroom.units import format_duration, format_size, size_or_unknown

if TYPE_CHECKING:
    from legroom.cache.list_and_verify import Listing


@click.group("cache", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Share one copy of a dataset between processes: load, list, remove.

    A Python script uses the shared copy if it opens the file with legroom.open().

    Every subcommand has --json. FILE is the path or URL that was loaded. ID is the hash that legroom cache list
    prints, or its first digits, six or more. NAME is the name of an object that a script put into the cache with
    legroom.freeze(..., name=NAME), which makes a shared read-only copy.
    """


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(readable=False))
@keys_option
@click.option(
    "--dtype", metavar="TYPE", help="Type of the numbers in a raw binary file of token IDs, for example uint16."
)
@click.option(
    "--join",
    is_flag=True,
    help="Load the files as shards of one dataset, joined along the first axis. A quoted pattern, such as "
    "'train-*.tar' or 'train-{000..127}.tar', is always joined into one dataset.",
)
@backing_option
@click.option("--hash", "algorithm", type=click.Choice(["md5", "blake3", "xxh3"]), default="md5", show_default=True,
              help="Hash function that identifies the source file; blake3 and xxh3 need the package blake3 or "
                   "xxhash.")  # fmt: skip
@click.option(
    "--no-evict", is_flag=True, help="Do not remove unused entries to make room; fail with error no-room instead."
)
@click.option(
    "--no-wait",
    is_flag=True,
    help="If another process is loading the file, do not wait for it; fail with error not-loaded instead.",
)
@revalidate_option
@json_option
def load(
    files: tuple[str, ...],
    keys: str | None,
    dtype: str | None,
    join: bool,
    backing: str,
    algorithm: str,
    no_evict: bool,
    no_wait: bool,
    revalidate: bool,
    as_json: bool,
) -> int:
    """Load files into the cache.

    FILES are paths, or URLs such as s3://bucket/key and https://host/path. URLs need more packages: pip install
    aiohttp fsspec s3fs. An interrupted download continues where it stopped. If a file cannot be loaded, the others
    are loaded all the same, and the exit status is that of the error.
    """
    from legroom.loader.batches.legroom_open import open as open_data

    if legroom_disabled(os.environ):
        message_printer(quiet=False)(
            say("LEGROOM_DISABLE is set: the files are read, but nothing stays in the cache. Unset it to load them.")
        )
    groups = [list(files)] if join else [[name] for name in files]
    loaded: list[dict[str, Any]] = []
    failed: list[tuple[str, LegroomError]] = []
    for group in groups:
        label = without_credentials(group[0])
        if len(group) > 1:
            label = say("{first} and {count} more", first=label, count=len(group) - 1)
        started = time.perf_counter()
        try:
            with progress_bars() as draw:
                bar = Bar(label, draw)
                opened = open_data(
                    group if join else group[0],
                    names(keys),
                    backing=backing,
                    hash=algorithm,
                    dtype=dtype,
                    evict=not no_evict,
                    wait=not no_wait,
                    progress=bar.told,
                    revalidate=revalidate,
                )
        except LegroomError as error:
            if len(groups) == 1:
                raise
            failed.append((label, _refused(error, failed)))
            continue
        with opened as data:
            seconds = time.perf_counter() - started
            loaded.append(entry_object(data.info) | {"seconds": seconds, "built": bar.moved})
            if not as_json:
                click.echo(row(loaded_line(data.info, seconds, built=bar.moved)))
    if as_json:
        errors = [{"source": name, **error.as_dict()} for name, error in failed]
        told = {"error": failed[0][1].as_dict(), "errors": errors} if failed else {}
        print_result(True, "cache.load", lambda: {"entries": loaded, **told}, str)
    elif failed:
        click.echo(say("loaded {count} of {all} files", count=len(loaded), all=len(groups)))
    return max((error.exit_status for _, error in failed), default=0)


def _refused(error: LegroomError, before: Sequence[tuple[str, LegroomError]]) -> LegroomError:
    """The error with the options of the command, printed unless one before it said the same."""
    in_options(error, click.get_current_context().command)
    if str(error) not in (str(one) for _, one in before):
        click.echo(error_text(error, error_columns()), err=True)
    return error


@command.command("list")
@click.argument("what", nargs=-1, type=EntryName(), metavar="[FILE|ID|NAME]…")
@json_option
def list_(what: tuple[str, ...], as_json: bool) -> None:
    """List entries, the processes that use them, and free space.

    Also lists copies in GPU memory that processes share, and groups of training runs that share one set of DataLoader
    workers. With FILE, ID or NAME, lists only those entries.
    """
    from legroom.cache.list_and_verify import listing
    from legroom.cache.list_gpu_copies import gpu_copies
    from legroom.loader.dataloader.sharing.group_folder import group_rows, groups
    from legroom.monitor.watch_text import gpu_copy_line, group_lines

    found = listing(what or None, with_users=True)
    copies = () if what else gpu_copies()

    def as_object() -> dict[str, Any]:
        shared = [dataclasses.asdict(copy) for copy in copies]
        return {**listing_object(found), "groups": [] if what else groups(), "gpu_copies": shared}

    def as_text() -> str:
        lines = [listing_text(found), *([""] if copies else [])]
        lines += [paragraph(gpu_copy_line(copy), "", "  ") for copy in copies]
        for group in () if what else group_rows():
            head, *rest = group_lines(group)
            lines += ["", paragraph(head, "", "  "), *(paragraph(one, "", "    ") for one in rest)]
        return "\n".join(lines)

    print_result(as_json, "cache.list", as_object, as_text)


@command.command()
@click.argument("what", nargs=-1, required=True, type=EntryName(), metavar="FILE|ID|NAME…")
@json_option
def info(what: tuple[str, ...], as_json: bool) -> None:
    """Show all details of entries; exit 1 if one is not loaded."""
    from legroom.cache.list_and_verify import infos

    found = infos(what)
    print_result(
        as_json, "cache.info",
        lambda: {"entry": entry_object(found[0]), "entries": [entry_object(one) for one in found]},
        lambda: "\n\n".join(entry_text(entry, attributes=True) for entry in found),
    )  # fmt: skip


@command.command()
@click.argument("what", nargs=-1, type=EntryName(), metavar="[FILE|ID|NAME]…")
@click.option(
    "--all", "everything", is_flag=True, help="Remove every entry that is not in use, whichever program loaded it."
)
@force_option
@click.option("--dry-run", is_flag=True, help="Print what would be removed and remove nothing.")
@click.option("--yes", is_flag=True, help="With --all: do not ask for confirmation, even on a terminal.")
@json_option
def drop(what: tuple[str, ...], everything: bool, force: bool, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Remove entries; with --all, every one that is not in use.

    On a terminal, --all asks for confirmation first; in a script or with --json it never does.

    Without --force, entries in use are kept and the others are removed. Exits 1 if an entry is kept (even with
    --all), if a FILE, ID or NAME is not loaded, or if you do not confirm. For what ID and NAME are, see legroom cache
    --help.
    """
    from legroom.cache.drop_and_gc import drop as remove

    if what and everything:
        others = shlex.join(what)
        raise click.UsageError(say("{option} cannot be combined with {others}", option="--all", others=others))
    if not what and not everything:
        raise click.UsageError(say("pass a file, an ID or --all"))
    require_options({"yes": ("everything",)})
    if everything and not (yes or dry_run or as_json) and sys.stdin.isatty() and sys.stdout.isatty():
        found = remove(None, force=force, dry_run=True)
        if found.entries and not _confirmed(found):
            click.echo(say("nothing was removed"))
            return 1
    gone = remove(what or None, force=force, dry_run=dry_run)
    print_result(as_json, "cache.drop", lambda: reaped_object(gone), lambda: reaped_text(gone))
    return 1 if gone.kept or gone.missing else 0


def _confirmed(found: Reaped) -> bool:
    """Whether the user agrees to remove these entries; the end of the input is a no."""
    entries = counted(len(found.entries), phrase("{count} entry"), phrase("{count} entries"))
    question = say("Remove {entries} ({size})?", entries=entries, size=format_size(found.freed))
    click.echo(f"{question} [y/N] ", nl=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@command.command()
@click.option(
    "--free",
    type=SIZE,
    metavar="SIZE",
    help="Remove entries that are not in use, least recently used first, until both /dev/shm "
    "and the disk of the cache have SIZE free.",
)
@click.option(
    "--older",
    type=DURATION_WITH_UNIT,
    metavar="TIME",
    help="Remove entries not used for this long: 7d, 12h or 30m (minutes). The unit is required.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="Remove entries whose source file has changed, and entries of an earlier version of Legroom that this version "
    "would load differently.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed and remove nothing.")
@json_option
def gc(free: int | None, older: float | None, stale: bool, dry_run: bool, as_json: bool) -> int:
    """Remove files left by dead processes.

    With --free, --older or --stale, also removes entries that are not in use. Exits 1 if --free could not free enough
    space.
    """
    from legroom.cache.drop_and_gc import gc as collect

    gone = collect(free=free, older=older, stale=stale, dry_run=dry_run)
    print_result(as_json, "cache.gc", lambda: reaped_object(gone), lambda: reaped_text(gone))
    return 1 if gone.short else 0


@command.command()
@click.argument("what", nargs=-1, type=EntryName(), metavar="[FILE|ID|NAME]…")
@click.option("--no-source", is_flag=True, help="Check only the copies; do not read the source files again.")
@json_option
def verify(what: tuple[str, ...], no_source: bool, as_json: bool) -> int:
    """Verify the checksums of entries and of their source files.

    Exits 1 if an entry is damaged or cannot be read, or its source has changed.
    """
    from legroom.cache.list_and_verify import verify as check

    results = check(what or None, source=not no_source)
    print_result(
        as_json, "cache.verify", lambda: {"entries": [verified_object(result) for result in results]},
        lambda: "\n".join(row(verified_line(result)) for result in results) or say("the cache is empty"),
    )  # fmt: skip
    return 0 if all(result.whole and result.source != "changed" for result in results) else 1


_SHORT = 12  # digits of a key in text output


class Bar:
    """The progress of a load: drawn on a terminal, silent in a pipe."""

    def __init__(self, label: str, draw: Draw | None) -> None:
        self.moved = False  # whether bytes were loaded, here or by the process waited for
        self._label, self._draw = label, draw
        if draw is not None:
            draw(label, label, 0, None)

    def told(self, done: int, total: int) -> None:
        self.moved = True
        if self._draw is not None:
            self._draw(self._label, self._label, done, total)


def entry_object(entry: Entry) -> dict[str, Any]:
    """An entry for JSON."""
    whole = dataclasses.asdict(entry)
    whole["source"] = entry.names[0] if entry.names else None
    return whole


def listing_object(found: Listing) -> dict[str, Any]:
    """The list for JSON; ``store`` is the first of ``stores``."""
    stores = [dataclasses.asdict(room) for room in found.rooms]
    return {
        "store": stores[0] if stores else None,
        "stores": stores,
        "entries": [entry_object(entry) for entry in found.entries],
        "missing": found.missing,
        "saved": saved(found.entries),
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
    }


def saved(found: Sequence[Entry]) -> int:
    """Bytes that separate copies would have taken on top: one for every user but the first."""
    return sum(entry.bytes * max(0, len(entry.users or ()) - 1) for entry in found)


def listing_text(found: Listing) -> str:
    """The list as text."""
    lines: list[str] = []
    for entry in found.entries:
        lines += [entry_text(entry), ""]
    if found.missing:
        lines += [*map(_not_loaded, found.missing), ""]
    elif not found.entries:
        lines += [say("the cache is empty"), ""]
    together = saved(found.entries)
    if together:
        lines.append(say("memory saved by sharing: {size}", size=format_size(together)))
    for room in found.rooms:
        told = say(
            "{backing} store {path}: {used} in entries, {free} free (limited by {bound})",
            backing=room.backing, path=room.path, used=format_size(room.used), free=format_size(room.free),
            bound=room.bound_by,
        )  # fmt: skip
        lines.append(paragraph(told, "", "  "))
        if room.leftovers:
            told = say("{size} left there by processes that were killed; legroom cache gc removes it",
                       size=format_size(room.leftovers))  # fmt: skip
            lines.append(paragraph(told, "  ", "    "))
        if room.downloads:
            told = say("{size} of interrupted downloads there, kept for a day for the next attempt",
                       size=format_size(room.downloads))  # fmt: skip
            lines.append(paragraph(told, "  ", "    "))
    lines += [
        paragraph(say("{name}: {why}", name=finding.message, why=finding.why) + f" [{finding.code}]", "", "  ")
        for finding in found.findings
        if finding.severity != "info"
    ]
    return "\n".join(lines).rstrip()


def entry_text(entry: Entry, *, attributes: bool = False) -> str:
    """One entry: file, digest, arrays with their sizes, processes that use it."""
    lines = [_source(entry)]
    if entry.damaged is not None:
        lines += [f"  {entry.key}", row(say("  damaged: {why}", why=entry.damaged))]
        return "\n".join(lines)
    if entry.unreadable is not None:
        lines += [f"  {entry.key}", row(say("  cannot be read: {why}", why=entry.unreadable))]
        return "\n".join(lines)
    lines.append(f"  {(entry.hash or '').upper():<8}{entry.digest}")
    if entry.key != entry.digest:
        lines.append(f"  {left(say('ID'), 8)}{entry.key}")
    lines += [paragraph(_version_text(entry, version), "  ", "    ") for version in dict.fromkeys(entry.versions[:3])]
    names = [*entry.arrays, *entry.tables]
    column = max((cells(shown(name)) for name in names), default=0)
    for name, array in entry.arrays.items():
        shape = "×".join(map(str, array.shape)) or say("scalar")
        lines.append(f"  {left(shown(name), column)}  {format_size(array.bytes):>8}  {shape} {array.dtype}")
        if attributes:
            lines += _attribute_lines(array.attributes, "    ")
    for name, table in entry.tables.items():
        size = format_size(table.bytes)
        rows = counted(table.rows, phrase("{count} row"), phrase("{count} rows"))
        told = say("{name}: {why}", name=rows, why=listed(map(shown, table.columns)))
        lines.append(paragraph(told, f"  {left(shown(name), column)}  {size:>8}  ", "    "))
    lines.append(paragraph(_state(entry), "  ", "    "))
    if entry.outdated is not None:
        lines.append(paragraph(say("not used: {why}", why=entry.outdated), "  ", "    "))
    for user in entry.users or ():
        own = size_or_unknown(user.privatised)
        lines.append(
            paragraph(
                say("{pid} {command} (privatised {own})", pid=user.pid, command=user.command, own=own), "    ", "      "
            )
        )
    if attributes:
        lines += _attribute_lines(entry.attributes, "  ")
        lines += [say("  built by {who}", who=entry.built_by or say("unknown"))]
    return "\n".join(lines)


_VOUCHED = {
    "sha256": phrase("SHA-256 {tag}, stated by its store"),
    "md5": phrase("MD5 {tag}, stated by its store"),
    "etag": phrase("ETag {tag}"),
    "version": phrase("version {tag}"),
    "modified": phrase("time of its last change; its store gives no version"),
    "none": phrase("content; its store gives no version and no time of change"),
}


def _version_text(entry: Entry, version: str) -> str:
    """What a remote object is identified by, and whether its content was hashed."""
    kind, _, rest = version.partition(" ")
    by = say(_VOUCHED.get(kind, _VOUCHED["none"]), tag=rest.rpartition(" ")[0])
    if entry.hash == "version":
        return say("identified by its {by}; only the selected data were read, so they were not hashed", by=by)
    return say("identified by its {by}; its content was hashed while it was loaded", by=by)


def _source(entry: Entry) -> str:
    """The file behind an entry, of several the first and how many more; what a frozen object is."""
    if entry.format == "frozen" and entry.damaged is None:
        about = entry.attributes
        count = about.get("items")
        items = counted(count if isinstance(count, int) else 0, phrase("{count} item"), phrase("{count} items"))
        told = say("frozen {kind} of {items}", kind=about.get("type"), items=items)
        return say("{name} ({what})", name=shown(str(about["name"])), what=told) if "name" in about else told
    if not entry.sources:
        return say("source unknown")
    if entry.opened_as:
        path, name = _files(entry.opened_as), _files(entry.sources)
        return say("{path} (same content as {name} when that was loaded)", path=path, name=name)
    return _files(entry.sources)


def _files(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return shown(paths[0])
    return say("{first} and {count} more", first=shown(paths[0]), count=len(paths) - 1)


def _attribute_lines(attributes: Mapping[str, Any], indent: str) -> list[str]:
    return [
        f"{indent}@{shown(name)}: {shown(json.dumps(value, ensure_ascii=False, default=str))}"
        for name, value in attributes.items()
    ]


def _state(entry: Entry) -> str:
    now = time.time()
    if entry.users:
        use = counted(len(entry.users), phrase("used by {count} process"), phrase("used by {count} processes"))
    elif entry.in_use:
        use = say("in use by a process not visible from here")
    else:
        use = say("not in use")
    told = say("{size}, {use}", size=_size_and_store(entry), use=use)
    if entry.created is not None:
        told = say("{told}, built {age} ago", told=told, age=format_duration(max(0.0, now - entry.created)))
    if entry.last_used is not None:
        told = say("{told}, opened {age} ago", told=told, age=format_duration(max(0.0, now - entry.last_used)))
    return told


def _size_and_store(entry: Entry) -> str:
    size = format_size(entry.bytes)
    if entry.backing == "disk":
        return say("{size} on disk", size=size)
    return say("{size} in {backing}", size=size, backing=entry.backing)


def loaded_line(entry: Entry, seconds: float, *, built: bool) -> str:
    """One line about one load."""
    name = _source(entry) if entry.sources else entry.key
    what = say("{name}: {why}", name=name, why=_size_and_store(entry))
    if not built:
        return say("{what}, already in the cache ({time})", what=what, time=format_duration(seconds))
    rate = format_size(int(entry.bytes / seconds)) if seconds > 0 else "?"
    return say("{what}, loaded in {time} ({rate}/s)", what=what, time=format_duration(seconds), rate=rate)


def reaped_object(gone: Reaped) -> dict[str, Any]:
    """What was removed, for JSON."""
    return {
        "removed": [entry_object(entry) for entry in gone.entries],
        "kept": [entry_object(entry) for entry in gone.kept],
        "freed": gone.freed,
        "strays": gone.strays,
        "dry_run": gone.dry_run,
        "short": [dataclasses.asdict(one) for one in gone.short],
        "missing": gone.missing,
    }


def reaped_text(gone: Reaped) -> str:
    """What was removed, as text."""
    verb = say("would remove") if gone.dry_run else say("removed")
    lines = [row(f"{verb} {_named(entry)}") for entry in gone.entries]
    lines += [row(say("kept {name}: in use", name=_named(entry))) for entry in gone.kept]
    lines += map(_not_loaded, gone.missing)
    told = say(
        "{verb} {entries} and {leftovers}",
        verb=verb,
        entries=counted(len(gone.entries), phrase("{count} entry"), phrase("{count} entries")),
        leftovers=counted(gone.strays, phrase("{count} leftover"), phrase("{count} leftovers")),
    )
    # Whole pages of all files: more than the bytes of the arrays, which the lines above show.
    size = format_size(gone.freed)
    if gone.dry_run:
        lines.append(say("{told}, to free {size}", told=told, size=size))
    else:
        lines.append(say("{told}, {size} freed", told=told, size=size))
    for one in gone.short:
        told = say(
            "{store}: {missing} less than requested (limited by {bound})",
            store=one.store, missing=format_size(one.missing), bound=one.bound_by,
        )  # fmt: skip
        lines.append(paragraph(told, "", "  "))
    return "\n".join(lines)


def _not_loaded(name: str) -> str:
    return row(say("{what}: not loaded", what=shown(without_credentials(name))))


def _named(entry: Entry) -> str:
    return f"{(entry.key or '')[:_SHORT]} {_source(entry)} ({format_size(entry.bytes)})"


def verified_object(result: Verification) -> dict[str, Any]:
    """One verification for JSON."""
    return {
        "key": result.entry.key,
        "source": result.entry.names[0] if result.entry.names else None,
        "whole": result.whole,
        "damaged": list(result.damaged),
        "source_state": result.source,
        "source_why": result.source_why,
    }


def verified_line(result: Verification) -> str:
    """One verification as a line of text."""
    if not result.damaged and result.entry.unreadable is not None:
        return say("{name}: cannot be read: {why}", name=_named(result.entry), why=result.entry.unreadable)
    copy = (
        say("copy intact") if result.whole else say("copy DAMAGED: {names}", names=listed(map(shown, result.damaged)))
    )
    if result.entry.format == "frozen":
        return say("{name}: {why}", name=_named(result.entry), why=copy)
    source = {
        "same": say("source unchanged"),
        "changed": say("source CHANGED: {why}", why=result.source_why),
        "missing": say("source file missing"),
        "not-checked": say("source not checked"),
    }[result.source]
    return say("{name}: {copy}, {source}", name=_named(result.entry), copy=copy, source=source)

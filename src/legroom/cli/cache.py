"""`legroom cache`: load, list, info, drop, gc, verify. Parses, calls, renders; decides nothing."""

from __future__ import annotations

import time
from typing import Any

import click

from legroom.cli import cache_view as view
from legroom.cli.params import DURATION, SIZE, EntryName
from legroom.words import say

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group("cache", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """One copy of a dataset for every process: load, look, remove.

    Each subcommand has --json. A KEY is an entry's digest, or its first digits.
    """


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(readable=False))
@click.option("--keys", metavar="NAME,…", help="Load only these arrays or groups.")
@click.option(
    "--join", is_flag=True, help="The files are shards of one dataset: join them along the first axis."
)
@click.option("--backing", type=click.Choice(["auto", "shm", "disk"]), default="auto", show_default=True)
@click.option(
    "--hash", "algorithm", type=click.Choice(["md5", "blake3", "xxh3"]), default="md5", show_default=True
)
@click.option("--no-evict", is_flag=True, help="Never remove unused entries to make room.")
@click.option("--no-wait", is_flag=True, help="Do not wait for another process that is loading the file.")
@_json
def load(
    files: tuple[str, ...],
    keys: str | None,
    join: bool,
    backing: str,
    algorithm: str,
    no_evict: bool,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Load files into the cache, so that every process finds them there."""
    from legroom.loader.open import open as open_data

    names = [name.strip() for name in keys.split(",") if name.strip()] if keys else None
    loaded: list[dict[str, Any]] = []
    for group in [list(files)] if join else [[name] for name in files]:
        label = (
            group[0]
            if len(group) == 1
            else say("{first} and {count} more", first=group[0], count=len(group) - 1)
        )
        started = time.perf_counter()
        with view.progress(label) as bar:
            opened = open_data(
                group if join else group[0],
                names,
                backing=backing,
                hash=algorithm,
                evict=not no_evict,
                wait=not no_wait,
                progress=bar.told,
            )
        with opened as data:
            seconds = time.perf_counter() - started
            loaded.append(view.entry_object(data.info) | {"seconds": seconds, "built": bar.moved})
            if not as_json:
                click.echo(view.loaded_line(data.info, seconds, built=bar.moved))
    if as_json:
        view.print_json("cache.load", {"entries": loaded})


@command.command("list")
@click.argument("what", required=False, type=EntryName(), metavar="[FILE|KEY]")
@_json
def list_(what: str | None, as_json: bool) -> None:
    """What is in the cache: files, digests, arrays, users, room."""
    from legroom.cache.catalog import listing

    found, rooms, passed_over = listing(what, with_users=True)
    if as_json:
        view.print_json("cache.list", view.listing_object(found, rooms, passed_over))
    else:
        click.echo(view.listing_text(found, rooms, passed_over, what))


@command.command()
@click.argument("what", type=EntryName(), metavar="FILE|KEY")
@_json
def info(what: str, as_json: bool) -> None:
    """Everything about one entry; exits 1 where there is none."""
    from legroom.cache.catalog import info as look_up

    entry = look_up(what)
    if as_json:
        view.print_json("cache.info", {"entry": view.entry_object(entry)})
    else:
        click.echo(view.entry_text(entry, attributes=True))


@command.command()
@click.argument("what", required=False, type=EntryName(), metavar="[FILE|KEY]")
@click.option("--all", "everything", is_flag=True, help="Every entry that is not in use.")
@click.option("--force", is_flag=True, help="Also what is in use: those who have it mapped keep their pages.")
@_json
def drop(what: str | None, everything: bool, force: bool, as_json: bool) -> int:
    """Remove an entry, or all; exits 1 where something is in use."""
    from legroom.cache.reap import drop as remove

    if (what is None) == (not everything):
        raise click.UsageError(say("name a file or a key, or give --all"))
    gone = remove(what, force=force)
    if as_json:
        view.print_json("cache.drop", view.reaped_object(gone))
    else:
        click.echo(view.reaped_text(gone))
    return 1 if gone.kept else 0


@command.command()
@click.option(
    "--free", type=SIZE, metavar="SIZE", help="Remove least recently used entries until this much is free."
)
@click.option("--older", type=DURATION, metavar="TIME", help="Remove entries not used for this long, as 7d.")
@click.option("--stale", is_flag=True, help="Remove entries whose file holds other bytes now.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_json
def gc(free: int | None, older: float | None, stale: bool, dry_run: bool, as_json: bool) -> int:
    """Clear what dead processes left, then what nobody needs.

    What is in use is never touched. Exits 1 where --free asks for more room
    than that makes.
    """
    from legroom.cache.reap import gc as collect

    gone = collect(free=free, older=older, stale=stale, dry_run=dry_run)
    if as_json:
        view.print_json("cache.gc", view.reaped_object(gone))
    else:
        click.echo(view.reaped_text(gone))
    return 1 if gone.short else 0


@command.command()
@click.argument("what", required=False, type=EntryName(), metavar="[FILE|KEY]")
@click.option("--no-source", is_flag=True, help="Check the copies alone; do not read the source files again.")
@_json
def verify(what: str | None, no_source: bool, as_json: bool) -> int:
    """Checksum the copies and hash their sources again.

    Exits 1 where one is not what it should be.
    """
    from legroom.cache.verify import verify as check

    results = check(what, source=not no_source)
    if as_json:
        view.print_json("cache.verify", {"entries": [view.verified_object(result) for result in results]})
    else:
        click.echo("\n".join(view.verified_line(result) for result in results) or say("the cache is empty"))
    return 0 if all(result.whole and result.source != "changed" for result in results) else 1

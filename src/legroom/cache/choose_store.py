"""Which store gets an entry: the first that has room, shared memory before the local disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from legroom.cache.find_or_build_entry import OpenRequest
from legroom.cache.lease_and_map_entry import Attached
from legroom.cache.store_directories import Store, Stores, log
from legroom.errors import NoRoom, NoStore
from legroom.formats.decoding_memory import release_freed_memory
from legroom.messages import joined, say


def in_first_store(stores: Sequence[Store], build: Callable[[Store], Attached], what: str) -> Attached:
    """Build in the first of these stores that has room. Raises NoRoom with the reasons of all."""
    refused: list[NoRoom] = []
    for store in stores:
        try:
            return build(store)
        except NoRoom as problem:
            # Memory may also fill up during the load. The traceback would keep the data read so far alive.
            refused.append(problem.with_traceback(None))
            problem.__context__ = problem.__cause__ = None
            release_freed_memory()
            log.info("%s", problem)
    raise _no_room_anywhere(what, refused)


def stores_wanted(request: OpenRequest, stores: Stores) -> list[Store]:
    """The stores that the request may be built in, best first."""
    chosen = [store for store in stores.found if request.wants(store)]
    if not chosen:
        raise NoStore(
            say("there is no {backing} store", backing=request.backing),
            why=joined(finding.why for finding in stores.findings) or say("no candidate directory is usable"),
            fix=("backing='auto'", "LEGROOM_DIR=/some/local/directory"),
        )
    return chosen


def _no_room_anywhere(what: str, refused: Sequence[NoRoom]) -> NoRoom:
    if len(refused) == 1:
        return refused[0]
    return NoRoom(
        say("no store has enough free space for {path}", path=what),
        why=joined(say("{name}: {why}", name=problem.what, why=problem.why) for problem in refused),
        fix=tuple(dict.fromkeys(line for problem in refused for line in problem.fix)),
    )

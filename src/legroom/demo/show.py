"""The demo from beginning to end.

Covers: the order of things, from the folder to the last figure. Does not cover: options (cli), each act.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from legroom.demo.crew import Crew
from legroom.demo.dataset import make_dataset, read_plainly
from legroom.demo.loaders import loaders
from legroom.demo.machine import how_busy, in_words, machine
from legroom.demo.place import Place, make_place, room_at
from legroom.demo.result import Result
from legroom.demo.scale import least_disk, scale
from legroom.demo.screen import Screen
from legroom.demo.small_shm import SHM, SmallShm, enter
from legroom.demo.stage import Stage, shm_pool
from legroom.errors import DemoFailed
from legroom.probe.host import Host
from legroom.probe.memory import memory, ram_pool
from legroom.units import format_duration, format_size
from legroom.words import say

_QUIET = 2.1  # seconds after which a file counts as finished: until then it is hashed at every opening


@dataclass(frozen=True)
class Wish:
    """What was asked for."""

    quick: bool = False
    torch: bool = True
    keep: bool = False


def show(wish: Wish, screen: Callable[[], Screen]) -> tuple[Result, Path | None]:
    """Run it: what was found, and the folder that was kept, if that was wished for."""
    if why := why_not_here(Host()):
        raise DemoFailed(say("the demo cannot run here"), why=why, fix=(say("run it on Linux"),))
    room = enter()  # before anything else: it is for a process of one thread
    host = Host()
    stage = Stage(screen(), host)
    with stage.listening():
        place = make_place(host, least_disk(), None if room.own else SHM)
        try:
            with stage.playing():
                result = _acts(wish, stage, place, room)
        finally:
            place.remove(keep=wish.keep)
    return result, place.folder if wish.keep else None


def why_not_here(host: Host) -> str | None:
    """Why there can be no demo on this system, or None."""
    if host.platform != "linux":
        return say("it weighs processes by /proc, which {platform} does not have", platform=host.platform)
    if not host.table("/proc/self/smaps_rollup").get("Pss"):
        return say("/proc/self/smaps_rollup cannot be read: memory that is shared could not be told apart")
    return None


def _acts(wish: Wish, stage: Stage, place: Place, room: SmallShm) -> Result:
    host = stage.host
    where = machine(host)
    why_no_torch = _why_no_torch(wish)
    chosen = scale(
        ram_pool(memory(host)).free,
        room_at(place.folder),
        why_no_torch=why_no_torch,
        quick=wish.quick,
        in_memory=place.in_memory,
    )
    stage.begin("stage", say("0  This machine"))
    stage.tell(in_words(where))
    shm = shm_pool(host)
    size = say("unknown") if shm.size is None else format_size(shm.size)
    if room.own:
        stage.tell(say("/dev/shm is {size} for this demo, as in a container; nobody else sees it", size=size))
    else:
        stage.tell(
            say(
                "/dev/shm stays as it is ({size}): no small one could be made ({why})",
                size=size,
                why=room.why,
            )
        )
    notes = [*chosen.notes, *filter(None, [how_busy(where)])]
    for note in notes:
        stage.tell(note)
    data = place.folder / "train.h5"
    nbytes = make_dataset(data, chosen.rows, stage.obey)
    made = stage.clock
    plain = read_plainly(data)
    stage.tell(
        say(
            "made {rows} images, {size} of HDF5, which h5py reads in {time}",
            rows=chosen.rows,
            size=format_size(nbytes),
            time=format_duration(plain),
        )
    )
    environment = place.environment(os.environ)
    crew = Crew(stage, chosen, data, place.folder / "trainings", environment, plain)
    found = loaders(stage, chosen, data, place.folder / "loaders", environment)
    crew.separate()
    stage.until(lambda: stage.clock - made > _QUIET, _QUIET * 10, say("a quiet file"))
    crew.shared()
    if crew.rescue is None:
        raise DemoFailed(say("nobody was rescued"))
    return Result(
        machine=where,
        shm_size=shm.size,
        shm_own=room.own,
        shm_why=room.why,
        data_bytes=nbytes,
        rows=chosen.rows,
        engine=chosen.engine,
        notes=tuple(notes),
        trainings=crew.trainings(),
        memory=crew.memory(),
        opening=crew.opening(),
        rescue=crew.rescue,
        loaders=found,
        weights=tuple(stage.weights),
        marks=tuple(stage.marks),
        seconds=stage.clock,
    )


def _why_no_torch(wish: Wish) -> str | None:
    if not wish.torch:
        return say("torch is left out, as asked for")
    return None if importlib.util.find_spec("torch") is not None else say("torch is not installed")

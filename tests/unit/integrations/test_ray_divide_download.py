"""Who reads and who receives when nodes die, with a Ray whose calls answer at once or never."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from legroom.cache.download import PIECE
from legroom.integrations.ray_divide_download import Exchange, Member
from legroom.integrations.ray_node_actor import GROUP

FIRSTS = [GROUP * number for number in range(12)]


class ActorDied(Exception):
    pass


@dataclass(eq=False)
class Ref:
    """What a call will give: a value, an error, or nothing as long as it is not ready."""

    value: Any = None
    problem: Exception | None = None
    ready: bool = True
    owner: Any = None


class Ray:
    """As much of Ray as an exchange needs. Gives up a test that waits for what never comes."""

    exceptions = SimpleNamespace(RayActorError=ActorDied)

    def __init__(self, count: int) -> None:
        self.waits = 0
        self.actors = [Actor(f"node{number}") for number in range(count)]
        size = len(FIRSTS) * GROUP * PIECE
        self.members = [Member(one.name, one.name, one, set(FIRSTS), size) for one in self.actors]

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.ready][:num_returns]
        self.waits = 0 if ready else self.waits + 1
        assert refs and self.waits < 10, "it waits for what never comes"
        return ready, []

    def get(self, ref: Ref) -> Any:
        if ref.problem is not None:
            raise ref.problem
        return ref.value

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": one.name, "Alive": not one.dead} for one in self.actors]


class Actor:
    """A node: it may die after it has read a group, and its calls may say so or not."""

    def __init__(self, name: str) -> None:
        self.name, self.dead, self.says_so, self.dies_after = name, False, True, 1 << 30
        self.reads: list[int] = []
        self.refuses: set[int] = set()
        self.abandoned: list[str] = []
        self.read = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._read))
        self.receive = SimpleNamespace(remote=self._receive)
        self.abandon = SimpleNamespace(remote=lambda code, _: self.abandoned.append(code))

    def _read(self, first: int, last: int) -> tuple[Ref, Ref]:
        if self.dead:
            return Ref(), Ref(problem=ActorDied(), ready=self.says_so)
        self.reads.append(first)
        if first in self.refuses:
            return Ref(), Ref(problem=ValueError("no"))
        self.dead = len(self.reads) >= self.dies_after
        return Ref(owner=self), Ref("signed")

    def _receive(self, first: int, data: Ref, signed: str) -> Ref:
        if self.dead:
            return Ref(problem=ActorDied(), ready=self.says_so)
        return Ref(ready=not data.owner.dead)  # Ray waits for a copy that is gone


def test_each_group_is_read_by_one_node() -> None:
    ray = Ray(4)
    told: list[str] = []
    Exchange(ray, ray.members, lambda node: told.append(node.address)).run()
    assert sorted(first for one in ray.actors for first in one.reads) == FIRSTS
    assert not any(one.missing for one in ray.members) and len(told) == 4 * len(FIRSTS)
    assert {len(one.reads) for one in ray.actors} == {3}
    assert {(one.busy, one.reading) for one in ray.members} == {(0, 0)}


@pytest.mark.parametrize("says_so", [True, False])
def test_what_a_dead_node_had_read_is_read_by_another(says_so: bool) -> None:
    """Whether its own calls fail, or other nodes only wait for its copies."""
    ray = Ray(4)
    ray.actors[3].dies_after, ray.actors[3].says_so = 2, says_so
    Exchange(ray, ray.members, lambda _: None).run()
    *others, dead = ray.members
    assert not dead.alive and dead.result["error"]["code"] == "node-died"
    assert not any(one.missing for one in others) and all(one.alive for one in others)
    read = sorted(first for one in ray.actors[:3] for first in one.reads)
    lost = ray.actors[3].reads
    assert set(read) == set(FIRSTS) and len(read) <= len(FIRSTS) and set(lost) <= set(read)
    assert {(one.busy, one.reading) for one in others} == {(0, 0)}


def test_a_group_that_fails_everywhere_ends_the_load() -> None:
    ray = Ray(2)
    for one in ray.actors:
        one.refuses = {8}
    Exchange(ray, ray.members, lambda _: None).run()
    assert [one.abandoned for one in ray.actors] == [["node-failed"]] * 2

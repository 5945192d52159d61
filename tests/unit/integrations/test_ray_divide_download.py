"""Who reads and who receives when nodes die, with a Ray whose calls answer at once or never."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from legroom.cache.download import PIECE
from legroom.errors import NoRoom
from legroom.integrations import ray_divide_download
from legroom.integrations.ray_divide_download import Exchange, LoadingNode

PIECES = range(96)


class ActorDied(Exception):
    pass


@dataclass(eq=False)
class Ref:
    """What a call will give: a value, an error, or nothing as long as it is not ready."""

    value: Any = None
    problem: Exception | None = None
    ready: bool = True
    owner: Any = None
    group: tuple[int, int] = (0, 0)


class Ray:
    """As much of Ray as an exchange needs. Gives up a test that waits for what never comes."""

    exceptions = SimpleNamespace(RayActorError=ActorDied)

    def __init__(self, count: int) -> None:
        self.waits = self.calls = 0
        self.actors = [Actor(f"node{number}") for number in range(count)]
        size = len(PIECES) * PIECE - 5
        self.members = [LoadingNode(one.name, one.name, one, set(PIECES), size=size) for one in self.actors]
        self.most = 0  # pieces that were being read or on their way at one time

    def now(self) -> float:
        """Each answer takes 1 ms."""
        return self.calls / 1000

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.ready][:num_returns]
        self.waits = 0 if ready else self.waits + 1
        self.calls += 1
        assert refs and self.waits < 10, "it waits for what never comes"
        groups = {ref.group for ref in refs}
        self.most = max(self.most, sum(last - first for first, last in groups))
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
        self.reads: list[range] = []
        self.wanted: list[bool] = []
        self.received: list[int] = []
        self.refuses: set[int] = set()
        self.full_after: int = 1 << 30  # pieces: it cannot take more
        self.abandoned: list[str] = []
        self.read = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._read))
        self.receive = SimpleNamespace(remote=self._receive)
        self.abandon = SimpleNamespace(remote=lambda code, _: self.abandoned.append(code))

    def _read(self, first: int, last: int, wanted: bool) -> tuple[Ref, Ref]:
        group = first, last
        if self.dead:
            return Ref(group=group), Ref(problem=ActorDied(), ready=self.says_so, group=group)
        self.reads.append(range(first, last))
        self.wanted.append(wanted)
        if self.refuses.intersection(range(first, last)):
            return Ref(group=group), Ref(problem=ValueError("no"), group=group)
        self.dead = len(self.reads) >= self.dies_after
        return Ref(owner=self, group=group), Ref("signed", group=group)

    def _receive(self, first: int, data: Ref, signed: str) -> Ref:
        if self.dead:
            return Ref(problem=ActorDied(), ready=self.says_so, group=data.group)
        self.received.extend(range(*data.group))
        if first >= self.full_after:
            return Ref(problem=NoRoom("full"), group=data.group)
        return Ref(ready=not data.owner.dead, group=data.group)  # Ray waits for a copy that is gone

    @property
    def pieces(self) -> list[int]:
        return [number for group in self.reads for number in group]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    found = Ray(4)
    monkeypatch.setattr(ray_divide_download.time, "monotonic", found.now)
    return found


def _is_idle(members: list[LoadingNode]) -> bool:
    return {(one.busy, one.reading) for one in members} == {(0, 0)}


def test_each_piece_is_read_by_one_node(ray: Ray) -> None:
    told: list[str] = []
    Exchange(ray, ray.members, lambda node: told.append(node.address)).run()
    assert sorted(number for one in ray.actors for number in one.pieces) == list(PIECES)
    assert not any(one.missing for one in ray.members) and set(told) == {one.name for one in ray.actors}
    assert {one.done for one in ray.members} == {ray.members[0].size}
    assert _is_idle(ray.members) and all(all(one.wanted) for one in ray.actors)


def test_nodes_read_equal_shares_in_small_groups_first_and_last(ray: Ray) -> None:
    """So that no node has more to send than the others, and none waits for the last group."""
    Exchange(ray, ray.members, lambda _: None).run()
    shares = [len(one.pieces) for one in ray.actors]
    assert max(shares) - min(shares) <= ray_divide_download.GROUP, shares
    groups = sorted((group for one in ray.actors for group in one.reads), key=lambda group: group.start)
    assert len(groups[0]) == len(groups[-1]) == 1 and max(map(len, groups)) > 1


def test_a_node_that_is_slow_to_pass_on_reads_less(ray: Ray) -> None:
    """Others wait for its groups. It reads no more until they have them."""
    slow = ray.actors[0]
    waiting: list[Ref] = []

    def receive(actor: Actor, first: int, data: Ref, signed: str) -> Ref:
        ref = Ref(group=data.group, ready=data.owner is not slow)
        if data.owner is slow:
            waiting.append(ref)
        return ref

    for one in ray.actors:
        one.receive = SimpleNamespace(remote=lambda *a, one=one: receive(one, *a))
    wait = ray.wait

    def delayed(refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        if not any(ref.ready for ref in refs):
            for ref in waiting:
                ref.ready = True
        return wait(refs, num_returns, timeout)

    ray.wait = delayed  # type: ignore[method-assign]
    Exchange(ray, ray.members, lambda _: None).run()
    assert len(slow.reads) <= ray_divide_download._AHEAD and not any(one.missing for one in ray.members)
    assert len(slow.pieces) < min(len(one.pieces) for one in ray.actors[1:])


def test_what_is_on_its_way_is_bounded_over_all_nodes(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    Exchange(ray, ray.members, lambda _: None).run()
    usual = ray.most
    limited = Ray(4)
    monkeypatch.setattr(ray_divide_download, "_ON_THE_WAY", 10 * PIECE)
    Exchange(limited, limited.members, lambda _: None).run()
    assert limited.most <= 10 < usual and not any(one.missing for one in limited.members)


def test_a_node_alone_puts_nothing_into_the_object_store(ray: Ray) -> None:
    Exchange(ray, ray.members[:1], lambda _: None).run()
    assert ray.actors[0].pieces == list(PIECES) and not any(ray.actors[0].wanted)


def test_a_node_that_has_a_piece_passes_it_on(ray: Ray) -> None:
    """Left from an earlier attempt. Only nodes that lack it receive it."""
    ray.members[2].missing = set(range(10, 96))
    Exchange(ray, ray.members, lambda _: None).run()
    assert set(ray.actors[2].pieces) >= set(range(10))
    assert sorted(number for one in ray.actors for number in one.pieces) == list(PIECES)
    assert ray.members[2].done == ray.members[0].size - 10 * PIECE


@pytest.mark.parametrize("says_so", [True, False])
def test_what_a_dead_node_had_read_is_read_by_another(ray: Ray, says_so: bool) -> None:
    """Whether its own calls fail, or other nodes only wait for its copies."""
    ray.actors[3].dies_after, ray.actors[3].says_so = 2, says_so
    Exchange(ray, ray.members, lambda _: None).run()
    *others, dead = ray.members
    assert not dead.alive and dead.result["error"]["code"] == "node-died"
    assert not any(one.missing for one in others) and all(one.alive for one in others)
    read = sorted(number for one in ray.actors[:3] for number in one.pieces)
    lost = ray.actors[3].pieces
    assert set(read) == set(PIECES) and len(read) <= len(PIECES) and set(lost) <= set(read)
    assert _is_idle(others)


def test_a_node_that_cannot_take_what_it_is_sent_fails_alone(ray: Ray) -> None:
    ray.actors[1].full_after = 40
    ray.actors[1].refuses = set(range(40, 96))
    Exchange(ray, ray.members, lambda _: None).run()
    full = ray.members.pop(1)
    assert not full.alive and full.result["error"]["code"] == "no-room" and ray.actors[1].abandoned == ["no-room"]
    assert all(one.alive and not one.missing for one in ray.members) and _is_idle(ray.members)
    for one in (ray.actors[0], *ray.actors[2:]):  # nothing was sent to them twice
        assert len(one.received) == len(set(one.received)) and set(one.received) | set(one.pieces) == set(PIECES)


def test_what_is_sent_again_to_one_node_is_not_sent_again_to_others(ray: Ray) -> None:
    """The others have not answered yet when it fails, and every node is free to read."""
    ray.actors[1].full_after = 0
    for one in ray.members:
        one.missing = {8, 9}
    Exchange(ray, ray.members, lambda _: None).run()
    assert len(ray.actors[1].received) > 2 and not ray.members[1].alive
    for one in (ray.actors[0], *ray.actors[2:]):
        assert len(one.received) == len(set(one.received)), one.received


def test_a_node_that_cannot_read_leaves_it_to_the_others(ray: Ray) -> None:
    ray.actors[0].refuses = set(PIECES)
    Exchange(ray, ray.members, lambda _: None).run()
    assert all(one.alive and not one.missing and not one.actor.abandoned for one in ray.members)


def test_a_piece_that_no_node_can_read_ends_the_load() -> None:
    ray = Ray(3)
    for one in ray.actors:
        one.refuses = {8}
    ray.actors[2].dies_after = 1
    Exchange(ray, ray.members, lambda _: None).run()
    assert [one.abandoned for one in ray.actors[:2]] == [["node-failed"]] * 2

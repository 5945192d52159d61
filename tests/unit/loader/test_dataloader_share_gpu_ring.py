"""The ring of a GPU: who copies a batch, who reads it, and what happens when a trainer is gone."""

from __future__ import annotations

import random

from legroom.loader.dataloader.sharing.assign_copies_to_gpu import Claim, Ring

MB = 1 << 20


def everyone(_: int) -> bool:
    return True


def ring(*members: int) -> Ring:
    made = Ring("group")
    for number in members:
        made.join(number)
    return made


def test_the_first_copies_and_the_others_read() -> None:
    one = ring(1, 2, 3)
    assert one.claim(2, 7, MB, everyone) == (Claim.COPY, 0)
    assert one.claim(1, 7, MB, everyone) == (Claim.BUSY, 0)
    assert one.done(2, 7) == [1]
    assert one.claim(3, 7, MB, everyone) == (Claim.READY, 0)
    assert one.copied == 1 and one.read == 3
    assert one.ready(7)[:2] == ("ready", 0)


def test_one_trainer_alone_on_its_gpu_and_one_without_a_ring_copy_for_themselves() -> None:
    one = ring(1)
    assert one.claim(1, 7, MB, everyone) == (Claim.OWN, -1) and one.memory is None
    assert one.claim(2, 7, MB, everyone) == (Claim.OWN, -1)


def test_a_slot_is_written_again_when_all_have_read_it() -> None:
    one = ring(1, 2)
    for serial in range(8):
        assert one.claim(1, serial, 64 * MB // 2, everyone)[0] is Claim.COPY
        one.done(1, serial)
        one.release(1, serial)
    assert one.memory is not None and one.memory.slots == 8
    assert one.claim(1, 8, MB, everyone) == (Claim.OWN, -1)  # the second trainer needs what is there
    assert one.claim(2, 0, MB, everyone) == (Claim.READY, 0)
    assert one.claim(1, 9, MB, everyone) == (Claim.OWN, -1)  # it reads it now
    one.release(2, 0)
    assert one.claim(1, 10, MB, everyone) == (Claim.COPY, 0)
    assert one.claim(1, 11, MB, lambda number: number != 2)[0] is Claim.COPY  # out of the window: it needs nothing
    one.skip(2)
    assert one.claim(1, 12, MB, everyone)[0] is Claim.COPY


def test_a_trainer_that_claims_a_later_batch_does_not_need_the_earlier_ones() -> None:
    one = ring(1, 2)
    one.claim(1, 0, 400 * MB, everyone)
    one.done(1, 0), one.release(1, 0)
    one.claim(1, 1, MB, everyone)
    one.done(1, 1), one.release(1, 1)
    assert one.claim(1, 2, MB, everyone)[0] is Claim.OWN
    assert one.claim(2, 1, MB, everyone)[0] is Claim.READY  # it has made the first one itself
    assert one.claim(1, 3, MB, everyone) == (Claim.COPY, 0)


def test_the_slot_of_a_killed_writer_is_never_used_again_and_another_copies() -> None:
    one = ring(1, 2, 3)
    one.claim(3, 0, 400 * MB, everyone)
    one.done(3, 0), one.release(3, 0), one.skip(1), one.skip(2)
    assert one.claim(1, 1, MB, everyone) == (Claim.COPY, 1)
    assert one.claim(2, 1, MB, everyone)[0] is one.claim(3, 1, MB, everyone)[0] is Claim.BUSY
    first = one.memory
    assert one.leave(1) == [(2, 1), (3, 1)]
    assert one.claim(2, 1, MB, everyone) == (Claim.COPY, 0) and one.claim(3, 1, MB, everyone)[0] is Claim.BUSY
    assert one.memory == first and one.leave(2) == [(3, 1)]  # both slots are lost now
    one.join(4)
    assert one.claim(3, 1, MB, everyone)[0] is Claim.COPY and one.memory != first


def test_the_memory_is_created_once_and_forgotten_with_the_last_trainer_that_has_it() -> None:
    one = ring(1, 2, 3)
    assert one.claim(1, 0, MB, everyone)[0] is Claim.COPY and one.creator == 1
    first = one.memory
    assert one.claim(2, 1, MB, everyone)[0] is Claim.OWN  # there is no memory yet
    one.done(1, 0)
    assert one.creator is None and one.claim(2, 1, MB, everyone)[0] is Claim.COPY and one.creator is None
    assert one.claim(3, 0, MB, everyone)[0] is Claim.READY
    one.leave(1)  # nobody else has said that it has mapped it
    assert one.memory is None and one.done(2, 1) == []
    assert one.claim(3, 0, MB, everyone)[0] is Claim.COPY and one.creator == 3 and one.memory != first
    one.done(3, 0)
    assert one.claim(2, 0, MB, everyone)[0] is Claim.READY
    one.mapped(2, 0)
    one.leave(3)
    one.join(4)
    assert one.claim(4, 0, MB, everyone)[0] is Claim.READY  # the second one has it


def test_a_larger_batch_gets_a_new_ring() -> None:
    one = ring(1, 2)
    one.claim(1, 0, MB, everyone)
    first = one.memory
    assert first is not None and MB < first.nbytes <= MB + MB // 8 and first.nbytes % 4096 == 0
    assert one.done(1, 0) == [] and one.claim(1, 2, MB, everyone)[0] is Claim.COPY
    assert one.claim(2, 1, 2 * MB, everyone)[0] is Claim.COPY and one.memory != first
    assert one.done(1, 2) == []  # of the ring before: nobody waits for it


def test_a_trainer_that_cannot_use_the_ring_leaves_it_to_the_others() -> None:
    one = ring(1, 2, 3)
    one.claim(1, 0, MB, everyone)
    one.claim(2, 0, MB, everyone)
    assert one.failed(1, 0) == [(2, 0)] and one.members == {2, 3} and one.creator is None
    assert one.claim(2, 0, MB, everyone)[0] is Claim.COPY
    assert one.claim(3, 0, MB, everyone)[0] is Claim.BUSY
    assert one.give_up(2, 0) == [(3, 0)]  # the answer came too late for it
    assert one.claim(3, 0, MB, everyone)[0] is Claim.COPY


def test_random_trainers_read_only_what_was_copied_and_nothing_is_overwritten_while_it_is_read() -> None:
    assert sum(simulate(seed) for seed in range(40)) > 40


def simulate(seed: int) -> int:
    """Trainers that come, claim, read and are killed at random; how many batches were copied."""
    chance = random.Random(seed)
    one, born = ring(), 0
    at: dict[int, int] = {}
    memory: dict[tuple[object, int], int | None] = {}  # what is in a slot; None while it is written
    reading: dict[int, list[tuple[int, tuple[object, int]]]] = {}
    writing: dict[int, tuple[int, tuple[object, int]]] = {}
    waiting: dict[int, int] = {}
    maps: dict[object, set[int]] = {}  # trainers that have a ring
    lost: set[tuple[object, int]] = set()  # slots whose writer was killed

    def told(number: int, serial: int, claim: Claim, slot: int) -> None:
        place = (one.memory, slot)
        waiting.pop(number, None)
        if claim is Claim.COPY and one.creator != number and not maps.get(one.memory, set()) & set(at):
            again(one.give_up(number, serial))  # the memory is gone
        elif claim is Claim.COPY:
            maps.setdefault(one.memory, set()).add(number)
            if one.creator != number:
                one.mapped(number, serial)
            assert place not in lost
            assert all(place != held for all_held in reading.values() for _, held in all_held)
            assert all(place != other for _, other in writing.values())
            memory[place] = None
            writing[number] = serial, place
        elif claim is Claim.READY and not maps.get(one.memory, set()) & set(at):
            one.release(number, serial)  # the memory is gone
        elif claim is Claim.READY:
            maps[one.memory].add(number)
            one.mapped(number, serial)
            assert memory[place] == serial
            reading[number].append((serial, place))
        elif claim is Claim.BUSY:
            waiting[number] = serial

    def again(those: list[tuple[int, int]]) -> None:
        for number, serial in those:
            told(number, serial, *one.claim(number, serial, MB, everyone))

    for _ in range(500):
        step = chance.random()
        if step < 0.04 or not at:
            born += 1
            one.join(born)
            at[born], reading[born] = max([0, *at.values()]) if at else 0, []
        number = chance.choice(list(at))
        if 0.04 <= step < 0.07:
            del at[number], reading[number]
            waiting.pop(number, None)
            if number in writing:
                lost.add(writing.pop(number)[1])  # what it had queued may still arrive
            again(one.leave(number))
        elif number in writing:
            serial, place = writing.pop(number)
            memory[place] = serial
            for other in one.done(number, serial):
                told(other, serial, Claim.READY, place[1])
            reading[number].append((serial, place))
        elif number in waiting:
            if step < 0.2:  # it has waited long enough
                one.release(number, waiting.pop(number))
        elif step < 0.5:
            at[number] += 1
            nbytes = chance.choice([MB, MB, MB, 90 * MB])
            told(number, at[number], *one.claim(number, at[number], nbytes, everyone))
        elif reading[number]:
            serial, place = reading[number].pop(0)
            assert memory[place] == serial, seed
            one.release(number, serial)
    return one.copied

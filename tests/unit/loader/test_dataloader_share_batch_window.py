"""The window of a shared loader: which batches are kept, who gets which, who is let go."""

from __future__ import annotations

import random

from legroom.loader.dataloader.sharing.batch_window_and_late_joiners import JOIN_S, RETURN_S, Answer, MadeBatch, Window

LENGTH = 10


class Rig:
    """A window over epochs of ten batches, and what it dropped."""

    def __init__(self, trainers: int, most: int = 4, patience: float = 1.0, continuous: bool = False) -> None:
        self.dropped: list[tuple[int, int]] = []
        self.window = Window((0, 0), lambda _: LENGTH, self._drop)
        self.window.most, self.window.interval, self.window.in_production = most, 0.1, 2
        for number in range(1, trainers + 1):
            self.window.join(number, patience, continuous)

    def _drop(self, entry: MadeBatch) -> None:
        assert not entry.holders
        self.dropped.append(entry.position)

    def make(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.window.room()
            self.window.add(100, None)

    def take(self, number: int, position: tuple[int, int]) -> MadeBatch:
        assert self.window.want(number, position) is Answer.GRANT
        return self.window.granted(number)


def test_a_batch_is_dropped_when_every_trainer_has_released_it() -> None:
    rig = Rig(2)
    assert rig.window.want(1, (0, 0)) is rig.window.want(2, (0, 0)) is Answer.WAIT
    rig.make(2)
    one, two = rig.take(1, (0, 0)), rig.take(2, (0, 0))
    assert one is two and not rig.dropped
    rig.window.release(1, one.serial)
    assert not rig.dropped
    rig.window.release(2, one.serial)
    assert rig.dropped == [(0, 0)]


def test_a_held_batch_does_not_count_and_is_never_dropped() -> None:
    rig = Rig(1)
    rig.window.want(1, (0, 0))
    rig.make(1)
    held = rig.take(1, (0, 0))
    assert not rig.window.entries and held.serial in rig.window.aside
    rig.make(4)
    assert not rig.window.room() and not rig.dropped
    rig.window.leave(1)
    assert rig.dropped == [(0, 0)]  # the trainer is gone: nothing is held any more


def test_the_sequence_continues_in_the_next_epoch() -> None:
    rig = Rig(1, most=30)
    rig.window.want(1, (0, 0))
    rig.make(12)
    assert list(rig.window.entries)[-1] == (1, 1) and rig.window.head == (1, 2)


def test_a_slow_trainer_is_let_go_after_its_patience_and_comes_back() -> None:
    rig = Rig(2)
    rig.window.want(1, (0, 0)), rig.window.want(2, (0, 0))
    rig.make(4)
    rig.take(2, (0, 0))  # at work on its first batch
    rig.window.release(1, rig.take(1, (0, 0)).serial)
    rig.make(1)
    for number in range(1, 5):
        rig.window.release(1, rig.take(1, (0, number)).serial)
    assert rig.window.want(1, (0, 5)) is Answer.WAIT and not rig.window.room()
    rig.window.charge(0.6)
    assert not rig.window.room() and rig.window.slow() == [2]
    rig.window.charge(0.6)
    assert rig.window.room() and not rig.window.members[2].inside
    rig.make(1)
    assert rig.window.want(2, (0, 1)) is Answer.MISS and rig.window.members[2].made_itself == 1
    assert rig.window.want(2, (0, 5)) is Answer.GRANT  # it has caught up


def test_time_is_charged_only_while_others_wait_and_fades() -> None:
    rig = Rig(2)
    rig.window.want(1, (0, 0)), rig.window.want(2, (0, 0))
    rig.make(4)
    rig.take(2, (0, 0))
    rig.window.charge(60.0)  # the first trainer asks for nothing it cannot get
    assert rig.window.members[2].inside
    rig.window.release(1, rig.take(1, (0, 0)).serial)
    rig.make(1)
    for number in range(1, 5):
        rig.window.release(1, rig.take(1, (0, number)).serial)
    rig.window.want(1, (0, 5))
    rig.window.charge(0.9)
    rig.take(2, (0, 1))  # in time: there is room again
    rig.make(1)
    assert rig.window.members[2].charged == 0.9
    rig.window.charge(10.0)
    assert 0.3 < rig.window.members[2].charged < 0.5


def test_with_wait_the_time_counts_from_the_last_step() -> None:
    rig = Rig(2, patience=5.0, continuous=True)
    rig.window.want(1, (0, 0)), rig.window.want(2, (0, 0))
    rig.make(4)
    for number in range(4):
        rig.window.release(1, rig.take(1, (0, number)).serial)
    for number in range(4, 9):
        rig.window.want(1, (0, number))
        rig.window.charge(4.0)
        rig.take(2, (0, number - 4))
        rig.window.charge(0.1)
        rig.make(1)
        rig.window.granted(1)
    assert rig.window.members[2].inside
    rig.window.want(1, (0, 9))
    rig.window.charge(5.1)
    assert not rig.window.members[2].inside


def test_trainers_that_start_together_stay_together() -> None:
    rig = Rig(2)
    rig.window.want(1, (0, 0))
    rig.make(1)
    for number in range(6):
        rig.window.release(1, rig.take(1, (0, number)).serial)
        rig.make(1)
    assert rig.window.want(2, (0, 0)) is Answer.MISS
    assert rig.window.better_start() == (0, 0)  # 6 batches of 0.1 s are less than JOIN_S
    rig.window.restart((0, 0))
    assert rig.window.want(2, (0, 1)) is Answer.WAIT and rig.window.want(1, (0, 6)) is Answer.WAIT
    rig.make(1)
    assert rig.window.better_start() is None


def test_a_trainer_that_is_far_behind_moves_nothing() -> None:
    rig = Rig(2)
    rig.window.restart((3, 0))
    rig.window.want(1, (3, 0))
    rig.make(2)
    rig.window.want(2, (0, 0))
    assert rig.window.better_start() is None and rig.window.answer(2) is Answer.MISS
    rig.window.interval = JOIN_S  # every batch takes long
    rig.window.join(3, 1.0)
    rig.window.want(3, (2, 4))
    assert rig.window.better_start() is None


def taken_back(rig: Rig, seconds: float, group: int, other: int) -> tuple[float, tuple[int, int]] | None:
    """When and where the sequence starts again, if the first trainer takes ``group`` batches per tick of 0.2 s, and the
    second, which is out, makes ``other`` itself."""
    fast, behind = rig.window.members[1].cursor, rig.window.members[2].cursor
    assert behind is not None and fast is not None
    for tick in range(int(seconds / 0.2)):
        for _ in range(group):
            rig.window.want(1, fast)
            rig.make()
            rig.window.release(1, rig.take(1, fast).serial)
            fast = rig.window._after(fast)
        for _ in range(other):
            behind = rig.window._after(behind)
            assert rig.window.want(2, behind) is Answer.MISS
        rig.window.charge(0.2)
        if (found := rig.window.better_start()) is not None:
            assert found == behind
            return tick * 0.2, found
    return None


def left_behind(gap: int) -> Rig:
    """A group of one trainer, and another that is out, so many batches behind it."""
    rig = Rig(2, most=4)
    rig.window._length = lambda _: 10_000
    for number in range(100 + gap):
        if number == 0:
            rig.window.want(2, (0, 0))
        rig.window.want(1, (0, number))
        rig.make()
        rig.window.release(1, rig.take(1, (0, number)).serial)
        if number == 0:
            rig.window.release(2, rig.take(2, (0, 0)).serial)
            rig.window.members[2].inside = False
    assert rig.window.want(2, (0, 100)) is Answer.MISS
    return rig


def test_a_trainer_of_equal_speed_that_is_out_is_taken_back() -> None:
    """On the same cores it would never catch up, and the work would be done twice to the end."""
    rig = left_behind(gap=20)
    found = taken_back(rig, 10.0, 2, 2)
    assert found is not None and found[0] >= RETURN_S
    rig.window.restart(found[1])
    ahead = rig.window.members[1].cursor
    assert ahead is not None and ahead[1] - found[1][1] >= 20
    assert rig.window.want(2, found[1]) is Answer.WAIT
    assert rig.window.want(1, ahead) is Answer.WAIT  # two seconds: it waits, and does not run further ahead
    rig.make()
    rig.window.release(2, rig.take(2, found[1]).serial)
    assert rig.window.members[2].inside


def test_a_trainer_that_falls_further_back_is_not_waited_for() -> None:
    assert taken_back(left_behind(gap=20), 30.0, 4, 2) is None


def test_a_trainer_that_stands_still_or_is_far_is_not_waited_for() -> None:
    assert taken_back(left_behind(gap=20), 30.0, 2, 0) is None
    assert taken_back(left_behind(gap=60), 30.0, 2, 2) is None  # 6 seconds


def test_a_trainer_that_falls_out_again_and_again_is_taken_back_ever_later() -> None:
    rig = left_behind(gap=20)
    member = rig.window.members[2]
    for times in range(1, 5):
        member.out, member.gap, member.left_at, member.fresh = 1000.0, 50, (0, 0), False
        assert rig.window._keeps_pace(member) and member.return_after == RETURN_S * 2**times


def test_the_sequence_starts_again_where_the_trainers_are() -> None:
    rig = Rig(3)
    rig.window.want(1, (0, 0))
    rig.make(2)
    rig.window.leave(1)
    assert rig.window.want(2, (4, 2)) is rig.window.want(3, (4, 3)) is Answer.MISS
    assert rig.window.better_start() == (4, 2)


def test_a_trainer_slightly_ahead_of_a_cold_producer_does_not_move_it() -> None:
    rig = Rig(1)
    rig.window.interval = None
    assert rig.window.want(1, (0, 3)) is Answer.MISS  # it makes its own until the first batch is there
    assert rig.window.better_start() is None


def test_a_trainer_that_has_passed_a_full_window_is_not_told_to_wait_for_ever() -> None:
    """It made its batches itself while the window was filled, and got no core for a moment."""
    rig = Rig(1)
    rig.window.interval = None
    assert rig.window.want(1, (0, 3)) is Answer.MISS
    rig.window.interval = 0.01
    rig.make(4)
    assert not rig.window.room()
    assert rig.window.want(1, (0, 5)) is Answer.WAIT  # after the next one to be made
    assert rig.window.room() and rig.dropped == [(0, 0), (0, 1), (0, 2), (0, 3)]
    rig.make(1)
    rig.make(1)
    assert rig.window.answer(1) is Answer.GRANT


def filled(rig: Rig) -> None:
    """The first trainer has taken all that was made, and waits; the second still needs the first batch."""
    assert rig.window.want(1, (0, 0)) is rig.window.want(2, (0, 0)) is Answer.WAIT
    rig.make(4)
    for number in range(4):
        rig.window.release(1, rig.take(1, (0, number)).serial)
    assert rig.window.want(1, (0, 4)) is Answer.WAIT and not rig.window.room()


def test_what_only_a_trainer_that_leaves_the_window_needed_is_dropped_at_once() -> None:
    rig = Rig(2)
    filled(rig)
    assert rig.window.want(2, (7, 0)) is Answer.MISS
    assert rig.window.room() and len(rig.dropped) == 4


def test_a_trainer_that_goes_back_to_before_the_window_is_charged() -> None:
    rig = Rig(2)
    rig.window.restart((5, 0))
    rig.window.want(1, (5, 0)), rig.window.want(2, (5, 0))
    rig.make(4)
    rig.take(2, (5, 0))
    rig.window.move(2, (3, 0))  # an iterator that was made from an older state, and deleted
    for number in range(4):
        rig.take(1, (5, number))
    assert rig.window.want(1, (5, 4)) is Answer.WAIT and not rig.window.room()
    rig.window.charge(1.1)
    assert rig.window.room() and not rig.window.members[2].inside


def test_a_trainer_that_does_not_read_is_charged_and_one_that_has_just_asked_is_not() -> None:
    rig = Rig(2)
    filled(rig)
    rig.window.charge(60.0)  # the producer itself was stopped: what trainers asked meanwhile is not answered yet
    assert rig.window.members[2].inside
    rig.window.members[2].unread = True
    rig.window.charge(1.1)
    assert rig.window.room() and not rig.window.members[2].inside


def test_the_sequence_does_not_stay_in_an_epoch_without_batches() -> None:
    rig = Rig(1)
    rig.window._length = lambda epoch: 0 if epoch == 1 else 2
    rig.window.want(1, (0, 0))
    for number in range(2):
        rig.make(1)
        rig.take(1, (0, number))
    assert rig.window.head == (2, 0) and rig.window.want(1, (2, 0)) is Answer.WAIT
    rig.window.restart((1, 0))
    assert rig.window.head == (2, 0)


def test_whoever_waits_is_waited_for_by_a_batch_that_can_be_made_or_by_a_trainer_that_is_charged() -> None:
    """Trainers that take batches in turn, and now and then jump, idle, go back, are stopped, come and go."""
    waited = charged = 0
    for seed in range(100):
        chance = random.Random(seed)
        rig = Rig(0, most=chance.randint(2, 5))
        window, born, stopped = rig.window, 0, set[int]()
        window.interval = chance.choice([None, 0.01, 0.2])
        window._length = lambda epoch: 0 if epoch % 4 == 3 else 6
        for _ in range(400):
            step = chance.random()
            if not window.members or (step < 0.02 and len(window.members) < 4):
                born += 1
                window.join(born, 0.5, chance.random() < 0.3, chance.random() < 0.5)
            number = chance.choice(list(window.members))
            member = window.members[number]
            epoch, index = member.cursor or window.head
            if not window._length(epoch):
                epoch, index = epoch + 1, 0
            if 0.02 < step < 0.03:
                window.leave(number)
            elif step < 0.06:
                stopped ^= {number}
            elif step < 0.6 and number not in stopped:
                if member.asking:
                    continue
                if chance.random() < 0.03:
                    window.move(number, (epoch + chance.choice([1, -1]), 0))
                else:
                    window.want(number, (epoch, index if chance.random() < 0.9 else chance.randrange(6)))
            elif step < 0.9 and window.room() and window._length(window.head[0]):
                window.interval = window.interval or 0.05
                window.add(100, None)
            else:
                window.charge(chance.random() / 4)
            if (start := window.better_start()) is not None:
                window.restart(start)
            for one, member in list(window.members.items()):
                if member.asking and window.answer(one) is Answer.GRANT:
                    if one in stopped:
                        member.unread = True
                    else:
                        window.granted(one)
            if any(one.asking and one.inside and one.cursor not in window.entries for one in window.members.values()):
                waited += 1
                charged += bool(window.blocking())
                assert (window.room() and window._length(window.head[0])) or window.blocking(), seed
    assert waited > 1000 and charged > 100, (waited, charged)


def test_random_trainers_get_every_batch_once_in_order_and_nothing_held_is_dropped() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        rig = Rig(0, most=chance.randint(2, 5), patience=0.5)
        window, at, held, born = rig.window, dict[int, tuple[int, int]](), dict[int, list[int]](), 0
        for _ in range(600):
            step = chance.random()
            if step < 0.05 or not at:
                born += 1
                window.join(born, 0.5)
                at[born], held[born] = (0, 0), []
            number = chance.choice(list(at))
            if step < 0.08:
                window.leave(number)
                del at[number], held[number]
            elif step < 0.5:
                epoch, index = at[number]
                if window.want(number, at[number]) is Answer.GRANT:
                    entry = window.granted(number)
                    assert entry.position == at[number]
                    held[number].append(entry.serial)
                    while len(held[number]) > 2:
                        window.release(number, held[number].pop(0))
                elif window.members[number].asking:
                    continue  # it waits
                at[number] = (epoch, index + 1) if index + 1 < LENGTH else (epoch + 1, 0)
            elif step < 0.9 and window.room():
                window.add(100, None)
            else:
                window.charge(chance.random())
            if (start := window.better_start()) is not None:
                window.restart(start)
            assert len(window.entries) <= max(2, window.most)
            alive = {entry.serial for entry in [*window.entries.values(), *window.aside.values()]}
            assert all(serial in alive for one in held.values() for serial in one)

"""Room for requests that arrive in pieces: bounded, first come first served, nobody keeps it."""

import asyncio

import pytest

from kvkeep_server.rpc import frame_room
from kvkeep_server.rpc.frame_room import Claim, FrameRoom


class Asked:
    """One claim, and what was said to it."""

    def __init__(self, room, nbytes, refused=0):
        self.heard = []
        self.claim = Claim(nbytes, lambda: self.heard.append("room"), self._overdue, refused)
        self._room = room
        self.at_once = room.claim(self.claim)

    def _overdue(self):
        self.heard.append("overdue")
        self._room.give_back(self.claim)


def run(test):
    async def go():
        async with asyncio.timeout(10):
            await test(FrameRoom(100))

    asyncio.run(go())


def test_claims_are_bounded_and_served_in_their_order():
    async def test(room):
        first, second = Asked(room, 60), Asked(room, 40)
        large, small = Asked(room, 90), Asked(room, 10)
        assert [one.at_once for one in (first, second, large, small)] == [True, True, False, False]
        room.give_back(second.claim)
        assert (large.heard, small.heard) == ([], []), "the small one does not pass the large one"
        room.give_back(first.claim)
        assert (large.heard, small.heard, room.held_nbytes) == (["room"], ["room"], 100)
        for one in (large, small, large):
            room.give_back(one.claim)
        assert room.held_nbytes == 0

    run(test)


def test_who_leaves_while_it_waits_does_not_hold_up_others():
    async def test(room):
        holder, waits, other = Asked(room, 60), Asked(room, 90), Asked(room, 40)
        room.give_back(waits.claim)
        assert (waits.heard, other.heard, room.held_nbytes) == ([], ["room"], 100)
        for one in (holder, other):
            room.give_back(one.claim)
        assert room.held_nbytes == 0

    run(test)


def test_who_keeps_room_that_others_wait_for_is_told(monkeypatch):
    monkeypatch.setattr(frame_room, "_LOOK_S", 0.005)

    async def test(room):
        holder = Asked(room, 60)
        await asyncio.sleep(0.1)
        assert holder.heard == [], "it is in nobody's way"
        waits = Asked(room, 60)
        while not holder.heard:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)
        assert (holder.heard, waits.heard) == (["overdue"], ["room"])
        room.give_back(waits.claim)

    run(test)


def test_who_was_refused_less_often_comes_first():
    async def test(room):
        holder = Asked(room, 60)
        twice, once, never = Asked(room, 90, 2), Asked(room, 90, 1), Asked(room, 50)
        small = Asked(room, 40)
        assert not small.at_once, "one that never was refused waits before it"
        room.give_back(never.claim)
        assert small.heard == ["room"]
        again = Asked(room, 10)
        assert not again.at_once, "there is no room"
        room.give_back(small.claim)
        assert again.heard == ["room"]
        late = Asked(room, 20)
        assert late.at_once, "there is room, and those who wait were refused before"
        for one in (again, late, holder):
            room.give_back(one.claim)
        assert (twice.heard, once.heard) == ([], ["room"])
        room.give_back(once.claim)
        assert twice.heard == ["room"]
        room.give_back(twice.claim)
        assert room.held_nbytes == 0

    run(test)


def test_a_claim_that_can_never_fit_is_a_bug():
    async def test(room):
        with pytest.raises(AssertionError):
            Asked(room, 101)

    run(test)

"""Namespaces that nobody uses give their room back, and nobody gets another's by it."""

import asyncio
import time

import numpy as np
import pytest

from kvkeep_server.core.errors import NotFoundError, ResourceExhaustedError
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus, RenewStatus
from kvkeep_server.service.keyspace_numbers import KeyspaceNumbers
from kvkeep_server.service.namespaces import NamespaceLimits, Namespaces
from kvkeep_server.tiering.epochs import Epochs
from kvkeep_server.tiering.keyspaces import Keyspace
from tests.fakes.core_harness import Gate, Harness, full, keys_of, spec

FEW = "[limits]\nnamespaces_max = 8\nsession_namespaces_max = 8\n"
KEYS = keys_of("chain", 4)


@pytest.fixture
def numbers():
    return KeyspaceNumbers(lambda _: None)


@pytest.fixture
def namespaces(numbers):
    return Namespaces(limits=NamespaceLimits(64, 8, 64, 1 << 20), numbers=numbers, epochs=Epochs())


@pytest.fixture
def harness():
    with Harness(extra=FEW) as harness:
        yield harness


def number_of(opened):
    (space,) = opened.spaces.local
    return space.index


def fill(harness, session):
    """Opens as many as may be."""
    return [harness.open(session, spec(model=f"m{i}")) for i in range(8)]


def end(harness, session):
    harness.core.sessions.end(session.session_id, "test")


# ---- what is forgotten, and what is not


def seconds_a_set(count, with_blocks):
    """What it takes to look at so many sets of one tenant, which nobody has open."""
    limits, took_s = NamespaceLimits(count, count, count, 1 << 20), []
    for _ in range(3):
        numbers = KeyspaceNumbers(lambda _: None)
        namespaces = Namespaces(limits=limits, numbers=numbers, epochs=Epochs())
        for number in range(count):
            namespaces.open(spec(model=f"m{number}"), [])
        began_s = time.process_time()
        gone = namespaces.forget((), range(count) if with_blocks else ())
        took_s.append(time.process_time() - began_s)
        assert (gone > 0) is not with_blocks
    return min(took_s) / count


@pytest.mark.parametrize("with_blocks", [True, False])
def test_the_cost_of_looking_is_that_of_one_set_each(with_blocks):
    """It was that of all others for each: 3.2 s of the event loop for 4,096 of four groups."""
    few, many = seconds_a_set(250, with_blocks), seconds_a_set(4000, with_blocks)
    assert many < 4 * few


def test_what_nobody_opened_and_holds_nothing_is_forgotten(namespaces, numbers):
    old = namespaces.open(spec(), [])
    assert namespaces.forget((), ()) > 0
    assert (len(namespaces), len(numbers), list(namespaces)) == (0, 0, [])
    assert namespaces.near_misses(spec(engine="other")) == []
    with pytest.raises(NotFoundError, match="call OpenNamespace"):
        namespaces.get(old.spaces.index)


def test_a_handle_is_never_given_twice_but_a_number_is(namespaces):
    seen = set()
    for turn in range(20):
        opened = namespaces.open(spec(model=f"m{turn}"), [])
        assert opened.spaces.index not in seen
        assert number_of(opened) == 0
        seen.add(opened.spaces.index)
        namespaces.forget((), ())
    for handle in seen:
        with pytest.raises(NotFoundError):
            namespaces.get(handle)


def test_what_a_session_has_open_or_holds_blocks_or_works_stays(namespaces, numbers):
    live, stored, working, idle = (namespaces.open(spec(model=m), []) for m in "abcd")
    working.namespace_set.working += 1
    assert namespaces.forget({live.spaces.index}, [number_of(stored)]) > 0
    assert [namespaces.get(one.spaces.index) for one in (live, stored, working)]
    with pytest.raises(NotFoundError):
        namespaces.get(idle.spaces.index)
    assert len(numbers) == 3
    working.namespace_set.working -= 1
    namespaces.forget({live.spaces.index}, [number_of(stored)])
    assert (len(namespaces), len(numbers)) == (2, 2)


def test_blocks_keep_one_handle_that_reaches_them_not_all(namespaces, numbers):
    wide = spec(tp_size=8)
    first = namespaces.open(wide, [0, 1])
    namespaces.open(wide, [1, 2])
    namespaces.open(wide, [3])
    live = namespaces.open(wide, [4])
    of_rank = {space.rank: space for space in first.spaces.siblings}
    namespaces.forget({live.spaces.index}, [of_rank[1].index])
    assert len(namespaces) == 2
    left = {space.rank for space in namespaces.get(live.spaces.index).spaces.siblings}
    # All that the handle that stays reaches: who opens it again gets it as it is.
    assert left == {0, 1, 4}
    assert len(numbers) == 3
    others = namespaces.open(spec(tp_size=8, model="other"), []).spaces.local
    assert not {space.index for space in others} & {of_rank[0].index, of_rank[1].index}
    assert namespaces.open(wide, [0, 1]) is first
    # A rank whose keyspace was forgotten gets another one.
    again = namespaces.open(wide, [2, 4])
    assert {space.rank for space in live.spaces.siblings} == {0, 1, 2, 4}
    assert again.namespace_set is live.namespace_set


def test_what_recovery_named_stays_until_it_is_over(namespaces, numbers):
    opened = namespaces.open(spec(), [])
    (known,) = opened.spaces.local
    found = Keyspace(-1, b"n" * 16, -1, 0, known.kind, 32, 4096, 0, b"s" * 16, 1, 0)
    assert numbers.find_or_adopt(known) is known
    adopted = numbers.find_or_adopt(found)
    assert namespaces.forget((), ()) == 0
    assert numbers.find_or_adopt(found) is adopted
    numbers.recovered()
    namespaces.forget((), [adopted.index])
    assert (len(namespaces), len(numbers)) == (0, 1)
    namespaces.forget((), ())
    assert len(numbers) == 0
    assert numbers.by_name(b"n" * 16, 0) is None


# ---- limits of a session


def test_one_session_cannot_take_all_room(namespaces):
    theirs = {namespaces.open(spec(model=f"m{i}"), []).spaces.index for i in range(8)}
    with pytest.raises(ResourceExhaustedError, match=r"limits\.session_namespaces_max = 8"):
        namespaces.open(spec(model="one too many"), [], theirs)
    assert namespaces.open(spec(model="m3"), [], theirs)  # its own go on
    assert namespaces.open(spec(model="one too many"), [])


def test_nor_all_numbers(namespaces, numbers):
    wide = namespaces.open(spec(tp_size=60), [])
    theirs = {wide.spaces.index}
    with pytest.raises(ResourceExhaustedError, match=r"limits\.session_shards_max = 64.*local_ra"):
        namespaces.open(spec(tp_size=5, model="other"), [], theirs)
    assert len(numbers) == 60
    # Also where another session has opened them already.
    namespaces.open(spec(tp_size=5, model="other"), [])
    with pytest.raises(ResourceExhaustedError, match="session_shards_max"):
        namespaces.open(spec(tp_size=5, model="other"), [], theirs)
    namespaces.open(spec(tp_size=5, model="other"), [1, 2, 3], theirs)


# ---- in the daemon


def test_a_client_that_took_all_room_gives_it_back_when_it_ends(harness):
    greedy, other = harness.session(), harness.session()
    old = fill(harness, greedy)
    with pytest.raises(ResourceExhaustedError, match=r"limits\.namespaces_max = 8"):
        harness.open(other)
    end(harness, greedy)
    harness.clock.advance(1.0)
    mine = harness.open(other)
    assert len(harness.core.service.namespaces) == 1
    for opened in old:
        with pytest.raises(NotFoundError):
            harness.lookup(other, opened, KEYS)
    harness.put(other, mine, KEYS)


def test_a_search_for_room_is_seldom(harness, monkeypatch):
    """It looks at all blocks: nobody can ask for one a call."""
    greedy, other = harness.session(), harness.session()
    fill(harness, greedy)
    looked = []
    namespaces, forget = harness.core.service.namespaces, harness.core.service.namespaces.forget
    monkeypatch.setattr(namespaces, "forget", lambda *a: looked.append(a) or forget(*a))
    for _ in range(50):
        with pytest.raises(ResourceExhaustedError):
            harness.open(other)
    assert len(looked) == 1
    harness.clock.advance(1.0)
    with pytest.raises(ResourceExhaustedError):
        harness.open(other)
    assert len(looked) == 2


def test_who_gets_a_number_anew_finds_nothing_of_those_before(harness):
    """Equal keys, other sizes: starts, sizes, checksums and ghosts are the new one's."""
    first, other = harness.session(), harness.session()
    old = harness.open(first, spec(model="old", tenant="a", block_nbytes=4096))
    harness.put(first, old, KEYS)
    harness.remove(first, old, KEYS)
    for name in range(7):
        harness.open(other, spec(model=f"m{name}"))
    number = number_of(old)
    end(harness, first)
    harness.clock.advance(1.0)
    new_spec = spec(model="new", tenant="b", groups=(full(block_nbytes=8192),), key_nbytes=64)
    third = harness.session()
    new = harness.open(third, new_spec)
    assert number_of(new) == number
    keys = [key + key for key in KEYS]
    # What a client computes from the namespace's id, and looks for in shared memory.
    (space,), residency = new.spaces.local, harness.core.residency
    batch, draw = KeyBatch.unpack(b"".join(keys), 64), residency.table.multipliers
    start = map(np.uint64, draw.start(space.namespace_id, space.group, 64))
    tags = draw.fingerprints(batch.words, *start)[0]
    assert residency.fingerprints(space, batch)[0].tolist() == tags.tolist()
    assert harness.lookup(third, new, keys).blocks == 0
    assert harness.put(third, new, keys) == [CommitStatus.STORED] * 4
    harness.verify(harness.acquire(third, new, keys), keys)
    harness.check_at_rest()


def test_a_commit_of_a_session_that_is_over_keeps_its_namespace(harness):
    first, other = harness.session(), harness.session()
    opened = harness.open(first, spec(model="stored"))
    gate = Gate(harness.core)

    async def go():
        store = asyncio.create_task(harness.store(first, opened, KEYS[:1], [bytes(4096)]))
        await gate.reached()
        end(harness, first)
        for number in range(7):
            harness.open(other, spec(model=f"m{number}"))
        harness.clock.advance(1.0)
        with pytest.raises(ResourceExhaustedError):
            harness.open(other, spec(model="no room"))
        gate.open()
        return await store

    assert harness.run(go()) == [CommitStatus.STORED]
    gate.remove()
    # Its block keeps it now.
    harness.clock.advance(1.0)
    with pytest.raises(ResourceExhaustedError):
        harness.open(harness.session(), spec(model="no room"))
    again = harness.open(harness.session(), spec(model="stored"))
    assert harness.core.service.lookup(other, 1, b"", Hints())[1].blocks == 0
    assert again.spaces.index == opened.spaces.index


def test_a_block_that_left_under_a_lease_keeps_its_namespace(harness):
    first, other = harness.session(), harness.session()
    opened = harness.open(first, spec(model="leased", tp_size=2), [0, 1])
    harness.put(first, opened, KEYS, rank=0)
    harness.put(first, opened, KEYS, rank=1)
    same = harness.open(other, spec(model="leased", tp_size=2), [1])
    grant = harness.acquire(first, opened, KEYS)
    assert harness.renew(other, grant) is RenewStatus.RENEWED
    harness.remove(other, same, KEYS)
    end(harness, first)
    for number in range(6):
        harness.open(other, spec(model=f"m{number}"))
    harness.clock.advance(1.0)
    with pytest.raises(ResourceExhaustedError):
        harness.open(other, spec(model="no room"))
    assert harness.release(other, grant) == 1
    harness.clock.advance(1.0)
    harness.open(other, spec(model="there is room"))
    harness.check_at_rest()


def test_a_lease_can_be_joined_when_the_handle_it_was_taken_with_is_forgotten(harness):
    first, second, third = (harness.session() for _ in range(3))
    wide = spec(model="leased", tp_size=2)
    opened = harness.open(first, wide, [0])
    harness.put(first, opened, KEYS)
    grant = harness.acquire(first, opened, KEYS)
    harness.open(second, wide, [0, 1])
    harness.open(third, wide, [0, 1])
    assert harness.renew(second, grant) is RenewStatus.RENEWED
    end(harness, first)
    for number in range(6):
        harness.open(second, spec(model=f"m{number}"))
    harness.clock.advance(1.0)
    harness.open(second, spec(model="in its place"))
    with pytest.raises(NotFoundError):
        harness.core.service.namespaces.get(opened.spaces.index)
    assert harness.renew(third, grant) is RenewStatus.RENEWED

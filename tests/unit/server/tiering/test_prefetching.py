"""Hints: what they bring, what they may not do, and how their worth is counted."""

import asyncio

import numpy as np
import pytest

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.results import AckLevel, GroupKind, StateMode
from kvkeep_server.service.spec import GroupSpec
from kvkeep_server.tiering import prefetching
from kvkeep_server.tiering.prefetching import PrefetchOrder
from tests.fakes.core_harness import MIB, Harness, full, keys_of, spec

CHAIN = keys_of("chain", 20)


def harness(tmp_path, more=""):
    extra = f'[nvme]\ndirectories = ["{tmp_path}"]\nmax = "64MiB"\nsegment = "2MiB"\n{more}'
    return Harness(
        ram="4MiB", slab="256KiB", extra=extra + 'free_min = "1MiB"\n', ack=AckLevel.NVME
    )


@pytest.fixture
def core(tmp_path):
    with harness(tmp_path) as harness_:
        yield harness_
        harness_.check_at_rest()


@pytest.fixture
def session(core):
    return core.session(4 * MIB)


@pytest.fixture
def opened(core, session):
    """Its chain is on nvme only."""
    return with_chain_on_nvme(core, session)


def with_chain_on_nvme(core, session, wanted=None):
    opened = core.open(session, wanted or spec())
    assert set(core.put(session, opened, CHAIN)) == {1}
    flood(core, session, opened)
    assert in_ram(core, opened) == 0
    return opened


def flood(core, session, opened, name="flood"):
    for number in range(11):
        core.put(session, opened, keys_of((name, number), 100))


def in_ram(core, opened, keys=CHAIN):
    """Keys with all blocks in ram."""
    residency = core.core.residency
    from_spaces = core.core.service._keys(opened, b"".join(keys))
    units = residency.find(opened.spaces.local[0], from_spaces)
    return int(residency.columns.wholly_in_ram(units[units >= 0]).sum())


def hint(core, session, opened, keys=CHAIN, deadline_s=0.0, byte_budget=0):
    order = PrefetchOrder(deadline_s, byte_budget, Hints())
    return core.core.service.prefetch(session, opened.spaces.index, b"".join(keys), order)


def worker(core):
    return core.core.nvme.prefetching


def settled(core):
    async def wait():
        for _ in range(10_000):
            await asyncio.sleep(0.001)
            if not worker(core)._queue and not core.core.nvme.promotion.in_flight:
                break
        await asyncio.sleep(0.005)

    core.run(wait())


def foresight(core):
    found = core.core.residency.foresight
    return found.used, found.wasted, len(found.waiting)


def test_what_is_hinted_comes_into_ram_and_is_used(core, session, opened):
    assert hint(core, session, opened) == 20
    settled(core)
    assert in_ram(core, opened) == 20
    counts = worker(core).counts
    assert (counts.planned, counts.brought, counts.failed) == (20, 20, 0)
    assert foresight(core) == (0, 0, 20)
    # Nothing is held for it.
    assert not core.core.residency.columns.pins.any()
    core.verify(core.acquire(session, opened, CHAIN), CHAIN)
    assert foresight(core) == (20, 0, 0)
    assert hint(core, session, opened) == 0


def test_what_leaves_unused_was_wasted(core, session, opened):
    hint(core, session, opened)
    settled(core)
    flood(core, session, opened, "again")
    assert in_ram(core, opened) == 0
    assert foresight(core) == (0, 20, 0)


def test_only_the_budget_from_the_root_on(core, session, opened):
    assert hint(core, session, opened, byte_budget=5 * 4096 + 100) == 5
    settled(core)
    assert in_ram(core, opened) == 5
    assert in_ram(core, opened, CHAIN[:5]) == 5


def test_what_nobody_has_is_not_planned(core, session, opened):
    assert hint(core, session, opened, keys_of("none", 5)) == 0
    assert hint(core, session, opened, [*CHAIN[:3], *keys_of("none", 5)]) == 3


def test_the_queue_is_bounded_and_late_hints_give_way(tmp_path):
    with harness(tmp_path, 'prefetch_max = "100KiB"\n') as core:
        session = core.session(4 * MIB)
        second = keys_of("second", 20)
        core.put(session, core.open(session), second)
        opened = with_chain_on_nvme(core, session)
        # Nothing runs between these, so all of them wait.
        assert hint(core, session, opened) == 20
        # Who hints again adds nothing.
        assert hint(core, session, opened) == 20
        assert worker(core).queued_nbytes == 20 * 4096
        assert hint(core, session, opened, second) == 0
        assert worker(core).counts.refused == 20
        core.clock.advance(11)
        assert hint(core, session, opened, second) == 20
        assert worker(core).counts.expired == 20
        assert hint(core, session, opened) == 0
        settled(core)
        assert hint(core, session, opened) == 20
        settled(core)
        assert worker(core).queued_nbytes == 0
        assert in_ram(core, opened) == 20


def test_hints_are_few(core, session, opened, monkeypatch):
    monkeypatch.setattr(prefetching, "HINTS_MAX", 3)
    hints = [hint(core, session, opened, CHAIN[: at + 1]) for at in range(5)]
    assert hints == [1, 2, 3, 0, 0]


def test_a_hint_that_is_late_brings_nothing(core, session, opened):
    hint(core, session, opened, deadline_s=0.5)
    core.clock.advance(0.6)
    settled(core)
    assert in_ram(core, opened) == 0
    assert worker(core).counts.expired == 20


def test_reads_go_first(core, session, opened):
    """As long as a read waits for nvme nothing is prefetched."""
    promotion = core.core.nvme.promotion
    release = asyncio.Event()
    bring = promotion._bring

    async def held(units, hints):
        await release.wait()
        return await bring(units, hints)

    async def work():
        promotion._bring = held
        reading = asyncio.create_task(core.ask(session, opened, CHAIN[:4]))
        await asyncio.sleep(0.01)
        assert promotion.in_flight == 4
        assert hint(core, session, opened) == 20
        await asyncio.sleep(0.05)
        assert promotion.in_flight == 4
        release.set()
        promotion._bring = bring
        return await reading

    grant = core.run(work())
    core.verify(grant, CHAIN[:4])
    settled(core)
    assert in_ram(core, opened) == 20
    assert worker(core).counts.brought == 16


def test_it_goes_in_small_pieces_so_that_a_read_comes_between(core, session, monkeypatch):
    opened = with_chain_on_nvme(core, session)
    monkeypatch.setattr(prefetching, "_PIECE_NBYTES", 4 * 4096)
    begun, promotion = [], core.core.nvme.promotion
    begin = promotion.begin
    monkeypatch.setattr(
        promotion, "begin", lambda units, hints: (begun.append(len(units)), begin(units, hints))[1]
    )
    hint(core, session, opened)
    settled(core)
    assert begun == [4] * 5


def test_units_that_left_meanwhile_are_not_mistaken(core, session, opened):
    assert hint(core, session, opened) == 20
    core.remove(session, opened, CHAIN)
    other = core.open(session, spec(model="other"))
    core.put(session, other, keys_of("other", 20))
    settled(core)
    assert worker(core).counts.brought == 0
    assert foresight(core)[2] == 0


def test_hints_that_are_given_up_hold_nothing(core, session, opened):
    """B031: 500 hints at random, sessions that go: no bytes are left, no pins."""
    source = np.random.default_rng(31)
    for _ in range(500):
        other = core.session(4096)
        theirs = core.open(other)
        hint(core, other, theirs, CHAIN[: int(source.integers(1, 20))], 0.2)
        core.core.sessions.end(other.session_id, "gone")
        if source.random() < 0.05:
            core.clock.advance(1)
        if source.random() < 0.1:
            settled(core)
    settled(core)
    assert worker(core).queued_nbytes == 0
    assert not core.core.residency.columns.pins.any()


def test_states_and_windows_come_too(tmp_path):
    groups = (full(), GroupSpec("s", GroupKind.STATE, 16, 512, state_mode=StateMode.EXACT))
    with harness(tmp_path) as core:
        session = core.session(4 * MIB)
        opened = with_chain_on_nvme(core, session, spec(groups=groups))
        assert hint(core, session, opened) == 21
        settled(core)
        grant = core.acquire(session, opened, CHAIN)
        assert core.core.nvme.promotion.counts.read == 21
        core.verify(grant, CHAIN)


def test_turned_off(tmp_path):
    with harness(tmp_path, 'prefetch = "none"\n') as core:
        session = core.session(4 * MIB)
        assert hint(core, session, with_chain_on_nvme(core, session)) == 0


def test_without_nvme_there_is_nothing_to_bring():
    with Harness() as core:
        session = core.session()
        opened = core.open(session)
        core.put(session, opened, CHAIN[:4])
        assert hint(core, session, opened) == 0

"""Commits of many keys go in parts, between which others have their turn."""

import asyncio

import numpy as np
import pytest

from kvkeep_server.core.results import AckLevel, CommitStatus, GroupKind, StateMode
from kvkeep_server.service.spec import GroupSpec
from kvkeep_server.tiering import commits
from tests.fakes.core_harness import MIB, Harness, full, keys_of, spec
from tests.fakes.nvme_tier import fast_directory

STORED, ALREADY = CommitStatus.STORED, CommitStatus.ALREADY_STORED
EXACT = GroupSpec("state", GroupKind.STATE, 16, 4096, 0, StateMode.EXACT)
KEYS = keys_of("a", 25)


@pytest.fixture
def core(monkeypatch):
    monkeypatch.setattr(commits, "_KEYS_AT_ONCE", 10)
    with Harness(ram="8MiB") as harness:
        yield harness
        harness.check_at_rest()


def test_parts_follow_each_other_in_one_chain(core):
    session = core.session()
    opened = core.open(session, spec(groups=(full(), EXACT)))
    status = core.put_at(session, opened, KEYS, [range(25), [3, 12, 24]])
    assert status == [STORED] * 25
    columns = core.core.residency.columns
    assert np.count_nonzero(columns.parent[columns.in_use()] >= 0) == 24
    assert core.lookup(session, opened, KEYS).blocks == 25
    assert core.lookup(session, opened, KEYS[:20]).blocks == 13
    assert core.put_at(session, opened, KEYS, [[], [19]]) == [
        *([ALREADY] * 19),
        STORED,
        *([ALREADY] * 5),
    ]
    assert core.core.service.commits.counts.commits == 2


def test_others_have_their_turn_between_the_parts(core):
    session = core.session()
    opened = core.open(session)
    blocks = [bytes(4096)] * 25
    seen = []

    async def beside():
        while len(seen) < 100 and (not seen or seen[-1] < 25):
            seen.append(core.lookup(session, opened, KEYS).blocks)
            await asyncio.sleep(0)

    async def both():
        looking = asyncio.ensure_future(beside())
        await core.store(session, opened, KEYS, blocks)
        await looking

    core.run(both())
    assert {10, 20, 25} <= set(seen)


def test_what_is_refused_takes_the_next_parts_with_it(core):
    session = core.session()
    opened = core.open(session)
    blocks = [bytes(4096)] * 25
    status = core.run(core.store(session, opened, KEYS, blocks, parent=keys_of("none", 1)[0]))
    assert status == [CommitStatus.REFUSED_ORPHAN] * 25


def test_who_waits_for_nvme_waits_for_room_in_its_queue():
    """Ten times what the queue takes, from several at once."""
    with fast_directory() as path:
        extra = f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "256MiB"\nsegment = "16MiB"\n'
        extra += 'free_min = "0B"\nqueue = "1MiB"'
        with Harness(ram="32MiB", extra=extra, ack=AckLevel.NVME) as core:
            sessions = [core.session(2 * MIB) for _ in range(6)]
            opened = [core.open(session) for session in sessions]

            async def all_at_once():
                stores = [
                    core.store(session, of, keys_of(name, 200), [bytes(4096)] * 200)
                    for name, (session, of) in enumerate(zip(sessions, opened, strict=True))
                ]
                return await asyncio.gather(*stores)

            for status in core.run(all_at_once()):
                assert status == [STORED] * 200
            core.check_at_rest()

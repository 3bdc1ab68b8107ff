"""A log that is full keeps about as much as it holds, and two full tiers come to rest."""

import asyncio
import random
from contextlib import contextmanager

import pytest

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, GroupKind, MissReason, StateMode, TierId
from kvkeep_server.service.spec import GroupSpec
from tests.fakes.core_harness import MIB, Harness, full, keys_of, spec
from tests.fakes.core_readings import page_of
from tests.fakes.nvme_tier import fast_directory

WINDOW = GroupSpec("swa", GroupKind.WINDOW, 32, 1001, 80)
EXACT = GroupSpec("mamba", GroupKind.STATE, 48, 3000, 0, StateMode.EXACT)
SPECS = {
    "groups and ranks": spec(tp_size=2, groups=(full("a", 4097), full("b", 777), WINDOW, EXACT)),
    "two groups": spec(groups=(full("a", 4097), full("b", 777))),
}
KEYS_MAX = 60


@contextmanager
def core_of(ram, nvme):
    with fast_directory() as path:
        extra = (
            f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "{nvme}"\nsegment = "1MiB"\n'
            'free_min = "0B"\nqueue = "4MiB"'
        )
        with Harness(ram=ram, slab="1MiB", extra=extra) as core:
            yield core


def store(core, session, opened, name, count, ack):
    """One chain, all groups, rank by rank; whether all of it has the level."""
    wanted, core.ack = opened.namespace_set.spec, ack
    keys = keys_of(name, count)
    sparse = range(2, count, 3)
    at = [range(count) if g.kind == GroupKind.FULL else sparse for g in wanted.groups]
    statuses = [core.put_at(session, opened, keys, at, rank=rank) for rank in range(wanted.ranks)]
    return all(one.name in ("STORED", "ALREADY_STORED") for status in statuses for one in status)


async def rest(core, seconds):
    for _ in range(int(seconds / 0.1)):
        core.clock.advance(1.0)
        await asyncio.sleep(0.1)


async def settle(core):
    """Until nothing was written for half a second."""
    for _ in range(30):
        before = written(core)
        await rest(core, 0.5)
        if written(core) == before:
            return
    pytest.fail("it goes on writing")


def written(core):
    return core.core.nvme.tier.stats().counts.disk_nbytes


def held(core):
    return core.core.residency.held[TierId.NVME].blocks


@pytest.mark.parametrize("ack", [AckLevel.RAM, AckLevel.NVME])
def test_a_full_log_keeps_what_it_holds_of_many_groups_and_ranks(ack):
    """Room went to the blocks of the first ranks and groups, so no unit was whole; what was written
    was given up, and for its room a part of what was there, again and again."""
    source = random.Random(7)
    with core_of("12MiB", "32MiB") as core:
        session = core.session(4 * MIB)
        opened, most = core.open(session, SPECS["groups and ranks"]), 0
        for number in range(60):
            count = source.randint(1, KEYS_MAX)
            kept = store(core, session, opened, f"chain {number}", count, ack)
            assert kept or ack is AckLevel.RAM
            most = max(most, held(core))
        core.run(settle(core))
        assert held(core) > 0.8 * most
        core.check()
        ages_are_of_blocks(core)


def ages_are_of_blocks(core):
    """Each block that was evicted has left its age, whatever its unit has and whichever way it
    went: a page is checked for it."""
    page = page_of(core)
    assert page.sum("kvkeep_block_age_at_eviction_seconds_count", tier="ram") > 0


def test_two_full_tiers_come_to_rest():
    """What nvme let go of was in ram still, so it was offered again, and others had to go for it;
    what had a tail in ram only could not go, and was written again with every segment."""
    source = random.Random(7)
    with core_of("16MiB", "16MiB") as core:
        session = core.session(4 * MIB)
        opened = core.open(session, SPECS["two groups"])
        for number in range(120):
            count = source.randint(1, KEYS_MAX)
            store(core, session, opened, f"chain {number}", count, AckLevel.RAM)
        core.run(settle(core))
        before = written(core)
        core.run(rest(core, 1.5))
        assert written(core) == before
        assert held(core) > 1000
        core.check()
        ages_are_of_blocks(core)


def test_what_leaves_ram_without_its_record_is_counted_too():
    """It is lost, with all that descends from it: it left ram, and does not stay on nvme."""
    with core_of("16MiB", "16MiB") as core:
        core.ack = AckLevel.NVME
        session, residency = core.session(4 * MIB), core.core.residency
        opened = core.open(session)
        keys = keys_of("chain", 5)
        core.put(session, opened, keys)
        head = residency.find(opened.spaces.local[0], KeyBatch.unpack(b"".join(keys[:1]), 32))
        residency.forget(head, MissReason.CORRUPT)
        residency.evict(5)
        page = page_of(core)
        left = page.sum("kvkeep_blocks_left_total", tier="ram", reason="evicted")
        assert (left, page.sum("kvkeep_blocks_demoted_total")) == (2, 3)
        assert residency.evicted_total == 2

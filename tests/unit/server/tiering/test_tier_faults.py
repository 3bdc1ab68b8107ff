"""Every system call of the nvme tier fails once under a core with both tiers: engines get what is
in ram, exact bytes or a shorter prefix, and what was acknowledged on nvme is there afterwards."""

import contextlib
import errno

import pytest

from kvkeep_server.core.errors import TierUnavailableError
from kvkeep_server.core.results import AckLevel, CommitStatus, MissReason
from tests.fakes.core_harness import Harness, block_of, keys_of, spec
from tests.fakes.faulty_files import SHORT_WRITE, FaultyFiles
from tests.fakes.nvme_tier import fast_directory, until

STORED, FAILED = CommitStatus.STORED, CommitStatus.FAILED
NBYTES, CHAIN = 30_000, 6
EFFECTS = {
    "EIO": lambda _name: errno.EIO,
    "ENOSPC": lambda _name: errno.ENOSPC,
    "short write": lambda name: SHORT_WRITE if name == "pwritev" else 0,
}
SPEC = spec(block_nbytes=NBYTES)


def core_over(path, files=None):
    extra = (
        f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "16MiB"\nsegment = "1MiB"\nfree_min = "0B"\n'
        'queue = "1MiB"'
    )
    return Harness(
        ram="4MiB",
        slab="256KiB",
        extra=extra,
        files=files or FaultyFiles,
        ack=AckLevel.NVME,
        wait_s=5.0,
    )


def story(core, acked):
    """Stores, evicts, reads back, removes; notes what was acknowledged."""
    session = core.session()
    opened = core.open(session, SPEC)
    for name in range(4):
        keys = keys_of(name, CHAIN)
        status = core.put(session, opened, keys)
        assert set(status) <= {STORED, FAILED}
        acked[name] = status.index(FAILED) if FAILED in status else CHAIN
        # At level RAM nothing failed: it can be read at once.
        grant = core.acquire(session, opened, keys)
        assert grant.leased == CHAIN
        core.verify(grant, keys)
        core.release(session, grant)
        core.check()
    with contextlib.suppress(TierUnavailableError):
        core.remove(session, opened, keys_of(3, CHAIN)[2:3])
    acked[3] = min(acked[3], 2)
    while core.core.residency.evict(100):
        pass
    for name in range(4):
        grant = core.acquire(session, opened, keys_of(name, CHAIN))
        core.verify(grant, keys_of(name, CHAIN))
        if grant.leased < acked[name]:
            assert grant.prefix.ended in {MissReason.CORRUPT, MissReason.TIER_DOWN}
        if grant.lease is not None:
            core.release(session, grant)
    core.run(core.core.nvme.removal.of_lost())
    core.check_at_rest()


@pytest.mark.promise("P03", gate=1, unit="kinds of failure, at every call under both tiers")
@pytest.mark.parametrize("effect", EFFECTS)
def test_every_call_fails_once(effect):
    number, failed = 1, True
    while failed:
        files = FaultyFiles()
        with fast_directory() as path:
            with core_over(path, lambda: files) as core:  # noqa: B023 - used in this turn only
                core.run(core.core.nvme.recovery.settled())
                first = files.calls
                at = first + number
                files.plan = lambda name, now: EFFECTS[effect](name) if now == at else 0  # noqa: B023
                acked = {}
                story(core, acked)
                failed = files.calls >= at
            with core_over(path) as core:
                core.run(core.core.nvme.recovery.settled())
                session = core.session()
                opened = core.open(session, SPEC)
                for name, blocks in acked.items():
                    grant = core.acquire(session, opened, keys_of(name, CHAIN))
                    core.verify(grant, keys_of(name, CHAIN))
                    assert grant.leased >= blocks
                core.check()
        number += 3


def test_a_disk_that_takes_nothing_leaves_a_cache_in_ram():
    files = FaultyFiles(lambda name, _: errno.EIO if name in {"pwritev", "fdatasync"} else 0)
    with fast_directory() as path, core_over(path, lambda: files) as core:
        session = core.session()
        opened, keys = core.open(session, SPEC), keys_of("a", CHAIN)
        assert core.put(session, opened, keys) == [FAILED] * CHAIN
        core.ack = AckLevel.RAM
        for name in range(60):
            core.put(session, opened, keys_of(name, CHAIN))
        core.run(core.core.nvme.demotion.settle())
        grant = core.acquire(session, opened, keys_of(59, CHAIN))
        assert grant.leased == CHAIN
        core.verify(grant, keys_of(59, CHAIN))
        core.release(session, grant)
        assert core.core.residency.evicted_total > 0
        assert core.core.nvme.demotion.counts.written == 0
        core.check_at_rest()


def test_a_full_queue_leaves_blocks_out_and_a_later_unit_takes_them_along(monkeypatch):
    with fast_directory() as path, core_over(path) as core:
        demotion = core.core.nvme.demotion
        session = core.session()
        opened, keys = core.open(session, SPEC), keys_of("a", 30)
        core.ack = AckLevel.RAM
        monkeypatch.setattr(demotion, "_has_room", lambda *_: False)
        assert core.put(session, opened, keys[:20]) == [STORED] * 20
        assert demotion.counts.dropped == 20
        assert demotion.queued_blocks == demotion.queued_nbytes == 0
        monkeypatch.undo()
        core.ack = AckLevel.NVME
        status = core.put(session, opened, keys[20:], parent=keys[19])
        assert status == [STORED] * 10
        assert demotion.counts.written == 30
        core.check_at_rest()


def test_settling_waits_also_while_the_queue_is_full(monkeypatch):
    """A drain that took a full queue for an empty one lost what was in ram only."""
    with fast_directory() as path, core_over(path) as core:
        demotion = core.core.nvme.demotion
        session = core.session()
        opened, keys = core.open(session, SPEC), keys_of("a", 20)
        core.ack = AckLevel.RAM
        monkeypatch.setattr(demotion, "_has_room", lambda *_: not demotion._queue)

        async def store_and_settle():
            await core.commit(session, opened, keys, core.lay(session, opened, [blocks(keys)]))
            assert demotion.queued_blocks == 20
            await demotion.settle()

        core.run(store_and_settle())
        assert demotion.counts.written == 20
        assert demotion.queued_blocks == 0


def blocks(keys):
    return [block_of(key, SPEC.groups[0].block_nbytes) for key in keys]


def left_out(core, session, names, monkeypatch):
    """Stores chains that a full queue leaves out."""
    opened = core.open(session, SPEC)
    core.ack = AckLevel.RAM
    monkeypatch.setattr(core.core.nvme.demotion, "_has_room", lambda *_: False)
    for name in names:
        core.put(session, opened, keys_of(name, CHAIN))
    monkeypatch.undo()
    return opened


def test_what_a_full_queue_left_out_is_taken_when_it_has_room(monkeypatch):
    with fast_directory() as path, core_over(path) as core:
        demotion, columns = core.core.nvme.demotion, core.core.residency.columns
        left_out(core, core.session(), range(8), monkeypatch)
        dropped = demotion.counts.dropped
        assert dropped == 8 * CHAIN
        core.run(until(lambda: demotion.counts.written == dropped))
        core.run(demotion.settle())
        assert columns.recorded(columns.in_use()).all()
        assert demotion.counts.dropped == dropped, "taking them again counted anew"
        core.check_at_rest()


def test_what_nvme_did_not_take_is_taken_when_it_is_well_again():
    sick = True
    files = FaultyFiles(lambda name, _: errno.EIO if sick and name == "pwritev" else 0)
    with fast_directory() as path, core_over(path, lambda: files) as core:
        session, demotion = core.session(), core.core.nvme.demotion
        core.ack = AckLevel.RAM
        for name in range(4):
            core.put(session, core.open(session, SPEC), keys_of(name, CHAIN))
        core.run(demotion.settle())
        assert demotion.counts.written == 0
        failed = demotion.counts.failed
        assert failed == 4 * CHAIN
        # Not at once, and less and less often, however long it takes.
        tries = []
        for _ in range(300):
            core.clock.advance(1.0)
            core.run(offered_again(core))
            if demotion.counts.failed > failed:
                tries.append(core.clock.now_s)
                failed = demotion.counts.failed
        assert 3 <= len(tries) <= 12
        assert tries[-1] - tries[-2] > tries[1] - tries[0]
        sick = False
        core.clock.advance(120.0)
        core.run(until(lambda: demotion.counts.written == 4 * CHAIN))
        core.check_at_rest()


async def offered_again(core):
    core.core.nvme._left_out.offer()
    await core.core.nvme.demotion.settle()


def test_what_was_left_out_never_takes_more_than_the_queue_holds(monkeypatch):
    """1 MiB holds 34 blocks of 30,000 bytes, and there are 48."""
    with fast_directory() as path, core_over(path) as core:
        demotion, most = core.core.nvme.demotion, 0
        left_out(core, core.session(), range(8), monkeypatch)

        def all_written():
            nonlocal most
            most = max(most, demotion.queued_nbytes)
            return demotion.counts.written == 8 * CHAIN

        core.run(until(all_written))
        assert 0 < most <= demotion.limits.nbytes_max


def test_what_left_ram_or_was_removed_is_not_taken(monkeypatch):
    with fast_directory() as path, core_over(path) as core:
        session, demotion = core.session(), core.core.nvme.demotion
        opened = left_out(core, session, range(3), monkeypatch)
        core.remove(session, opened, keys_of(0, CHAIN)[:1])
        core.run(until(lambda: demotion.counts.written == 2 * CHAIN))
        core.run(demotion.settle())
        assert demotion.counts.written == 2 * CHAIN
        core.check_at_rest()


def test_a_parent_whose_id_is_higher_goes_first(monkeypatch):
    """Ids are used again, so their order is not that of the chain."""
    with fast_directory() as path, core_over(path) as core:
        session, demotion = core.session(), core.core.nvme.demotion
        opened = left_out(core, session, range(2), monkeypatch)
        core.remove(session, opened, keys_of(0, CHAIN)[:1])
        monkeypatch.setattr(demotion, "_has_room", lambda *_: False)
        keys = keys_of(1, CHAIN + 4)
        core.put(session, opened, keys[CHAIN:], parent=keys[CHAIN - 1])
        columns = core.core.residency.columns
        assert (columns.parent[columns.in_use()] > columns.in_use()).any()
        monkeypatch.undo()
        core.run(until(lambda: demotion.counts.written == CHAIN + 4))
        core.check_at_rest()

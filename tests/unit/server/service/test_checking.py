"""The audit of a core that serves: what it sees, what it takes out, and whom it holds up."""

import asyncio
import random

import numpy as np
import pytest

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus, MissReason, TierId
from kvkeep_server.service import checking
from kvkeep_server.service.checking import CheckOrder, CheckReport
from kvkeep_server.tiering import scrub
from tests.fakes.core_harness import Harness, block_of, full, keys_of, spec
from tests.fakes.turns import Turns

AUDIT = CheckOrder(verify=False, nbytes_max=0, nbytes_per_s=0)
BYTES = CheckOrder(verify=True, nbytes_max=0, nbytes_per_s=0)


@pytest.fixture
def core():
    harness = Harness(ram="4MiB", extra="[index]\nrows_initial = 64")
    yield harness
    harness.close()


@pytest.fixture
def filled(core):
    """(core, session, opened, keys): 30 blocks of 4096 bytes in two chains, one leased."""
    session = core.session()
    opened = core.open(session)
    keys, twig = keys_of("a", 20), keys_of("b", 10)
    core.put(session, opened, keys)
    core.put(session, opened, twig, parent=keys[4])
    core.acquire(session, opened, keys[:7])
    return core, session, opened, keys


def check(core, order=AUDIT):
    return core.run(core.core.service.checker.run(order))


def id_of(core, opened, key):
    space = opened.spaces.local[0]
    return int(core.core.residency.find(space, KeyBatch.unpack(key, len(key)))[0])


def test_a_healthy_core_has_no_findings(filled, monkeypatch):
    monkeypatch.setattr(checking, "_SLICE_IDS", 8)
    monkeypatch.setattr(checking, "_PAUSE_S", 0)
    core = filled[0]
    report = check(core)
    assert report.findings == []
    assert (report.blocks_checked, report.nbytes_verified) == (30, 0)
    report = check(core, BYTES)
    assert report.findings == []
    assert (report.blocks_verified, report.nbytes_verified) == (30, 30 * 4096)
    assert (report.blocks_corrupt, report.blocks_removed) == (0, 0)


@pytest.mark.parametrize("ids_at_a_time", [1, 7, 4096])
@pytest.mark.parametrize("batch_nbytes", [1, 20_000, 1 << 22])
def test_every_byte_is_read_once_whatever_the_batch(core, monkeypatch, ids_at_a_time, batch_nbytes):
    monkeypatch.setattr(scrub, "_IDS", ids_at_a_time)
    monkeypatch.setattr(checking, "_BATCH_NBYTES", batch_nbytes)
    session = core.session()
    wanted = spec(tp_size=2, groups=(full("a", 4096), full("b", 10_000)), key_nbytes=17)
    opened, other = core.open(session, wanted), core.open(session)
    for rank in (0, 1):
        core.put(session, opened, keys_of("a", 9, 17), rank=rank)
    core.put(session, other, keys_of("b", 5))
    report = check(core, BYTES)
    assert report.findings == []
    assert report.blocks_verified == 2 * 2 * 9 + 5
    assert report.nbytes_verified == 2 * 9 * 14_096 + 5 * 4096


def plant(core, opened, keys, what):
    """Breaks one thing of the eleventh block."""
    residency = core.core.residency
    columns, table = residency.columns, residency.table
    block, other = id_of(core, opened, keys[10]), id_of(core, opened, keys[11])
    row, next_row = (int(columns.row[one]) for one in (block, other))

    def add(where, name, amount):
        setattr(where, name, getattr(where, name) + amount)

    def change(column, value, at=block):
        column[at] = value

    breaks = {
        "address": lambda: change(table._places, table._places[row] + np.uint64(1), at=row),
        "nvme": lambda: change(columns.nvme, 1 << 32),
        "slot": lambda: core.core.ram.pool.set_odd(columns.address_of(np.array([block]))),
        "key": lambda: change(columns.key_words, columns.key_words[other]),
        "row": lambda: table.remove(columns.row[[block]].astype(np.int64)),
        "parent": lambda: change(columns.parent, columns.capacity - 1),
        "children": lambda: change(columns.children, 2),
        "payload": lambda: add(residency.held[TierId.RAM], "nbytes", 1),
        "counts": lambda: add(core.core.service.manager.counts.lookup, "asked", 1),
        "slot is free": lambda: core.core.ram.slabs.free(columns.address_of(np.array([block]))),
        "two in one slot": lambda: change(table._places, table._places[next_row], at=row),
        "policy": lambda: change(residency._policy._tree._children, 2),
        "lease": lambda: add(core.core.leases, "leased_nbytes", 1),
    }
    breaks[what]()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("address", "not sealed|two blocks in one slot"),
        ("nvme", "locations"),
        ("slot", "not sealed"),
        ("key", "not found by its key"),
        ("row", "live rows|row and id"),
        ("parent", "without its parent"),
        ("children", "child counts"),
        ("payload", "blocks and bytes in RAM"),
        ("counts", "missed"),
        ("slot is free", "slot that is free"),
        ("two in one slot", "two blocks in one slot"),
        ("policy", "child counts"),
        ("lease", "leased bytes"),
    ],
)
def test_a_planted_fault_is_found_and_says_where(filled, what, said):
    core, _, opened, keys = filled
    plant(core, opened, keys, what)
    report = check(core)
    found = [one for one in report.findings if any(word in one for word in said.split("|"))]
    assert found, report.findings


# ---- bytes


@pytest.mark.parametrize("at", [0, 2000, 4095])
def test_a_wrong_byte_takes_the_block_out_with_what_follows_it(filled, at):
    core, session, opened, keys = filled
    block = id_of(core, opened, keys[12])
    address = int(core.core.residency.columns.address_of(np.array([block]))[0])
    core.core.ram.view(address, 4096)[at] ^= 1
    report = check(core, BYTES)
    assert (report.blocks_corrupt, report.blocks_removed) == (1, 8)
    assert report.findings == ["wrong bytes: 1 blocks, taken out with what follows them"]
    found = core.lookup(session, opened, keys)
    assert (found.blocks, found.ended) == (12, MissReason.CORRUPT)
    assert check(core, BYTES).findings == []
    core.check_at_rest()


def test_a_slot_that_is_used_anew_meanwhile_is_no_fault(filled, monkeypatch):
    core, session, opened, keys = filled
    read = scrub.BytesBatch.wrong

    def others_come(batch):
        """While the thread reads, the tail leaves and others are stored in its slots."""

        async def work():
            index = opened.spaces.index
            await core.core.service.remove(session, index, keys[12], with_descendants=True)
            new = keys_of("new", 8)
            return await core.store(session, opened, new, [block_of(key) for key in new])

        stored = asyncio.run_coroutine_threadsafe(work(), core.loop).result(20)
        assert set(stored) <= {CommitStatus.STORED, CommitStatus.ALREADY_STORED}
        wrong = read(batch)
        differing.append(len(wrong))
        return wrong

    differing = []
    monkeypatch.setattr(scrub.BytesBatch, "wrong", others_come)
    report = check(core, BYTES)
    assert sum(differing) > 0, "no slot was used anew"
    assert (report.blocks_corrupt, report.findings) == (0, [])
    core.check_at_rest()


def test_at_most_so_many_bytes(filled, monkeypatch):
    monkeypatch.setattr(checking, "_BATCH_NBYTES", 4096 * 4)
    report = check(filled[0], CheckOrder(verify=True, nbytes_max=4096 * 10, nbytes_per_s=0))
    assert report.nbytes_verified == 4096 * 10


def test_bytes_are_read_at_the_rate(filled, monkeypatch):
    core = filled[0]
    monkeypatch.setattr(checking, "_BATCH_NBYTES", 4096 * 2)
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        core.clock.advance(seconds)

    monkeypatch.setattr(checking.asyncio, "sleep", sleep)
    began_s = core.clock.now_s
    check(core, CheckOrder(verify=True, nbytes_max=0, nbytes_per_s=4096 * 10))
    pauses = sum(pause for pause in slept if pause == checking._PAUSE_S)
    assert core.clock.now_s - began_s - pauses == pytest.approx(3.0)


# ---- beside others


def test_one_check_at_a_time(filled):
    core = filled[0]

    async def two():
        first = asyncio.ensure_future(core.core.service.checker.run(AUDIT))
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhaustedError, match="running already"):
            await core.core.service.checker.run(AUDIT)
        return await first

    assert core.run(two()).findings == []
    assert check(core).findings == []


def test_a_caller_that_goes_away_ends_it(filled):
    core = filled[0]

    async def cancelled():
        running = asyncio.ensure_future(core.core.service.checker.run(BYTES))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    core.run(cancelled())
    assert check(core).findings == []


@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm_while_others_store_read_and_remove(core, monkeypatch, seed):
    monkeypatch.setattr(checking, "_SLICE_IDS", 16)
    monkeypatch.setattr(checking, "_PAUSE_S", 0)
    monkeypatch.setattr(checking, "_BATCH_NBYTES", 30_000)
    source = random.Random(seed)
    session = core.session()
    opened = core.open(session)
    chains = [keys_of(number, 120) for number in range(10)]
    blocks_of = {keys[0]: [block_of(key) for key in keys] for keys in chains}

    async def disturb():
        held = []
        while True:
            keys = source.choice(chains)
            blocks = blocks_of[keys[0]]
            await core.store(session, opened, keys, blocks)
            held.append(await core.ask(session, opened, keys[: source.randrange(60)]))
            if len(held) > 3 or source.random() < 0.5:
                grant = held.pop(0)
                if grant.lease is not None:
                    core.release(session, grant)
            if source.random() < 0.3:
                named = source.choice(chains)[source.randrange(120)]
                index = opened.spaces.index
                await core.core.service.remove(session, index, named, with_descendants=True)
            await asyncio.sleep(0)

    async def work():
        disturbing = asyncio.ensure_future(disturb())
        reports = [await core.core.service.checker.run(BYTES) for _ in range(4)]
        disturbing.cancel()
        return reports

    reports = core.run(work())
    assert [report.findings for report in reports] == [[]] * 4
    assert sum(report.blocks_verified for report in reports) > 400
    assert core.core.residency.evicted_total > 0


def test_a_report_has_room_for_so_many_findings_whoever_finds():
    report = CheckReport()
    for number in range(150):
        report.note(f"finding {number}")
    assert report.findings == [f"finding {number}" for number in range(100)]


def test_blocks_of_many_keyspaces_do_not_hold_the_loop(monkeypatch):
    """What a look-up of some keys costs, a look-up of one costs too, and each keyspace takes its
    own: 16,384 blocks of 1,024 held the loop for 69 ms."""
    core = Harness(ram="128MiB")
    try:
        session = core.session(2 << 20)
        groups = tuple(full(f"g{number}", 64) for number in range(16))
        opened = core.open(session, spec(tp_size=64, groups=groups))
        for rank in range(64):
            assert set(core.put(session, opened, keys_of("a", 16), rank=rank)) == {
                CommitStatus.STORED
            }
        turns = Turns(monkeypatch)
        report = check(core)
        assert (report.findings, report.blocks_checked) == ([], 16 * 1024)
        assert turns.longest_s < 0.05
    finally:
        core.close()

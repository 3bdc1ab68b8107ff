"""The whole core against dicts: commits, leases, sessions, clock, eviction, a moving index.

The pool holds about a hundred blocks and the index begins tiny, so that every run evicts and moves.
After each step everything audits itself. What is held against the model:

- a read under a lease gives exactly the bytes that were acknowledged for that key, rank and group;
- an acknowledged block is readable or reported missing, never anything else;
- nothing is resident without its parent;
- under a lease nothing goes, whatever happens to others;
- a renewed lease reads what it read, and a lost one says so;
- blocks asked for = blocks hit + blocks missed.
"""

import asyncio
import functools
import operator
import struct
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus, MissReason, RemovalStatus, RenewStatus
from kvkeep_server.service.namespaces import OpenedNamespace
from kvkeep_server.service.sessions import Session
from kvkeep_server.service.touch_ring import HEADER_NBYTES
from kvkeep_server.tiering.manager import Grant
from tests.fakes.core_harness import Gate, Harness, block_of, full, keys_of, spec

STORED, ALREADY = CommitStatus.STORED, CommitStatus.ALREADY_STORED
REFUSED = {CommitStatus.REFUSED_NO_ROOM, CommitStatus.REFUSED_ORPHAN}
EXTRA = "[index]\nrows_initial = 64\n[limits]\nkeys_max = 256\n[sessions]\ntouch_records = 64"

# One plain namespace; one with two ranks; one with two groups, one of them large.
SPECS = (
    spec(block_nbytes=40_000),
    spec(model="ranks", block_nbytes=20_000, tp_size=2),
    spec(model="groups", groups=(full("a", 4096), full("b", 200_000)), key_nbytes=17),
)

CLIENTS = 4
WHO = st.integers(0, CLIENTS - 1)
WHICH = st.integers(0, 1000)  # of the leases
SETS = st.integers(0, len(SPECS) - 1)
# Chains share a stem of 6 blocks with one other and then go their own way.
CHAINS = st.integers(0, 5)
LENGTH = 14
PARTS = st.tuples(st.sampled_from([0, 0, 1, 3, 6, 7, 12]), st.integers(1, LENGTH))


def chain(set_number: int, number: int) -> list[bytes]:
    nbytes = SPECS[set_number].key_nbytes
    stem = keys_of(f"{set_number}/stem {number // 2}", 6, nbytes)
    return stem + keys_of(f"{set_number}/{number}", LENGTH - 6, nbytes)


ALL_CHAINS = [
    KeyBatch.unpack(
        b"".join(b"".join(chain(set_number, number)) for number in range(6)), of.key_nbytes
    )
    for set_number, of in enumerate(SPECS)
]


@dataclass
class Attached:
    session: Session
    opened: list[OpenedNamespace]
    touched: int = 0


@dataclass
class Leased:
    holder: Attached
    set_number: int
    keys: list[bytes]
    grant: Grant
    read: list[list[bytes]]
    lost: bool = False


class CoreAgainstDicts(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000))
    def start(self, seed):
        self.core = Harness(ram="4MiB", slab="256KiB", extra=EXTRA, seed=seed)
        # (set, key, rank, group) -> the bytes that a commit acknowledged.
        self.acknowledged: dict[tuple[int, bytes, int, int], bytes] = {}
        self.commits = 0
        self.leases: list[Leased] = []
        self.generations = {}  # of each lease, when it was seen first
        self.clients = [self._attach() for _ in range(CLIENTS)]

    def _attach(self) -> Attached:
        session = self.core.session(3 << 20)
        return Attached(session, [self.core.open(session, wanted) for wanted in SPECS])

    def _attach_again(self):
        """Clients that were ended come back, as they do."""
        self.clients = [
            self._attach() if client.session.over else client for client in self.clients
        ]

    # --- sessions

    @rule(who=WHO)
    def end(self, who):
        self.core.core.sessions.end(self.clients[who].session.session_id, "eof")
        self._attach_again()

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 35.0]))
    def wait(self, seconds):
        self.core.clock.advance(seconds)
        self.core.core.service.sweep()
        self._attach_again()

    # --- writing

    def _blocks(self, set_number, rank, keys):
        """Bytes that no other commit brings: what is stored is the acknowledged one's."""
        self.commits += 1
        salt = b"%d/%d" % (rank, self.commits)
        groups = SPECS[set_number].groups
        return [
            [block_of(key, group.block_nbytes, salt + b"/%d" % number) for key in keys]
            for number, group in enumerate(groups)
        ]

    def _note(self, set_number, rank, keys, blocks, status):
        assert set(status) <= {STORED, ALREADY} | REFUSED
        for position, (key, one) in enumerate(zip(keys, status, strict=True)):
            for group in range(len(blocks)):
                name = (set_number, key, rank, group)
                if one == STORED:
                    self.acknowledged[name] = blocks[group][position]
                elif one == ALREADY:
                    assert name in self.acknowledged
        # A chain is stored head first: behind a refused block nothing new.
        refused = [position for position, one in enumerate(status) if one in REFUSED]
        if refused:
            assert STORED not in status[refused[0] :]

    @rule(
        who=WHO,
        set_number=SETS,
        number=CHAINS,
        rank=st.integers(0, 1),
        part=PARTS,
    )
    def commit(self, who, set_number, number, rank, part):
        by = self.clients[who]
        start, count = part
        rank = rank % SPECS[set_number].ranks
        keys = chain(set_number, number)
        parent, keys = (keys[start - 1] if start else b""), keys[start : start + count]
        self._commit(by, set_number, rank, keys, parent)

    @rule(who=WHO, set_number=SETS, first=st.integers(0, 2))
    def commit_much(self, who, set_number, first):
        """Whole chains of all ranks, so that there is pressure."""
        by = self.clients[who]
        for number in (first, first + 3):
            keys = chain(set_number, number)
            for rank in range(SPECS[set_number].ranks):
                self._commit(by, set_number, rank, keys, b"")

    def _commit(self, by, set_number, rank, keys, parent):
        blocks = self._blocks(set_number, rank, keys)
        opened = by.opened[set_number]
        groups = self.core.lay(by.session, opened, blocks)
        status = self.core.run(
            self.core.commit(by.session, opened, keys, groups, parent=parent, rank=rank)
        )
        self._note(set_number, rank, keys, blocks, status)

    @rule(
        pair=st.permutations(range(CLIENTS)),
        set_number=SETS,
        part=st.tuples(CHAINS, st.integers(1, LENGTH)),
        meanwhile=st.sampled_from(["nothing", "its client dies", "all is removed"]),
    )
    def commit_at_once(self, pair, set_number, part, meanwhile):
        """Two commits of one chain, one while the other copies, and something happens meanwhile."""
        number, count = part
        one, other = (self.clients[who] for who in pair[:2])
        keys = chain(set_number, number)[:count]
        blocks = [self._blocks(set_number, 0, keys) for _ in range(2)]
        laid = [
            self.core.lay(by.session, by.opened[set_number], of_one)
            for by, of_one in zip((one, other), blocks, strict=True)
        ]

        async def work():
            gate = Gate(self.core.core)
            storing = [
                asyncio.ensure_future(
                    self.core.commit(by.session, by.opened[set_number], keys, groups)
                )
                for by, groups in zip((one, other), laid, strict=True)
            ]
            for _ in range(5):
                await asyncio.sleep(0)
            self.core.core.service.check()
            if meanwhile == "its client dies":
                self.core.core.sessions.end(one.session.session_id, "killed")
            if meanwhile == "all is removed":
                await self.core.core.service.remove(
                    other.session,
                    other.opened[set_number].spaces.index,
                    b"".join(keys),
                    with_descendants=True,
                )
            gate.open()
            status = [await task for task in storing]
            gate.remove()
            return status

        first, second = self.core.run(work())
        self._note(set_number, 0, keys, blocks[0], first)
        self._note(set_number, 0, keys, blocks[1], second)
        self._attach_again()

    # --- removing

    @rule(
        who=WHO,
        which=WHICH,
        part=st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)),
        with_descendants=st.booleans(),
    )
    def remove(self, who, which, part, with_descendants):
        set_number, keys = self._pick(which)
        named = keys[part[0] : part[0] + part[1]]
        before = self._there(set_number)
        by = self.clients[who]
        removed = self.core.remove(
            by.session, by.opened[set_number], named, with_descendants=with_descendants
        )
        after = self._there(set_number)
        assert removed.units == len(before - after)
        for key, status in zip(named, removed.status.tolist(), strict=True):
            assert (status == RemovalStatus.ABSENT) == (key not in before)
            assert (status == RemovalStatus.KEPT) == (key in after)
            assert not with_descendants or status != RemovalStatus.KEPT
        assert with_descendants or before - after <= set(named)

    def _there(self, set_number):
        """Keys of which any rank or group is in the index."""
        every = ALL_CHAINS[set_number]
        there = [self.core.core.residency.find(of, every) >= 0 for of in self._spaces(set_number)]
        packed, nbytes = every.pack(), every.key_nbytes
        some = functools.reduce(operator.or_, there)
        return {packed[at * nbytes : (at + 1) * nbytes] for at in some.nonzero()[0].tolist()}

    # --- reading

    @rule(
        who=WHO,
        which=WHICH,
        limits=st.sampled_from([(0, 0), (0, 0), (3, 0), (20, 0), (0, 300_000), (2, 300_000)]),
        ttl_s=st.sampled_from([5.0, 30.0]),
    )
    def acquire(self, who, which, limits, ttl_s):
        by = self.clients[who]
        skip, budget = limits
        set_number, keys = self._pick(which)
        grant = self.core.acquire(
            by.session,
            by.opened[set_number],
            keys,
            ttl_s=ttl_s,
            byte_budget=budget,
            skip=skip,
        )
        assert grant.prefix.blocks == self._resident(set_number, keys)
        if grant.prefix.blocks < len(keys):
            assert grant.prefix.ended in (
                MissReason.NEVER_SEEN,
                MissReason.EVICTED,
                MissReason.REMOVED,
            )
        assert (grant.lease is None) == (grant.leased == 0)
        if budget:
            boundary = sum(group.block_nbytes for group in SPECS[set_number].groups)
            assert grant.leased * boundary * SPECS[set_number].ranks <= budget
        if grant.lease is not None:
            keys = keys[grant.first : grant.first + grant.leased]
            leased = Leased(by, set_number, keys, grant, self._read(grant))
            for needed, got in zip(grant.columns, leased.read, strict=True):
                space = needed.keyspace
                for key, payload in zip(keys, got, strict=True):
                    name = (set_number, key, space.rank, space.group)
                    assert payload == self.acknowledged[name]
            self.leases.append(leased)

    def _pick(self, which):
        """A chain, one of which something is here if there is any."""
        every = [(of, number) for of in range(len(SPECS)) for number in range(6)]
        heads = [
            self.core.core.residency.find(self._spaces(of)[-1], ALL_CHAINS[of]).reshape(6, -1)[:, 0]
            for of in range(len(SPECS))
        ]
        here = [(of, number) for of, number in every if heads[of][number] >= 0]
        of, number = (here or every)[which % len(here or every)]
        return of, chain(of, number)

    def _read(self, grant):
        return [self.core.bytes_of(grant, column) for column in range(len(grant.columns))]

    def _resident(self, set_number, keys):
        """Length of the prefix, found the slow way: key by key, keyspace by keyspace."""
        spaces = self._spaces(set_number)
        for position, key in enumerate(keys):
            batch = KeyBatch.unpack(key, len(key))
            for space in spaces:
                if self.core.core.residency.find(space, batch)[0] < 0:
                    return position
        return len(keys)

    def _spaces(self, set_number):
        """Handles are given in the order of opening, so they are the numbers here."""
        return self.core.core.service.namespaces.get(set_number).spaces.local

    @rule(who=WHO, set_number=SETS, number=CHAINS)
    def look_up(self, who, set_number, number):
        by, keys = self.clients[who], chain(set_number, number)
        found = self.core.lookup(by.session, by.opened[set_number], keys).blocks
        assert found == self._resident(set_number, keys)

    @rule(who=WHO, set_number=SETS, number=CHAINS, garbage=st.booleans())
    def touch(self, who, set_number, number, garbage):
        """A look-up that the client answered by itself; or what it calls one."""
        by, keys = self.clients[who], chain(set_number, number)
        found = self._resident(set_number, keys)
        row, version = 0xFFFFFFFF, 0
        if found:
            residency = self.core.core.residency
            space = by.opened[set_number].spaces.local[0]
            batch = KeyBatch.unpack(keys[found - 1], len(keys[0]))
            row = int(residency.columns.row[residency.find(space, batch)[0]])
            version = residency.table.version_of(row)
        if garbage:
            row, version, found = row ^ 5, version ^ 2, found * 3
        number = by.touched + 1
        index = by.opened[set_number].spaces.index
        fields = (number, index, 0, len(keys), found, row, version, 0, 0, 1, 0, 0, 0, 0, number)
        buffer, place = by.session.ring.memfd.buffer, HEADER_NBYTES + by.touched % 64 * 64
        struct.pack_into("<QIIIIIIQIBBBBQQ", buffer, place, *fields)
        struct.pack_into("<Q", buffer, 64, number)
        by.touched = number
        self.core.core.service.drain_touches()

    # --- leases

    @precondition(lambda self: self.leases)
    @rule(which=WHICH)
    def release(self, which):
        leased = self.leases.pop(which % len(self.leases))
        if not leased.holder.session.over:
            self.core.release(leased.holder.session, leased.grant)
            self.core.release(leased.holder.session, leased.grant)

    @precondition(lambda self: self.leases)
    @rule(which=WHICH, who=WHO)
    def renew(self, which, who):
        leased = self.leases[which % len(self.leases)]
        status = self.core.renew(self.clients[who].session, leased.grant)
        if status == RenewStatus.RENEWED:
            assert not leased.lost
            leased.holder = self.clients[who]
            # Also where the key was removed meanwhile, and stored again with other bytes.
            assert self._read(leased.grant) == leased.read
        elif status == RenewStatus.LOST:
            leased.lost = True

    @precondition(lambda self: self.leases)
    @rule(which=WHICH, who=WHO, set_number=SETS, first=st.integers(0, 2))
    def come_late(self, which, who, set_number, first):
        """A reader that outlived its lease, with pressure or (the same chain) without."""
        self.wait(31.0)
        self.commit_much(who, set_number, first)
        self.renew(which, who)

    # --- always

    @invariant()
    def audit(self):
        if not hasattr(self, "core"):
            return
        self.core.check_at_rest()
        for lease in self.core.core.leases._live.values():
            generations = self.core.core.ram.generations(
                self.core.core.residency.columns.address_of(lease.blocks)
            )
            first = self.generations.setdefault(lease.lease_id, generations)
            assert (generations == first).all(), "a slot under a lease was used anew"

    @invariant()
    def no_child_without_its_parent(self):
        if not hasattr(self, "core"):
            return
        for set_number in range(len(SPECS)):
            for space in self._spaces(set_number):
                there = self.core.core.residency.find(space, ALL_CHAINS[set_number]) >= 0
                for of_chain in there.reshape(-1, LENGTH).tolist():
                    assert of_chain == sorted(of_chain, reverse=True)

    def teardown(self):
        if hasattr(self, "core"):
            core = self.core.core
            for session in core.sessions:
                core.sessions.end(session.session_id, "test is over")
            assert len(core.leases) == 0
            assert not core.residency.columns.pins.any()
            assert core.sessions.staging_nbytes == 0
            while core.residency.evict(100):
                pass
            self.core.check_at_rest()
            assert core.ram.stats().used_nbytes == 0
            self.core.close()


TestCoreAgainstDicts = CoreAgainstDicts.TestCase
TestCoreAgainstDicts.settings = settings(max_examples=30, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(7200)
class TestCoreAgainstDictsForLong(CoreAgainstDicts.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=60)

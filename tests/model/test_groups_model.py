"""WINDOW and STATE groups against a dict, over both tiers: stores in any order, evictions,
removals, crashes and recoveries.

- What is read is what was stored last under that key, in every rank and group.
- A look-up and an acquire give the prefix that the rule gives of what is there now, key by key.
- What was acknowledged at level NVME is there after a crash, but for what is replayable.
- What was removed never comes back, in no group.
- Every audit holds after every step.
"""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, CommitStatus, GroupKind, StateMode
from kvkeep_server.service.spec import GroupSpec
from tests.fakes import prefix_oracle
from tests.fakes.core_harness import Harness, block_of, full, keys_of, spec
from tests.fakes.nvme_tier import fast_directory

WINDOW = GroupSpec("swa", GroupKind.WINDOW, 16, 30_000, 40)
REPLAYABLE = GroupSpec("state", GroupKind.STATE, 16, 50_000, 0, StateMode.REPLAYABLE)
EXACT = GroupSpec("mamba", GroupKind.STATE, 32, 20_000, 0, StateMode.EXACT)
SPECS = (
    spec(groups=(full(block_nbytes=40_000), WINDOW, REPLAYABLE), tp_size=2),
    spec(model="exact", groups=(EXACT, full("a", 9000), full("b", 5000))),
    spec(model="states", groups=(EXACT, REPLAYABLE)),
)
# Of each group: (blocks of a prefix, stride, shortens); no blocks = FULL.
RULES = (
    ((0, 1, True), (3, 1, True), (1, 1, False)),
    ((1, 2, True), (0, 1, True), (0, 1, True)),
    ((1, 1, True), (1, 1, False)),
)
SETS = st.integers(0, len(SPECS) - 1)
CHAINS = st.integers(0, 3)
LENGTH = 8
POSITIONS = st.sets(st.integers(0, LENGTH - 1), max_size=4)


def chain(which, number):
    """Two chains share their first three keys."""
    return keys_of(f"{which}/stem {number // 2}", 3) + keys_of(f"{which}/{number}", LENGTH - 3)


class GroupsAgainstADict(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.temporary = fast_directory()
        self.stored = {}  # (set, key, rank, group) -> bytes
        self.on_nvme = set()  # the same, acknowledged at level NVME
        self.stores = 0
        self._open()

    def _open(self):
        extra = (
            f'[nvme]\ndirectories = ["{Path(self.temporary.name)}"]\nmax = "64MiB"\n'
            'segment = "1MiB"\nfree_min = "0B"\n[index]\nrows_initial = 64'
        )
        self.core = Harness(ram="4MiB", slab="256KiB", extra=extra)
        self.session = self.core.session(4 << 20)
        self.opened = [self.core.open(self.session, wanted) for wanted in SPECS]

    def teardown(self):
        self.core.close()
        self.temporary.cleanup()

    def _present(self, which, key, rank, group):
        space = self.opened[which].namespace_set.keyspaces[rank, group]
        return self.core.core.residency.find(space, KeyBatch.unpack(key, 32))[0] >= 0

    # --- writing

    @rule(
        which=SETS,
        number=CHAINS,
        span=st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)),
        others=st.tuples(POSITIONS, POSITIONS),
        how=st.tuples(st.booleans(), st.booleans()),
    )
    def store(self, which, number, span, others, how):
        (start, stop), (chained, durable) = span, how
        keys, wanted = chain(which, number), SPECS[which]
        parent = keys[start - 1] if start else b""
        keys = keys[start : max(stop, start + 1)]
        positions, left = [], list(others)
        for group in wanted.groups:
            at = left.pop() if group.kind != GroupKind.FULL else range(len(keys) * chained)
            positions.append(sorted(position for position in at if position < len(keys)))
        if not any(positions):
            return
        self.core.ack = AckLevel.NVME if durable else AckLevel.RAM
        for rank in range(wanted.ranks):
            self._store_rank(which, keys, positions, parent, rank)

    def _store_rank(self, which, keys, positions, parent, rank):
        self.stores += 1
        salt = b"%d/%d" % (rank, self.stores)
        groups = SPECS[which].groups
        blocks = [
            [block_of(keys[at], group.block_nbytes, salt + b"/%d" % number) for at in own]
            for number, (group, own) in enumerate(zip(groups, positions, strict=True))
        ]
        there = {
            (at, number): self._present(which, keys[at], rank, number)
            for number, own in enumerate(positions)
            for at in own
        }
        laid = self.core.lay(self.session, self.opened[which], blocks)
        packed = [
            (number, b"".join(at.to_bytes(4, "little") for at in positions[number]), offsets)
            for number, _, offsets in laid
        ]
        work = self.core.commit(
            self.session, self.opened[which], keys, packed, parent=parent, rank=rank
        )
        status = self.core.run(work)
        for number, own in enumerate(positions):
            for nth, at in enumerate(own):
                name = (which, keys[at], rank, number)
                kept = status[at] in (CommitStatus.STORED, CommitStatus.FAILED)
                if kept and not there[at, number]:
                    self.stored[name] = blocks[number][nth]
                done = status[at] in (CommitStatus.STORED, CommitStatus.ALREADY_STORED)
                replayable = groups[number].state_mode == StateMode.REPLAYABLE
                if done and self.core.ack is AckLevel.NVME and not replayable:
                    self.on_nvme.add(name)

    @rule(which=SETS, number=CHAINS, at=st.integers(0, LENGTH - 1))
    def remove(self, which, number, at):
        keys = chain(which, number)
        self.core.remove(self.session, self.opened[which], keys[at : at + 1])
        for name in list(self.stored):
            if name[:2] == (which, keys[at]):
                assert not self._present(*name)
                del self.stored[name]
                self.on_nvme.discard(name)
        # What followed it has left with its FULL blocks, and else stays.
        for name in list(self.stored):
            if not self._present(*name):
                self.on_nvme.discard(name)

    # --- between the tiers

    @rule(count=st.integers(1, 40))
    def evict(self, count):
        self.core.core.residency.evict(count)

    @rule()
    def crash(self):
        """Without a drain: what was not acknowledged at level NVME may be gone."""
        self.core.close()
        self._open()
        self.core.run(self.core.core.nvme.recovery.settled())
        for name in self.on_nvme:
            assert self._present(*name)
        for name in [name for name in self.stored if not self._present(*name)]:
            del self.stored[name]

    # --- reading

    @rule(which=SETS, number=CHAINS, length=st.integers(1, LENGTH), skip=st.integers(0, 3))
    def read(self, which, number, length, skip):
        keys = chain(which, number)[:length]
        case = tuple(
            prefix_oracle.Group(
                *rule,
                tuple(
                    tuple(bool(self._present(which, key, rank, group)) for key in keys)
                    for rank in range(SPECS[which].ranks)
                ),
            )
            for group, rule in enumerate(RULES[which])
        )
        full_groups = tuple(group for group in case if not group.blocks)
        limit = prefix_oracle.usable(full_groups, length) if full_groups else length
        usable = prefix_oracle.usable(case, limit)
        found = self.core.lookup(self.session, self.opened[which], keys)
        assert found.blocks == usable
        assert usable - found.replayed == prefix_oracle.without_replay(case, usable)
        grant = self.core.acquire(self.session, self.opened[which], keys, skip=skip)
        assert grant.prefix.blocks <= usable
        for column, needed in enumerate(grant.columns):
            space = needed.keyspace
            for at, content in zip(
                needed.at().tolist(), self.core.bytes_of(grant, column), strict=True
            ):
                assert self.stored[which, keys[at], space.rank, space.group] == content
        if grant.lease is not None:
            self.core.release(self.session, grant)

    @invariant()
    def everything_is_sound(self):
        if hasattr(self, "core"):
            self.core.run(self.core.core.nvme.promotion.finish())
            self.core.check()


@pytest.mark.timeout(7200)
@pytest.mark.promise("P03", gate=20, nightly=1000, unit="histories of several groups")
def test_groups_against_a_dict(promise_count):
    run_state_machine_as_test(
        GroupsAgainstADict,
        settings=settings(max_examples=promise_count, stateful_step_count=40),
    )

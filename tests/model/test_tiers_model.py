"""Both tiers against a dict: stores, evictions, promotions, removals, spoiled bytes, a log that
reclaims, crashes and recoveries.

- What is read is what was stored last under that key, in every rank and group, or it is missing.
- What was acknowledged at level NVME is there after a crash, as long as nothing was removed or
  spoiled and the log gave nothing back.
- What was removed never comes back.
- Every audit holds after every step.
"""

import shutil
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

from kvkeep_server.core.results import AckLevel, CommitStatus
from tests.fakes.core_harness import Harness, block_of, full, keys_of, spec
from tests.fakes.nvme_tier import fast_directory

STORED, ALREADY = CommitStatus.STORED, CommitStatus.ALREADY_STORED
SPECS = (
    spec(block_nbytes=40_000),
    spec(model="ranks", block_nbytes=20_000, tp_size=2),
    spec(model="groups", groups=(full("a", 4096), full("b", 100_000)), key_nbytes=17),
)
SETS = st.integers(0, len(SPECS) - 1)
CHAINS = st.integers(0, 5)
LENGTH = 12


def chain(set_number, number):
    nbytes = SPECS[set_number].key_nbytes
    stem = keys_of(f"{set_number}/stem {number // 2}", 5, nbytes)
    return stem + keys_of(f"{set_number}/{number}", LENGTH - 5, nbytes)


class TiersAgainstADict(RuleBasedStateMachine):
    size = "8MiB"
    reclaims = True

    @initialize()
    def start(self):
        self.temporary = fast_directory()
        self.generation = 0
        self.stored = {}  # (set, key, rank, group) -> bytes
        self.on_nvme = set()  # (set, key): acknowledged at level NVME, all ranks
        self.removed = set()  # (set, key)
        self.stores = 0
        self._open()

    @property
    def directory(self):
        return Path(self.temporary.name) / str(self.generation)

    def _open(self):
        extra = (
            f'[nvme]\ndirectories = ["{self.directory}"]\nmax = "{self.size}"\nsegment = "1MiB"\n'
            'free_min = "0B"\nqueue = "2MiB"\n[index]\nrows_initial = 64'
        )
        self.core = Harness(ram="4MiB", slab="256KiB", extra=extra)
        self._attach()

    def _attach(self):
        self.session = self.core.session(3 << 20)
        self.opened = [self.core.open(self.session, wanted) for wanted in SPECS]

    def teardown(self):
        self.core.close()
        self.temporary.cleanup()

    # --- writing

    @rule(which=SETS, number=CHAINS, length=st.integers(1, LENGTH), durable=st.booleans())
    def store(self, which, number, length, durable):
        keys, wanted = chain(which, number)[:length], SPECS[which]
        self.core.ack = AckLevel.NVME if durable else AckLevel.RAM
        acked = set(keys)
        for rank in range(wanted.ranks):
            self.stores += 1
            salt = b"%d/%d" % (rank, self.stores)
            blocks = [
                [block_of(key, group.block_nbytes, salt + b"/%d" % number) for key in keys]
                for number, group in enumerate(wanted.groups)
            ]
            groups = self.core.lay(self.session, self.opened[which], blocks)
            work = self.core.commit(self.session, self.opened[which], keys, groups, rank=rank)
            status = self.core.run(work)
            there = self._shards_there(which, keys, rank)
            for at, (key, one) in enumerate(zip(keys, status, strict=True)):
                new = one == STORED or (one == CommitStatus.FAILED and not there[at])
                for group in range(len(blocks)):
                    if new:
                        self.stored[which, key, rank, group] = blocks[group][at]
                if one in (STORED, ALREADY):
                    self.removed.discard((which, key))
                else:
                    acked.discard(key)
                if one == CommitStatus.FAILED:
                    self.removed.discard((which, key))
        if durable:
            self.on_nvme |= {(which, key) for key in acked}

    def _shards_there(self, which, keys, rank):
        return [(which, key, rank, 0) in self.stored for key in keys]

    @rule(which=SETS, number=CHAINS, at=st.integers(0, LENGTH - 1))
    def remove(self, which, number, at):
        keys = chain(which, number)
        self.core.remove(self.session, self.opened[which], keys[at : at + 1])
        gone = {keys[at]}
        for other in range(6):
            other_chain = chain(which, other)
            if keys[at] in other_chain:
                gone |= set(other_chain[other_chain.index(keys[at]) :])
        self._forget(which, gone)
        self.removed |= {(which, key) for key in gone}

    def _forget(self, which, gone):
        self.on_nvme -= {(which, key) for key in gone}
        self.stored = {
            name: content
            for name, content in self.stored.items()
            if name[0] != which or name[1] not in gone
        }

    # --- between the tiers

    @rule(count=st.integers(1, 60))
    def evict(self, count):
        self.core.core.residency.evict(count)

    @rule()
    def evict_all(self):
        while self.core.core.residency.evict(100):
            pass

    @rule(seconds=st.sampled_from([0.1, 5.0, 100.0]))
    def wait(self, seconds):
        self.core.clock.advance(seconds)
        self.core.core.service.sweep()
        if self.session.over:
            self._attach()
        self.core.run(self.core.core.nvme.demotion.settle())

    @rule()
    def take_out_the_lost(self):
        self.core.run(self.core.core.nvme.removal.of_lost())

    @rule()
    def reclaim(self):
        if self.reclaims:
            self.on_nvme.clear()
            self.core.run(self.core.core.nvme.tier.reclaim_oldest())

    # --- reading

    @rule(which=SETS, number=CHAINS, length=st.integers(1, LENGTH), waits=st.booleans())
    def read(self, which, number, length, waits):
        keys = chain(which, number)[:length]
        self.core.wait_s = 30.0 if waits else 0.0
        grant = self.core.acquire(self.session, self.opened[which], keys)
        for column, needed in enumerate(grant.columns):
            space = needed.keyspace
            contents = self.core.bytes_of(grant, column)
            for key, content in zip(keys, contents, strict=False):
                assert (which, key) not in self.removed
                assert self.stored[which, key, space.rank, space.group] == content
        if grant.lease is not None:
            self.core.release(self.session, grant)

    # --- dying

    @rule()
    def crash(self):
        """What the kernel has of the files is what the next daemon finds."""
        before, core = self.directory, self.core
        self.generation += 1
        shutil.copytree(before, self.directory)
        core.close()
        shutil.rmtree(before)
        self._open()
        self._look_at_what_is_there()

    @rule()
    def restart(self):
        self.core.run(self.core.core.nvme.drain())
        self.core.close()
        self._open()
        self._look_at_what_is_there()

    def _look_at_what_is_there(self):
        self.core.run(self.core.core.nvme.recovery.settled())
        self.core.wait_s = 30.0
        if self.size == "8MiB":
            return
        for which in range(len(SPECS)):
            for number in range(6):
                keys = chain(which, number)
                found = self.core.lookup(self.session, self.opened[which], keys).blocks
                acked = [(which, key) in self.on_nvme for key in keys]
                assert found >= (acked.index(False) if False in acked else LENGTH)

    @invariant()
    def audits_hold(self):
        if hasattr(self, "core"):
            self.core.check()


class TiersThatNeverReclaim(TiersAgainstADict):
    size = "512MiB"
    reclaims = False


COUNTS = settings(max_examples=25, stateful_step_count=25)


@pytest.mark.parametrize("machine", [TiersAgainstADict, TiersThatNeverReclaim])
def test_both_tiers_are_a_dict(machine):
    run_state_machine_as_test(machine, settings=COUNTS)

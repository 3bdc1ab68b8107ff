"""The nvme tier against a dict: random operations, reclaim, clean restarts and crashes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkeep_server.core.errors import TierUnavailableError
from kvkeep_server.tiers.base import ReadStatus, RemoveStatus, WriteStatus
from tests.fakes.nvme_blocks import content, named, with_facts
from tests.fakes.nvme_tier import MIB, IndexOwner, fast_directory, get, nvme_tier, put, started

NAMES = [content([9, i], 32) for i in range(10)]
SIZES = st.sampled_from([3000, 4096, 30_000, 200_000])
SOME = st.lists(st.sampled_from(range(len(NAMES))), min_size=1, max_size=6, unique=True)
CLASSES = st.sampled_from(["global", "pinned"])


class NvmeAgainstADict(RuleBasedStateMachine):
    """`stored` is what a read must give; `older` what may come back instead when the newest record
    was given up by its owner: versions since the key was last removed."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = fast_directory()
        self.threads = ThreadPoolExecutor(3)
        self.stored = {}  # name -> bytes
        self.given_up = set()  # names whose newest record reclaim may have dropped
        self.versions = {}  # name -> every content since the last removal
        self.count = 0

    def do(self, work):
        return self.loop.run_until_complete(work)

    @initialize(directories=st.integers(1, 2))
    def begin(self, directories):
        self.paths = [Path(self.root.name) / str(i) for i in range(directories)]
        self._start()

    def _start(self, **changes):
        self.owner = IndexOwner()
        limits = {"segment_nbytes": MIB, "max_nbytes": 4 * MIB, "open_max": 2} | changes
        self.tier = nvme_tier(self.paths, self.threads, owner=self.owner, **limits)
        self.do(started(self.tier, self.owner))

    def teardown(self):
        if hasattr(self, "tier"):
            self.do(self.tier.close())
        self.loop.close()
        self.threads.shutdown()
        self.root.cleanup()

    def _blocks(self, names, nbytes, retention_class):
        self.count += 1
        contents = [content([self.count, i], nbytes) for i in names]
        blocks = named(b"".join(NAMES[i] for i in names), nbytes)
        return with_facts(blocks, contents, retention_class=retention_class), contents

    @rule(names=SOME, nbytes=SIZES, durable=st.booleans(), retention_class=CLASSES)
    def store(self, names, nbytes, durable, retention_class):
        blocks, contents = self._blocks(names, nbytes, retention_class)
        status = self.do(put(self.tier, self.owner, blocks, contents, durable=durable))
        for name, data, answer in zip(names, contents, status, strict=False):
            assert answer != WriteStatus.FAILED
            if answer == WriteStatus.WRITTEN:
                self.stored[name] = data
                self.given_up.discard(name)
                self.versions.setdefault(name, set()).add(data)

    @rule(names=SOME, nbytes=SIZES)
    def abandon(self, names, nbytes):
        """Written and never committed: as if it had never been, also after a crash."""
        blocks, contents = self._blocks(names, nbytes, "global")

        async def run():
            with self.tier.reserve(nbytes, len(names)) as batch:
                if len(batch.locations) == len(names):
                    await batch.write(blocks, [memoryview(data) for data in contents])
            for log in self.tier._logs:
                for appender in log._appenders.values():
                    if appender._task is not None:
                        await appender._task

        self.do(run())

    @rule(names=SOME)
    def remove(self, names):
        for name in names:
            place = self.owner.forget(NAMES[name])
            if place is None:
                continue
            columns = [np.array([value], np.uint64) for value in place]
            blocks = named(NAMES[name], len(self.stored.pop(name)), *columns)
            try:
                assert self.do(self.tier.remove(blocks)).tolist() == [RemoveStatus.REMOVED]
                self.versions[name] = set()
            except TierUnavailableError:  # no room for the tombstone: it may come back
                self.given_up.add(name)
            assert self.do(self.tier.remove(blocks)).tolist() == [RemoveStatus.ABSENT]

    @rule(names=SOME)
    def read(self, names):
        for name in names:
            data = self.stored.get(name)
            nbytes = len(data) if data else 5000
            got = self.do(get(self.tier, self.owner, [NAMES[name]], nbytes))[NAMES[name]]
            assert (got is None) == (data is None)
            if data is not None:
                assert got == (ReadStatus.HIT, data)

    @rule(unwanted=st.sets(st.sampled_from(range(len(NAMES))), max_size=3))
    def reclaim(self, unwanted):
        """What its owner gives up may stay away; all else stays, unless there is no room."""
        keys = {NAMES[name] for name in unwanted}
        self.owner.keep = lambda key: key not in keys
        for name in unwanted:
            # The owner stops to know it at once, wherever it lies.
            if self.owner.forget(NAMES[name]) is not None:
                del self.stored[name]
                self.given_up.add(name)
        self.do(self.tier.reclaim_oldest())
        self._accept_drops()

    def _accept_drops(self):
        """Without room to write it again, a wanted record may go, and its owner is told."""
        for name in list(self.stored):
            if NAMES[name] not in self.owner.places:
                assert self.owner.dropped_places, "lost without a word"
                del self.stored[name]
                self.given_up.add(name)

    @rule()
    def seal(self):
        self.do(self.tier.seal())

    @rule(clean=st.booleans(), segments=st.integers(4, 6))
    def restart(self, clean, segments):
        if clean:
            self.do(self.tier.close())
        else:  # what a SIGKILL leaves: no seal, no close; the kernel gives locks and files back
            for log, lock in zip(self.tier._logs, self.tier._locks, strict=True):
                log.directory.table.close_all()
                lock.release()
        self._start(segment_nbytes=MIB, max_nbytes=segments * MIB)
        for name, key in enumerate(NAMES):
            if name in self.stored:
                assert key in self.owner.places, "lost"
            elif key in self.owner.places:
                assert name in self.given_up, "came back after it was removed, or never was there"
                self._take_back(name)

    def _take_back(self, name):
        """A record that its owner had given up, found again."""
        fits = []
        for data in self.versions[name]:
            got = self.do(get(self.tier, self.owner, [NAMES[name]], len(data)))[NAMES[name]]
            if got == (ReadStatus.HIT, data):
                fits.append(data)
        assert len(fits) == 1
        self.stored[name] = fits[0]
        self.given_up.discard(name)

    @invariant()
    def holds(self):
        if hasattr(self, "tier"):
            self.tier.check()
            stats = self.tier.stats()
            for directory in stats.directories:
                assert directory.used_nbytes <= directory.max_nbytes + MIB
            assert stats.counts.corrupt == 0


TestNvmeAgainstADict = NvmeAgainstADict.TestCase
TestNvmeAgainstADict.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)

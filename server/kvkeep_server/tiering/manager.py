"""Which tier answers, and who makes room: look-up, acquire, and the counts of both. Commits are in
`commits`.

Only the ram tier stands behind it in this release; nvme and redis join here, and nowhere above.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason, TierId
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.leases import Lease, Leases
from kvkeep_server.tiering.removal import Removal
from kvkeep_server.tiering.residency import Residency

I64 = NDArray[np.int64]


class ReadCall(StrEnum):
    """What asks for blocks. An engine that looks up and then acquires asks for them twice."""

    LOOKUP = "lookup"
    ACQUIRE = "acquire"


@dataclass(slots=True)
class CallCounts:
    """Blocks that one kind of call asked for, and what became of each.

    `asked` is counted by itself; at any time it is the sum of `hits`, `misses` and `failed`.

    Attributes:
        calls: Calls that got as far as asking.
        asked: Blocks.
        hits: Blocks by the tier that has them.
        misses: Blocks by the reason why the prefix ended, which is that of its first missing block;
            UNSPECIFIED where a client looked by itself, in shared memory.
        failed: Blocks of calls that ended in an error: neither hits nor misses.
    """

    calls: int = 0
    asked: int = 0
    hits: dict[TierId, int] = field(default_factory=lambda: {TierId.RAM: 0})
    misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    failed: int = 0

    def add(self, asked: int, hit: int, ended: MissReason) -> None:
        """One call over a chain of `asked` blocks whose leading `hit` are there."""
        self.calls += 1
        self.asked += asked
        self.hits[TierId.RAM] += hit
        self.misses[ended] += asked - hit

    def add_failed(self, asked: int) -> None:
        """One call that ended in an error."""
        self.calls += 1
        self.asked += asked
        self.failed += asked

    def check(self) -> None:
        """Raises AssertionError where blocks are lost."""
        answered = sum(self.hits.values()) + sum(self.misses.values())
        assert self.asked == answered + self.failed, "asked = hit + missed + failed"


@dataclass(slots=True)
class Counts:
    """The counts of all calls, and their sums."""

    lookup: CallCounts = field(default_factory=CallCounts)
    acquire: CallCounts = field(default_factory=CallCounts)

    def by_call(self) -> dict[ReadCall, CallCounts]:
        """Each call's own."""
        return {ReadCall.LOOKUP: self.lookup, ReadCall.ACQUIRE: self.acquire}

    @property
    def hit(self) -> int:
        """Blocks that were there."""
        return sum(self.lookup.hits.values()) + sum(self.acquire.hits.values())

    @property
    def missed(self) -> int:
        """Blocks that were not."""
        return sum(self.lookup.misses.values()) + sum(self.acquire.misses.values())

    def missed_by(self) -> dict[MissReason, int]:
        """`missed` by reason; only those that occurred."""
        sums = {
            reason: self.lookup.misses[reason] + self.acquire.misses[reason]
            for reason in MissReason
        }
        return {reason: blocks for reason, blocks in sums.items() if blocks}

    @property
    def answered(self) -> int:
        """Blocks asked for in calls that got an answer: hit or missed."""
        return self.lookup.asked + self.acquire.asked - self.lookup.failed - self.acquire.failed


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a look-up found.

    Attributes:
        blocks: Leading keys that are usable.
        ended: Why it ended; UNSPECIFIED when it did not.
        evicted_age_s: For EVICTED: seconds since the last use of the block that is missing.
    """

    blocks: int
    ended: MissReason
    evicted_age_s: float


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """How an acquire wants its lease.

    Attributes:
        session_id: Who holds it.
        ttl_s: Its life.
        byte_budget: Of all ranks and groups together, 0 = no limit.
        skip: Leading keys that the caller has: used, but not leased.
        hints: For the policies.
    """

    session_id: int
    ttl_s: float
    byte_budget: int
    skip: int
    hints: Hints


@dataclass(frozen=True, slots=True)
class Grant:
    """What an acquire gave.

    Attributes:
        prefix: As of a look-up.
        lease: None when no block was leased.
        first: Position of the first leased key.
        leased: Number of leased keys, from `first` on; the rest of the prefix is deferred.
        columns: Keyspace and block ids of each rank and group, each `leased` long.
    """

    prefix: Prefix
    lease: Lease | None
    first: int
    leased: int
    columns: Sequence[tuple[Keyspace, I64]]


class TierManager:
    """Look-ups and leased reads over all tiers. Event loop only.

    Args:
        residency: Where blocks are.
        leases: Who may read.
        removal: Takes out by name.
    """

    def __init__(self, *, residency: Residency, leases: Leases, removal: Removal) -> None:
        """See the class."""
        self.residency = residency
        self.leases = leases
        self.removal = removal
        self.counts = Counts()

    def lookup(self, spaces: KeyspaceSet, keys: KeyBatch, hints: Hints) -> Prefix:
        """Longest usable prefix; counts as a use of its blocks."""
        found = self.residency.prefix(spaces.local, keys)
        self.residency.touch(self.residency.units_of(found[0]), hints)
        prefix = self._prefix(spaces, keys, len(found[0]))
        self.counts.lookup.add(len(keys), prefix.blocks, prefix.ended)
        return prefix

    def _prefix(self, spaces: KeyspaceSet, keys: KeyBatch, blocks: int) -> Prefix:
        if blocks == len(keys):
            return Prefix(blocks, MissReason.UNSPECIFIED, 0.0)
        reasons = [self.residency.why_absent(space, keys, blocks) for space in spaces.local]
        ended, age_s = max(reasons, key=lambda reason: reason[0] != MissReason.NEVER_SEEN)
        return Prefix(blocks, ended, age_s)

    def acquire(self, spaces: KeyspaceSet, keys: KeyBatch, order: ReadOrder) -> Grant:
        """Leases the usable prefix, from `order.skip` on and up to `order.byte_budget` bytes.

        Raises:
            ResourceExhaustedError: Too many leases.
        """
        found = self.residency.prefix(spaces.local, keys)
        blocks = len(found[0])
        self.residency.touch(self.residency.units_of(found[0]), order.hints)
        boundary_nbytes = sum(space.block_nbytes for space in spaces.local)
        first = min(order.skip, blocks)
        leased = blocks - first
        if order.byte_budget:
            leased = min(leased, order.byte_budget // boundary_nbytes)
        columns = [
            (space, ids[first : first + leased])
            for space, ids in zip(spaces.local, found, strict=True)
        ]
        try:
            lease = self._lease(spaces, columns, leased * boundary_nbytes, order)
        except ResourceExhaustedError:
            self.counts.acquire.add_failed(len(keys))
            raise
        prefix = self._prefix(spaces, keys, blocks)
        self.counts.acquire.add(len(keys), blocks, prefix.ended)
        return Grant(prefix, lease, first, leased, columns)

    def _lease(
        self,
        spaces: KeyspaceSet,
        columns: Sequence[tuple[Keyspace, I64]],
        nbytes: int,
        order: ReadOrder,
    ) -> Lease | None:
        """A lease on these blocks; None when there are none."""
        if not len(columns[0][1]):
            return None
        return self.leases.open(
            session_id=order.session_id,
            set_index=spaces.index,
            units=self.residency.units_of(columns[0][1]),
            blocks=np.concatenate([ids for _, ids in columns]),
            nbytes=nbytes,
            ttl_s=order.ttl_s,
        )

    def check(self) -> None:
        """Audits everything below.

        Raises:
            AssertionError: Something disagrees.
        """
        self.residency.check()
        self.leases.check()
        self.check_counts()

    def check_counts(self) -> None:
        """The part of `check` that looks at numbers only.

        Raises:
            AssertionError: See there.
        """
        for counts in self.counts.by_call().values():
            counts.check()

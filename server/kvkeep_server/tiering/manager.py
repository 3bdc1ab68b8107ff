"""Which tier answers, and who makes room: look-up, acquire, and the counts of both. Commits are in
`commits`.

Only the ram tier stands behind it in this release; nvme and redis join here, and nowhere above.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.leases import Lease, Leases
from kvkeep_server.tiering.removal import Removal
from kvkeep_server.tiering.residency import Residency

I64 = NDArray[np.int64]


@dataclass(slots=True)
class Counts:
    """Blocks asked for and what became of them; `asked == hit + missed` at any time."""

    asked: int = 0
    hit: int = 0
    missed: int = 0
    lookups: int = 0
    acquires: int = 0
    missed_by: dict[MissReason, int] = field(default_factory=dict)

    def add(self, asked: int, hit: int, ended: MissReason) -> None:
        """One request over a chain of `asked` blocks whose leading `hit` are there, and why it
        ended; UNSPECIFIED where nobody knows."""
        self.asked += asked
        self.hit += hit
        if asked > hit:
            self.missed += asked - hit
            self.missed_by[ended] = self.missed_by.get(ended, 0) + asked - hit


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
        self.counts.lookups += 1
        self.counts.add(len(keys), prefix.blocks, prefix.ended)
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
        prefix = self._prefix(spaces, keys, blocks)
        self.counts.acquires += 1
        self.counts.add(len(keys), blocks, prefix.ended)
        boundary_nbytes = sum(space.block_nbytes for space in spaces.local)
        first = min(order.skip, blocks)
        leased = blocks - first
        if order.byte_budget:
            leased = min(leased, order.byte_budget // boundary_nbytes)
        columns = [
            (space, ids[first : first + leased])
            for space, ids in zip(spaces.local, found, strict=True)
        ]
        lease = None
        if leased:
            lease = self.leases.open(
                session_id=order.session_id,
                set_index=spaces.index,
                units=self.residency.units_of(columns[0][1]),
                blocks=np.concatenate([ids for _, ids in columns]),
                nbytes=leased * boundary_nbytes,
                ttl_s=order.ttl_s,
            )
        return Grant(prefix, lease, first, leased, columns)

    def check(self) -> None:
        """Audits everything below.

        Raises:
            AssertionError: Something disagrees.
        """
        self.residency.check()
        self.leases.check()
        self.check_counts()

    def check_counts(self) -> None:
        """Audits the counts.

        Raises:
            AssertionError: They do not add up.
        """
        assert self.counts.asked == self.counts.hit + self.counts.missed, "asked = hit + missed"
        assert self.counts.missed == sum(self.counts.missed_by.values()), "missed, by reason"

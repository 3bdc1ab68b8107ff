"""Which tier answers, and who makes room: look-up, acquire, and the counts of both. Commits are in
`commits`.

What lies on nvme only is brought into ram before it is leased; redis joins here, and nowhere above.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason, TierId
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.leases import Lease, Leases
from kvkeep_server.tiering.promotion import Promotion
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
    hits: dict[TierId, int] = field(default_factory=lambda: {TierId.RAM: 0, TierId.NVME: 0})
    misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    failed: int = 0

    def add(self, asked: int, hit: int, ended: MissReason, *, on_nvme: int = 0) -> None:
        """One call over a chain of `asked` blocks whose leading `hit` are there, `on_nvme` of them
        there only."""
        self.calls += 1
        self.asked += asked
        self.hits[TierId.RAM] += hit - on_nvme
        self.hits[TierId.NVME] += on_nvme
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
        runs: Which tier had how many successive blocks, when it was asked.
    """

    blocks: int
    ended: MissReason
    evicted_age_s: float
    runs: tuple[tuple[TierId, int], ...] = ()

    @property
    def on_nvme(self) -> int:
        """Blocks of the runs of nvme."""
        return sum(blocks for tier, blocks in self.runs if tier is TierId.NVME)


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """How an acquire wants its lease.

    Attributes:
        session_id: Who holds it.
        ttl_s: Its life.
        byte_budget: Of all ranks and groups together, 0 = no limit.
        skip: Leading keys that the caller has: used, but not leased.
        hints: For the policies.
        wait_s: How long to wait for blocks that are not in ram.
    """

    session_id: int
    ttl_s: float
    byte_budget: int
    skip: int
    hints: Hints
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Grant:
    """What an acquire gave.

    Attributes:
        prefix: As of a look-up.
        lease: None when no block was leased.
        first: Position of the first leased key.
        leased: Number of leased keys, from `first` on.
        pending: Keys behind them that are on their way into ram; what then is left of the prefix is
            deferred.
        columns: Keyspace and block ids of each rank and group, each `leased` long.
    """

    prefix: Prefix
    lease: Lease | None
    first: int
    leased: int
    pending: int
    columns: Sequence[tuple[Keyspace, I64]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One acquire on its way."""

    spaces: KeyspaceSet
    keys: KeyBatch
    order: ReadOrder
    prefix: Prefix


def _runs(in_ram: NDArray[np.bool_]) -> tuple[tuple[TierId, int], ...]:
    """Which tier has how many successive blocks."""
    if in_ram.all():
        return ((TierId.RAM, len(in_ram)),) if len(in_ram) else ()
    edges = [0, *(np.flatnonzero(in_ram[1:] != in_ram[:-1]) + 1).tolist(), len(in_ram)]
    return tuple(
        (TierId.RAM if in_ram[start] else TierId.NVME, stop - start)
        for start, stop in pairwise(edges)
    )


def _cut(runs: Sequence[tuple[TierId, int]], blocks: int) -> tuple[tuple[TierId, int], ...]:
    """The leading part of runs, `blocks` long; what came in meanwhile is in ram."""
    cut, left = [], blocks
    for tier, count in runs:
        if left:
            cut.append((tier, min(count, left)))
            left -= cut[-1][1]
    return (*cut, (TierId.RAM, left)) if left else tuple(cut)


class TierManager:
    """Look-ups and leased reads over all tiers. Event loop only.

    Args:
        residency: Where blocks are.
        leases: Who may read.
        removal: Takes out by name.
        promotion: Brings blocks into ram; None = all that there is is there.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        leases: Leases,
        removal: Removal,
        promotion: Promotion | None = None,
    ) -> None:
        """See the class."""
        self.promotion = promotion
        self.residency = residency
        self.leases = leases
        self.removal = removal
        self.counts = Counts()

    def lookup(self, spaces: KeyspaceSet, keys: KeyBatch, hints: Hints) -> Prefix:
        """Longest usable prefix; counts as a use of its blocks."""
        found = self.residency.prefix(spaces.local, keys)
        self.residency.touch(self.residency.units_of(found[0]), hints)
        prefix = self._prefix(spaces, keys, self._in_ram(found))
        self.counts.lookup.add(len(keys), prefix.blocks, prefix.ended, on_nvme=prefix.on_nvme)
        return prefix

    def _prefix(self, spaces: KeyspaceSet, keys: KeyBatch, in_ram: NDArray[np.bool_]) -> Prefix:
        """Of a prefix, as long as `in_ram` tells of it where its blocks are."""
        blocks, runs = len(in_ram), _runs(in_ram)
        if blocks == len(keys):
            return Prefix(blocks, MissReason.UNSPECIFIED, 0.0, runs)
        reasons = [self.residency.why_absent(space, keys, blocks) for space in spaces.local]
        ended, age_s = max(reasons, key=lambda reason: reason[0] != MissReason.NEVER_SEEN)
        return Prefix(blocks, ended, age_s, runs)

    def _in_ram(self, found: Sequence[I64]) -> NDArray[np.bool_]:
        """Which keys have all of their blocks in ram."""
        in_ram: NDArray[np.bool_] = self.residency.columns.address[found[0]] != 0
        for ids in found[1:]:
            in_ram &= self.residency.columns.address[ids] != 0
        return in_ram

    def acquire(
        self, spaces: KeyspaceSet, keys: KeyBatch, order: ReadOrder
    ) -> Grant | Awaitable[Grant]:
        """Leases the usable prefix, from `order.skip` on and up to `order.byte_budget` bytes: at
        once where all of that is in ram, else after at most `order.wait_s`.

        Raises:
            ResourceExhaustedError: Too many leases.
        """
        found = self.residency.prefix(spaces.local, keys)
        self.residency.touch(self.residency.units_of(found[0]), order.hints)
        in_ram = self._in_ram(found)
        prefix = self._prefix(spaces, keys, in_ram)
        first, wanted = self._span(spaces, len(in_ram), order)
        asked = _Asked(spaces, keys, order, prefix)
        if self.promotion is None or in_ram[first : first + wanted].all():
            return self._grant(asked, found, first, wanted, 0)
        units = self.residency.units_of(found[0][first : first + wanted])
        return self._promoted(self.promotion, asked, units)

    @staticmethod
    def _span(spaces: KeyspaceSet, blocks: int, order: ReadOrder) -> tuple[int, int]:
        """First key to lease, and how many."""
        first = min(order.skip, blocks)
        wanted = blocks - first
        if order.byte_budget:
            boundary_nbytes = sum(space.block_nbytes for space in spaces.local)
            wanted = min(wanted, order.byte_budget // boundary_nbytes)
        return first, wanted

    async def _promoted(self, promotion: Promotion, asked: "_Asked", units: I64) -> Grant:
        """Brings units into ram, and leases what is there when it is time."""
        # What is in ram already must not make room for what is not.
        self.residency.pin(units)
        try:
            flights = promotion.begin(units, asked.order.hints)
            await asyncio.wait([flights], timeout=asked.order.wait_s)
            found = self.residency.prefix(asked.spaces.local, asked.keys)
            in_ram = self._in_ram(found)
            prefix = self._prefix(asked.spaces, asked.keys, in_ram)
            first, wanted = self._span(asked.spaces, len(in_ram), asked.order)
            in_ram = in_ram[first : first + wanted]
            leased = wanted if in_ram.all() else int(in_ram.argmin())
            if leased == wanted:
                pending = 0
            elif not flights.done():
                pending = wanted - leased
            else:
                # It can be read, but not now: who waits for it would wait for nothing.
                pending, found = 0, [ids[: first + leased] for ids in found]
                prefix = Prefix(len(found[0]), MissReason.TIER_DOWN, 0.0)
            runs = _cut(asked.prefix.runs, prefix.blocks)
            asked = replace(asked, prefix=replace(prefix, runs=runs))
            return self._grant(asked, found, first, leased, pending)
        finally:
            self.residency.unpin(units)

    def _grant(
        self, asked: "_Asked", found: Sequence[I64], first: int, leased: int, pending: int
    ) -> Grant:
        columns = [
            (space, ids[first : first + leased])
            for space, ids in zip(asked.spaces.local, found, strict=True)
        ]
        counts, count = self.counts.acquire, len(asked.keys)
        boundary_nbytes = sum(space.block_nbytes for space in asked.spaces.local)
        try:
            lease = self._lease(asked.spaces, columns, leased * boundary_nbytes, asked.order)
        except ResourceExhaustedError:
            counts.add_failed(count)
            raise
        prefix = asked.prefix
        counts.add(count, prefix.blocks, prefix.ended, on_nvme=prefix.on_nvme)
        return Grant(prefix, lease, first, leased, pending, columns)

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
            set_id=spaces.local[0].set_id,
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

"""Which tier answers, and who makes room: look-up, acquire, and the counts of both. Commits are in
`commits`.

What lies on nvme only is brought into ram before it is leased; redis joins here, and nowhere above.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import BlockStatus, MissReason, TierId
from kvkeep_server.tiering.chain import Chain, Needed
from kvkeep_server.tiering.keyspaces import KeyspaceSet
from kvkeep_server.tiering.leases import Coming, Lease, Leases
from kvkeep_server.tiering.prefetching import Prefetching
from kvkeep_server.tiering.promotion import Flights, Promotion
from kvkeep_server.tiering.removal import Removal
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.retention_pins import RetentionPins
from kvkeep_server.tiering.watching import ChangeLog

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


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
        groups: Leading keys that each group alone allows, in the order of the specification;
            look-ups only.
        replayed: Of `blocks`, the last ones that need a STATE replayed.
    """

    blocks: int
    ended: MissReason
    evicted_age_s: float
    runs: tuple[tuple[TierId, int], ...] = ()
    groups: tuple[int, ...] = ()
    replayed: int = 0

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
        groups: Whose columns are wanted; none = all.
    """

    session_id: int
    ttl_s: float
    byte_budget: int
    skip: int
    hints: Hints
    wait_s: float = 0.0
    groups: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """What an acquire gave.

    Attributes:
        prefix: As of a look-up.
        lease: None when no block was leased.
        first: Position of the first leased key.
        leased: Number of leased keys that are in ram, from `first` on.
        pending: Leased keys behind them that are on their way there; what then is left of the
            prefix is deferred.
        columns: The leased blocks in ram of each rank and group that was asked for.
    """

    prefix: Prefix
    lease: Lease | None
    first: int
    leased: int
    pending: int
    columns: Sequence[Needed]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Leased blocks that were pending, and are not any more.

    Attributes:
        first: Position of the first of their keys.
        status: A `BlockStatus` for each of the keys.
        columns: Blocks in ram, of each rank and group that was asked for.
    """

    first: int
    status: bytes
    columns: Sequence[Needed]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One acquire on its way."""

    spaces: KeyspaceSet
    keys: KeyBatch
    order: ReadOrder
    prefix: Prefix


def _runs(in_ram: Mask) -> tuple[tuple[TierId, int], ...]:
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


def _columns(needed: Sequence[Needed], keys: range, groups: Collection[int]) -> Sequence[Needed]:
    """Those of these keys and groups; no group named = all."""
    wanted = [one for one in needed if not groups or one.keyspace.group in groups]
    return [one.cut(keys.start, keys.stop) for one in wanted]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What clients may wish beside reads.

    Attributes:
        pins: That chains are kept.
        changes: To hear what comes and goes.
        prefetching: That chains are brought into ram ahead of reads; None = there is only ram.
    """

    pins: RetentionPins
    changes: ChangeLog
    prefetching: Prefetching | None


class TierManager:
    """Look-ups and leased reads over all tiers. Event loop only.

    Args:
        residency: Where blocks are.
        leases: Who may read.
        removal: Takes out by name.
        wishes: Beside reads.
        promotion: Brings blocks into ram; None = all that there is is there.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        leases: Leases,
        removal: Removal,
        wishes: Wishes,
        promotion: Promotion | None = None,
    ) -> None:
        """See the class."""
        self.pins = wishes.pins
        self.prefetching = wishes.prefetching
        self.changes = wishes.changes
        self.promotion = promotion
        self.residency = residency
        self.leases = leases
        self.removal = removal
        self.counts = Counts()

    def lookup(self, spaces: KeyspaceSet, keys: KeyBatch, hints: Hints) -> Prefix:
        """Longest usable prefix; counts as a use of its blocks."""
        chain = Chain.of(self.residency, spaces, keys)
        self._touch(chain, hints)
        prefix = self._found(chain, spaces, keys)
        self.counts.lookup.add(len(keys), prefix.blocks, prefix.ended, on_nvme=prefix.on_nvme)
        return prefix

    def find_nothing(self, call: ReadCall, keys: int, reason: MissReason) -> Prefix:
        """As a read of a namespace set that answers nothing, whatever is there."""
        self.counts.by_call()[call].add(keys, 0, reason)
        return Prefix(0, reason, 0.0)

    def peek(self, spaces: KeyspaceSet, keys: KeyBatch) -> Prefix:
        """As `lookup`, of somebody who is about to store: counts as nothing."""
        return self._found(Chain.of(self.residency, spaces, keys), spaces, keys)

    def _found(self, chain: Chain, spaces: KeyspaceSet, keys: KeyBatch) -> Prefix:
        prefix = self._prefix(chain, keys, self._in_ram(chain, chain.blocks))
        groups = range(len(spaces.groups) + len({space.group for space in spaces.local}))
        return replace(prefix, groups=tuple(map(chain.of_group, groups)))

    def _touch(self, chain: Chain, hints: Hints) -> None:
        """A request used the usable prefix."""
        units, others = chain.units(self.residency, range(chain.blocks))
        self.residency.touch(units, hints)
        for of_group in others:
            self.residency.touch(of_group, hints)

    def _prefix(self, chain: Chain, keys: KeyBatch, in_ram: Mask) -> Prefix:
        blocks, runs = chain.blocks, _runs(in_ram)
        ended, age_s = MissReason.UNSPECIFIED, 0.0
        if blocks < len(keys):
            spaces, position = chain.missing()
            reasons = [self.residency.why_absent(space, keys, position) for space in spaces]
            ended, age_s = max(reasons, key=lambda reason: reason[0] != MissReason.NEVER_SEEN)
        return Prefix(blocks, ended, age_s, runs, replayed=chain.replayed)

    def acquire(
        self, spaces: KeyspaceSet, keys: KeyBatch, order: ReadOrder
    ) -> Grant | Awaitable[Grant]:
        """Leases the usable prefix, from `order.skip` on and up to `order.byte_budget` bytes: at
        once where all of that is in ram, else after at most `order.wait_s`.

        Raises:
            ResourceExhaustedError: Too many leases.
        """
        chain = Chain.of(self.residency, spaces, keys)
        self._touch(chain, order.hints)
        in_ram = self._in_ram(chain, chain.blocks)
        asked = _Asked(spaces, keys, order, self._prefix(chain, keys, in_ram))
        span = self._span(chain, order)
        if span.stop < chain.blocks:
            in_ram = self._in_ram(chain, span.stop)
        if self.promotion is None or in_ram[span.start :].all():
            return self._grant(asked, chain, span, len(span), None)
        own, others = chain.units(self.residency, span)
        units = np.concatenate([own, *others])
        # At once, not when the task has its turn: what is in ram already must not make room for
        # what is not, and nothing may leave meanwhile.
        self.residency.pin(units)
        coming = asyncio.create_task(self._promoted(self.promotion, asked, units))
        coming.add_done_callback(lambda _: self.residency.unpin(units))
        return coming

    @staticmethod
    def _span(chain: Chain, order: ReadOrder) -> range:
        """The keys to lease: such that they are a usable prefix with the skipped ones."""
        first = min(order.skip, chain.blocks)
        if not order.byte_budget:
            return range(first, chain.blocks)
        stop = chain.blocks
        while stop > first:
            over = sum(needed.cut(first, stop).nbytes for needed in chain.needed(stop))
            over -= order.byte_budget
            if over <= 0:
                break
            key_nbytes = chain.key_nbytes()
            # Without FULL groups no single key can be blamed: in few steps, not the longest.
            fewer = -(-over // key_nbytes) if key_nbytes else max(1, (stop - first) // 2)
            stop = max(first, chain.usable(max(first, stop - fewer)))
        return range(first, stop)

    def _in_ram(self, chain: Chain, boundary: int) -> Mask:
        return chain.keys_in_ram(self.residency.columns, boundary)

    async def _promoted(self, promotion: Promotion, asked: "_Asked", units: I64) -> Grant:
        """Brings units, which are pinned, into ram; leases what is there when it is time."""
        flights = promotion.begin(units, asked.order.hints)
        await asyncio.wait([flights], timeout=asked.order.wait_s)
        chain = Chain.of(self.residency, asked.spaces, asked.keys)
        span = self._span(chain, asked.order)
        in_ram = self._in_ram(chain, span.stop)[span.start :]
        leased = len(span) if in_ram.all() else int(in_ram.argmin())
        prefix, coming = self._prefix(chain, asked.keys, in_ram), None
        if leased < len(span) and not flights.done():
            coming = flights
        elif leased < len(span):
            # The rest can be read, but not now: who waits for it would wait for nothing.
            chain = chain.in_ram(self.residency.columns)
            span = self._span(chain, asked.order)
            leased = len(span)
            why = promotion.why_not(flights)
            prefix = Prefix(chain.blocks, why, 0.0, replayed=chain.replayed)
        runs = _cut(asked.prefix.runs, prefix.blocks)
        asked = replace(asked, prefix=replace(prefix, runs=runs))
        return self._grant(asked, chain, span, leased, coming)

    def _grant(
        self, asked: "_Asked", chain: Chain, span: range, leased: int, flights: Flights | None
    ) -> Grant:
        needed = [one.cut(span.start, span.stop) for one in chain.needed(span.stop)]
        counts, count = self.counts.acquire, len(asked.keys)
        try:
            lease = self._lease(asked, needed) if len(span) else None
        except ResourceExhaustedError:
            counts.add_failed(count)
            raise
        if lease is not None and flights is not None:
            lease.coming = Coming(needed, span[leased:], flights, asked.order.groups)
        prefix = asked.prefix
        counts.add(count, prefix.blocks, prefix.ended, on_nvme=prefix.on_nvme)
        columns = _columns(needed, span[:leased], asked.order.groups)
        return Grant(prefix, lease, span.start, leased, len(span) - leased, columns)

    async def arrivals(self, lease: Lease) -> AsyncIterator[Arrived]:
        """Blocks of a lease that were pending, as they come into ram; at last those that will not
        come. Ends with the lease."""
        coming, promotion = lease.coming, self.promotion
        assert promotion is not None or coming is None
        while coming is not None and promotion is not None and coming.keys:
            there = self._there(coming)
            if there:
                ready = coming.keys[:there]
                status = bytes([BlockStatus.READY]) * there
                yield Arrived(ready.start, status, _columns(coming.needed, ready, coming.groups))
                coming = replace(coming, keys=coming.keys[there:])
            elif coming.flights.done():
                yield Arrived(coming.keys.start, self._status_of_rest(coming), ())
                return
            else:
                await promotion.landing(coming.flights)
                if lease.coming is None:
                    return

    def _there(self, coming: Coming) -> int:
        """How many of the leading keys that are coming are whole in ram."""
        there, keys = np.ones(len(coming.keys), bool), coming.keys
        for needed in coming.needed:
            own = needed.cut(keys.start, keys.stop)
            absent = self.residency.columns.address_of(own.ids) == 0
            there[own.at()[absent] - keys.start] = False
        return len(there) if there.all() else int(there.argmin())

    def _status_of_rest(self, coming: Coming) -> bytes:
        """Of keys of which the first will not come: why, and what that is for those behind it."""
        columns, first = self.residency.columns, coming.keys[:1]
        ids = np.concatenate([one.ids for one in _columns(coming.needed, first, ())])
        lost = (columns.address_of(ids) == 0) & (columns.nvme[ids] == 0)
        why = BlockStatus.CORRUPT if lost.any() else BlockStatus.TIER_DOWN
        if why is BlockStatus.TIER_DOWN and Promotion.why_not(coming.flights) is MissReason.NO_ROOM:
            why = BlockStatus.NO_ROOM
        return bytes([why]) + bytes([BlockStatus.MISS]) * (len(coming.keys) - 1)

    def _lease(self, asked: "_Asked", needed: Sequence[Needed]) -> Lease:
        """A lease on these blocks."""
        # Of each unit the blocks of one keyspace: the first FULL one, and one of each other group.
        of_units = {one.keyspace.boundary_id: one.ids for one in reversed(needed)}
        units = [self.residency.units_of(ids) for ids in of_units.values()]
        return self.leases.open(
            session_id=asked.order.session_id,
            set_id=asked.spaces.set_id,
            units=np.concatenate(units),
            needed=needed,
            ttl_s=asked.order.ttl_s,
        )

    def check(self) -> None:
        """Audits everything below.

        Raises:
            AssertionError: Something disagrees.
        """
        self.residency.check()
        self.leases.check()
        self.pins.check()
        self.check_counts()

    def check_counts(self) -> None:
        """The part of `check` that looks at numbers only.

        Raises:
            AssertionError: See there.
        """
        for counts in self.counts.by_call().values():
            counts.check()

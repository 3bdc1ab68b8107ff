"""Brings chains from nvme into ram because somebody says that they will be asked for.

A hint may be dropped at any time, and never holds up who reads: a piece is begun only while no read
is on its way from nvme, one at a time, and is so small that a read which comes meanwhile finds the
other threads free. Hints wait as units, with what tells whether they still are the same; nothing is
held for them, neither room nor pins.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.policies.prefetch import PrefetchPolicy
from kvkeep_server.tiering.chain import Chain
from kvkeep_server.tiering.keyspaces import KeyspaceSet
from kvkeep_server.tiering.promotion import Promotion
from kvkeep_server.tiering.residency import Residency

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

DEADLINE_DEFAULT_S = 10.0
DEADLINE_MAX_S = 60.0
# Units are looked at one hint after the other, so there may not be many small ones.
HINTS_MAX = 256
# A read that comes while a piece is read waits for a thread at most if there is one only.
_PIECE_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class PrefetchFacts:
    """What it is made with.

    Attributes:
        policy: What of a chain is worth it.
        nbytes_max: Payload that waits to be brought, of all hints.
    """

    policy: PrefetchPolicy
    nbytes_max: int


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    """One hint.

    Attributes:
        deadline_s: After so long it is of no use any more; 0 = 10 s, at most a minute.
        byte_budget: Payload, 0 = no bound of its own.
        hints: For the policy.
    """

    deadline_s: float
    byte_budget: int
    hints: Hints


@dataclass(slots=True)
class PrefetchCounts:
    """Units since the start: what became of those that were planned.

    Attributes:
        planned: Taken up.
        brought: That came into ram.
        failed: That nvme or ram could not give.
        expired: Whose time was over before their turn.
        refused: That found the queue full, and were not planned.
    """

    planned: int = 0
    brought: int = 0
    failed: int = 0
    expired: int = 0
    refused: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    """Units of one hint, root to tail."""

    units: I64
    checksums: U64
    sizes: I64
    until_s: float
    hints: Hints


class Prefetching:
    """Event loop only; `run` in a task.

    Args:
        residency: Whose units.
        promotion: Brings them.
        clock: For deadlines.
        facts: See `PrefetchFacts`.
    """

    def __init__(
        self, *, residency: Residency, promotion: Promotion, clock: Clock, facts: PrefetchFacts
    ) -> None:
        """See the class."""
        self._residency = residency
        self._promotion = promotion
        self._clock = clock
        self.facts = facts
        self._queue: deque[_Waiting] = deque()
        # Units in the queue: who hints again and again adds nothing.
        self._named: set[int] = set()
        self._news = asyncio.Event()
        self.queued_nbytes = 0
        self.counts = PrefetchCounts()

    def plan(self, spaces: KeyspaceSet, keys: KeyBatch, order: PrefetchOrder) -> int:
        """Takes a hint up: that these keys will be asked for; how many keys are to be brought.

        Of the usable prefix what is not in ram; less what passes the budget, and nothing where too
        much waits already.
        """
        units = self._wanted(spaces, keys, order.hints)
        sizes = self._residency.columns.summed(units, self._residency.sizes_of)
        if order.byte_budget:
            fits = int(np.searchsorted(np.cumsum(sizes), order.byte_budget, "right"))
            units, sizes = units[:fits], sizes[:fits]
        planned = len(units)
        new = np.fromiter((unit not in self._named for unit in units.tolist()), bool, planned)
        units, sizes = units[new], sizes[new]
        if not len(units):
            return planned
        nbytes = int(sizes.sum())
        if self._is_full(nbytes):
            self._drop_late()
        if self._is_full(nbytes):
            self.counts.refused += len(units)
            return 0
        deadline_s = min(order.deadline_s or DEADLINE_DEFAULT_S, DEADLINE_MAX_S)
        until_s = self._clock.monotonic_s() + deadline_s
        checksums = self._residency.columns.checksum[units]
        self._queue.append(_Waiting(units, checksums, sizes, until_s, order.hints))
        self._named.update(units.tolist())
        self.queued_nbytes += nbytes
        self.counts.planned += len(units)
        self._news.set()
        return planned

    def _wanted(self, spaces: KeyspaceSet, keys: KeyBatch, hints: Hints) -> I64:
        columns = self._residency.columns
        chain = Chain.of(self._residency, spaces, keys)
        own, others = chain.units(self._residency, range(chain.blocks))
        there = columns.wholly_in_ram(own)
        matched = len(own) if there.all() else int(there.argmin())
        planned = self._policy_plan(own, matched, hints)
        rest = np.concatenate([np.empty(0, np.int64), *others])
        if len(rest):
            # What a prefix needs at its end, it needs with all that is in front of it.
            there = columns.wholly_in_ram(rest)
            rest = self._policy_plan(np.concatenate([rest[there], rest[~there]]), sum(there), hints)
        units = np.concatenate([planned, rest])
        return units[~columns.wholly_in_ram(units)]

    def _policy_plan(self, chain: I64, matched: int, hints: Hints) -> I64:
        now_s = self._clock.monotonic_s()
        return self.facts.policy.plan(chain, int(matched), hints, now_s)

    def _is_full(self, more_nbytes: int) -> bool:
        full = self.queued_nbytes + more_nbytes > self.facts.nbytes_max
        return full or len(self._queue) >= HINTS_MAX

    def _drop_late(self) -> None:
        """Hints whose time is over."""
        now_s = self._clock.monotonic_s()
        for waiting in list(self._queue):
            if now_s >= waiting.until_s:
                self._queue.remove(waiting)
                self.queued_nbytes -= int(waiting.sizes.sum())
                self._named.difference_update(waiting.units.tolist())
                self.counts.expired += len(waiting.units)

    async def run(self) -> None:
        """Brings what waits, until it is cancelled."""
        while True:
            await self._news.wait()
            await self._promotion.quiet()
            if not self._queue:
                self._news.clear()
                continue
            await self._bring(self._queue[0])

    async def _bring(self, waiting: _Waiting) -> None:
        """The next piece of the hint in front, which leaves with its last one."""
        late = self._clock.monotonic_s() >= waiting.until_s
        count = len(waiting.units) if late else self._fitting(waiting.sizes)
        units, checksums = waiting.units[:count], waiting.checksums[:count]
        self.queued_nbytes -= int(waiting.sizes[:count].sum())
        self._named.difference_update(units.tolist())
        waiting.units, waiting.checksums = waiting.units[count:], waiting.checksums[count:]
        waiting.sizes = waiting.sizes[count:]
        if not len(waiting.units):
            self._queue.popleft()
        if late:
            self.counts.expired += count
            return
        columns, foresight = self._residency.columns, self._residency.foresight
        # Ids may be others' by now; who is in ram already was used.
        same = (columns.row[units] >= 0) & (columns.checksum[units] == checksums)
        some = units[same]
        some = some[~columns.wholly_in_ram(some)]
        foresight.bring(some)
        # Not awaited itself: others may have joined its flights.
        await asyncio.wait([self._promotion.begin(some, waiting.hints)])
        came = columns.wholly_in_ram(some) & (columns.row[some] >= 0)
        foresight.fail(some[~came])
        self.counts.brought += int(came.sum())
        self.counts.failed += count - int(came.sum())

    @staticmethod
    def _fitting(sizes: I64) -> int:
        """How many units make a piece, at least one."""
        return max(1, int(np.searchsorted(np.cumsum(sizes), _PIECE_NBYTES, "right")))

"""Leases: a client's time-limited right to read pinned blocks.

A lease belongs to a namespace set and to the sessions that hold it; it ends with the last of them,
by `release`, or by time. One that ended by time is remembered for a while, so that a reader that
comes late is told which it is: renewed, because every slot still holds what it held, or lost.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.results import RenewStatus
from kvkeep_server.tiering.chain import Needed
from kvkeep_server.tiering.promotion import Flights
from kvkeep_server.tiering.residency import Residency

I64 = NDArray[np.int64]

# What a lease remembers of each block is 24 bytes, so blocks are bounded beside leases: so many a
# lease on average, in any case so many together.
_BLOCKS_A_LEASE = 64
_BLOCKS_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class Coming:
    """Blocks of a lease that are on their way into ram.

    Attributes:
        needed: All blocks of the lease, those that are there included.
        keys: Positions of the keys that were not whole in ram when the lease was given.
        flights: Done when all of them are there or will not come.
        groups: Whose columns are wanted; none = all.
    """

    needed: Sequence[Needed]
    keys: range
    flights: Flights
    groups: Collection[int]


@dataclass(slots=True)
class Lease:
    """One lease.

    Attributes:
        lease_id: Random, not 0.
        set_id: Of the namespace set.
        units: Pinned units, in chain order.
        blocks: Ids of all leased blocks.
        nbytes: Payload bytes of `blocks`.
        expires_s: Monotonic seconds.
        holders: Session ids.
        generations: Of `blocks`, when the lease expired; 0 = not there. None until then.
        coming: What of it was not in ram when it was given; None = all was.
    """

    lease_id: int
    set_id: bytes
    units: I64
    blocks: I64
    nbytes: int
    expires_s: float
    holders: set[int] = field(default_factory=set)
    generations: NDArray[np.uint64] | None = None
    coming: Coming | None = None


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Limits of leases.

    Attributes:
        ttl_s: Default and upper limit of a lease's life.
        leases_max: Live leases at most.
        remembered_max: Expired leases that can still be renewed.
    """

    ttl_s: float
    leases_max: int
    remembered_max: int


class Leases:
    """All leases of the daemon. Event loop only.

    Args:
        residency: Whose units are pinned.
        clock: For expiry.
        source: Draws lease ids.
        limits: See `LeaseLimits`.
    """

    def __init__(
        self, *, residency: Residency, clock: Clock, source: random.Random, limits: LeaseLimits
    ) -> None:
        """See the class."""
        self._residency = residency
        self._clock = clock
        self._source = source
        self._limits = limits
        self._live: dict[int, Lease] = {}
        self._expired: OrderedDict[int, Lease] = OrderedDict()
        self._of_session: dict[int, set[int]] = {}
        self._due: list[tuple[float, int]] = []
        self._leased_blocks = 0
        self._expired_blocks = 0
        self.expired_total = 0
        self.leased_nbytes = 0

    def __len__(self) -> int:
        """Live leases."""
        return len(self._live)

    def life_s(self, asked_s: float) -> float:
        """The life that a lease gets when `asked_s` was asked for (0 = default)."""
        return min(asked_s, self._limits.ttl_s) if asked_s > 0 else self._limits.ttl_s

    def open(
        self,
        *,
        session_id: int,
        set_id: bytes,
        units: I64,
        needed: Sequence[Needed],
        ttl_s: float,
    ) -> Lease:
        """Pins the units and gives a lease on the blocks that are needed of them.

        Raises:
            ResourceExhaustedError: `leases_max` leases live, or too many blocks are leased.
        """
        blocks = np.concatenate([one.ids for one in needed])
        if self._refusal(len(blocks)):
            self.expire()
        if msg := self._refusal(len(blocks)):
            raise ResourceExhaustedError(msg, retry_after_s=min(1.0, self._limits.ttl_s))
        lease_id = 0
        while lease_id == 0 or lease_id in self._live or lease_id in self._expired:
            lease_id = self._source.getrandbits(64)
        lease = Lease(
            lease_id,
            set_id,
            units,
            blocks,
            sum(one.nbytes for one in needed),
            self._clock.monotonic_s() + ttl_s,
            {session_id},
        )
        self._start(lease)
        return lease

    def _refusal(self, blocks: int) -> str:
        """Why so many more blocks cannot be leased now; empty = they can."""
        leases_max = self._limits.leases_max
        if len(self._live) >= leases_max:
            return f"leases.leases_max = {leases_max} leases are live; release some or raise it"
        if self._leased_blocks + blocks > _blocks_max(leases_max):
            return (
                f"{self._leased_blocks} blocks are leased and leases.leases_max = {leases_max} "
                f"allows {_blocks_max(leases_max)}; release some or raise it"
            )
        return ""

    def _start(self, lease: Lease) -> None:
        self._residency.pin(lease.units)
        self._live[lease.lease_id] = lease
        self.leased_nbytes += lease.nbytes
        self._leased_blocks += len(lease.blocks)
        for session_id in lease.holders:
            self._of_session.setdefault(session_id, set()).add(lease.lease_id)
        heapq.heappush(self._due, (lease.expires_s, lease.lease_id))

    def _stop(self, lease: Lease) -> None:
        del self._live[lease.lease_id]
        self.leased_nbytes -= lease.nbytes
        self._leased_blocks -= len(lease.blocks)
        for session_id in lease.holders:
            held = self._of_session.get(session_id)
            if held is not None:
                held.discard(lease.lease_id)
                if not held:
                    del self._of_session[session_id]
        self._residency.unpin(lease.units)

    def release(self, session_id: int, lease_ids: Sequence[int]) -> int:
        """Gives leases back on behalf of a session; returns how many it held. Unknown ids are no
        error."""
        released = 0
        for lease_id in lease_ids:
            lease = self._live.get(lease_id)
            if lease is not None and session_id in lease.holders:
                self._drop_holder(lease, session_id)
                released += 1
            else:
                forgotten = self._expired.get(lease_id)
                if forgotten is not None and session_id in forgotten.holders:
                    forgotten.holders.discard(session_id)
                    if not forgotten.holders:
                        self._forget(lease_id)
        return released

    def _drop_holder(self, lease: Lease, session_id: int) -> None:
        if len(lease.holders) == 1:
            self._stop(lease)
            return
        lease.holders.discard(session_id)
        held = self._of_session[session_id]
        held.discard(lease.lease_id)
        if not held:
            del self._of_session[session_id]

    def renew(
        self,
        session_id: int,
        lease_ids: Sequence[int],
        ttl_s: float,
        may_join: Callable[[bytes], bool],
    ) -> list[RenewStatus]:
        """Extends leases, joins those of other sessions, revives expired ones whose slots are
        unchanged.

        Args:
            session_id: Who asks.
            lease_ids: Which.
            ttl_s: Life from now.
            may_join: Whether the session has opened this namespace set.
        """
        return [self._renew(session_id, lease_id, ttl_s, may_join) for lease_id in lease_ids]

    def _renew(
        self, session_id: int, lease_id: int, ttl_s: float, may_join: Callable[[bytes], bool]
    ) -> RenewStatus:
        lease = self._live.get(lease_id) or self._expired.get(lease_id)
        if lease is None or not (session_id in lease.holders or may_join(lease.set_id)):
            return RenewStatus.UNKNOWN
        expires_s = self._clock.monotonic_s() + ttl_s
        if lease_id in self._live:
            # Never shorter than another holder was told.
            lease.expires_s = max(lease.expires_s, expires_s)
            lease.holders.add(session_id)
            self._of_session.setdefault(session_id, set()).add(lease_id)
            heapq.heappush(self._due, (lease.expires_s, lease_id))
            return RenewStatus.RENEWED
        now = self._residency.generations_of(lease.blocks)
        # What never came into ram may be another block by now.
        assert lease.generations is not None, "an expired lease knows them"
        if not (now == lease.generations).all() or not now.all():
            return RenewStatus.LOST
        self._forget(lease_id)
        lease.expires_s = expires_s
        lease.holders = {session_id}
        self._start(lease)
        return RenewStatus.RENEWED

    def end_session(self, session_id: int) -> int:
        """Takes the session off all its leases; returns how many."""
        held = list(self._of_session.get(session_id, ()))
        for lease_id in held:
            self._drop_holder(self._live[lease_id], session_id)
        return len(held)

    def expire(self) -> int:
        """Ends leases whose time is over; returns how many."""
        now, ended = self._clock.monotonic_s(), 0
        while self._due and self._due[0][0] <= now:
            _, lease_id = heapq.heappop(self._due)
            lease = self._live.get(lease_id)
            if lease is not None and lease.expires_s <= now:
                lease.generations = self._residency.generations_of(lease.blocks)
                lease.coming = None
                self._stop(lease)
                self._remember(lease)
                ended += 1
        if len(self._due) > 4 * len(self._live) + 1024:
            self._due = [(lease.expires_s, lease_id) for lease_id, lease in self._live.items()]
            heapq.heapify(self._due)
        self.expired_total += ended
        return ended

    def _remember(self, lease: Lease) -> None:
        self._expired[lease.lease_id] = lease
        self._expired_blocks += len(lease.blocks)
        remembered_max = self._limits.remembered_max
        while len(self._expired) > remembered_max or self._expired_blocks > _blocks_max(
            remembered_max
        ):
            self._forget(next(iter(self._expired)))

    def _forget(self, lease_id: int) -> None:
        self._expired_blocks -= len(self._expired.pop(lease_id).blocks)

    def held_by(self, session_id: int, lease_id: int) -> Lease | None:
        """The live lease of this id, if the session holds it."""
        lease = self._live.get(lease_id)
        return lease if lease is not None and session_id in lease.holders else None

    def check(self) -> None:
        """Audits pins against leases: a unit has at least the pins of its leases.

        Raises:
            AssertionError: Fewer.
        """
        self.moment()()

    def moment(self) -> Callable[[], None]:
        """Copies what must be seen at once; returns the audit of the copy, for any thread, which
        raises AssertionError."""
        # A lease's arrays are never written to.
        live, pinned = list(self._live.values()), self._residency.columns.pins.copy()
        assert all(lease.holders for lease in live), "a lease that nobody holds"
        counted = self.leased_nbytes, self._leased_blocks, self._expired_blocks
        expired = sum(len(lease.blocks) for lease in self._expired.values())

        def judge() -> None:
            pins = np.zeros(len(pinned), np.int64)
            for lease in live:
                np.add.at(pins, lease.units, 1)
            assert (pins <= pinned).all(), "leases without pins"
            assert counted[0] == sum(lease.nbytes for lease in live), "leased bytes"
            assert counted[1] == sum(len(lease.blocks) for lease in live), "leased blocks"
            assert counted[2] == expired, "remembered blocks"

        return judge


def _blocks_max(leases: int) -> int:
    return max(leases * _BLOCKS_A_LEASE, _BLOCKS_MIN)

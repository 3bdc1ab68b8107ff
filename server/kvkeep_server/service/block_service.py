"""Use cases of engines: open, look up, acquire, renew, release, commit; and what is told to
operators."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TierUnavailableError,
)
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, MissReason, RenewStatus, StopReason
from kvkeep_server.index.layout import LAYOUT_VERSION, PAGE_NBYTES
from kvkeep_server.service.checking import Checker
from kvkeep_server.service.commit_orders import WAIT_MAX_S, CommitOrder, batch_of
from kvkeep_server.service.namespace_control import NamespaceControl
from kvkeep_server.service.namespaces import Namespaces, NamespaceSet, OpenedNamespace
from kvkeep_server.service.sessions import Session, Sessions
from kvkeep_server.service.spec import NamespaceSpec
from kvkeep_server.service.touch_ring import NO_ROW
from kvkeep_server.tiering.chain import at_boundary
from kvkeep_server.tiering.commit_plan import CommitBatch
from kvkeep_server.tiering.commits import Commits
from kvkeep_server.tiering.lineage import chain_to
from kvkeep_server.tiering.manager import (
    Arrived,
    Grant,
    Prefix,
    ReadCall,
    ReadOrder,
    TierManager,
)
from kvkeep_server.tiering.prefetching import PrefetchOrder
from kvkeep_server.tiering.removal import Removed
from kvkeep_server.tiering.retention_pins import Pinned
from kvkeep_server.tiering.watching import Change

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
# Keys times local ranks and groups of one call: bounds its work, and its answer to 34 MiB.
_ENTRIES_MAX = 1 << 21
# A look-up in shared memory has no limit of keys; a record that claims more than this is a lie.
_ASKED_MAX = 1 << 24
_FORGET_PERIOD_S = 1.0
# Look-ups of clients are credited in slices, so that a full ring never holds the loop for long.
_TOUCHES_A_DRAIN = 512
_CHAIN_STEPS_A_DRAIN = 65536
# Of one session that ends, more than a client makes between two drains; and of all such.
_PARTING_TOUCHES = 4096
_PARTING_TOUCHES_MAX = 16384


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of one call; names as in the configuration's `[limits]`."""

    keys_max: int
    commits_running_max: int


@dataclass(slots=True)
class TouchCounts:
    """What the touch rings brought."""

    lost: int = 0
    invalid: int = 0


class BlockService:
    """Event loop only.

    Args:
        limits: Of one call.
        namespaces: Identity.
        sessions: Who calls.
        manager: Reads and removals.
        commits: Writes.
        clock: For uptime.
    """

    def __init__(
        self,
        *,
        limits: ServiceLimits,
        namespaces: Namespaces,
        sessions: Sessions,
        manager: TierManager,
        commits: Commits,
        clock: Clock,
    ) -> None:
        """See the class."""
        self.limits = limits
        self.namespaces = namespaces
        self.sessions = sessions
        self.manager = manager
        self.commits = commits
        self.control = NamespaceControl(
            namespaces=namespaces, sessions=sessions, removal=manager.removal
        )
        self.checker = Checker(manager=manager, clock=clock)
        self.touches = TouchCounts()
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._running: set[asyncio.Task[U8]] = set()
        self._finishing = False
        # Look-ups of sessions that ended, whose rings are gone.
        self._parting: deque[tuple[Session, tuple[int, ...]]] = deque()
        self._forget_next_s = self._started_s

    # --- engines

    def check_layout(self, version: int) -> None:
        """Raises FailedPreconditionError unless the client was built for this daemon's shared
        memory."""
        if version != LAYOUT_VERSION:
            msg = (
                f"client speaks layout version {version}, this daemon {LAYOUT_VERSION}; "
                "install client and daemon of the same release"
            )
            raise FailedPreconditionError(msg)

    def slot_nbytes(self, block_nbytes: int) -> int:
        """Bytes that a block of this size takes in the pool."""
        return -(-block_nbytes // PAGE_NBYTES) * PAGE_NBYTES

    def open_namespace(
        self, session: Session, spec: NamespaceSpec, local_ranks: Sequence[int]
    ) -> OpenedNamespace:
        """Checks and opens, in its present epoch; errors as `Namespaces.open`."""
        theirs = self.control.serving(session.opened)
        try:
            opened = self.namespaces.open(spec, local_ranks, theirs)
        except ResourceExhaustedError:
            if not self._forget_idle():
                raise
            opened = self.namespaces.open(spec, local_ranks, theirs)
        session.opened.add(opened.spaces.index)
        return opened

    def _forget_idle(self) -> bool:
        """Whether namespaces that nobody uses gave their room back; seldom, for it looks at all."""
        now_s = self._clock.monotonic_s()
        if now_s < self._forget_next_s:
            return False
        self._forget_next_s = now_s + _FORGET_PERIOD_S
        sessions = [*self.sessions, *(session for session, _ in self._parting)]
        live = {handle for session in sessions for handle in session.opened}
        columns = self.manager.residency.columns
        ids = np.concatenate((columns.in_use(), columns.withdrawn()))
        blocks = np.bincount(columns.keyspace[ids])
        return self.namespaces.forget(live, np.flatnonzero(blocks).tolist()) > 0

    async def advance_epoch(self, session: Session, set_index: int, expected: int) -> int:
        """Ends the epoch of a namespace set; see `NamespaceControl.advance`."""
        namespace_set = self._opened(session, set_index).namespace_set
        namespace_set.working += 1
        try:
            # A caller that goes away does not leave it half done.
            return await asyncio.shield(self.control.advance(namespace_set, expected))
        finally:
            namespace_set.working -= 1

    def lookup(
        self, session: Session, set_index: int, keys: bytes, hints: Hints
    ) -> tuple[OpenedNamespace, Prefix]:
        """Longest usable prefix, without a lease."""
        opened = self._opened(session, set_index)
        batch = self._keys(opened, keys)
        if hidden := self.control.hides(opened.namespace_set):
            return opened, self.manager.find_nothing(ReadCall.LOOKUP, len(batch), hidden)
        return opened, self.manager.lookup(opened.spaces, batch, hints)

    def peek(self, session: Session, set_index: int, keys: bytes) -> tuple[OpenedNamespace, Prefix]:
        """As `lookup`, before a store: no use of the blocks, and not counted."""
        opened = self._opened(session, set_index)
        return opened, self.manager.peek(opened.spaces, self._keys(opened, keys))

    def acquire(
        self,
        session: Session,
        set_index: int,
        keys: bytes,
        groups: Sequence[int],
        order: ReadOrder,
    ) -> tuple[Grant | Awaitable[Grant], int]:
        """Leases the usable prefix, at once if it is in ram; returns it and the number of keys
        asked for."""
        opened = self._opened(session, set_index)
        spec_groups = opened.namespace_set.spec.groups
        wanted = frozenset(groups) if len(groups) <= len(spec_groups) else {len(spec_groups)}
        for group in wanted:
            if group >= len(spec_groups):
                raise InvalidArgumentError(
                    "groups",
                    group if len(groups) <= len(spec_groups) else f"{len(groups)} indices",
                    f"indices of groups, 0 to {len(spec_groups) - 1}, each once",
                    "leave it empty for all",
                )
        batch = self._keys(opened, keys)
        if hidden := self.control.hides(opened.namespace_set):
            prefix = self.manager.find_nothing(ReadCall.ACQUIRE, len(batch), hidden)
            return Grant(prefix, None, 0, 0, 0, ()), len(batch)
        order = replace(order, wait_s=min(order.wait_s, WAIT_MAX_S), groups=wanted)
        grant = self.manager.acquire(opened.spaces, batch, order)
        if isinstance(grant, Grant):
            return grant, len(batch)
        opened.namespace_set.working += 1
        return self._late(session, opened.namespace_set, grant), len(batch)

    async def _late(
        self,
        session: Session,
        namespace_set: NamespaceSet,
        coming: Awaitable[Grant],
    ) -> Grant:
        try:
            grant = await coming
        finally:
            namespace_set.working -= 1
        if session.over:
            self.manager.leases.end_session(session.session_id)
            msg = "the session ended while blocks were brought into ram"
            raise TierUnavailableError(msg)
        return grant

    def arrivals(self, session: Session, lease_id: int) -> AsyncIterator[Arrived]:
        """Blocks of a lease that are on their way into ram, as they come.

        Raises:
            NotFoundError: The session does not hold this lease.
        """
        lease = self.manager.leases.held_by(session.session_id, lease_id)
        if lease is None:
            msg = f"lease {lease_id} is not held by this session; acquire again"
            raise NotFoundError(msg)
        return self.manager.arrivals(lease)

    def release(self, session: Session, lease_ids: Sequence[int]) -> int:
        """Gives leases back; returns how many the session held."""
        self._bounded("lease_ids", len(lease_ids))
        return self.manager.leases.release(session.session_id, lease_ids)

    def renew(
        self, session: Session, lease_ids: Sequence[int], ttl_s: float
    ) -> tuple[list[RenewStatus], float]:
        """Extends leases; returns a status each and the life that they have now."""
        self._bounded("lease_ids", len(lease_ids))
        leases = self.manager.leases
        life_s, may_join = leases.life_s(ttl_s), self._set_ids(session).__contains__
        renewed = leases.renew(session.session_id, lease_ids, life_s, may_join)
        return renewed, life_s

    async def watch(
        self, session: Session, set_indexes: Sequence[int], from_sequence: int
    ) -> AsyncGenerator[Change, None]:
        """What is stored and removed in namespace sets that the session has open, none = all of
        them, until it is over, or the epoch of one of them is and all that left with it was told;
        see `ChangeLog.watch`."""
        handles = set_indexes if len(set_indexes) else sorted(session.opened)
        self._bounded("set_indexes", len(handles))
        opened = [self._opened(session, handle) for handle in handles]
        spaces = {
            space.index: (one.namespace_set.set_id, space)
            for one in opened
            for space in one.spaces.everywhere
        }
        with self.control.watched([one.namespace_set for one in opened]) as is_complete:
            watcher = self.manager.changes.watch(spaces, from_sequence)
            try:
                async for change in watcher.changes(lambda: self._is_over(session), is_complete):
                    yield change
                if self._is_over(session):
                    raise TierUnavailableError("the session is over")
            finally:
                watcher.close()

    def _is_over(self, session: Session) -> bool:
        return session.over or self._finishing

    def prefetch(self, session: Session, set_index: int, keys: bytes, order: PrefetchOrder) -> int:
        """Takes up that these keys will be asked for; how many are to be brought into ram."""
        opened = self._opened(session, set_index)
        batch = self._keys(opened, keys)
        prefetching = self.manager.prefetching
        if prefetching is None or self.control.hides(opened.namespace_set):
            return 0
        return prefetching.plan(opened.spaces, batch, order)

    def pin(self, session: Session, set_index: int, keys: bytes, keep_for_s: float) -> Pinned:
        """Keeps the usable prefix for a while; see `RetentionPins.pin`."""
        opened = self._opened(session, set_index)
        batch = self._keys(opened, keys)
        if self.control.hides(opened.namespace_set):
            return Pinned(0, 0, 0.0)
        return self.manager.pins.pin(opened.spaces, batch, keep_for_s)

    def unpin(self, session: Session, pin_ids: Sequence[int]) -> int:
        """Ends pins in namespace sets that the session has open; how many held."""
        self._bounded("pin_ids", len(pin_ids))
        return self.manager.pins.unpin(pin_ids, self._set_ids(session).__contains__)

    def _set_ids(self, session: Session) -> set[bytes]:
        return {self.namespaces.get(index).namespace_set.set_id for index in session.opened}

    def begin_commit(self, session: Session, order: CommitOrder) -> asyncio.Task[U8]:
        """Begins to seal blocks that lie in the session's staging; the result is one
        `CommitStatus` a key.

        Not to be cancelled: what was begun is sealed or given back whole, also when its caller is
        gone.
        """
        return self.begin_batch(session, order.set_index, self.batch(session, order))

    def batch(self, session: Session, order: CommitOrder) -> CommitBatch:
        """What a commit asks for, checked; its blocks lie in the session's staging, or will."""
        opened = self._opened(session, order.set_index)
        served = [AckLevel.UNSPECIFIED, AckLevel.RAM]
        served += [AckLevel.NVME] if self.commits.writes_through else []
        if order.ack_level not in served:
            msg = f"ack level {order.ack_level.name}: no such tier is configured; use RAM"
            raise FailedPreconditionError(msg)
        keys = self._keys(opened, order.keys)
        return batch_of(order, opened, keys, session.staging.buffer)

    def begin_batch(self, session: Session, set_index: int, batch: CommitBatch) -> asyncio.Task[U8]:
        """The rest of `begin_commit`."""
        if self._finishing:
            msg = "the daemon is about to stop and takes no more commits"
            raise TierUnavailableError(msg)
        opened = self._opened(session, set_index)
        if len(self._running) >= self.limits.commits_running_max:
            running_max = self.limits.commits_running_max
            msg = f"limits.commits_running_max = {running_max} commits are running"
            raise ResourceExhaustedError(msg, retry_after_s=0.05)
        self.sessions.begin_copy(session)
        refusal = self.control.refuses(opened.namespace_set)
        work = self.commits.run(batch) if refusal is None else self.commits.refuse(batch, refusal)
        task = asyncio.create_task(work)
        self._running.add(task)
        opened.namespace_set.working += 1

        def over(done: asyncio.Task[U8]) -> None:
            opened.namespace_set.working -= 1
            self._running.discard(done)
            self.sessions.end_copy(session)
            if not done.cancelled():
                done.exception()  # the caller may be gone: whoever is left has it logged

        task.add_done_callback(over)
        return task

    async def finish(self) -> None:
        """Waits for the commits that run; takes no more."""
        self._finishing = True
        await self.control.finish()
        while self._running:
            await asyncio.wait(set(self._running))

    async def remove(
        self, session: Session, set_index: int, keys: bytes, *, with_descendants: bool
    ) -> Removed:
        """Takes the units of these keys out, leased ones too; see `Removal.of_keys`."""
        opened = self._opened(session, set_index)
        batch = self._keys(opened, keys)
        opened.namespace_set.working += 1
        try:
            return await self.manager.removal.of_keys(
                opened.spaces, batch, with_descendants=with_descendants
            )
        finally:
            opened.namespace_set.working -= 1

    def _opened(self, session: Session, set_index: int) -> OpenedNamespace:
        if set_index not in session.opened:
            msg = f"namespace set {set_index} is not open in this session; call OpenNamespace"
            raise NotFoundError(msg)
        return self.namespaces.get(set_index)

    def _keys(self, opened: OpenedNamespace, packed: bytes) -> KeyBatch:
        keys = KeyBatch.unpack(packed, opened.namespace_set.spec.key_nbytes)
        self._bounded("keys", len(keys))
        columns = len(opened.spaces.everywhere)
        if len(keys) * columns > _ENTRIES_MAX:
            raise InvalidArgumentError(
                "keys",
                len(keys),
                f"at most {_ENTRIES_MAX // columns} with {columns} local ranks and groups",
                "split the call",
            )
        return keys

    def _bounded(self, field: str, count: int) -> None:
        if count > self.limits.keys_max:
            raise InvalidArgumentError(
                field, count, f"at most limits.keys_max = {self.limits.keys_max}", "split the call"
            )

    # --- upkeep

    def drain_touches(self) -> None:
        """Credits the look-ups that clients answered by themselves."""
        steps_left = _CHAIN_STEPS_A_DRAIN
        for session in self.sessions:
            if session.ring is None:
                continue
            drained = session.ring.drain(_TOUCHES_A_DRAIN)
            self.touches.lost += drained.lost
            self.touches.invalid += drained.torn
            for record in drained.records.tolist():
                steps_left -= self._credit(session, record, max(1, steps_left))
        for _ in range(min(len(self._parting), _TOUCHES_A_DRAIN)):
            steps_left -= self._credit(*self._parting.popleft(), max(1, steps_left))

    def part(self, session: Session) -> None:
        """Keeps what the client of a session that ends looked up since the last drain, for the next
        ones: its ring goes with it."""
        if session.ring is None:
            return
        drained = session.ring.drain(_PARTING_TOUCHES)
        records = drained.records.tolist()[: _PARTING_TOUCHES_MAX - len(self._parting)]
        self.touches.lost += drained.lost + len(drained.records) - len(records)
        self.touches.invalid += drained.torn
        self._parting.extend((session, record) for record in records)

    def _credit(self, session: Session, record: tuple[int, ...], steps_max: int) -> int:
        _, set_index, _, asked, found, row, version, hit_tokens, output, stop, sub_agent, *_ = (
            record
        )
        if set_index not in session.opened or found > asked or asked > _ASKED_MAX:
            self.touches.invalid += 1
            return 1
        # A record does not name what is missing, so nobody can say why it is.
        counts = self.manager.counts.lookup
        if not found or row == NO_ROW:
            counts.add(asked, found, MissReason.UNSPECIFIED)
            return 1
        residency = self.manager.residency
        spaces = self.namespaces.get(set_index).spaces
        unit = residency.unit_at(row, version, spaces)
        chain = chain_to(residency.columns, unit, min(found, steps_max))
        on_nvme = int(np.count_nonzero(~residency.columns.in_ram[chain]))
        counts.add(asked, found, MissReason.UNSPECIFIED, on_nvme=on_nvme)
        reason = StopReason(stop) if stop <= max(StopReason) else StopReason.OTHER
        hints = Hints(reason, output, bool(sub_agent), b"", hit_tokens)
        residency.touch(chain, hints)
        # A record names one row: what else the prefix needs has the keys of its last blocks.
        others = at_boundary(residency, spaces, chain)
        for units in others:
            residency.touch(units, hints)
        return max(1, len(chain) + sum(map(len, others)))

    def sweep(self) -> None:
        """Ends leases and sessions whose time is over."""
        self.manager.leases.expire()
        self.manager.pins.expire()
        for session in self.sessions.silent():
            self.sessions.end(session.session_id, "silent")

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self._clock.monotonic_s() - self._started_s

    @property
    def commits_running(self) -> int:
        """Commits that run now."""
        return len(self._running)

    def held(self, namespace_sets: Sequence[NamespaceSet]) -> list[tuple[int, int]]:
        """(blocks, payload bytes) of namespace sets, all ranks and groups of each."""
        columns = self.manager.residency.columns
        spaces = [space for each in namespace_sets for space in each.keyspaces.values()]
        most = max((space.index for space in spaces), default=0)
        # One pass over all blocks, however many sets are asked for.
        counts = np.bincount(columns.keyspace[columns.in_use()], minlength=most + 1).tolist()
        return [
            (
                sum(counts[space.index] for space in each.keyspaces.values()),
                sum(counts[space.index] * space.block_nbytes for space in each.keyspaces.values()),
            )
            for each in namespace_sets
        ]

    def check(self) -> None:
        """Audits all state.

        Raises:
            AssertionError: Something disagrees.
        """
        self.manager.check()

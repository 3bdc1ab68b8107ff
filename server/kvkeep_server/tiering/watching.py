"""What comes into each tier and leaves it, for those who watch: routers.

Changes go into one log for all watchers, each of which is a place in it, so who reads slowly holds
nobody up: what it misses is told as a gap. While nobody watches nothing is written down.

A watcher that begins, or has a gap, is told all that there is by a walk over the ids of blocks, a
slice at a time. Of blocks that the walk has not reached it gets no changes, because the walk will
see what became of them; a slice is walked only when the watcher has all changes until then. So
everything is told once, and the sum of what was told is the digest of what is there.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import OutOfRangeError, ResourceExhaustedError
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import ChangeKind, TierId
from kvkeep_server.tiering.keyspaces import KEYSPACES_MAX, Keyspace
from kvkeep_server.tiering.residency import Residency

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

# What is written down goes on for so long without watchers: one may come back.
_KEEP_S = 60.0
# Between two digests where something changed.
DIGEST_S = 30.0
# How often a watcher looks whether its session is over.
_LOOK_S = 1.0
# Of one message: 256 KiB at most. Of one step of a walk: 3 ms.
_KEYS_AT_ONCE = 4096
_MODULUS = 1 << 64
_TIERS = (TierId.RAM, TierId.NVME)


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Names as in the configuration's `[limits]`."""

    watchers_max: int
    blocks_max: int


@dataclass(frozen=True, slots=True)
class Change:
    """What a watcher is told; fields as in `WatchResponse`."""

    sequence: int
    kind: ChangeKind
    tier: TierId = TierId.UNSPECIFIED
    set_id: bytes = b""
    rank: int = 0
    group: int = 0
    keys: bytes = b""
    parent_key: bytes = b""
    digest: int = 0


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks as they were when something happened to them.

    Attributes:
        ids: Theirs.
        spaces: Numbers of their keyspaces.
        words: Full keys, shape (n, words).
        above: Keys of the blocks before them in their chains, zeros = none; shape (n, words).
    """

    ids: I64
    spaces: NDArray[np.uint16]
    words: U64
    above: U64

    def only(self, which: Mask) -> "_Blocks":
        """Some of them."""
        if which.all():
            return self
        return _Blocks(self.ids[which], self.spaces[which], self.words[which], self.above[which])


@dataclass(frozen=True, slots=True)
class _Entry:
    """They came into a tier, or left it."""

    kind: ChangeKind
    tier: TierId
    blocks: _Blocks


class ChangeLog:
    """Implements `arrivals.Onlooker`. Event loop only.

    Args:
        residency: Whose changes.
        clock: For how long it goes on without watchers.
        first: Sequence of the first change: such that those of two daemons do not meet.
        limits: See there.
    """

    def __init__(
        self, *, residency: Residency, clock: Clock, first: int, limits: WatchLimits
    ) -> None:
        """See the class."""
        self._residency = residency
        self._clock = clock
        self.limits = limits
        self._entries: deque[_Entry] = deque()
        self._blocks = 0
        self.first = first
        self._news: asyncio.Future[None] | None = None
        self._alone_s = 0.0
        self.watchers = 0
        self.gaps_total = 0

    @property
    def next(self) -> int:
        """Sequence that the next change will have."""
        return self.first + len(self._entries)

    def now_s(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic_s()

    # --- Onlooker

    def came(self, tier: TierId, blocks: I64) -> None:
        """See `Onlooker`."""
        self._add(ChangeKind.STORED, tier, blocks)

    def went(self, tier: TierId, blocks: I64) -> None:
        """See `Onlooker`."""
        self._add(ChangeKind.REMOVED, tier, blocks)

    def _add(self, kind: ChangeKind, tier: TierId, ids: I64) -> None:
        if not self.watchers and self._clock.monotonic_s() - self._alone_s > _KEEP_S:
            self._stop()
        elif len(ids):
            self._entries.append(_Entry(kind, tier, self.blocks(ids)))
            self._blocks += len(ids)
            while self._blocks > self.limits.blocks_max:
                self._blocks -= len(self._entries.popleft().blocks.ids)
                self.first += 1
            if self._news is not None:
                self._news.set_result(None)
                self._news = None

    def _stop(self) -> None:
        self._residency.onlooker = None
        # What happens from now on is not in it, so no sequence until here is followed by another.
        self.first = self.next + 1
        self._entries.clear()
        self._blocks = 0

    def blocks(self, ids: I64) -> _Blocks:
        """These blocks, as they are now."""
        columns = self._residency.columns
        parents = columns.parent[columns.unit_of(ids)]
        above = columns.key_words[np.maximum(parents, 0)]
        above[parents < 0] = 0
        return _Blocks(ids, columns.keyspace[ids], columns.key_words[ids], above)

    # --- watchers

    def watch(self, spaces: Mapping[int, tuple[bytes, Keyspace]], from_sequence: int) -> "Watcher":
        """A watcher, to be closed.

        Args:
            spaces: By number: set id and keyspace of what it wants to hear of.
            from_sequence: The first that it wants; 0 = begin with all that is there.

        Raises:
            OutOfRangeError: That is not in the log any more, or of another daemon.
            ResourceExhaustedError: Too many watch.
        """
        if self.watchers >= self.limits.watchers_max:
            msg = f"limits.watchers_max = {self.limits.watchers_max} watch; end some or raise it"
            raise ResourceExhaustedError(msg, retry_after_s=1.0)
        listening = self._residency.onlooker is self
        if from_sequence and not (listening and self.first <= from_sequence <= self.next):
            msg = f"from_sequence is {from_sequence}, and {self.first} to {self.next} can be had"
            raise OutOfRangeError(f"{msg}: begin with 0, to be told all that is there")
        self._residency.onlooker = self
        self.watchers += 1
        return Watcher(self, self._residency, spaces, from_sequence)

    def leave(self) -> None:
        """A watcher goes."""
        self.watchers -= 1
        self._alone_s = self._clock.monotonic_s()

    def get(self, sequence: int) -> _Entry | None:
        """That change; None = it is yet to come."""
        place = sequence - self.first
        return self._entries[place] if 0 <= place < len(self._entries) else None

    async def more(self, timeout_s: float) -> None:
        """Until there is another change, or for so long."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._news], timeout=timeout_s)


class Watcher:
    """One place in the log. Made by `ChangeLog.watch`."""

    def __init__(
        self,
        log: ChangeLog,
        residency: Residency,
        spaces: Mapping[int, tuple[bytes, Keyspace]],
        from_sequence: int,
    ) -> None:
        """See the class."""
        self._log = log
        self._residency = residency
        self._spaces = spaces
        self._wanted = np.zeros(KEYSPACES_MAX, bool)
        self._wanted[list(spaces)] = True
        self._next = from_sequence or log.next
        # Of a resumed one the walk tells nothing: it sums what is there.
        self._telling = not from_sequence
        self._walked: int | None = 0
        self._sums: dict[tuple[int, TierId], int] = {}
        self._changed, self._summed_s = False, 0.0
        self._clear()

    def _clear(self) -> None:
        self._walked = 0
        self._sums = {(number, tier): 0 for number in self._spaces for tier in _TIERS}

    def close(self) -> None:
        """It is over."""
        self._log.leave()

    async def changes(
        self, is_over: Callable[[], bool], is_complete: Callable[[], bool]
    ) -> AsyncIterator[Change]:
        """What happens, until somebody says that it is over, or that nothing more will happen when
        all is told."""
        if self._telling:
            yield Change(self._next, ChangeKind.ALL_CLEARED)
        while not is_over():
            told = self._step()
            for change in told:
                yield change
            if self._walked is not None:
                await asyncio.sleep(0)
            elif not told and self._log.get(self._next) is None:
                if is_complete():
                    return
                await self._log.more(_LOOK_S)

    def _step(self) -> list[Change]:
        """What can be told now, of one thing; all of it at one moment."""
        entry, now_s = self._log.get(self._next), self._log.now_s()
        if self._next < self._log.first:
            self._log.gaps_total += 1
            self._next, self._telling = self._log.next, True
            self._clear()
            return [Change(self._next, ChangeKind.ALL_CLEARED)]
        if entry is not None:
            self._next += 1
            return list(self._of_entry(entry))
        if self._walked is not None:
            return self._walk()
        if self._changed and now_s - self._summed_s >= DIGEST_S:
            return self._digests()
        return []

    def _of_entry(self, entry: _Entry) -> Iterator[Change]:
        blocks = entry.blocks.only(self._wanted[entry.blocks.spaces])
        counted = blocks
        if self._walked is not None:
            counted = blocks.only(blocks.ids < self._walked)
        if len(blocks.ids):
            self._sum(entry.kind, entry.tier, counted)
            self._changed = True
            told = counted if self._telling else blocks
            yield from self._tell(entry.kind, entry.tier, told, self._next - 1)

    def _walk(self) -> list[Change]:
        """The next slice of what is there."""
        assert self._walked is not None
        columns, start = self._residency.columns, self._walked
        stop = start + _KEYS_AT_ONCE
        ids = start + np.flatnonzero(columns.row[start:stop] >= 0)
        ids = ids[self._wanted[columns.keyspace[ids]]]
        self._walked = stop if stop < columns.capacity else None
        told: list[Change] = []
        for tier, places in zip(_TIERS, (columns.address_of(ids), columns.nvme[ids]), strict=True):
            blocks = self._log.blocks(ids[places != 0])
            self._sum(ChangeKind.STORED, tier, blocks)
            if self._telling:
                told += self._tell(ChangeKind.STORED, tier, blocks, self._next)
        if self._walked is None:
            self._telling = True
            told += self._digests()
        return told

    def _apart(self, blocks: _Blocks) -> Iterator[tuple[int, KeyBatch, bytes]]:
        """Number of each keyspace, its keys, and the key before the first; not too many keys."""
        for number in np.unique(blocks.spaces).tolist():
            own = np.flatnonzero(blocks.spaces == number)
            nbytes = self._spaces[number][1].key_nbytes
            width = -(-nbytes // 8)
            for start in range(0, len(own), _KEYS_AT_ONCE):
                some = own[start : start + _KEYS_AT_ONCE]
                words = np.ascontiguousarray(blocks.words[some][:, :width])
                above = np.ascontiguousarray(blocks.above[some[:1]][:, :width])
                parent = KeyBatch(above, nbytes).pack() if above.any() else b""
                yield number, KeyBatch(words, nbytes), parent

    def _sum(self, kind: ChangeKind, tier: TierId, blocks: _Blocks) -> None:
        sign = 1 if kind is ChangeKind.STORED else -1
        for number, keys, _ in self._apart(blocks):
            total = self._sums[number, tier] + sign * digest_of(keys.pack(), keys.key_nbytes)
            self._sums[number, tier] = total % _MODULUS

    def _tell(
        self, kind: ChangeKind, tier: TierId, blocks: _Blocks, sequence: int
    ) -> Iterator[Change]:
        for number, keys, parent in self._apart(blocks):
            set_id, space = self._spaces[number]
            before = parent if kind is ChangeKind.STORED else b""
            yield Change(sequence, kind, tier, set_id, space.rank, space.group, keys.pack(), before)

    def _digests(self) -> list[Change]:
        self._changed, self._summed_s = False, self._log.now_s()
        return [
            Change(
                self._next,
                ChangeKind.RESYNC_DIGEST,
                tier,
                self._spaces[number][0],
                self._spaces[number][1].rank,
                self._spaces[number][1].group,
                digest=total,
            )
            for (number, tier), total in self._sums.items()
        ]


def digest_of(packed: bytes, key_nbytes: int) -> int:
    """The sum of xxh3-64 over keys, modulo 2^64: in any order, and to be added to."""
    digest = xxhash.xxh3_64_intdigest
    whole = range(0, len(packed), key_nbytes)
    return sum(digest(packed[at : at + key_nbytes]) for at in whole) % _MODULUS

"""The daemon's half of the shared index: one table in a memfd, batches in numpy.

Open addressing in buckets of eight rows, so that the tags of a bucket fill one cache line and a
look-up mostly touches one. A removed row becomes empty again where its bucket has an empty row
anyway (no probe goes past it), else a tombstone. Only one thread writes at a time (the event loop,
or a rebuild that it waits for); clients read at any time, guarded by the row's version.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.memfd import Memfd, create_sealed
from kvkeep_server.index.layout import (
    BUCKET_ROWS,
    COLUMNS,
    PROBED_BUCKETS_MAX,
    STATE_OFFSET,
    TAG_EMPTY,
    TAG_REMOVED,
    Geometry,
    Multipliers,
    encode_header,
    home_buckets,
)

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

Word = TypeVar("Word", np.uint32, np.uint64)

# Eight bools of a bucket read as one u64 hold a single 1 in byte `lane`; times this, shifted by 56,
# gives `lane`.
_LANE_OF_BYTE = np.uint64(0x0001020304050607)
_U56 = np.uint64(56)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_EMPTY = np.uint64(TAG_EMPTY)
_REMOVED = np.uint64(TAG_REMOVED)


class TableFullError(Exception):
    """A row finds no place within `PROBED_BUCKETS_MAX` buckets of its home: rebuild with more
    rows."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where blocks are: what a row says beside its fingerprint; columns of one length.

    Attributes:
        addresses: In ram, 0 = not there.
        generations: Of those slots, 0 = not there.
        nvme: Locations on nvme, 0 = none.
    """

    addresses: U64
    generations: U64
    nvme: U64


class IndexTable:
    """One table. Rows are numbered 0 to rows - 1; -1 means "none".

    Args:
        rows: At least so many rows.
        multipliers: The table's seed.
        server_epoch: Of this daemon.
        table_id: Counts from 1 in a server epoch.

    Attributes:
        ids: Shape (rows,), dense block id of each row, -1 = none; the daemon's own, not shared.
    """

    def __init__(
        self, *, rows: int, multipliers: Multipliers, server_epoch: int, table_id: int
    ) -> None:
        """See the class. Allocates the memory: raises OSError when there is not enough."""
        self.geometry = Geometry.for_rows(rows)
        self.multipliers = multipliers
        self.table_id = table_id
        self.live_rows = 0
        self.removed_rows = 0
        self.memfd: Memfd = create_sealed(
            f"kvkeep-index-{table_id}",
            self.geometry.nbytes,
            future_write_seal=True,
            huge=True,
            touch=True,
        )
        header = encode_header(
            geometry=self.geometry,
            multipliers=multipliers,
            server_epoch=server_epoch,
            table_id=table_id,
        )
        self.memfd.buffer[: len(header)] = header
        self._tag: U64 = self._column(0, np.uint64)
        self._check: U64 = self._column(1, np.uint64)
        self._address: U64 = self._column(2, np.uint64)
        self._generation: U64 = self._column(3, np.uint64)
        self._nvme: U64 = self._column(4, np.uint64)
        self._version: NDArray[np.uint32] = self._column(5, np.uint32)
        self._state = np.frombuffer(self.memfd.buffer, np.uint32, 1, STATE_OFFSET)
        self._bucket_tags: U64 = self._tag.reshape(-1, BUCKET_ROWS)
        self.ids: NDArray[np.int32] = np.full(self.geometry.rows, -1, np.int32)
        self._bucket_ids: NDArray[np.int32] = self.ids.reshape(-1, BUCKET_ROWS)

    def _column(self, number: int, kind: type[Word]) -> NDArray[Word]:
        assert COLUMNS[number][1] is kind
        offset = self.geometry.offsets[number]
        return np.frombuffer(self.memfd.buffer, kind, self.geometry.rows, offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the table, the daemon's own column included."""
        return self.geometry.nbytes + self.ids.nbytes

    def room(self, load_max: float) -> int:
        """How many more rows may be inserted before the load is above `load_max` (tombstones
        count)."""
        return int(self.geometry.rows * load_max) - self.live_rows - self.removed_rows

    def set_state(self, state: int) -> None:
        """Publishes one of `layout.STATE_*`."""
        self._state[0] = state

    def find(self, tags: U64, checks: U64) -> tuple[I64, NDArray[np.bool_] | None]:
        """Rows of these fingerprints.

        Returns:
            rows, -1 where the tag is absent; and where a tag is present with another check (a
            collision, whose row is given too), None = all tags are absent.
        """
        buckets = self.geometry.buckets
        bucket = home_buckets(tags, buckets)
        rows, more = self._probe(tags, bucket)
        pending = np.flatnonzero(more)
        for step in range(1, PROBED_BUCKETS_MAX):
            if not len(pending):
                break
            found, more = self._probe(tags[pending], (bucket[pending] + step) % buckets)
            rows[pending] = found
            pending = pending[more]
        if rows.max(initial=-1) < 0:
            return rows, None
        collides = self._check[rows] != checks
        collides &= rows >= 0
        return rows, collides

    def _probe(self, tags: U64, bucket: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Rows in just these buckets (-1: not here), and where the search must go on in the next
        one."""
        entries = self._bucket_tags[bucket]
        hit = (entries == tags[:, None]).view(np.uint64).ravel()
        rows = ((hit * _LANE_OF_BYTE) >> _U56).view(np.int64)
        rows += bucket * BUCKET_ROWS
        absent = hit == _ZERO
        rows[absent] = -1
        if absent.any():
            absent &= (entries == _EMPTY).view(np.uint64).ravel() == _ZERO
        return rows, absent

    def insert(
        self,
        tags: U64,
        checks: U64,
        places: Places,
        ids: NDArray[np.int32],
    ) -> I64:
        """Adds rows. The tags must be absent and differ from each other.

        Raises:
            TableFullError: Nothing was added, and nothing of it was ever visible.
        """
        bucket = home_buckets(tags, self.geometry.buckets)
        rows = self._place_apart(bucket)
        if rows is not None:
            self._write(rows, tags, checks, places)
            self.ids[rows] = ids
            return rows
        rows = np.full(len(tags), -1, np.int64)
        pending = np.arange(len(tags))
        for _ in range(min(PROBED_BUCKETS_MAX, self.geometry.buckets)):
            placed, at = self._place(pending, bucket)
            if len(placed):
                rows[placed] = at
                # Takes the rows, where clients do not see it: they see all of a batch or nothing.
                self.ids[at] = ids[placed]
                pending = np.setdiff1d(pending, placed, assume_unique=True)
            if not len(pending):
                self._write(rows, tags, checks, places)
                return rows
            bucket[pending] = (bucket[pending] + 1) % self.geometry.buckets
        self.ids[rows[rows >= 0]] = -1
        msg = f"index table with {self.geometry.rows} rows, {self.live_rows} of them used"
        raise TableFullError(msg)

    def _place_apart(self, bucket: I64) -> I64 | None:
        """A row in each of these buckets, None unless they differ and all have one free.

        Nearly every batch is so: a quarter of the numpy calls of the general way.
        """
        ordered = np.sort(bucket)
        if (ordered[1:] == ordered[:-1]).any():
            return None
        free = (self._bucket_tags[bucket] <= _REMOVED).view(np.uint64).ravel()
        if not free.all():
            return None
        lowest = free & (~free + _ONE)
        lanes = ((lowest * _LANE_OF_BYTE) >> _U56).view(np.int64)
        return bucket * BUCKET_ROWS + lanes

    def _place(self, pending: I64, bucket: I64) -> tuple[I64, I64]:
        """Of the pending entries those that fit their bucket, and the rows that they get."""
        pending = pending[np.argsort(bucket[pending], kind="stable")]
        wanted = bucket[pending]
        position = np.arange(len(pending))
        starts = np.ones(len(pending), bool)
        starts[1:] = wanted[1:] != wanted[:-1]
        rank = position - np.maximum.accumulate(np.where(starts, position, 0))
        free_so_far = (self._bucket_ids[wanted] < 0).cumsum(axis=1)
        fits = rank < free_so_far[:, -1]
        lanes = (free_so_far[fits] == (rank[fits] + 1)[:, None]).argmax(axis=1)
        return pending[fits], wanted[fits] * BUCKET_ROWS + lanes

    def _write(self, rows: I64, tags: U64, checks: U64, places: Places) -> None:
        """Fills free rows in the order that readers rely on: version odd, content, tag, version
        even."""
        self.removed_rows -= int(np.count_nonzero(self._tag[rows] == _REMOVED))
        self.live_rows += len(rows)
        self._version[rows] += np.uint32(1)
        self._check[rows] = checks
        self._put(rows, places)
        self._tag[rows] = tags
        self._version[rows] += np.uint32(1)

    def move(self, rows: I64, places: Places) -> None:
        """Says where the blocks of live rows, which differ from each other, are from now on."""
        self._version[rows] += np.uint32(1)
        self._put(rows, places)
        self._version[rows] += np.uint32(1)

    def _put(self, rows: I64, places: Places) -> None:
        self._address[rows] = places.addresses
        self._generation[rows] = places.generations
        self._nvme[rows] = places.nvme

    def remove(self, rows: I64) -> None:
        """Takes rows out. They must be live and differ from each other."""
        if not len(rows):
            return
        self._version[rows] += np.uint32(1)
        self._tag[rows] = _REMOVED
        self._address[rows] = 0
        self._generation[rows] = 0
        self._nvme[rows] = 0
        self.ids[rows] = -1
        self._version[rows] += np.uint32(1)
        self.live_rows -= len(rows)
        self.removed_rows += len(rows)
        self._clear_tombstones(np.unique(rows // BUCKET_ROWS))

    def _clear_tombstones(self, buckets: I64) -> None:
        """Where a bucket has an empty row no probe goes past it, so its tombstones can be empty as
        well."""
        entries = self._bucket_tags[buckets]
        open_buckets = (entries == _EMPTY).any(axis=1)
        entries = entries[open_buckets]
        dead = entries == _REMOVED
        if dead.any():
            entries[dead] = _EMPTY
            # Only tombstones change in value, so readers of the other seven rows see what they saw
            # before.
            self._bucket_tags[buckets[open_buckets]] = entries
            self.removed_rows -= int(np.count_nonzero(dead))

    def address_of(self, rows: I64) -> U64:
        """Addresses in ram, 0 where a row has none."""
        return self._address[rows]

    def tag_of(self, rows: I64) -> U64:
        """Tags of live rows."""
        return self._tag[rows]

    def generation_of(self, rows: I64) -> U64:
        """Generations of these rows' addresses."""
        return self._generation[rows]

    def nvme_of(self, rows: I64) -> U64:
        """Locations on nvme, 0 where a row has none."""
        return self._nvme[rows]

    def version_of(self, row: int) -> int:
        """Version of one row; even while it does not change."""
        return int(self._version[row])

    def close(self) -> None:
        """Gives the memory back; clients that still map the table keep it alive for themselves."""
        del self._tag, self._check, self._address, self._generation, self._nvme, self._version
        del self._state, self._bucket_tags
        self.memfd.close()

    def check(self) -> None:
        """Audits the table.

        Raises:
            AssertionError: A count is off, a row's version is odd, or a live row cannot be found by
                its tag.
        """
        self.check_counts()
        rows = np.flatnonzero(self._tag > _REMOVED)
        found, collides = self.find(self._tag[rows], self._check[rows])
        assert collides is None or not collides.any(), "two rows of one tag"
        assert (found == rows).all(), "a live row is out of reach"

    def check_counts(self) -> None:
        """The part of `check` that looks nothing up.

        Raises:
            AssertionError: See there.
        """
        live = self._tag > _REMOVED
        assert int(np.count_nonzero(live)) == self.live_rows, "live rows"
        assert int(np.count_nonzero(self._tag == _REMOVED)) == self.removed_rows, "removed rows"
        assert not (self._version & np.uint32(1)).any(), "a version is odd at rest"
        assert ((self.ids >= 0) == live).all(), "ids of live rows, and of no others"

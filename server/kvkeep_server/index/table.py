"""The daemon's half of the shared index: one table in a memfd, batches in numpy.

Open addressing in buckets of eight rows, so that the tags of a bucket fill one cache line and a
look-up mostly touches one. Each bucket counts the rows that found no place in it and lie further
on: where none passed, a search ends. So there are no tombstones, and a table in which rows come and
go at a high load stays as it is. Only one thread writes at a time (the event loop, or a rebuild
that it waits for); clients read at any time, guarded by the row's version.
"""

import copy
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.memfd import Memfd, create_sealed
from kvkeep_server.index.layout import (
    BUCKET_ROWS,
    COLUMNS,
    ON_NVME,
    PROBED_BUCKETS_MAX,
    STATE_OFFSET,
    TAG_EMPTY,
    Geometry,
    Multipliers,
    encode_header,
    home_buckets,
    probe_steps,
)

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

Word = TypeVar("Word", np.uint16, np.uint32, np.uint64)

# Eight bools of a bucket read as one u64 hold a single 1 in byte `lane`; times this, shifted by 56,
# gives `lane`.
_LANE_OF_BYTE = np.uint64(0x0001020304050607)
_U56 = np.uint64(56)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_NOWHERE = np.empty(0, np.int64)
_ONE_MORE = np.uint16(1)
_EMPTY = np.uint64(TAG_EMPTY)
_ADDRESS = ~ON_NVME


class TableFullError(Exception):
    """A row finds no place within `PROBED_BUCKETS_MAX` buckets of its home: rebuild with more
    rows."""


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
        self._places: U64 = self._column(2, np.uint64)
        self._version: NDArray[np.uint32] = self._column(3, np.uint32)
        self._passed: NDArray[np.uint16] = self._column(4, np.uint16)
        self._state = np.frombuffer(self.memfd.buffer, np.uint32, 1, STATE_OFFSET)
        self._bucket_tags: U64 = self._tag.reshape(-1, BUCKET_ROWS)
        self.ids: NDArray[np.int32] = np.full(self.geometry.rows, -1, np.int32)
        self._bucket_ids: NDArray[np.int32] = self.ids.reshape(-1, BUCKET_ROWS)

    def _column(self, number: int, kind: type[Word]) -> NDArray[Word]:
        assert COLUMNS[number][1] is kind
        count = self.geometry.rows // COLUMNS[number][2]
        return np.frombuffer(self.memfd.buffer, kind, count, self.geometry.offsets[number])

    @property
    def nbytes(self) -> int:
        """Bytes of the table, the daemon's own column included."""
        return self.geometry.nbytes + self.ids.nbytes

    def room(self, load_max: float) -> int:
        """How many more rows may be inserted before the load is above `load_max`."""
        return int(self.geometry.rows * load_max) - self.live_rows

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
        bucket, steps = bucket[pending], probe_steps(tags[pending])
        for _ in range(1, PROBED_BUCKETS_MAX):
            if not len(pending):
                break
            bucket = (bucket + steps) % buckets
            found, more = self._probe(tags[pending], bucket)
            rows[pending] = found
            pending, bucket, steps = pending[more], bucket[more], steps[more]
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
            absent &= self._passed[bucket] != 0
        return rows, absent

    def insert(
        self,
        tags: U64,
        checks: U64,
        places: U64,
        ids: NDArray[np.int32],
    ) -> I64:
        """Adds rows. The tags must be absent and differ from each other.

        Args:
            tags: Shape (n,).
            checks: Shape (n,).
            places: As `layout.places_of` makes them, shape (n,).
            ids: Shape (n,).

        Raises:
            TableFullError: Nothing was added, and nothing of it was ever visible.
        """
        rows, passed = self._place(home_buckets(tags, self.geometry.buckets), tags, ids)
        if len(passed):
            # Before the rows: who sees one of them must get to it.
            np.add.at(self._passed, passed, _ONE_MORE)
        self._write(rows, tags, checks, places)
        return rows

    def _place(self, bucket: I64, tags: U64, ids: NDArray[np.int32]) -> tuple[I64, I64]:
        """Takes a row for each entry, from these buckets on; the rows, and the buckets passed.

        `ids` takes rows where clients do not see it: they see all of a batch or nothing.

        Raises:
            TableFullError: No row was taken.
        """
        rows, won, full = self._claim(bucket, ids)
        pending, passed, tries_max = (
            np.flatnonzero(~won),
            [_NOWHERE],
            min(PROBED_BUCKETS_MAX, self.geometry.buckets),
        )
        bucket, full, steps = bucket[pending], full[pending], probe_steps(tags[pending])
        tries = np.ones(len(pending), np.int64)
        while len(pending):
            passed.append(bucket[full])
            bucket[full] = (bucket[full] + steps[full]) % self.geometry.buckets
            tries += full
            if tries.max() > tries_max:
                self.ids[rows[self.ids[rows] == ids]] = -1
                used = f"{self.live_rows} of them used"
                raise TableFullError(f"index table with {self.geometry.rows} rows, {used}")
            rows[pending], won, full = self._claim(bucket, ids[pending])
            left = ~won
            pending, bucket, steps = pending[left], bucket[left], steps[left]
            tries, full = tries[left], full[left]
        return rows, np.concatenate(passed)

    def _claim(
        self, bucket: I64, ids: NDArray[np.int32]
    ) -> tuple[I64, NDArray[np.bool_], NDArray[np.bool_]]:
        """Takes the first free row of each bucket. The rows; which entries got theirs, of several
        with one bucket the last; and which buckets have none."""
        free = (self._bucket_ids[bucket] < 0).view(np.uint64).ravel()
        lowest = free & (~free + _ONE)
        rows: I64 = ((lowest * _LANE_OF_BYTE) >> _U56).view(np.int64)
        rows += bucket * BUCKET_ROWS
        full = free == _ZERO
        if full.any():
            takes = ~full
            self.ids[rows[takes]] = ids[takes]
        else:
            self.ids[rows] = ids
        # Where nothing was free, another block's id stands.
        return rows, self.ids[rows] == ids, full

    def _write(self, rows: I64, tags: U64, checks: U64, places: U64) -> None:
        """Fills free rows in the order that readers rely on: version odd, content, tag, version
        even."""
        self.live_rows += len(rows)
        self._version[rows] += np.uint32(1)
        self._check[rows] = checks
        self._places[rows] = places
        self._tag[rows] = tags
        self._version[rows] += np.uint32(1)

    def move(self, rows: I64, places: U64) -> None:
        """Says where the blocks of live rows, which differ from each other, are from now on."""
        self._version[rows] += np.uint32(1)
        self._places[rows] = places
        self._version[rows] += np.uint32(1)

    def remove(self, rows: I64) -> None:
        """Takes rows out. They must be live and differ from each other."""
        if not len(rows):
            return
        passing = self._passing(rows)
        self._version[rows] += np.uint32(1)
        self._tag[rows] = _EMPTY
        self._places[rows] = 0
        self._version[rows] += np.uint32(1)
        self.ids[rows] = -1
        self.live_rows -= len(rows)
        np.subtract.at(self._passed, passing, _ONE_MORE)

    def _passing(self, rows: I64) -> I64:
        """The buckets that these live rows ran over on the way from home, each as often as that."""
        tags, at = self._tag[rows], rows // BUCKET_ROWS
        assert (tags != _EMPTY).all(), "a row that is not live leads nowhere"
        bucket = home_buckets(tags, self.geometry.buckets)
        away = np.flatnonzero(bucket != at)
        bucket, at, steps = bucket[away], at[away], probe_steps(tags[away])
        passing = [np.empty(0, np.int64)]
        while len(at):
            passing.append(bucket)
            bucket = (bucket + steps) % self.geometry.buckets
            further = bucket != at
            bucket, at, steps = bucket[further], at[further], steps[further]
        return np.concatenate(passing)

    def address_of(self, rows: I64 | NDArray[np.int32]) -> U64:
        """Addresses in ram, 0 where a row has none."""
        addresses: U64 = self._places[rows] & _ADDRESS
        return addresses

    def on_nvme(self, rows: I64) -> NDArray[np.bool_]:
        """Which rows say that nvme has a record."""
        there: NDArray[np.bool_] = self._places[rows] >= ON_NVME
        return there

    def places(self, rows: I64) -> U64:
        """What `layout.places_of` made of each row's block."""
        return self._places[rows]

    def tag_of(self, rows: I64) -> U64:
        """Tags of live rows."""
        return self._tag[rows]

    def version_of(self, row: int) -> int:
        """Version of one row; even while it does not change."""
        return int(self._version[row])

    def blank(self) -> U64:
        """Room for a `snapshot`, touched, so that filling it takes no page faults. Any thread."""
        return np.ones(self.geometry.rows, np.uint64)

    def snapshot(self, room: NDArray[np.generic]) -> "IndexTable":
        """A twin whose `address_of` goes on telling what holds now. `room` is that of `blank`, of
        this table or of one before."""
        if len(room) != self.geometry.rows:
            room = self.blank()
        np.copyto(room, self._places)
        twin = copy.copy(self)
        twin.__dict__["_places"] = room
        return twin

    def close(self) -> None:
        """Gives the memory back; clients that still map the table keep it alive for themselves."""
        del self._tag, self._check, self._places, self._version, self._passed
        del self._state, self._bucket_tags
        self.memfd.close()

    def check(self) -> None:
        """Audits the table.

        Raises:
            AssertionError: A count is off, a row's version is odd, or a live row cannot be found by
                its tag.
        """
        self.check_counts()
        rows = np.flatnonzero(self._tag)
        found, collides = self.find(self._tag[rows], self._check[rows])
        assert collides is None or not collides.any(), "two rows of one tag"
        assert (found == rows).all(), "a live row is out of reach"
        passed = np.bincount(self._passing(rows), minlength=len(self._passed))
        assert (passed == self._passed).all(), "rows that passed a bucket"

    def check_counts(self) -> None:
        """The part of `check` that looks nothing up.

        Raises:
            AssertionError: See there.
        """
        live = self._tag != _EMPTY
        assert int(np.count_nonzero(live)) == self.live_rows, "live rows"
        assert not (self._version & np.uint32(1)).any(), "a version is odd at rest"
        assert ((self.ids >= 0) == live).all(), "ids of live rows, and of no others"

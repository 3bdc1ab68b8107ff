"""Look-ups without a call: the reader's half of the index layout.

The layout is proto/kvkeep/v1/shared_memory.md, section 4.

Everything here runs inside an engine's process, beside busy Python threads. numpy gives the GIL up
in calls on more than 500 elements (and in `take`, `argmin`, `argmax` and `compress` on fewer), and
then waits up to the switch interval of 5 ms to get it back. So keys are looked up in pieces of
`PIECE_KEYS`, no call sees more than 500 elements, and those four are not used: 1,000 keys beside a
busy thread took 57 ms in one piece and take 0.4 ms so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from kvkeep.shared_memory import NO_ROW, PAGE_NBYTES, RegionError, check_magic

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE_KEYS: Final = 480
BUCKET_ROWS: Final = 8
PROBED_BUCKETS_MAX: Final = 64
STATE_LIVE: Final = 1

_ELEMENTS_MAX: Final = 496  # of one numpy call that keeps the GIL, rounded down to whole columns
_ROW_READS_MAX: Final = 3
_STEP_MASK: Final = 15
_SCRATCHES_KEPT: Final = 8
_MASK: Final = 2**64 - 1


def _constant(value: int) -> NDArray[np.uint64]:
    """A 0-d array: as an operand it costs half of what a numpy scalar does."""
    return np.array(value, dtype=np.uint64)


_SHIFT_29 = _constant(29)
_SHIFT_32 = _constant(32)
_SHIFT_56 = _constant(56)
_LOWEST_TAG = _constant(1)
_ZERO = _constant(0)
_SEVEN = _constant(7)
_ODD = np.array(1, dtype=np.uint32)
_ODD_GENERATION = _constant(1)
# Of a row's place: whether nvme has the block, and its address in ram.
_ON_NVME = _constant(1 << 63)
_ADDRESS = _constant(2**63 - 1)
# A found entry leaves one byte of 1 among a bucket's eight. Times this, the top byte is the place
# of that byte.
_POSITION = _constant(sum(k << (56 - 8 * k) for k in range(8)))
_BUCKET_ROWS = _constant(BUCKET_ROWS)


class Seed(NamedTuple):
    """What the fingerprints of one namespace, group and key length share, in one table."""

    chain: NDArray[np.uint64]
    total: NDArray[np.uint64]


class Found(NamedTuple):
    """The leading keys that have a row."""

    blocks: int
    last_row: int  # NO_ROW when blocks is 0
    last_version: int


NOTHING: Final = Found(0, NO_ROW, 0)


Places: TypeAlias = "list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]"
"""Addresses and generations of successive keys, in pieces that numpy handles under the GIL."""


GenerationsOf: TypeAlias = "Callable[[NDArray[np.uint64]], NDArray[np.uint64]]"
"""Generations of the slots at these addresses now; odd ones where nothing is mapped."""


class Rows(NamedTuple):
    """Where the leading keys lie in ram."""

    found: Found
    places: Places


class Words:
    """Keys of one length as u64 words; `piece(a, b)` has shape (b - a, ceil(key_nbytes / 8))."""

    def __init__(self, packed: bytes | bytearray | memoryview, key_nbytes: int) -> None:
        """`packed` is the concatenation of the keys; the caller has checked its length."""
        self.packed = packed
        self.count = len(packed) // key_nbytes
        self._width = -(-key_nbytes // 8)
        self._whole: NDArray[np.uint64] | None = None
        if key_nbytes % 8 == 0:
            self._whole = np.frombuffer(packed, dtype=np.uint64).reshape(self.count, self._width)
        else:
            self._padded = np.dtype(f"S{8 * self._width}")
            self._odd = np.frombuffer(packed, dtype=np.dtype(f"S{key_nbytes}"))

    def piece(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Words of the keys [start, stop)."""
        if self._whole is not None:
            return self._whole[start:stop]
        # Casting to the longer string fills up with zero bytes.
        padded = self._odd[start:stop].astype(self._padded)
        return padded.view(np.uint64).reshape(-1, self._width)


class _Scratch:
    """Buffers of one look-up in progress, cut to `n` keys. Never shared between threads."""

    def __init__(self) -> None:
        self._full = [np.empty(PIECE_KEYS, dtype=np.uint64) for _ in range(5)]
        self._flags = np.empty((PIECE_KEYS, BUCKET_ROWS), dtype=np.bool_)
        self._missing = np.empty(PIECE_KEYS, dtype=np.bool_)
        self.n = -1

    def cut(self, n: int) -> None:
        """Set the views for `n` keys; free when the last use had as many."""
        if n == self.n:
            return
        self.n = n
        self.tag, self.check, self.temporary, self.home, self.slot = [a[:n] for a in self._full]
        self.home_index = self.home.view(np.int64)
        self.row = self.slot.view(np.int64)
        flags = self._flags[:n]
        self.hit = flags.reshape(-1).view(np.uint64)
        self.missing = self._missing[:n]
        self.step = max(1, min(BUCKET_ROWS, _ELEMENTS_MAX // max(n, 1)))
        columns = flags.T
        self.flag_columns = [columns[j : j + self.step] for j in range(0, BUCKET_ROWS, self.step)]


class IndexTable:
    """One mapped index table. Any thread may read."""

    _HEADER = struct.Struct("<8sIIQQQQQ5Q")

    def __init__(self, region: memoryview, *, table_id: int, server_epoch: int) -> None:
        """Errors: RegionError when the header contradicts the description or the file."""
        header = self._HEADER.unpack_from(region)
        check_magic("index table", header[0], b"KVKINDX1", header[1])
        epoch, found_id, buckets, rows, nbytes = header[3:8]
        if (found_id, epoch, nbytes) != (table_id, server_epoch, len(region)):
            raise RegionError(f"index table {table_id}: its header describes another table")
        if not 0 < buckets < 2**31 or not buckets & 1 or rows != buckets * BUCKET_ROWS:
            raise RegionError(f"index table {table_id}: {buckets} buckets, {rows} rows")
        self.table_id = table_id
        self.rows: int = rows
        self._buckets: int = buckets
        self._buckets_constant = _constant(buckets)
        self._region = region
        self._state = region[12:16].cast("I")
        self._map_columns(header[8:13])
        multipliers = struct.unpack_from("<32Q", region, 128)
        self._a, self._b = multipliers[:16], multipliers[16:]
        self._a_constants = [_constant(a) for a in self._a]
        self._b_constants = [_constant(b) for b in self._b]
        self._scratches: list[_Scratch] = []

    def _map_columns(self, offsets: tuple[int, ...]) -> None:
        views = []
        # Bytes a bucket.
        for offset, width in zip(offsets, (64, 64, 64, 32, 2), strict=True):
            end = offset + self._buckets * width
            if offset < PAGE_NBYTES or offset % PAGE_NBYTES or end > len(self._region):
                raise RegionError(f"index table {self.table_id}: column at {offset} does not fit")
            views.append(self._region[offset:end])
        self._tag_view = views[0].cast("Q")
        self._buckets_of_tags = np.frombuffer(views[0], dtype="V64")
        self._check = np.frombuffer(views[1], dtype=np.uint64)
        self._place = np.frombuffer(views[2], dtype=np.uint64)
        self._version = np.frombuffer(views[3], dtype=np.uint32)
        self._version_view = views[3].cast("I")
        self._passed_view = views[4].cast("H")
        self._passed = np.frombuffer(views[4], dtype=np.uint16)

    @property
    def live(self) -> bool:
        """Whether this table answers; otherwise every look-up in it is a miss."""
        return self._state[0] == STATE_LIVE

    def seed(self, namespace_id: bytes, group: int, key_nbytes: int) -> Seed:
        """The constant part of the fingerprints; `namespace_id` has 16 bytes."""
        a, b = self._a, self._b
        n0, n1 = struct.unpack("<2Q", namespace_id)
        c = (group << 32) + key_nbytes
        chain = a[15]
        for x in (n0, n1, c):
            chain = (chain ^ x) * a[14] & _MASK
            chain ^= chain >> 32
        total = b[15] + n0 * b[14] + n1 * b[13] + c * b[12] & _MASK
        return Seed(_constant(chain), _constant(total))

    def find(self, seed: Seed, words: Words, limit: int) -> Found:
        """How many of the first `limit` keys have rows, up to the first that has none.

        Tag and check suffice for that, so the row version is read for the last row only: the
        daemon writes the tag of a new row last, and a row that changed hands between the two reads
        has another check.
        """
        return self._search(seed, words, limit, None)

    def find_at(self, seed: Seed, words: Words, position: int) -> Found:
        """The row of one key; blocks is 1, or 0 when there is none."""
        if not self.live:
            return NOTHING
        scratch = self._borrow()
        there = self._find_piece(seed, words.piece(position, position + 1), scratch)
        row = int(scratch.row[0])
        self._scratches.append(scratch)
        return Found(1, row, self._version_view[row]) if there else NOTHING

    def present(self, seed: Seed, words: Words, limit: int) -> bytes:
        """Which of the first `limit` keys have rows: a byte each, 1 = it has.

        As with `find`, tag and check suffice for that.
        """
        if not self.live:
            return bytes(limit)
        scratch = self._borrow()
        pieces = [
            self._present_piece(seed, words.piece(at, min(at + PIECE_KEYS, limit)), scratch)
            for at in range(0, limit, PIECE_KEYS)
        ]
        self._scratches.append(scratch)
        return b"".join(pieces)

    def _present_piece(self, seed: Seed, words: NDArray[np.uint64], scratch: _Scratch) -> bytes:
        self._probe_home(seed, words, scratch)
        absent = bytearray(scratch.missing.tobytes())
        # Most are absent for good: only behind a bucket that was passed there can be more.
        scratch.missing &= self._passed[scratch.home_index] != 0
        going_on = scratch.missing.tobytes()
        position = going_on.find(1)
        while position >= 0:
            row = self._probe_on(int(scratch.tag[position]), int(scratch.home[position]))
            if row >= 0:
                scratch.row[position] = row
                absent[position] = 0
            position = going_on.find(1, position + 1)
        # Of those that are absent any row will do.
        agree = (self._check[scratch.row] == scratch.check).tobytes()
        there = int.from_bytes(agree, "little") & ~int.from_bytes(absent, "little")
        return there.to_bytes(len(words), "little")

    def find_on_nvme(self, seed: Seed, words: Words, limit: int) -> int:
        """How many of the first `limit` keys lie on nvme, up to the first that does not.

        A row that changes hands meanwhile can count though it does not lie there.
        """
        on_nvme = 0
        while on_nvme < limit:
            stop = min(on_nvme + PIECE_KEYS, limit)
            scratch = self._borrow()
            found = self._find_piece(seed, words.piece(on_nvme, stop), scratch) if self.live else 0
            there = (
                (self._place[scratch.row[:found]] >= _ON_NVME).tobytes().find(0) if found else -1
            )
            self._scratches.append(scratch)
            count = found if there < 0 else there
            on_nvme += count
            if on_nvme < stop:
                break
        return on_nvme

    def find_rows(
        self, seed: Seed, words: Words, limit: int, generations_of: GenerationsOf
    ) -> Rows:
        """As `find`, with addresses and generations, up to the first key that is not in ram."""
        places: Places = []

        def read(scratch: _Scratch, found: int) -> int:
            return self._read_rows(scratch, found, places, generations_of)

        return Rows(self._search(seed, words, limit, read), places)

    def _search(
        self,
        seed: Seed,
        words: Words,
        limit: int,
        read: Callable[[_Scratch, int], int] | None,
    ) -> Found:
        """`read` tells how many of the leading keys found in a piece count, None = all."""
        if not self.live:
            return NOTHING
        scratch = self._borrow()
        blocks, last = 0, NO_ROW
        for start in range(0, limit, PIECE_KEYS):
            stop = min(start + PIECE_KEYS, limit)
            found = self._find_piece(seed, words.piece(start, stop), scratch)
            if read is not None:
                found = read(scratch, found)
            if found:
                blocks, last = start + found, int(scratch.row[found - 1])
            if start + found < stop:
                break
        self._scratches.append(scratch)
        return Found(blocks, last, self._version_view[last]) if blocks else NOTHING

    def _borrow(self) -> _Scratch:
        # list.pop and list.append are atomic under the GIL, so no lock is needed.
        try:
            return self._scratches.pop()
        except IndexError:
            return _Scratch()

    def _fingerprint(self, seed: Seed, words: NDArray[np.uint64], scratch: _Scratch) -> None:
        """Fill scratch.tag and scratch.check."""
        tag, check, temporary = scratch.tag, scratch.check, scratch.temporary
        multiply, xor, shift, add = np.multiply, np.bitwise_xor, np.right_shift, np.add
        a, b = self._a_constants, self._b_constants
        before, total = seed
        for i in range(words.shape[1]):
            word = words[:, i]
            xor(before, word, tag)
            multiply(tag, a[i], tag)
            shift(tag, _SHIFT_32, temporary)
            xor(tag, temporary, tag)
            multiply(word, b[i], temporary)
            add(total, temporary, check)
            before, total = tag, check
        shift(check, _SHIFT_29, temporary)
        xor(check, temporary, check)
        multiply(check, b[11], check)
        shift(check, _SHIFT_32, temporary)
        xor(check, temporary, check)
        np.maximum(tag, _LOWEST_TAG, out=tag)

    def _find_piece(self, seed: Seed, words: NDArray[np.uint64], scratch: _Scratch) -> int:
        """Number of leading keys of the piece that have rows; those are left in scratch.row."""
        n = len(words)
        self._probe_home(seed, words, scratch)
        missing = scratch.missing.tobytes()
        position = missing.find(1)
        while position >= 0:
            row = self._probe_on(int(scratch.tag[position]), int(scratch.home[position]))
            if row < 0:
                n = position
                break
            scratch.row[position] = row
            position = missing.find(1, position + 1)
        if n == 0:
            return 0
        agree = self._check[scratch.row[:n]] == scratch.check[:n]
        first = agree.tobytes().find(0)
        return n if first < 0 else first

    def _probe_home(self, seed: Seed, words: NDArray[np.uint64], scratch: _Scratch) -> None:
        """Fill tag, check, home, row and missing."""
        n = len(words)
        scratch.cut(n)
        self._fingerprint(seed, words, scratch)
        home = scratch.home
        np.right_shift(scratch.tag, _SHIFT_32, home)
        np.multiply(home, self._buckets_constant, home)
        np.right_shift(home, _SHIFT_32, home)
        # A bucket's tags are one cache line; as one 64-byte element it is gathered in one call.
        lines = self._buckets_of_tags[scratch.home_index].view(np.uint64).reshape(n, BUCKET_ROWS).T
        self._compare(lines, scratch.tag, scratch)
        hit, slot = scratch.hit, scratch.slot
        np.equal(hit, _ZERO, scratch.missing)
        np.multiply(hit, _POSITION, slot)
        np.right_shift(slot, _SHIFT_56, slot)
        # A bucket that changed while it was gathered can show its tag twice.
        np.bitwise_and(slot, _SEVEN, slot)
        np.multiply(home, _BUCKET_ROWS, scratch.temporary)
        np.add(slot, scratch.temporary, slot)

    @staticmethod
    def _compare(lines: NDArray[np.uint64], value: NDArray[np.uint64], scratch: _Scratch) -> None:
        """Flag the entries of each bucket that equal `value`: one byte each in scratch.hit."""
        step = scratch.step
        for j, flags in enumerate(scratch.flag_columns):
            np.equal(lines[j * step : j * step + step], value, flags)

    def _probe_on(self, tag: int, bucket: int) -> int:
        """Row of a tag that its home bucket does not show, or -1."""
        tags, passed, step = self._tag_view, self._passed_view, 1 << (tag & _STEP_MASK)
        for _ in range(min(PROBED_BUCKETS_MAX, self._buckets) - 1):
            if not passed[bucket]:
                break
            bucket = (bucket + step) % self._buckets
            first = bucket * BUCKET_ROWS
            line = tags[first : first + BUCKET_ROWS].tolist()
            if tag in line:
                return first + line.index(tag)
        return -1

    def _read_rows(
        self, scratch: _Scratch, n: int, places: Places, generations_of: GenerationsOf
    ) -> int:
        """Append where the leading rows lie that are in ram and not changing; their number.

        A generation is the block's because the row names its slot before and after the generation
        is read: the daemon takes the slot out of the row before it changes the generation.
        """
        row, check = scratch.row[:n], scratch.check[:n]
        for _ in range(_ROW_READS_MAX):
            before = self._version[row]
            good = self._check[row] == check
            address = self._place[row] & _ADDRESS
            generation = generations_of(address)
            steady = self._version[row] == before
            steady &= before & _ODD == 0
            if steady.tobytes().find(0) < 0:
                break
        # A table that another one took over from is not written to any more.
        if not self.live:
            return 0
        good &= steady
        good &= address != _ZERO
        good &= generation & _ODD_GENERATION == _ZERO
        first = good.tobytes().find(0)
        count = n if first < 0 else first
        if count:
            places.append((address[:count], generation[:count]))
        return count

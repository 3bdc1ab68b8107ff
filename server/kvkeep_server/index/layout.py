"""The index table to the byte: header, columns, fingerprint. No I/O.

Written down for clients in `proto/kvkeep/v1/shared_memory.md`, section 4; both trees are held to it
by `proto/kvkeep/v1/shared_memory_vectors.json`. The fingerprint is a seeded multiply-mix instead of
a real hash, because a hash call for each key costs 80 to 500 ns and this costs 8; keys are hashes
already, the seed keeps outsiders from clustering probes, and the full key is compared wherever
bytes are leased or stored.
"""

import random
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LAYOUT_VERSION = 2
MAGIC = b"KVKINDX1"
PAGE_NBYTES = 4096
BUCKET_ROWS = 8
PROBED_BUCKETS_MAX = 64

TAG_EMPTY = 0
TAG_FIRST = 1

STATE_LIVE = 1
STATE_MOVED = 2
STATE_STOPPED = 3
STATE_OFFSET = 12

# name, type, rows an entry
COLUMNS: tuple[tuple[str, type[np.uint64] | type[np.uint32] | type[np.uint16], int], ...] = (
    ("tag", np.uint64, 1),
    ("check", np.uint64, 1),
    ("place", np.uint64, 1),
    ("version", np.uint32, 1),
    ("passed", np.uint16, BUCKET_ROWS),
)
# magic, layout version, state, server epoch, table id, buckets, rows, file size, column offsets,
# padding, A, B
_HEADER = struct.Struct("<8sIIQQQQQ5Q32x16Q16Q")
assert _HEADER.size == 384

# What a row says of its block beside the fingerprint: the address in ram, 0 = not there, and this
# bit where nvme has a record.
ON_NVME = np.uint64(1 << 63)

_MASK = (1 << 64) - 1
_STEP_MASK = np.uint64(15)
_U32 = np.uint64(32)
_U29 = np.uint64(29)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one table.

    Attributes:
        buckets: Number of buckets of `BUCKET_ROWS` rows, odd, so that every way of probing comes to
            all of them.
        offsets: Byte offset of each column of `COLUMNS` in the file.
        nbytes: Size of the file.
    """

    buckets: int
    offsets: tuple[int, ...]
    nbytes: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.buckets * BUCKET_ROWS

    @classmethod
    def for_rows(cls, rows: int) -> "Geometry":
        """The smallest table of at least `rows` rows."""
        buckets = max(1, -(-rows // BUCKET_ROWS)) | 1
        offsets, at = [], PAGE_NBYTES
        for _, kind, rows_each in COLUMNS:
            offsets.append(at)
            nbytes = buckets * BUCKET_ROWS // rows_each * np.dtype(kind).itemsize
            at += -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        return cls(buckets, tuple(offsets), at)


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The table's seed: two rows of 16 odd u64."""

    a: tuple[int, ...]
    b: tuple[int, ...]

    @classmethod
    def draw(cls, source: random.Random) -> "Multipliers":
        """A fresh seed."""
        return cls(
            tuple(source.getrandbits(64) | 1 for _ in range(16)),
            tuple(source.getrandbits(64) | 1 for _ in range(16)),
        )

    def start(self, namespace_id: bytes, group: int, key_nbytes: int) -> tuple[int, int]:
        """(h, s) after namespace id (16 bytes), group and key length: where every key of that group
        begins."""
        n0, n1 = struct.unpack("<QQ", namespace_id)
        c = ((group << 32) + key_nbytes) & _MASK
        h = self.a[15]
        for x in (n0, n1, c):
            h = ((h ^ x) * self.a[14]) & _MASK
            h ^= h >> 32
        s = (self.b[15] + n0 * self.b[14] + n1 * self.b[13] + c * self.b[12]) & _MASK
        return h, s

    def fingerprints(
        self,
        words: NDArray[np.uint64],
        start_h: NDArray[np.uint64] | np.uint64,
        start_s: NDArray[np.uint64] | np.uint64,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Tags and checks of keys.

        Args:
            words: Shape (keys, words of a key).
            start_h: From `start`, one for all or one a key.
            start_s: The same.
        """
        h = np.empty(len(words), np.uint64)
        s = np.empty(len(words), np.uint64)
        t = np.empty(len(words), np.uint64)
        h[:] = start_h
        s[:] = start_s
        for i in range(words.shape[1]):
            word = words[:, i]
            h ^= word
            h *= np.uint64(self.a[i])
            np.right_shift(h, _U32, out=t)
            h ^= t
            np.multiply(word, np.uint64(self.b[i]), out=t)
            s += t
        np.right_shift(s, _U29, out=t)
        s ^= t
        s *= np.uint64(self.b[11])
        np.right_shift(s, _U32, out=t)
        s ^= t
        np.maximum(h, np.uint64(TAG_FIRST), out=h)
        return h, s


def places_of(addresses: NDArray[np.uint64], on_nvme: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """What rows say: addresses in ram (0 = not there), and which blocks have a record on nvme."""
    places: NDArray[np.uint64] = addresses | np.where(on_nvme, ON_NVME, np.uint64(0))
    return places


def home_buckets(tags: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    """Bucket in which the probing of each tag begins."""
    home = np.right_shift(tags, _U32)
    home *= np.uint64(buckets)
    home >>= _U32
    return home.view(np.int64)


def probe_steps(tags: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How far from one bucket to the next the probing of each tag goes."""
    steps: NDArray[np.int64] = np.left_shift(1, (tags & _STEP_MASK).view(np.int64))
    return steps


def encode_header(
    *,
    geometry: Geometry,
    multipliers: Multipliers,
    server_epoch: int,
    table_id: int,
    state: int = STATE_LIVE,
) -> bytes:
    """The first 384 bytes of a table's file."""
    return _HEADER.pack(
        MAGIC,
        LAYOUT_VERSION,
        state,
        server_epoch,
        table_id,
        geometry.buckets,
        geometry.rows,
        geometry.nbytes,
        *geometry.offsets,
        *multipliers.a,
        *multipliers.b,
    )

"""Regions that the daemon shares: mapped so that nothing it or a peer does can fault this process.

The layout is proto/kvkeep/v1/shared_memory.md. Every descriptor is checked (size, seals) before it
is mapped, and every header and offset before it is used; a region that does not fit is refused with
`RegionError` and never read.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.errors import KVKeepError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYOUT_VERSION: Final = 2
PAGE_NBYTES: Final = 4096
ELEMENT_NBYTES: Final = 512
NO_ROW: Final = 0xFFFFFFFF

_HUGE_PAGE_NBYTES: Final = 2 * 1024 * 1024
_MADV_DONTDUMP: Final = 16
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_SEALS: Final = {
    "SHRINK": fcntl.F_SEAL_SHRINK,
    "GROW": fcntl.F_SEAL_GROW,
    "SEAL": fcntl.F_SEAL_SEAL,
}
# Of what only the daemon writes. Not every Python's fcntl has a name for it.
_READ_ONLY_SEALS: Final = {"FUTURE_WRITE": 0x10}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class RegionError(KVKeepError):
    """A region from the daemon is not what its description or the layout says."""


def map_region(fd: int, nbytes: int, *, writable: bool = False) -> memoryview:
    """Map the memfd `fd` of exactly `nbytes`; the caller still owns `fd` and may close it.

    The map begins at a multiple of 2 MiB, so that huge pages of the file are mapped as such, is
    populated, and stays out of core dumps. It is unmapped when the last view of it is gone.

    Errors: RegionError (other size, a seal of the layout is missing, or mmap fails).
    """
    size = os.fstat(fd).st_size
    if size != nbytes or nbytes <= 0:
        raise RegionError(f"a region of {nbytes} bytes was announced, its file has {size}")
    _check_seals(fd, writable=writable)
    address = _map_aligned(fd, nbytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    _libc.madvise(address, nbytes, _MADV_DONTDUMP)
    owner = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: threads may still look into it, and the kernel unmaps anyway.
    weakref.finalize(owner, _libc.munmap, address, nbytes).atexit = False
    view = memoryview(owner).cast("B")
    return view if writable else view.toreadonly()


def _check_seals(fd: int, *, writable: bool) -> None:
    """The layout's seals must be among the file's: without them reading could fault or change."""
    found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    required = _SEALS if writable else {**_SEALS, **_READ_ONLY_SEALS}
    missing = [name for name, seal in required.items() if not found & seal]
    if missing:
        raise RegionError(f"a region lacks the seals {', '.join(missing)}: it is not the daemon's")


def _map_aligned(fd: int, nbytes: int, protection: int) -> int:
    reserved = nbytes + _HUGE_PAGE_NBYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _mmap(0, reserved, 0, flags, -1)
    address = -(-base // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        _mmap(address, nbytes, protection, flags, fd)
    except RegionError:
        _libc.munmap(base, reserved)
        raise
    end = address + -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    if address > base:
        _libc.munmap(base, address - base)
    _libc.munmap(end, base + reserved - end)
    return address


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped: int | None = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise RegionError(f"mmap of {nbytes} bytes failed: {os.strerror(code)}")
    return mapped


class Chunk:
    """One chunk of the pool, mapped read-only.

    `buffer` is the whole file as bytes; `generations[page]`, shape (pages,), is the generation of
    the slot that begins at `page`. Slots lie from byte `data_offset` on. `elements` is `buffer` in
    elements of 512 bytes.
    """

    _HEADER = struct.Struct("<8sIIQQQQ")

    def __init__(self, region: memoryview, *, chunk_id: int, server_epoch: int) -> None:
        """Errors: RegionError when the header contradicts the description or the file."""
        magic, version, found_id, epoch, nbytes, generations_at, data_at = self._HEADER.unpack_from(
            region
        )
        check_magic("chunk", magic, b"KVKCHNK1", version)
        pages = len(region) // PAGE_NBYTES
        if (found_id, epoch, nbytes) != (chunk_id, server_epoch, len(region)):
            raise RegionError(f"chunk {chunk_id}: its header describes another chunk")
        if (
            generations_at != PAGE_NBYTES
            or nbytes % PAGE_NBYTES
            or data_at % PAGE_NBYTES
            or not generations_at + 8 * pages <= data_at < nbytes
        ):
            raise RegionError(f"chunk {chunk_id}: offsets {generations_at}, {data_at} do not fit")
        self.chunk_id = chunk_id
        self.nbytes = len(region)
        self.buffer = region
        self.generations: NDArray[np.uint64] = np.frombuffer(
            region, dtype=np.uint64, count=pages, offset=generations_at
        )
        self.data_offset: int = data_at
        self.elements = np.frombuffer(region, dtype=f"V{ELEMENT_NBYTES}")
        self._last_page = np.array(pages - 1)

    def generations_at(self, pages: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Of slots, shape (n,); that of a page beyond the end is no slot's."""
        generations: NDArray[np.uint64] = self.generations[np.minimum(pages, self._last_page)]
        return generations


def check_magic(what: str, magic: bytes, expected: bytes, version: int) -> None:
    """Errors: RegionError for another kind of region or an unknown layout version."""
    if magic != expected:
        raise RegionError(f"{what}: begins with {magic!r}, expected {expected!r}")
    if version != LAYOUT_VERSION:
        raise RegionError(
            f"{what}: has layout version {version}; this client knows only {LAYOUT_VERSION}. "
            "Install a kvkeep client of the daemon's release"
        )


class TouchRing:
    """The session's reports of look-ups to the daemon. Any thread may write."""

    _RECORD = struct.Struct("<QIIIIIIQIBBBBQQ")

    def __init__(self, region: memoryview) -> None:
        """Errors: RegionError when the header does not fit the file."""
        magic, version, records = struct.unpack_from("<8sII", region)
        check_magic("touch ring", magic, b"KVKTUCH1", version)
        if (
            records < 1
            or records & (records - 1)
            or PAGE_NBYTES + records * self._RECORD.size > len(region)
        ):
            raise RegionError(f"touch ring: {records} records do not fit {len(region)} bytes")
        self._region = region
        self._head = region[64:72].cast("Q")
        self._mask = records - 1
        self._next = self._head[0]
        self._lock = threading.Lock()

    def append(self, *fields: int) -> None:
        """Write one record: the layout's fields between the two sequence numbers, in order.

        Overwrites the oldest record when the daemon does not keep up: it counts what it lost.
        """
        with self._lock:
            sequence = self._next + 1
            offset = PAGE_NBYTES + (self._next & self._mask) * 64
            self._RECORD.pack_into(self._region, offset, sequence, *fields, sequence)
            self._next = sequence
            self._head[0] = sequence

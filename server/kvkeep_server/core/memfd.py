"""Memory that the daemon shares: sealed memfds, mapped where huge pages can form.

A memfd has no name, so no peer can truncate it, nothing is left in /dev/shm after a SIGKILL, and no
mount bounds it (docker's 64 MiB /dev/shm does not matter). The seals are those of
`proto/kvkeep/v1/shared_memory.md`; `F_SEAL_EXEC` comes on top where the kernel knows it.

Maps are placed at a multiple of 2 MiB, which Python's `mmap` cannot: it keeps the kernel's choice,
and a shared map at another address never gets a huge page. So an `AddressRange` reserves addresses
with an ordinary Python `mmap` and memfds are mapped over it. The Python object still counts who
uses it: memory is unmapped when the last view is gone, never under a reader. Measured on 1 GiB:
`MADV_COLLAPSE` takes 0.25 s, a touch of each 4 KiB page 0.37 s; random writes of 57 KiB run at 14.0
against 10.9 GB/s afterwards.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 << 20

# Linux ABI numbers that Python 3.11 has no names for.
F_SEAL_FUTURE_WRITE = 0x10
_MFD_NOEXEC_SEAL = 0x8
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


class AddressRange:
    """Addresses of this process that memfds are mapped into, one behind the other.

    Costs no memory by itself; touching what nothing was mapped into kills the process (SIGSEGV),
    which is what a stray pointer deserves.

    Attributes:
        nbytes: Size of the range.
        view: The whole range, writable. Whoever holds a slice of it keeps the whole range mapped.
    """

    def __init__(self, region: mmap.mmap, start: int, nbytes: int) -> None:
        """Use `reserve`."""
        self.nbytes = nbytes
        self.view = memoryview(region)[start : start + nbytes]
        self._base = _address_of(region) + start
        self._next = 0

    @classmethod
    def reserve(cls, nbytes: int) -> "AddressRange":
        """Reserves a range that begins at a multiple of 2 MiB.

        Raises:
            OSError: the address space is exhausted (`ulimit -v`).
        """
        total = round_up(nbytes, PAGE_NBYTES) + HUGE_PAGE_NBYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        region = mmap.mmap(-1, total, flags=flags)
        address = _address_of(region)
        _check(_libc.mprotect(address, total, 0), "mprotect")
        return cls(region, round_up(address, HUGE_PAGE_NBYTES) - address, nbytes)

    def map(self, fd: int, nbytes: int) -> int:
        """Maps a file read-write at the next multiple of 2 MiB of the range and returns that
        offset.

        Raises:
            OSError: ENOMEM when the range is full, or what mmap says.
        """
        offset = round_up(self._next, HUGE_PAGE_NBYTES)
        if offset + nbytes > self.nbytes:
            raise OSError(
                errno.ENOMEM, f"{nbytes} bytes at {offset} exceed a range of {self.nbytes}"
            )
        self._map(offset, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        self._next = offset + nbytes
        self.advise(offset, nbytes, mmap.MADV_DONTDUMP)
        return offset

    def unmap(self, offset: int, nbytes: int) -> None:
        """Takes a map out of the range. Nobody may hold a view of it: a touch is SIGSEGV.

        Raises:
            OSError: what mmap says.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map(offset, nbytes, 0, flags, -1)

    def _map(self, offset: int, nbytes: int, prot: int, flags: int, fd: int) -> None:
        got = _libc.mmap(self._base + offset, nbytes, prot, flags | _MAP_FIXED, fd, 0)
        if got == _MAP_FAILED:
            _check(-1, "mmap")

    def advise(self, offset: int, nbytes: int, advice: int) -> None:
        """`madvise` of a part of the range. The GIL is free meanwhile.

        Raises:
            OSError: what madvise says.
        """
        _check(_libc.madvise(self._base + offset, nbytes, advice), "madvise")


@dataclass(slots=True)
class Memfd:
    """A sealed memfd and the daemon's writable map of it. Made by `create_sealed`.

    Attributes:
        fd: The daemon's descriptor, read-write, owned by this object.
        nbytes: Size of the file, a multiple of 4096.
        buffer: The whole file, writable.
        offset: Where `buffer` begins in its address range.
        huge: Its pages were collapsed into huge ones.
    """

    fd: int
    nbytes: int
    buffer: memoryview
    offset: int
    huge: bool
    _client_fd: int
    _range: AddressRange | None

    def client_fd(self) -> int:
        """A new descriptor to hand to a client: read-only where only the daemon writes.

        The caller closes it. Clients share its file offset, so they map it, or use pread.

        Raises:
            OSError: out of descriptors.
        """
        return os.dup(self._client_fd)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.fd < 0

    def collapse(self, start: int, nbytes: int) -> bool:
        """Makes huge pages of a part of the file, best effort; whether the kernel did.

        False when it is closed. Whoever uses the memory meanwhile is held up for no longer than one
        page takes, in this process and in others. Blocks, 0.25 to 3 s a GiB, by how fragmented the
        host's memory is: use a thread.
        """
        view, target = self.buffer, self._range  # the map stays while the kernel works on it
        if target is None or start >= len(view):
            return False
        return _collapse(target, self.offset + start, min(nbytes, len(view) - start))

    def discard(self) -> None:
        """Closes the descriptor and takes the map away: a touch of what is left of `buffer` is
        SIGSEGV, so nobody may hold a part of it. For a thread: the GIL is free while the kernel
        takes its 0.25 s a GiB (0.003 s in huge pages).
        """
        target = self._range
        if target is not None:
            target.unmap(self.offset, self.nbytes)
        self.close()

    def close(self) -> None:
        """Closes the descriptor and forgets the map, which goes with its last view. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._client_fd)
            self.fd = -1
            self.buffer = memoryview(b"")
            self._range = None


def create_sealed(
    name: str,
    nbytes: int,
    *,
    future_write_seal: bool,
    within: AddressRange | None = None,
    huge: bool = False,
    touch: bool = False,
) -> Memfd:
    """Makes a memfd of zero bytes: allocates, maps and seals it. Blocks for about 0.25 s a GiB.

    The memory is allocated before it is touched: a touch of what is not there would be SIGBUS, an
    allocation is an error that can be answered.

    Args:
        name: For /proc/<pid>/maps; at most 249 bytes.
        nbytes: Rounded up to a multiple of 4096, > 0.
        future_write_seal: Only the map made here may ever write; else clients write too (staging,
            touch ring).
        within: Where to map it; None = a range of its own.
        huge: Try to collapse it into huge pages. Works whatever
            /sys/kernel/mm/transparent_hugepage/shmem_enabled says, from Linux 6.1 on. 0.25 s a GiB
            more.
        touch: Map every page here and now, so that no later write pays a fault. 0.4 s a GiB more
            unless it was collapsed.

    Raises:
        OSError: no memory, no descriptors.
    """
    nbytes = round_up(nbytes, PAGE_NBYTES)
    fd = _memfd_create(name)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        # The descriptor is the right to it: another uid must not open it again through /proc.
        os.fchmod(fd, 0o600)
        target = within if within is not None else AddressRange.reserve(nbytes)
        offset = target.map(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    try:
        _seal(fd, future_write_seal=future_write_seal)
        collapsed = huge and _collapse(target, offset, nbytes)
        if touch:
            _populate(target, offset, nbytes)
        client_fd = _reopen_read_only(fd) if future_write_seal else os.dup(fd)
    except BaseException:
        target.unmap(offset, nbytes)
        os.close(fd)
        raise
    buffer = target.view[offset : offset + nbytes]
    return Memfd(fd, nbytes, buffer, offset, collapsed, client_fd, target)


def _reopen_read_only(fd: int) -> int:
    """Once, before a client has the file: who has it may take a lease that makes an open wait."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _seal(fd: int, *, future_write_seal: bool) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if future_write_seal:
        seals |= F_SEAL_FUTURE_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _collapse(target: AddressRange, offset: int, nbytes: int) -> bool:
    """See `Memfd.collapse`. The end that does not fill a huge page stays as it is."""
    whole = nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
    if not whole:
        return False
    try:
        target.advise(offset, whole, _MADV_COLLAPSE)
    except OSError:
        return False
    return True


def _populate(target: AddressRange, offset: int, nbytes: int) -> None:
    """Maps every page writable."""
    try:
        target.advise(offset, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 5.14: the first writes pay
            raise


def _memfd_create(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Hosts with vm.memfd_noexec=2 refuse a memfd without this flag, kernels before 6.3 one with
        # it.
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)


def _address_of(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")

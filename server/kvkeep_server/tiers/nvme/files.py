"""The only module of the tier that makes system calls on files: the seam for faults in tests."""

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvkeep_server.tiers.nvme.aio import BatchReader, ReadOp

Buffers = Sequence[memoryview]
# Reads of one thread.
_AT_ONCE = 16
_NO_ALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS}
# `os.posix_fallocate` writes zeros where the file system cannot allocate; this one says so instead.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


@dataclass(frozen=True, slots=True)
class Found:
    """One entry of a directory.

    Attributes:
        name: Without the directory.
        nbytes: Its size.
        disk_nbytes: What it takes on disk.
        regular: A file, not a directory, link or device.
    """

    name: str
    nbytes: int
    disk_nbytes: int
    regular: bool


class Files(Protocol):
    """What the tier asks of a file system. Every call blocks, may come from any thread, and raises
    OSError.
    """

    def listing(self, directory: str) -> list[Found]:
        """Entries of a directory, in no order."""
        ...

    def create(self, path: str) -> int:
        """Makes a file of mode 0600 that was not there, for reading and writing."""
        ...

    def open(self, path: str, *, write: bool = False) -> int:
        """Opens a file that is there."""
        ...

    def close(self, fd: int) -> None:
        """Closes."""
        ...

    def preadv(self, fd: int, into: Buffers, offset: int) -> int:
        """Reads; the number of bytes, fewer at the end of the file."""
        ...

    def read_many(self, ops: Sequence[ReadOp]) -> list[int | OSError]:
        """Reads at once, as deep as the device likes; what `preadv` would return or raise."""
        ...

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> None:
        """Writes all of it."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Returns when what was written, and the size, are on the medium."""
        ...

    def allocate(self, fd: int, nbytes: int) -> None:
        """Makes the file so large; its room is taken where the file system can."""
        ...

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cuts the file."""
        ...

    def size(self, fd: int) -> int:
        """Size of the file in bytes."""
        ...

    def links(self, fd: int) -> int:
        """How many names the file has; 0 = somebody removed it."""
        ...

    def unlink(self, path: str) -> None:
        """Removes the name."""
        ...

    def rename(self, path: str, new_path: str) -> None:
        """Gives a file another name in its directory."""
        ...

    def sync_directory(self, directory: str) -> None:
        """Returns when the names in it are on the medium."""
        ...

    def free_nbytes(self, directory: str) -> int:
        """What an ordinary user may still write to the file system."""
        ...


class DiskFiles:
    """The machine's file systems, with O_DIRECT wherever they take it.

    Attributes:
        opened_buffered: Files that were opened without O_DIRECT, because it was refused.
        allocated_sparse: Files whose room was not taken in advance, because that was refused.
    """

    def __init__(self) -> None:
        """See the class."""
        self.opened_buffered = 0
        self.allocated_sparse = 0
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def listing(self, directory: str) -> list[Found]:
        """See `Files`; an entry that vanishes meanwhile is left out."""
        found = []
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                    regular = entry.is_file(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                nbytes, disk_nbytes = status.st_size, status.st_blocks * 512
                found.append(Found(entry.name, nbytes, disk_nbytes, regular))
        return found

    def create(self, path: str) -> int:
        """See `Files`."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open(self, path: str, *, write: bool = False) -> int:
        """See `Files`."""
        return self._open(path, os.O_RDWR if write else os.O_RDONLY)

    def close(self, fd: int) -> None:
        """See `Files`."""
        os.close(fd)

    def preadv(self, fd: int, into: Buffers, offset: int) -> int:
        """See `Files`."""
        return os.preadv(fd, into, offset)

    def read_many(self, ops: Sequence[ReadOp]) -> list[int | OSError]:
        """See `Files`. One by one where there is no asynchronous I/O."""
        reader = self._batch_reader() if len(ops) > 1 else None
        if reader is None:
            return [self._read_one(op) for op in ops]
        results: list[int | OSError] = []
        for start in range(0, len(ops), reader.ops_max):
            some = ops[start : start + reader.ops_max]
            for op, got in zip(some, reader.read(some), strict=True):
                if got is None:
                    results.append(self._read_one(op))
                else:
                    results.append(got if got >= 0 else OSError(-got, os.strerror(-got)))
        return results

    def _read_one(self, op: ReadOp) -> int | OSError:
        try:
            return self.preadv(op.fd, op.into, op.offset)
        except OSError as error:
            return error

    def _batch_reader(self) -> BatchReader | None:
        """This thread's."""
        found = self._of_thread.__dict__
        if "reader" not in found:
            try:
                found["reader"] = BatchReader(_AT_ONCE)
            except OSError:
                found["reader"] = None
        reader: BatchReader | None = found["reader"]
        return reader

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> None:
        """See `Files`. A short write is an error: nobody knows what of it lies on the medium."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        written = os.pwritev(fd, buffers, offset)
        if written != nbytes:
            raise OSError(errno.EIO, f"wrote {written} of {nbytes} bytes")

    def fdatasync(self, fd: int) -> None:
        """See `Files`."""
        os.fdatasync(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        """See `Files`."""
        if _libc.fallocate(fd, 0, 0, nbytes) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_ALLOCATE:
            raise OSError(code, os.strerror(code))
        with self._lock:
            self.allocated_sparse += 1
        os.ftruncate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        """See `Files`."""
        os.ftruncate(fd, nbytes)

    def size(self, fd: int) -> int:
        """See `Files`."""
        return os.fstat(fd).st_size

    def links(self, fd: int) -> int:
        """See `Files`."""
        return os.fstat(fd).st_nlink

    def unlink(self, path: str) -> None:
        """See `Files`."""
        os.unlink(path)

    def rename(self, path: str, new_path: str) -> None:
        """See `Files`."""
        os.rename(path, new_path)

    def sync_directory(self, directory: str) -> None:
        """See `Files`."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_nbytes(self, directory: str) -> int:
        """See `Files`."""
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # A refused O_DIRECT may have made the file all the same.
        fd = os.open(path, flags & ~os.O_EXCL, 0o600)
        with self._lock:
            self.opened_buffered += 1
        return fd

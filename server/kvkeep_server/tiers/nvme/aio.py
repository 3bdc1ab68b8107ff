"""Several reads at once from one thread: the kernel's asynchronous I/O, waited for to the end.

A thread for each read would have to get the GIL back after each: 4 switches of context a read were
measured, half of its cost.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

# Numbers of io_setup, io_destroy, io_submit, io_getevents; the structures of <linux/aio_abi.h>.
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_PREADV = 7
_IOCB = struct.Struct("<QIIHhIQQqQII")
_IOVEC = struct.Struct("<QQ")
_EVENT = struct.Struct("<QQqq")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(slots=True)
class ReadOp:
    """One read.

    Attributes:
        fd: Of the file.
        into: Writable buffers, one behind the other in the file.
        offset: In the file.
    """

    fd: int
    into: Sequence[memoryview]
    offset: int


class BatchReader:
    """For one thread.

    Args:
        ops_max: Reads at once.

    Raises:
        OSError: the kernel, or who confines this process, does not allow it.
    """

    def __init__(self, ops_max: int) -> None:
        """See the class."""
        self._context = ctypes.c_ulong(0)
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        setup, self._destroy, self._submit, self._getevents = map(ctypes.c_long, calls)
        self._iocbs = ctypes.create_string_buffer(ops_max * _IOCB.size)
        self._events = ctypes.create_string_buffer(ops_max * _EVENT.size)
        first = ctypes.addressof(self._iocbs)
        places = [first + i * _IOCB.size for i in range(ops_max)]
        self._pointers = (ctypes.c_void_p * ops_max)(*places)
        self.ops_max = ops_max
        if _libc.syscall(setup, ctypes.c_long(ops_max), ctypes.byref(self._context)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Gives the context back; the kernel takes nothing any more. Idempotent."""
        if self._context.value:
            _libc.syscall(self._destroy, self._context)
            self._context.value = 0

    def __del__(self) -> None:
        """It goes with its thread."""
        self.close()

    def read(self, ops: Sequence[ReadOp]) -> list[int | None]:
        """Reads at most `ops_max`; returns when nothing touches the buffers any more.

        Returns:
            Of each the number of bytes, or an errno below 0; None = the kernel did not take it.
        """
        held, vectors, starts = [], bytearray(), []
        for op in ops:
            starts.append(len(vectors))
            for view in op.into:
                first = ctypes.c_char.from_buffer(view)
                held.append(first)
                vectors += _IOVEC.pack(ctypes.addressof(first), len(view))
        base = ctypes.addressof(ctypes.c_char.from_buffer(vectors))
        for i, (op, start) in enumerate(zip(ops, starts, strict=True)):
            fields = (i, 0, 0, _PREADV, 0, op.fd, base + start, len(op.into), op.offset, 0, 0, 0)
            _IOCB.pack_into(self._iocbs, i * _IOCB.size, *fields)
        results: list[int | None] = [None] * len(ops)
        taken = _libc.syscall(self._submit, self._context, ctypes.c_long(len(ops)), self._pointers)
        left = max(0, taken)
        while left:
            left -= self._collect(left, results)
        return results

    def _collect(self, count: int, results: list[int | None]) -> int:
        """Waits for all of so many; how many ended before a signal came."""
        number = ctypes.c_long(count)
        got = int(_libc.syscall(self._getevents, self._context, number, number, self._events, None))
        for i in range(got):
            place, _, result, _ = _EVENT.unpack_from(self._events, i * _EVENT.size)
            results[place] = result
        return max(0, got)

"""A file system that fails at the Nth call, or from then on, or as a test says; and a small one."""

import errno
import os
import threading

from kvkeep_server.tiers.nvme.files import DiskFiles

CALLS = (
    "listing",
    "create",
    "open",
    "preadv",
    "pwritev",
    "fdatasync",
    "allocate",
    "truncate",
    "size",
    "links",
    "unlink",
    "rename",
    "sync_directory",
    "free_nbytes",
)
# Half of it is written, then the count says so.
SHORT_WRITE = -1


class FaultyFiles(DiskFiles):
    """Counts calls; `plan(name, number)` gives an errno, SHORT_WRITE, or 0 = all is well.

    `number` counts all calls from 1, `name` is the method's.
    """

    def __init__(self, plan=lambda _name, _number: 0):
        super().__init__()
        self.plan = plan
        self.calls = 0
        self.failed = []
        self._count_lock = threading.Lock()

    def _before(self, name):
        with self._count_lock:
            self.calls += 1
            code = self.plan(name, self.calls)
            if code:
                self.failed.append((name, code))
        if code > 0:
            raise OSError(code, os.strerror(code), name)
        return code

    def pwritev(self, fd, buffers, offset):
        if self._before("pwritev") == SHORT_WRITE:
            half = [buffer[: len(buffer) // 2 // 4096 * 4096] for buffer in buffers[:1]]
            super().pwritev(fd, half, offset)
            raise OSError(errno.EIO, "short write")
        super().pwritev(fd, buffers, offset)

    def read_many(self, ops):
        """One by one, so that each is a call that may fail."""
        return [self._read_one(op) for op in ops]

    def fdatasync(self, fd):
        self._before("fdatasync")
        super().fdatasync(fd)


def _checked(name):
    inherited = getattr(DiskFiles, name)

    def call(self, *args, **kwargs):
        self._before(name)
        return inherited(self, *args, **kwargs)

    return call


for _name in set(CALLS) - {"pwritev", "fdatasync"}:
    setattr(FaultyFiles, _name, _checked(_name))


class SmallDisk(DiskFiles):
    """The file system of one directory, with so much room for it and for others.

    `least_nbytes` is the least that was ever free; `hidden_nbytes` is room that it says it has and
    does not give, as with a quota.
    """

    def __init__(self, directory, nbytes):
        super().__init__()
        self.directory = str(directory)
        self.nbytes = nbytes
        self.others_nbytes = 0
        self.hidden_nbytes = 0
        self.least_nbytes = nbytes

    def _left(self):
        with os.scandir(self.directory) as entries:
            used = sum(entry.stat().st_size for entry in entries if entry.name.endswith(".kvks"))
        return max(0, self.nbytes - self.others_nbytes - used)

    def free_nbytes(self, directory):
        """What is left."""
        assert directory == self.directory
        return self._left()

    def allocate(self, fd, nbytes):
        """Not more than is left."""
        if nbytes > self._left() - self.hidden_nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, nbytes)
        self.least_nbytes = min(self.least_nbytes, self._left())

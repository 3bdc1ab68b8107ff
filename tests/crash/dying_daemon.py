"""A daemon that kills itself at a named point of its work with files.

    python -m tests.crash.dying_daemon POINT NUMBER serve ...

POINT is a call of `tiers.nvme.files` and when: `pwritev:half` dies after half of what the NUMBERth
write is to write, `fdatasync:before` and `fdatasync:after` before and after a sync.
"""

import itertools
import os
import signal
import sys

from kvkeep_server.__main__ import main
from kvkeep_server.tiers.nvme.files import DiskFiles

# In the order of a segment's life.
POINTS = [
    *("create:before", "create:after", "allocate:before", "allocate:after"),
    *("sync_directory:before", "sync_directory:after"),
    *("pwritev:before", "pwritev:half", "pwritev:after", "fdatasync:before", "fdatasync:after"),
    *("truncate:before", "truncate:after", "open:after", "preadv:after"),
]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Up to some byte within a page; O_DIRECT could not."""
    whole = b"".join(buffers)
    buffered = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.pwrite(buffered, whole[: len(whole) // 2 + 100], offset)


def arm(point: str, number: int) -> None:
    name, when = point.split(":")
    inherited = getattr(DiskFiles, name)
    numbers = itertools.count(1)  # its next() is atomic

    def call(self, *args, **kwargs):
        last = next(numbers) == number
        if last and when == "before":
            die()
        if last and when == "half":
            write_half(*args)
            die()
        answer = inherited(self, *args, **kwargs)
        if last:
            die()
        return answer

    setattr(DiskFiles, name, call)


if __name__ == "__main__":
    arm(sys.argv.pop(1), int(sys.argv.pop(1)))
    sys.exit(main())

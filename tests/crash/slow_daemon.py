"""A daemon on a disk that is slow to sync.

python -m tests.crash.slow_daemon SECONDS serve ...
"""

import sys
import time

from kvkeep_server.__main__ import main
from kvkeep_server.tiers.nvme.files import DiskFiles


def slow_down(seconds: float) -> None:
    inherited = DiskFiles.fdatasync

    def fdatasync(self: DiskFiles, fd: int) -> None:
        time.sleep(seconds)
        inherited(self, fd)

    DiskFiles.fdatasync = fdatasync  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(sys.argv.pop(1)))
    sys.exit(main())

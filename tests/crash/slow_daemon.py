"""A daemon on a disk that is slow to sync.

python -m tests.crash.slow_daemon FILE serve ...

FILE holds the seconds that each sync takes longer from then on.
"""

import sys
import time
from pathlib import Path

from kvkeep_server.__main__ import main
from kvkeep_server.tiers.nvme.files import DiskFiles


def slow_down(seconds: Path) -> None:
    inherited = DiskFiles.fdatasync

    def fdatasync(self: DiskFiles, fd: int) -> None:
        time.sleep(float(seconds.read_text()))
        inherited(self, fd)

    DiskFiles.fdatasync = fdatasync  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(Path(sys.argv.pop(1)))
    sys.exit(main())

"""A cgroup v1 with a memory limit, for children of a test. Each is removed when its `with` ends."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE_S = 10.0
# Runs a program in a cgroup: python -c ENTER CGROUP PROGRAM ARGUMENTS...
ENTER = (
    "import os, sys;"
    "open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()));"
    "os.execv(sys.argv[2], sys.argv[2:])"
)
REASON = "needs root and a writable cgroup v1 memory controller"


@dataclass(frozen=True)
class MemoryCgroup:
    directory: Path

    def command(self, *program: str, python: str) -> tuple[str, ...]:
        """The program, started inside."""
        return (python, "-c", ENTER, str(self.directory), *program)

    @property
    def oom_kills(self) -> int:
        lines = (self.directory / "memory.oom_control").read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    @property
    def usage_nbytes(self) -> int:
        return int((self.directory / "memory.usage_in_bytes").read_text())

    @property
    def peak_nbytes(self) -> int:
        return int((self.directory / "memory.max_usage_in_bytes").read_text())


@contextlib.contextmanager
def memory_cgroup(name: str, limit_nbytes: int) -> Iterator[MemoryCgroup]:
    """Skips the test where there is none."""
    paths = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    parent = Path("/sys/fs/cgroup/memory") / paths.get("memory", "").lstrip("/")
    if os.geteuid() != 0 or "memory" not in paths:
        pytest.skip(REASON)
    if not os.access(parent / "memory.limit_in_bytes", os.W_OK):
        pytest.skip(REASON)
    directory = parent / f"kvkeep-{name}-{os.getpid()}"
    directory.mkdir()
    try:
        (directory / "memory.limit_in_bytes").write_text(str(limit_nbytes))
        yield MemoryCgroup(directory)
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    """Busy for a moment after its last process is gone."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            directory.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return

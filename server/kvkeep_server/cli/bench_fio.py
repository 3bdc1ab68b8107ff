"""fio as a baseline: the same kinds of reads and durable writes, on the same directory."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvkeep_server.core.errors import KVKeepError

# EX_UNAVAILABLE of sysexits.h.
EXIT_NO_FIO = 69
DEPTH = 16
# Of one run: it reads or writes less than a GiB.
_RUN_S = 120.0
_MISSING = (
    "fio is not installed, and it is what this is measured against: `apt-get install fio` (Debian,"
    " Ubuntu), `dnf install fio` (Fedora), or put it on PATH"
)


class NoFioError(KVKeepError):
    """There is nothing to measure against."""


class FioError(KVKeepError):
    """fio did not do what it was asked for."""


@dataclass(frozen=True, slots=True)
class FioRun:
    """One run of fio.

    Attributes:
        pattern: fio's `rw`: "read", "randread", "write".
        request_nbytes: Of each request, `DEPTH` of which are under way.
        nbytes: Of the whole run.
        sync_nbytes: Written between two fdatasync; 0 = no sync.
    """

    pattern: str
    request_nbytes: int
    nbytes: int
    sync_nbytes: int = 0

    @property
    def whole_nbytes(self) -> int:
        """In whole requests: a last, broken one would go behind the end."""
        return max(1, self.nbytes // self.request_nbytes) * self.request_nbytes

    def at(self, request_nbytes: int) -> "FioRun":
        """The same with requests of another size."""
        return replace(self, request_nbytes=request_nbytes)


class Fio:
    """Runs it: libaio, O_DIRECT, `DEPTH` requests under way.

    Args:
        directory: Where it writes.
        random: Draws what it reads.

    Attributes:
        version: What it calls itself.

    Raises:
        NoFioError: it is not on PATH.
    """

    def __init__(self, directory: Path, random: np.random.Generator) -> None:
        """See the class."""
        program = shutil.which("fio")
        if program is None:
            raise NoFioError(_MISSING)
        self._program = program
        self._directory = directory
        self._random = random
        self.version = self._output("--version").strip()

    def write(self, run: FioRun) -> float:
        """Seconds that it took, by fio's own clock.

        Into a new file each time, as a log does: writing over what was written before costs a file
        system less.
        """
        path = self._directory / "fio"
        try:
            return self._run(run, f"--filename={path}", f"--size={run.whole_nbytes}")
        finally:
            path.unlink(missing_ok=True)

    def read(self, run: FioRun, files: Sequence[Path]) -> float:
        """Seconds that it took. The files are those of the log: what one host just wrote may come
        out of a cache of another, below the device, so both sides read the same bytes."""
        if run.pattern == "read":
            files = [files[int(self._random.integers(len(files)))]]
        nbytes = min(file.stat().st_size for file in files) * len(files)
        names = ":".join(str(file).replace(":", r"\:") for file in files)
        return self._run(
            run,
            f"--filename={names}",
            f"--size={nbytes}",
            "--file_service_type=random",
            "--readonly",
        )

    def _run(self, run: FioRun, *where: str) -> float:
        options = [
            "--name=bench",
            f"--rw={run.pattern}",
            f"--bs={run.request_nbytes}",
            f"--io_size={run.whole_nbytes}",
            f"--iodepth={DEPTH}",
            f"--randseed={int(self._random.integers(1 << 30))}",
            "--ioengine=libaio",
            "--direct=1",
            "--output-format=json",
            *where,
        ]
        if run.sync_nbytes:
            options.append(f"--fdatasync={max(1, run.sync_nbytes // run.request_nbytes)}")
        output = self._output(*options)
        try:
            job = json.loads(output[output.index("{") :])["jobs"][0]
            side = job["write" if run.pattern == "write" else "read"]
            return float(run.nbytes / side["bw_bytes"])
        except (ValueError, LookupError, ZeroDivisionError) as error:
            raise FioError(f"fio gave no figures: {output.strip()[:300]!r}") from error

    def _output(self, *options: str) -> str:
        done = subprocess.run(  # noqa: S603 - a program on PATH, options of ours
            [self._program, *options], capture_output=True, text=True, timeout=_RUN_S, check=False
        )
        if done.returncode:
            complaint = (done.stderr or done.stdout).strip()[:300]
            raise FioError(f"fio ended with {done.returncode}: {complaint}")
        return done.stdout

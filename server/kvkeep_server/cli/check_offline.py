"""`kvkeep check --offline FILE`: the nvme directories of a daemon that does not run."""

import json
from contextlib import ExitStack
from pathlib import Path

import click

from kvkeep_server.config import load
from kvkeep_server.config.disks import nvme_directories
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.errors import FailedPreconditionError, KVKeepError
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.core.ownership import Ownership
from kvkeep_server.core.quantities import show_size
from kvkeep_server.tiers.nvme.files import DiskFiles
from kvkeep_server.tiers.nvme.offline import OfflineCheck, OfflineReport

_COUNTS = ("segments", "blocks_checked", "blocks_verified", "nbytes_verified", "blocks_corrupt")

_CHECKED = """\
checked   {report.blocks_checked:,} blocks in {report.segments:,} segments against table and header
bytes     {nbytes} of {report.blocks_verified:,} blocks against their checksums{rest}
          {report.blocks_corrupt:,} blocks that are not what their segment's table says"""
_REST = "; --bytes reads those of sealed segments too"


class NotOfflineError(KVKeepError):
    """A daemon has one of the directories, or it cannot be read."""


def check_directories(config_file: Path, *, nbytes_per_s: int | None) -> OfflineReport:
    """Checks the directories that a settings file names, and changes nothing.

    Args:
        config_file: A daemon's settings.
        nbytes_per_s: See `OfflineCheck`.

    Raises:
        ConfigError: The file is refused.
        click.UsageError: It names no directory.
        NotOfflineError: See there.
    """
    directories = nvme_directories(load(config_file, read_memory_limit()).settings)
    if not directories:
        msg = f"{config_file} names no nvme.directories: nothing outlives a daemon"
        raise click.UsageError(msg)
    with ExitStack() as held:
        try:
            for directory in directories:
                instead = "give a FILE that names other nvme.directories"
                lock = Ownership(Path(directory.path), server_epoch=0, instead=instead)
                lock.acquire_to_look()
                held.callback(lock.release)
            return OfflineCheck(
                directories=directories,
                files=DiskFiles(),
                clock=SystemClock(),
                nbytes_per_s=nbytes_per_s,
            ).run()
        except FailedPreconditionError as error:
            raise NotOfflineError(str(error)) from error
        except OSError as error:
            raise NotOfflineError(f"{error.filename}: {error.strerror}") from error


def as_json(report: OfflineReport) -> str:
    """One JSON object, with the names that the check of a daemon has."""
    disks = [
        {"directory": path, "used_nbytes": used, "limit_nbytes": limit}
        for path, used, limit in report.disks
    ]
    return json.dumps(
        {
            "ok": not report.findings,
            **{name: getattr(report, name) for name in _COUNTS},
            "disks": disks,
            "notes": report.notes,
            "findings": report.findings,
        }
    )


def as_text(report: OfflineReport, *, verify: bool) -> str:
    """For a reader."""
    checked = _CHECKED.format(
        report=report, nbytes=show_size(report.nbytes_verified), rest="" if verify else _REST
    )
    disks = (
        f"disk      {show_size(used)} of {show_size(limit)} in {path}"
        for path, used, limit in report.disks
    )
    lines = [
        checked,
        *disks,
        *(f"note      {note}" for note in report.notes),
        *(f"wrong     {finding}" for finding in report.findings),
        f"{len(report.findings)} findings" if report.findings else "ok",
    ]
    return "\n".join(lines)

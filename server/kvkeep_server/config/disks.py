"""The settings of the nvme tier against the file systems that they name."""

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvkeep_server.config import ConfigError, Settings, problem
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.quantities import format_size, show_size
from kvkeep_server.core.settings_kinds import disk_nbytes
from kvkeep_server.tiers.nvme.segments import DirectorySettings

_SEGMENTS_OPEN_MAX = 256
# With fewer a directory could give none back.
_SEGMENTS_MIN = 4


def nvme_directories(settings: Settings) -> tuple[DirectorySettings, ...]:
    """The directories of the nvme tier, and what it may take there.

    Raises:
        FailedPreconditionError: `nvme.max` of a file system is too little, or there is none.
    """
    nvme = settings.nvme
    return tuple(
        DirectorySettings(
            path=path,
            max_nbytes=_disk_share(nvme.max, path),
            segment_nbytes=nvme.segment_nbytes,
            free_min_nbytes=nvme.free_min_nbytes,
            open_max=_SEGMENTS_OPEN_MAX,
        )
        for path in nvme.directories
    )


def check_disks(settings: Settings, source: str) -> tuple[str, ...]:
    """Holds `[nvme]` against the file systems of its directories.

    Args:
        settings: All of them.
        source: The file, for messages.

    Returns:
        What works and is not what somebody meant, a sentence each.

    Raises:
        ConfigError: It cannot work there; all problems at once.
    """
    places = [_place(path) for path in settings.nvme.directories]
    problems = [_no_place(place) for place in places if place.trouble]
    if not problems:
        problems = [one for place in places for one in _too_little(settings, place)]
    if problems:
        raise ConfigError(source, tuple(problems))
    return tuple(_more_than_there_is(settings, places))


def _disk_share(text: str, path: str) -> int:
    """What `nvme.max` means in a directory. Errors as in `nvme_directories`."""
    place = _place(path)
    if place.trouble and not place.nbytes:
        raise FailedPreconditionError(f"nvme.directories: {path} {place.trouble}")
    try:
        return disk_nbytes(text, place.nbytes)
    except ValueError as error:
        msg = (
            f"nvme.max = {text!r} of the {place.nbytes} bytes that the file system of {path} has:"
            f" {error}"
        )
        raise FailedPreconditionError(msg) from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a directory lies, or will.

    Attributes:
        path: Of it.
        nbytes: Size of the file system.
        device: Number of the file system.
        trouble: Why no daemon can have it, in words that follow the path; "" = as far as is known.
    """

    path: str
    nbytes: int
    device: int
    trouble: str


def _place(path: str) -> _Place:
    there = Path(path)
    try:
        while True:
            try:
                status = there.stat()
                break
            except FileNotFoundError:
                if there.is_symlink():
                    return _Place(path, 0, 0, f"is behind a link that leads nowhere, {there}")
                there = there.parent
        nbytes, flags = shutil.disk_usage(there).total, os.statvfs(there).f_flag
    except OSError as error:
        return _Place(path, 0, 0, f"cannot be used: {error.strerror}")
    return _Place(path, nbytes, status.st_dev, _trouble(there, status, nbytes, flags, path))


def _trouble(there: Path, status: os.stat_result, nbytes: int, flags: int, path: str) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return f"is no directory, for {there} is none"
    if not nbytes:
        return "is on a file system that takes no files"
    if flags & os.ST_RDONLY:
        return "is on a file system that is mounted read-only"
    if str(there) == path and status.st_mode & stat.S_IWOTH:
        return "is writable by everybody: chmod o-w it"
    return ""


def _no_place(place: _Place) -> str:
    return problem(
        "nvme.directories",
        f'"{place.path}"',
        "directories of the daemon's own, there or to be made, on file systems that take files",
        f"name another; this one {place.trouble}",
    )


def _too_little(settings: Settings, place: _Place) -> Iterator[str]:
    """Why a daemon could never write there, or give nothing back."""
    nvme = settings.nvme
    least, segment = _SEGMENTS_MIN * nvme.segment_nbytes, f'"{format_size(nvme.segment_nbytes)}"'
    try:
        max_nbytes = disk_nbytes(nvme.max, place.nbytes)
    except ValueError:
        max_nbytes = 0
    if max_nbytes < least:
        yield problem(
            "nvme.max",
            f'"{nvme.max}" ({show_size(max_nbytes)} in {place.path})',
            f"at least {_SEGMENTS_MIN} times nvme.segment, which is {segment}",
            f'set nvme.max to "{format_size(least)}" or more, or lower nvme.segment',
        )
    elif nvme.free_min_nbytes + least > place.nbytes:
        free_max = place.nbytes - least
        yield problem(
            "nvme.free_min",
            f'"{format_size(nvme.free_min_nbytes)}"',
            f"what leaves room for {_SEGMENTS_MIN} times nvme.segment ({segment}) of the"
            f" {show_size(place.nbytes)} that the file system of {place.path} has",
            f'set nvme.free_min to "{show_size(free_max)}" or less'
            if free_max > 0
            else "name a directory on a larger file system, or lower nvme.segment",
        )


def _more_than_there_is(settings: Settings, places: list[_Place]) -> Iterator[str]:
    nvme = settings.nvme
    for device in dict.fromkeys(place.device for place in places):
        here = [place for place in places if place.device == device]
        wanted = sum(disk_nbytes(nvme.max, place.nbytes) for place in here)
        there = here[0].nbytes - nvme.free_min_nbytes
        if wanted > there:
            yield (
                f'nvme.max is "{nvme.max}", {show_size(wanted)} in'
                f" {', '.join(place.path for place in here)}, where the file system has"
                f" {show_size(here[0].nbytes)} and nvme.free_min"
                f" ({show_size(nvme.free_min_nbytes)}) stays free: it is never reached"
            )

"""Keeps which epochs are over in a small file of each nvme directory, so that it outlives a crash.

A file is written whole and synced before it gets its name, and named before the one before it goes,
so that at any moment at least one is right. Nobody is told that an epoch is over while an earlier
file is left: so a right file counts whatever is wrong with a later one, which nobody was told of.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kvkeep_server.core.errors import FailedPreconditionError, TierUnavailableError
from kvkeep_server.tiers.nvme.epoch_format import (
    EPOCHS_NBYTES_MAX,
    EPOCHS_NUMBER_MAX,
    NEWER_RELEASE,
    UNFINISHED_NAME,
    EpochState,
    decode,
    encode,
    file_name,
    number_of,
    why_unreadable,
)
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import ScratchPool
from kvkeep_server.tiers.record import PAGE_NBYTES

# What follows of files that nobody has to miss.
ENOUGH = "an earlier or later one that is right says all that is over"
NOT_OURS = "is not ours: it has nothing of a file of epochs but the name, nobody touches it"
_MEANING = (
    "It says which blocks are of weights that were replaced in place. Bring back a copy, or another"
    " of nvme.directories' files of this number if one daemon had both; without it those blocks"
    " could be found again: delete it only if that does not matter, or if each model whose weights"
    " were replaced gets a higher namespace_epoch"
)


@dataclass(slots=True)
class EpochsFound:
    """What the files of one directory say.

    Attributes:
        state: Of the right one with the highest number.
        ours: Numbers of our files, right or not, the highest first.
        earlier: Numbers of right ones that say less.
        foreign: Numbers of files that have nothing of ours but the name.
        damaged: What is wrong with files of ours, by path.
        refused: Why nobody may serve; "" = `state` is all there is to know.
    """

    state: EpochState = field(default_factory=lambda: EpochState({}, ()))
    ours: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    refused: str = ""


def look(files: Files, pool: ScratchPool, directory: str) -> EpochsFound:
    """Reads the files of one directory and changes nothing. Blocks; any thread.

    Raises:
        OSError: The directory cannot be read.
    """
    found, right = EpochsFound(), False
    for number in _numbers(files, directory):
        path = f"{directory}/{file_name(number)}"
        read = _read(files, pool, path, number)
        if not read:
            found.foreign.append(number)
            continue
        found.ours.append(number)
        if isinstance(read, str):
            found.damaged[path] = read
            if not right and (not found.refused or NEWER_RELEASE in read):
                found.refused = f"{path} {read}. {_MEANING}"
        elif right:
            found.earlier.append(number)
        else:
            found.state, right = read, True
            if NEWER_RELEASE not in found.refused:
                found.refused = ""
    return found


def _numbers(files: Files, directory: str) -> list[int]:
    """Of the files in a directory, the highest first."""
    names = (entry.name for entry in files.listing(directory) if entry.regular)
    return sorted((n for n in map(number_of, names) if n is not None), reverse=True)


def _read(files: Files, pool: ScratchPool, path: str, number: int) -> EpochState | str:
    """What a file says; or why it cannot be read; or "", it is not ours."""
    try:
        fd = files.open(path)
        try:
            nbytes = files.size(fd)
            into = pool.take(min(nbytes, EPOCHS_NBYTES_MAX) + PAGE_NBYTES).data
            aligned = into[: len(into) // PAGE_NBYTES * PAGE_NBYTES]
            content = aligned[: files.preadv(fd, [aligned], 0)]
        finally:
            files.close(fd)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return decode(content, number) or why_unreadable(content, nbytes, number)


class EpochFiles:
    """Event loop only; one call at a time. `load` comes first, when the directories are taken.

    Args:
        directories: Their paths.
        files: The file systems.
        writers: Threads for what blocks.

    Attributes:
        unused: What lay there and is of no use, with the reason; by path.
    """

    def __init__(self, *, directories: Sequence[str], files: Files, writers: Executor) -> None:
        """See the class."""
        self.unused: dict[str, str] = {}
        self._directories = directories
        self._files = files
        self._writers = writers
        self._scratch = ScratchPool(nbytes=PAGE_NBYTES, kept_max=1)
        self._number = 0
        # Names that somebody else gave to files: they are not touched.
        self._taken: set[int] = set()
        self._ours: dict[str, set[int]] = {}

    async def load(self) -> EpochState:
        """What earlier daemons left, of all directories together.

        Raises:
            FailedPreconditionError: A directory does not say any more which epochs are over.
            OSError: A directory cannot be read, or a file that says less cannot be removed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writers, self._load)

    async def save(self, state: EpochState) -> None:
        """Returns when all directories have it on the medium, and nothing earlier.

        Raises:
            TierUnavailableError: One has not, so it may be forgotten with the others.
        """
        failed = await asyncio.get_running_loop().run_in_executor(self._writers, self._save, state)
        if failed:
            raise TierUnavailableError(f"nvme: not on the medium: {failed[0]}")

    def _load(self) -> EpochState:
        return EpochState.merged(map(self._load_one, self._directories))

    def _load_one(self, directory: str) -> EpochState:
        found = look(self._files, self._scratch, directory)
        if found.refused:
            raise FailedPreconditionError(f"nvme.directories: {found.refused}")
        self._number = max([self._number, *found.ours])
        self._taken.update(found.foreign)
        self._ours[directory] = set(found.ours)
        self.unused.update({path: f"{why}; {ENOUGH}" for path, why in found.damaged.items()})
        names = map(file_name, found.foreign)
        self.unused.update({f"{directory}/{name}": NOT_OURS for name in names})
        self._remove(directory, found.earlier)
        return found.state

    def _save(self, state: EpochState) -> list[str]:
        """What went wrong, a sentence for each directory in which it did."""
        self._number += 1
        while self._number in self._taken:
            self._number += 1
        if self._number > EPOCHS_NUMBER_MAX:
            return [f"{file_name(EPOCHS_NUMBER_MAX)} has the last number there is"]
        failed = []
        for directory in self._directories:
            try:
                self._save_one(directory, state)
            except OSError as error:
                failed.append(f"{directory}: {error.strerror}")
        return failed

    def _save_one(self, directory: str, state: EpochState) -> None:
        content = encode(state, self._number)
        pages = self._scratch.take(len(content)).data[: len(content)]
        pages[:] = content
        unfinished, path = (
            f"{directory}/{UNFINISHED_NAME}",
            f"{directory}/{file_name(self._number)}",
        )
        if self._number in _numbers(self._files, directory):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        try:
            fd = self._files.create(unfinished)
        except FileExistsError:
            # Of a save that came to no end.
            self._files.unlink(unfinished)
            fd = self._files.create(unfinished)
        try:
            self._files.pwritev(fd, [pages], 0)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)
        earlier = sorted(self._ours[directory])
        self._files.rename(unfinished, path)
        self._ours[directory].add(self._number)
        self._files.sync_directory(directory)
        self._remove(directory, earlier)

    def _remove(self, directory: str, numbers: Sequence[int]) -> None:
        """Removes files that say less, to stay away."""
        for number in numbers:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(f"{directory}/{file_name(number)}")
            self._ours[directory].discard(number)
        if numbers:
            self._files.sync_directory(directory)

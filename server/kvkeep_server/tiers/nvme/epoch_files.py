"""Keeps which epochs are over in a small file of each nvme directory, so that it outlives a crash.

A file is written whole under a new name and synced before the one before it goes, so that at any
moment at least one is right.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor

from kvkeep_server.core.errors import FailedPreconditionError, TierUnavailableError
from kvkeep_server.tiers.nvme.epoch_format import (
    EpochState,
    decode,
    encode,
    file_name,
    number_of,
)
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import ScratchPool
from kvkeep_server.tiers.record import PAGE_NBYTES


class EpochFiles:
    """Event loop only; one call at a time. `load` comes first, when the directories are taken.

    Args:
        directories: Their paths.
        files: The file systems.
        writers: Threads for what blocks.
    """

    def __init__(self, *, directories: Sequence[str], files: Files, writers: Executor) -> None:
        """See the class."""
        self._directories = directories
        self._files = files
        self._writers = writers
        self._scratch = ScratchPool(nbytes=PAGE_NBYTES, kept_max=1)
        self._number = 0

    async def load(self) -> EpochState:
        """What earlier daemons left, of all directories together.

        Raises:
            FailedPreconditionError: None of a directory's files can be read any more.
            OSError: A directory cannot be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writers, self._load)

    async def save(self, state: EpochState) -> None:
        """Returns when all directories have it on the medium.

        Raises:
            TierUnavailableError: One has not, so it may be forgotten with the others.
        """
        failed = await asyncio.get_running_loop().run_in_executor(self._writers, self._save, state)
        if failed:
            raise TierUnavailableError(f"nvme: not on the medium: {failed[0]}")

    def _load(self) -> EpochState:
        return EpochState.merged(map(self._load_one, self._directories))

    def _numbers(self, directory: str) -> list[int]:
        """Of the files in a directory, the highest first."""
        names = (entry.name for entry in self._files.listing(directory) if entry.regular)
        return sorted((n for n in map(number_of, names) if n is not None), reverse=True)

    def _load_one(self, directory: str) -> EpochState:
        numbers = self._numbers(directory)
        self._number = max([self._number, *numbers])
        for number in numbers:
            state = decode(self._read(f"{directory}/{file_name(number)}"), number)
            if state is not None:
                return state
        if numbers:
            msg = (
                f"nvme.directories: {directory}/{file_name(numbers[0])} is damaged or of a newer "
                "release. It says which blocks are of weights that were replaced, and without it "
                "those could be found again: use the newer release, or empty the directory"
            )
            raise FailedPreconditionError(msg)
        return EpochState({}, ())

    def _read(self, path: str) -> memoryview:
        fd = self._files.open(path)
        try:
            nbytes = self._files.size(fd) // PAGE_NBYTES * PAGE_NBYTES
            into = self._scratch.take(nbytes).data[:nbytes]
            got = self._files.preadv(fd, [into], 0) if nbytes else 0
        finally:
            self._files.close(fd)
        return into[:got]

    def _save(self, state: EpochState) -> list[str]:
        """What went wrong, a sentence for each directory in which it did."""
        self._number += 1
        failed = []
        for directory in self._directories:
            try:
                self._save_one(directory, state)
            except OSError as error:
                failed.append(f"{directory}: {error.strerror}")
        return failed

    def _save_one(self, directory: str, state: EpochState) -> None:
        before = self._numbers(directory)
        content = encode(state, self._number)
        page = self._scratch.take(len(content)).data[: len(content)]
        page[:] = content
        path = f"{directory}/{file_name(self._number)}"
        fd = self._files.create(path)
        try:
            self._files.pwritev(fd, [page], 0)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)
        self._files.sync_directory(directory)
        for number in before:
            # It says less than the new one: it may stay.
            with contextlib.suppress(OSError):
                self._files.unlink(f"{directory}/{file_name(number)}")

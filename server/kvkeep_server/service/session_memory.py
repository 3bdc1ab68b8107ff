"""What a session maps: its staging and touch ring, and the descriptors that its client gets."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TypeVar

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.core.memfd import Memfd, create_sealed
from kvkeep_server.service.touch_ring import TouchRing

Made = TypeVar("Made")


class FdKind(IntEnum):
    """What a descriptor is; numbers as in `session.proto`."""

    INDEX = 1
    STAGING = 2
    TOUCH_RING = 3
    CHUNK = 4
    CALLS = 5


@dataclass(frozen=True, slots=True)
class FdOffer:
    """A descriptor for a client. The receiver of the offer sends and closes it."""

    kind: FdKind
    id: int
    nbytes: int
    fd: int


class SessionMemory:
    """Makes the memory of sessions. Event loop only.

    Args:
        touch_records: Places of a touch ring.
        offers: The index table and the chunks of now, as descriptors.
        huge_pages: Collapses staging once it is in use.
        executor: Gives it back.
    """

    def __init__(
        self,
        *,
        touch_records: int,
        offers: Callable[[], list[FdOffer]],
        huge_pages: HugePages,
        executor: Executor,
    ) -> None:
        """See the class."""
        self._touch_records = touch_records
        self._offers = offers
        self._huge_pages = huge_pages
        self._executor = executor

    async def make(self, nbytes: int) -> tuple[Memfd, TouchRing, list[FdOffer]]:
        """Staging of this size, a touch ring, and all descriptors of a new session: all or none.

        In a thread: 1 GiB takes 0.5 s. Huge pages come later, behind the work: a client that
        attaches waits for 2 s by default.

        Raises:
            ResourceExhaustedError: No memory or descriptors.
        """
        staging, ring = await _made(partial(self._allocate, nbytes), lambda made: self.free(*made))
        with ExitStack() as undo:
            undo.callback(staging.close)
            undo.callback(ring.close)
            fds = self._make_offers(staging, ring)
            undo.pop_all()
        self._huge_pages.make(staging)
        return staging, ring, fds

    async def make_staging(self, nbytes: int) -> Memfd:
        """Staging of this size alone, as `make` does, for a client that maps nothing.

        Raises:
            ResourceExhaustedError: No memory or descriptors.
        """
        staging = await _made(
            partial(self._allocate_staging, nbytes), lambda made: self.free(made, None)
        )
        self._huge_pages.make(staging)
        return staging

    def free(self, staging: Memfd, ring: TouchRing | None) -> None:
        """Gives a session's memory back; nobody may use it any more.

        Staging in a thread: the event loop would stand still for 0.25 s a GiB. Memory for new
        sessions is made by the same threads, behind it.
        """
        if ring is not None:
            ring.close()
        try:
            self._executor.submit(staging.discard)
        except RuntimeError:
            staging.close()  # the daemon ends, and its threads have

    def _allocate(self, nbytes: int) -> tuple[Memfd, TouchRing]:
        """A session's memory, mapped and warm: both or none."""
        staging = self._allocate_staging(nbytes)
        try:
            return staging, TouchRing(records=self._touch_records)
        except OSError as error:
            staging.close()
            raise _no_memory(nbytes, error) from error
        except BaseException:
            staging.close()
            raise

    @staticmethod
    def _allocate_staging(nbytes: int) -> Memfd:
        try:
            return create_sealed("kvkeep-staging", nbytes, future_write_seal=False, touch=True)
        except OSError as error:
            raise _no_memory(nbytes, error) from error

    def _make_offers(self, staging: Memfd, ring: TouchRing) -> list[FdOffer]:
        """The descriptors that a client gets: all or none."""
        fds: list[FdOffer] = []
        with ExitStack() as undo:
            undo.callback(close_offers, fds)
            try:
                fds.append(FdOffer(FdKind.STAGING, 0, staging.nbytes, staging.client_fd()))
                fds.append(FdOffer(FdKind.TOUCH_RING, 0, ring.memfd.nbytes, ring.memfd.client_fd()))
                fds += self._offers()
            except OSError as error:
                raise _no_memory(staging.nbytes, error) from error
            undo.pop_all()
        return fds


async def _made(make: Callable[[], Made], take_back: Callable[[Made], None]) -> Made:
    """What `make` gives, in a thread.

    A cancelled caller waits for its end, since until then the memory is taken; then it goes back.
    """
    making = asyncio.create_task(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        while not making.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([making])
        if making.exception() is None:
            take_back(making.result())
        raise


def _no_memory(nbytes: int, error: OSError) -> ResourceExhaustedError:
    msg = f"no memory or descriptors for {nbytes} bytes of staging ({error}); try again"
    return ResourceExhaustedError(msg, retry_after_s=1.0)


def close_offers(fds: list[FdOffer]) -> None:
    """Closes descriptors that nobody will send."""
    for offer in fds:
        os.close(offer.fd)

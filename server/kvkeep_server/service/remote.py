"""Use cases of clients on other hosts: attach without shared memory, read, write."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SessionUnknownError,
)
from kvkeep_server.service.block_service import BlockService
from kvkeep_server.service.commit_orders import CommitOrder
from kvkeep_server.service.sessions import Session
from kvkeep_server.service.streams import Streams
from kvkeep_server.service.writing import Writing
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiering.leases import Lease
from kvkeep_server.tiering.sending import Chunk, Sending, SendOrder
from kvkeep_server.tiers.ram.tier import RamTier

_PLACES_AGAIN_S = 0.05


class RemoteService:
    """Event loop only.

    Args:
        service: Everything that is not a stream of bytes.
        sending: Takes the bytes of leased blocks.
        streams: Whose turn it is.
        ram: Threads that lay down what comes.
    """

    def __init__(
        self, *, service: BlockService, sending: Sending, streams: Streams, ram: RamTier
    ) -> None:
        """See the class."""
        self.service = service
        self.streams = streams
        self._sending = sending
        self._ram = ram
        # By session: whose bytes come, or are being sealed.
        self._writings: dict[int, list[Writing]] = {}
        self._sealing: set[Writing] = set()

    async def read(self, session: Session, order: SendOrder) -> AsyncGenerator[Chunk, None]:
        """The bytes of blocks under a lease, in order.

        Raises:
            NotFoundError: The session does not hold the lease, or no longer.
            InvalidArgumentError: Names the field.
        """
        lease = self._lease(session, order.lease_id)
        keyspace = self._keyspace(session, lease, order)

        def lives() -> None:
            if self._lease(session, order.lease_id) is not lease:
                msg = f"lease {order.lease_id} ended and was given anew; acquire again"
                raise NotFoundError(msg)

        async for chunk in self._sending.chunks(lease, keyspace, order, lives):
            yield chunk
            self.streams.counts.read_nbytes += len(chunk.data)

    def _lease(self, session: Session, lease_id: int) -> Lease:
        lease = self.service.manager.leases.held_by(session.session_id, lease_id)
        if lease is None:
            msg = f"lease {lease_id} is not held by this session; acquire again"
            raise NotFoundError(msg)
        return lease

    def _keyspace(self, session: Session, lease: Lease, order: SendOrder) -> Keyspace:
        """That of the column which is meant."""
        opened = [self.service.namespaces.get(index) for index in session.opened]
        opened = [one for one in opened if one.namespace_set.set_id == lease.set_id]
        for one in opened:
            keyspace = one.namespace_set.keyspaces.get((order.rank, order.group))
            if order.rank in one.ranks and keyspace is not None:
                return keyspace
        if not opened:
            msg = "the lease's namespace set is not open in this session; call OpenNamespace"
            raise NotFoundError(msg)
        raise InvalidArgumentError(
            "rank and group",
            (order.rank, order.group),
            "a local rank of the namespace and one of its groups",
            "name a column of the lease",
        )

    @contextmanager
    def writing(self, session: Session, order: CommitOrder, crc32: int) -> Iterator[Writing]:
        """A commit whose bytes are about to come. The session's staging stays until it is left.

        Args:
            session: Whose it is.
            order: The commit.
            crc32: Of its header; what those of its bytes go on from.

        Raises:
            KVKeepError: As of a commit.
            ResourceExhaustedError: Also where an earlier one of the session still uses the places:
                who did not wait for its answer must not get other bytes sealed under its keys.
        """
        writing = Writing(self.service.batch(session, order), self._ram.run, crc32)
        own = self._writings.get(session.session_id, [])
        if any(writing.meets(one) for one in own):
            msg = "an earlier store still uses these places in the staging memory; try again"
            raise ResourceExhaustedError(msg, retry_after_s=_PLACES_AGAIN_S)
        self._writings[session.session_id] = [*own, writing]
        self.service.sessions.begin_copy(session)
        try:
            yield writing
        finally:
            self.service.sessions.end_copy(session)
            if writing not in self._sealing:
                self._leave(session, writing)

    def _leave(self, session: Session, writing: Writing) -> None:
        self._sealing.discard(writing)
        own = [one for one in self._writings.pop(session.session_id) if one is not writing]
        if own:
            self._writings[session.session_id] = own

    def begin(
        self, session: Session, set_index: int, writing: Writing
    ) -> asyncio.Task[NDArray[np.uint8]]:
        """Begins the commit of what came; see `BlockService.begin_commit`."""
        running = self.service.begin_batch(session, set_index, writing.batch)
        self._sealing.add(writing)
        running.add_done_callback(lambda _: self._leave(session, writing))
        return running

    def went_on(self, session: Session, nbytes: int) -> None:
        """A chunk came.

        Raises:
            SessionUnknownError: The session is over.
        """
        if session.over:
            msg = "the session ended meanwhile; attach again"
            raise SessionUnknownError(msg)
        self.streams.counts.written_nbytes += nbytes

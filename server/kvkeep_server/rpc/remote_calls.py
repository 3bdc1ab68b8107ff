"""What clients on other hosts do beside the unary calls: say hello, and move bytes in streams."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import NoReturn

import grpc

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.core.errors import (
    InvalidArgumentError,
    SessionUnknownError,
    TierUnavailableError,
)
from kvkeep_server.rpc import convert
from kvkeep_server.rpc.calls import SESSION_KEY, Context, accept, refuse
from kvkeep_server.rpc.checksums import sealed
from kvkeep_server.service.remote import RemoteService
from kvkeep_server.service.sessions import Session
from kvkeep_server.service.streams import HURRIED_S, Place
from kvkeep_server.service.writing import Writing

# Of a stream. gRPC has no other means to end one whose client takes nothing, not even the status.
DEADLINE_MAX_S = 60.0
_HELLO_TIMEOUT_S = 2.0
# Who watches may be slow: what it misses is told as a gap. It may not stand still for ever.
WATCH_STALL_S = 60.0

_log = logging.getLogger(__name__)


class RemoteCalls:
    """Parse, call, render; each raises KVKeepError.

    Args:
        remote: Does the work.
    """

    def __init__(self, remote: RemoteService) -> None:
        """See the class."""
        self._remote = remote
        self._streams = remote.streams

    async def greet(self, beats: AsyncIterator[pb.AttachRequest], peer: str) -> Session:
        """Begins a session for a client that says hello in its first message.

        Raises:
            SessionUnknownError: It says none in time.
        """
        first = None
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await anext(beats, None)
        except TimeoutError:
            _log.debug("no hello in time", extra={"peer": peer})
        accept(first)
        if first is None or not first.HasField("hello"):
            msg = f"Attach came without {SESSION_KEY} and without a hello; send one of them first"
            raise SessionUnknownError(msg)
        facts = convert.hello_of(first.hello)
        session = await self._remote.service.sessions.open_remote(facts)
        _log.info(
            "session opened",
            extra={"session": session.session_id, "client": facts.client_name, "peer": peer},
        )
        return session

    async def watch(self, session: Session, request: pb.WatchRequest, context: Context) -> None:
        """Watch, of clients of this host too."""
        changes = self._remote.service.watch(session, request.set_indexes, request.from_sequence)
        try:
            async with aclosing(changes):
                async for change in changes:
                    async with asyncio.timeout(WATCH_STALL_S):
                        with _until_gone():
                            await context.write(convert.change_message(change))
        except TimeoutError:
            msg = f"the client took nothing for {WATCH_STALL_S:g} s; watch anew"
            with _until_gone():
                await refuse(context, TierUnavailableError(msg))

    async def read(self, session: Session, request: pb.ReadRequest, context: Context) -> None:
        """Read."""
        _check_deadline(context)
        order = convert.send_order_of(request)
        with self._streams.entered(session) as place:
            try:
                async with aclosing(self._remote.read(session, order)) as chunks:
                    async for chunk in chunks:
                        async with place.patient():
                            with _until_gone():
                                await context.write(convert.chunk_message(chunk))
            except TimeoutError:
                await self._end_stalled(session, place, context, "took")

    async def write(
        self, session: Session, stream: AsyncIterator[pb.WriteRequest], context: Context
    ) -> pb.WriteResponse:
        """Write."""
        _check_deadline(context)
        with self._streams.entered(session) as place:
            # Not before: Python complains of a receiver that is never awaited.
            requests = aiter(stream)
            try:
                header = await self._next(requests, place)
                if header is None or not header.HasField("header") or header.data:
                    raise InvalidArgumentError(
                        "header", "missing", "a Commit, without data", "send it first"
                    )
                commit = header.header
                order, crc32 = convert.order_of(commit), header.message_crc32
                with self._remote.writing(session, order, crc32) as writing:
                    await self._receive(session, requests, place, writing)
                    running = self._remote.begin(session, commit.set_index, writing)
            except TimeoutError:
                await self._end_stalled(session, place, context, "sent")
        # A cancelled call does not stop it.
        status = await asyncio.shield(running)
        response = pb.WriteResponse(commit=convert.commit_message(commit, status))
        return sealed(response, header.message_crc32)

    async def _receive(
        self,
        session: Session,
        requests: AsyncIterator[pb.WriteRequest],
        place: Place,
        writing: Writing,
    ) -> None:
        while (message := await self._next(requests, place)) is not None:
            self._remote.went_on(session, len(message.data))
            if message.HasField("header"):
                raise InvalidArgumentError(
                    "header", "there again", "in the first message only", "send one Commit a stream"
                )
            await writing.take(message.offset, message.data, message.crc32)
        await writing.finish()

    @staticmethod
    async def _next(
        requests: AsyncIterator[pb.WriteRequest], place: Place
    ) -> pb.WriteRequest | None:
        """The next message, None at the end.

        Raises:
            TimeoutError: None came.
        """
        async with place.patient():
            message = await anext(requests, None)
        accept(message)
        return message

    async def _end_stalled(
        self, session: Session, place: Place, context: Context, did: str
    ) -> NoReturn:
        """gRPC holds what the client has not taken until it takes the answer, or until the
        deadline."""
        place.give_up()
        self._streams.counts.stalled += 1
        if session.remote:
            self._remote.service.sessions.end(session.session_id, "stalled")
        stall_s = self._streams.limits.stall_timeout_s
        msg = (
            f"the client {did} nothing for remote.stall_timeout = {stall_s:g} s, or for "
            f"{HURRIED_S:g} s while others waited; attach again"
        )
        with _until_gone():
            await refuse(context, TierUnavailableError(msg))
        raise AssertionError  # refuse raises


@contextmanager
def _until_gone() -> Iterator[None]:
    """What gRPC raises when nobody is there to send to is the end of the call, not an error."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _check_deadline(context: Context) -> None:
    left_s = context.time_remaining()
    if left_s is None or left_s > DEADLINE_MAX_S:
        raise InvalidArgumentError(
            "deadline",
            "none" if left_s is None else f"{left_s:.1f} s",
            f"at most {DEADLINE_MAX_S:g} s for a stream",
            "give the call one, and ask for less at a time",
        )

"""Who is attached: their token, staging, touch ring, events; and when a session is over.

A session is the fd socket's connection, or for a client on another host its Attach stream. EOF
there ends it at once (a killed client); silence for `timeout_s` ends it too (a stopped one). What
it held comes back: its leases now, its staging memory when the copies that run from it are done.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SessionUnknownError,
)
from kvkeep_server.core.memfd import Memfd
from kvkeep_server.index.layout import LAYOUT_VERSION
from kvkeep_server.service.session_memory import FdOffer, SessionMemory, close_offers
from kvkeep_server.service.touch_ring import TouchRing

TOKEN_NBYTES = 32
CLIENT_NAME_NBYTES_MAX = 256
_EVENTS_QUEUED_MAX = 4096
_PAGE_NBYTES = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HelloFacts:
    """What a client said of itself, and what the kernel says of it (uid, gid, pid)."""

    client_name: str
    layout_versions: tuple[int, ...]
    staging_nbytes: int
    credential: str = field(repr=False)
    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a hello."""

    session_id: int
    token: bytes = field(repr=False)
    server_epoch: int
    fds: list[FdOffer]


@dataclass(frozen=True, slots=True)
class Event:
    """Something a session is told on its Attach stream.

    Attributes:
        sequence: Counts up from 1 in a session.
        name: Field of `AttachEvent`.
        values: Fields of that message.
    """

    sequence: int
    name: str
    values: Mapping[str, int | bytes]


class FdSender(Protocol):
    """The fd socket's sending side."""

    def send(self, session_id: int, sequence: int, fds: list[FdOffer]) -> None:
        """Sends and closes the descriptors; never blocks."""
        ...

    def hang_up(self, session_id: int) -> None:
        """Closes the connection of a session that ended otherwise than by EOF."""
        ...


@dataclass(slots=True)
class Session:
    """One attached client.

    Attributes:
        session_id: Counts from 1.
        token: 32 random bytes.
        facts: Of its hello.
        staging: Its staging memory; of a client on another host only the daemon maps it.
        ring: Its touch ring; None of a client on another host, which shares no memory.
        seen_s: Monotonic seconds of its last sign of life.
        opened: Handles of the namespace sets that it opened.
        events: Waiting for its Attach stream.
        news: Set when its Attach streams have something to look at.
        sequence: Of the last event.
        copies: Running copies from its staging.
        attach_number: Counts the Attach streams; only the newest may go on.
        over: The session ended.
    """

    session_id: int
    token: bytes = field(repr=False)
    facts: HelloFacts
    staging: Memfd
    ring: TouchRing | None
    seen_s: float
    opened: set[int] = field(default_factory=set)
    events: deque[Event] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    sequence: int = 0
    copies: int = 0
    attach_number: int = 0
    over: bool = False

    @property
    def remote(self) -> bool:
        """Whether its client is on another host."""
        return self.ring is None


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of sessions; names as in the configuration's `[sessions]` and `[remote]`."""

    timeout_s: float
    staging_nbytes: int
    staging_max_nbytes: int
    staging_total_max_nbytes: int
    sessions_max: int
    remote_max: int
    remote_staging_max_nbytes: int


@dataclass(slots=True)
class _Share:
    """What clients on other hosts have."""

    sessions: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.sessions += 1
        self.nbytes += nbytes

    def take(self, nbytes: int) -> None:
        self.sessions -= 1
        self.nbytes -= nbytes


class Sessions:
    """All sessions. Event loop only.

    Args:
        limits: See `SessionLimits`.
        clock: For silence.
        source: Draws tokens; must be unguessable in production (`random.SystemRandom`).
        server_epoch: Of this daemon.
        memory: Makes what a session maps.
        on_end: Gives back what tiering holds for a session.
    """

    def __init__(
        self,
        *,
        limits: SessionLimits,
        clock: Clock,
        source: random.Random,
        server_epoch: int,
        memory: SessionMemory,
        on_end: Callable[[Session], None],
    ) -> None:
        """See the class."""
        self.limits = limits
        self._clock = clock
        self._source = source
        self._server_epoch = server_epoch
        self._memory = memory
        self._on_end = on_end
        self._by_token: dict[bytes, Session] = {}
        self._by_id: dict[int, Session] = {}
        self._opening = 0
        self._next_id = 1
        self._staging_nbytes = 0
        self._remote = _Share()
        self.sender: FdSender | None = None
        self.ended_total = 0

    def __len__(self) -> int:
        """Live sessions."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        """Live sessions."""
        return iter(list(self._by_id.values()))

    @property
    def opened_total(self) -> int:
        """Sessions that ever began."""
        return self._next_id - 1

    @property
    def remote(self) -> int:
        """Sessions of clients on other hosts, ended ones with running copies included."""
        return self._remote.sessions

    @property
    def staging_nbytes(self) -> int:
        """Staging memory of all sessions, ended ones with running copies included."""
        return self._staging_nbytes

    async def open(self, facts: HelloFacts) -> Welcome:
        """Begins a session for a client that said hello on the fd socket.

        Raises:
            FailedPreconditionError: No common layout version.
            InvalidArgumentError: Staging too large, name too long.
            ResourceExhaustedError: Too many sessions, or too much staging.
        """
        nbytes = self._checked_staging(facts)
        with self._claimed(nbytes):
            staging, ring, fds = await self._memory.make(nbytes)
        session = self._begin(facts, staging, ring)
        return Welcome(session.session_id, session.token, self._server_epoch, fds)

    async def open_remote(self, facts: HelloFacts) -> Session:
        """As `open`, for a client on another host: what it has of shared memory is its staging,
        which only the daemon maps.

        Raises:
            ResourceExhaustedError: Also when clients on other hosts have what they may.
        """
        nbytes = self._checked_staging(facts)
        self._check_remote(nbytes)
        self._remote.add(nbytes)
        try:
            with self._claimed(nbytes):
                staging = await self._memory.make_staging(nbytes)
        except BaseException:
            self._remote.take(nbytes)
            raise
        return self._begin(facts, staging, None)

    @contextlib.contextmanager
    def _claimed(self, nbytes: int) -> Iterator[None]:
        """Claims before a wait, so that hellos that meet cannot pass a limit together."""
        self._opening += 1
        self._staging_nbytes += nbytes
        try:
            yield
        except BaseException:
            self._staging_nbytes -= nbytes
            raise
        finally:
            self._opening -= 1

    def _begin(self, facts: HelloFacts, staging: Memfd, ring: TouchRing | None) -> Session:
        session = Session(
            self._next_id,
            self._source.randbytes(TOKEN_NBYTES),
            facts,
            staging,
            ring,
            self._clock.monotonic_s(),
        )
        self._next_id += 1
        self._by_id[session.session_id] = session
        self._by_token[session.token] = session
        return session

    def _check_remote(self, nbytes: int) -> None:
        limits, share = self.limits, self._remote
        if share.sessions >= limits.remote_max:
            msg = f"remote.sessions_max = {limits.remote_max} are attached; raise it or end some"
            raise ResourceExhaustedError(msg, retry_after_s=1.0)
        if share.nbytes + nbytes > limits.remote_staging_max_nbytes:
            msg = (
                f"staging of clients on other hosts would be {share.nbytes + nbytes} bytes, "
                f"remote.staging_total_max is {limits.remote_staging_max_nbytes}; ask for less"
            )
            raise ResourceExhaustedError(msg, retry_after_s=1.0)

    def _checked_staging(self, facts: HelloFacts) -> int:
        if LAYOUT_VERSION not in facts.layout_versions:
            msg = (
                f"client speaks layout versions {list(facts.layout_versions)}, this daemon only "
                f"{LAYOUT_VERSION}; install client and daemon of the same release"
            )
            raise FailedPreconditionError(msg)
        if len(facts.client_name.encode()) > CLIENT_NAME_NBYTES_MAX:
            raise InvalidArgumentError(
                "client_name",
                facts.client_name,
                f"at most {CLIENT_NAME_NBYTES_MAX} bytes",
                "shorten it",
            )
        limits = self.limits
        nbytes = facts.staging_nbytes or limits.staging_nbytes
        if nbytes > limits.staging_max_nbytes:
            raise InvalidArgumentError(
                "staging_nbytes",
                nbytes,
                f"at most sessions.staging_max = {limits.staging_max_nbytes}",
                "ask for less, or raise the limit",
            )
        nbytes = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        if len(self._by_id) + self._opening >= limits.sessions_max:
            msg = (
                f"sessions.sessions_max = {limits.sessions_max} are attached; raise it or end some"
            )
            raise ResourceExhaustedError(msg, retry_after_s=1.0)
        if self._staging_nbytes + nbytes > limits.staging_total_max_nbytes:
            msg = (
                f"staging of all sessions would be {self._staging_nbytes + nbytes} bytes, "
                f"sessions.staging_total_max is {limits.staging_total_max_nbytes}; ask for less"
            )
            raise ResourceExhaustedError(msg, retry_after_s=1.0)
        return nbytes

    def get(self, token: bytes) -> Session:
        """The live session of a token; counts as a sign of life.

        Raises:
            SessionUnknownError: None.
        """
        # A dict finds a 256-bit random token by its hash: what its timing tells is no help in
        # guessing one.
        session = self._by_token.get(token)
        if session is None:
            msg = "no live session has this token; attach again"
            raise SessionUnknownError(msg)
        session.seen_s = self._clock.monotonic_s()
        return session

    def end(self, session_id: int, reason: str) -> None:
        """Ends a session, and says why; unknown ids are ignored, so that EOF and timeout may both
        come."""
        session = self._by_id.pop(session_id, None)
        if session is None:
            return
        del self._by_token[session.token]
        facts = {"session": session_id, "remote": session.remote, "reason": reason}
        _log.info("session ended", extra=facts)
        self.ended_total += 1
        session.over = True
        session.news.set()
        if self.sender is not None:
            self.sender.hang_up(session_id)
        self._on_end(session)
        self._free_memory(session)

    def alive(self, session: Session) -> None:
        """A sign of life."""
        session.seen_s = self._clock.monotonic_s()

    def hear(self, session: Session, heartbeat: int) -> None:
        """A heartbeat. A client on another host is told: it knows in no other way that what it
        sends arrives."""
        self.alive(session)
        if session.remote and not session.over:
            self.tell(session, "heard", {"heartbeat": heartbeat})

    async def listen(self, session: Session) -> AsyncIterator[Event]:
        """The session's events until it is over; a newer listener takes over from an older one.

        Raises:
            FailedPreconditionError: Another stream of the same session took over.
        """
        session.attach_number += 1
        number = session.attach_number
        timeout_ms = round(self.limits.timeout_s * 1000)
        values: dict[str, int | bytes] = {
            "server_epoch": self._server_epoch,
            "session_timeout_ms": timeout_ms,
        }
        if session.remote:
            values |= {"session_token": session.token, "staging_nbytes": session.staging.nbytes}
        self.tell(session, "attached", values)
        while True:
            if session.attach_number != number:
                msg = "another Attach stream of this session took over"
                raise FailedPreconditionError(msg)
            if session.events:
                yield session.events.popleft()
            elif session.over:
                return
            else:
                session.news.clear()
                await session.news.wait()

    def silent(self) -> list[Session]:
        """Sessions that gave no sign of life for `timeout_s`."""
        before = self._clock.monotonic_s() - self.limits.timeout_s
        return [session for session in self if session.seen_s < before]

    def begin_copy(self, session: Session) -> None:
        """Keeps the session's staging memory until the matching `end_copy`."""
        session.copies += 1

    def end_copy(self, session: Session) -> None:
        """See `begin_copy`."""
        session.copies -= 1
        if session.over:
            self._free_memory(session)

    def _free_memory(self, session: Session) -> None:
        if session.copies == 0:
            nbytes = session.staging.nbytes
            self._staging_nbytes -= nbytes
            if session.remote:
                self._remote.take(nbytes)
            self._memory.free(session.staging, session.ring)

    def tell(
        self,
        session: Session,
        name: str,
        values: Mapping[str, int | bytes],
        fds: list[FdOffer] | None = None,
    ) -> None:
        """Queues an event for one session, its descriptors first. A session that does not listen is
        ended."""
        session.sequence += 1
        if fds and self.sender is not None:
            self.sender.send(session.session_id, session.sequence, fds)
        elif fds:
            close_offers(fds)
        if len(session.events) >= _EVENTS_QUEUED_MAX:
            self.end(session.session_id, "does not take its events")
            return
        session.events.append(Event(session.sequence, name, values))
        session.news.set()

    def tell_all(
        self, name: str, values: dict[str, int], offers: Callable[[], list[FdOffer]] | None = None
    ) -> None:
        """Queues an event for every session; `offers` makes fresh descriptors for each. A session
        for which there are none is ended: it would miss what they bring for ever. Clients on other
        hosts have no use for an event that brings descriptors."""
        for session in self:
            if offers and session.remote:
                continue
            try:
                fds = offers() if offers else None
            except OSError as error:
                self.end(session.session_id, f"no descriptors for it: {error.strerror}")
                continue
            self.tell(session, name, values, fds)

"""Calls that an engine's loop submits, and collects later: it waits for nothing.

Nothing here has a thread of its own. `submit_*` puts the call into the socket, `poll` takes the
replies that are there: both keep the GIL, for who gives it up beside a busy thread gets it back
5 ms later (`server/decisions/0018-tickets.md`).

A ticket's life: OPEN, then one of the other states, at the latest at its deadline.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvkeep.errors import DeadlineError, KVKeepError, ResourceExhaustedError, SessionLostError
from kvkeep.leases import Acquired
from kvkeep.readiness import Readiness
from kvkeep.transport import payload_of
from kvkeep.v1.block_cache_pb2 import AcquireResponse, AwaitRequest, AwaitResponse
from kvkeep.v1.session_pb2 import CallMethod

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.call_socket import CallSocket, PendingCall, Reply
    from kvkeep.opened import Opened
    from kvkeep.results import CommitResult
    from kvkeep.session import Session
    from kvkeep.v1.block_cache_pb2 import AcquireRequest

TICKETS_OPEN_MAX: Final = 8192
_RETRY_AFTER_S: Final = 0.05
_PARENTS: Final = "the ticket is the parent's: this process was forked from it"


class TicketState(Enum):
    """What became of a ticket; anything but READY means: do without.

    Attributes:
        OPEN: Nothing yet, or a part of it: `poll` will hand it out.
        READY: What was asked for is there.
        NOTHING: Of an acquire: no block is there.
        FAILED: `error` says why.
        CANCELLED: By `cancel`; `poll` does not hand it out.
    """

    OPEN = "open"
    READY = "ready"
    NOTHING = "nothing"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Ticket:
    """One submitted call. Any thread may look at it and cancel it.

    Attributes:
        state: See `TicketState`.
        error: Why it failed, or why a part did not come; else None.
        until_s: Its deadline, monotonic seconds.
    """

    def __init__(self, tickets: Tickets, session: Session | None) -> None:
        """Made by `Namespace.submit_acquire` and `Store.submit_commit`."""
        self.state = TicketState.OPEN
        self.error: KVKeepError | None = None
        self.until_s = 0.0
        self.session = session
        self._tickets = tickets
        self._inbox: deque[Reply] = deque()
        self._call: PendingCall | None = None

    @property
    def done(self) -> bool:
        """Nothing more becomes of it."""
        return self.state is not TicketState.OPEN

    def cancel(self) -> None:
        """Want it no more. What it has or gets is given back; a commit may be stored or not.

        Idempotent; one that `poll` has handed out as done stays as it is.
        """
        self._tickets.cancel(self)

    # --- for Tickets and those who submit

    @property
    def what(self) -> str:
        """Name of its call, for messages."""
        return "a call" if self._call is None else self._call.what

    def follow(self, call: PendingCall) -> None:
        """This call is under way for it."""
        self._call = call
        self._tickets.followed(self)

    def on_reply(self, reply: Reply | None) -> None:
        """Of `PendingCall`: in the thread that happens to read."""
        if reply is None:
            return
        if self.done:
            self.take_late(reply)
        else:
            self._inbox.append(reply)
            self._tickets.hear(self)

    def progress(self) -> bool:
        """Look at the replies that came; whether there is news to tell."""
        news = False
        while self._inbox:
            reply = self._inbox.popleft()
            if self.done:
                self.take_late(reply)
                continue
            try:
                self.take(reply)
            except KVKeepError as error:
                self.lapse(error)
            news = True
        return news

    def take(self, reply: Reply) -> None:
        """One reply to an open ticket. Errors: those of the call."""
        raise NotImplementedError

    def take_late(self, reply: Reply) -> None:
        """One reply to a ticket that has ended."""

    def give_back(self) -> None:
        """What it has so far."""

    def leave(self) -> None:
        """Let go of the call under way; it may be answered late."""
        if self._call is not None and self.session is not None:
            self.session.transport.calls.leave(self._call)

    def overdue(self) -> None:
        """Its deadline has passed."""
        call, session = self._call, self.session
        if call is not None and session is not None and call.reply is None:
            session.transport.calls.breaker.timed_out(call.asked_s)
        self.lapse(DeadlineError(f"{self.what}: no answer in time"))

    def lapse(self, error: KVKeepError) -> None:
        """It ends without an answer, or with a part of one."""
        self.error = error
        self.give_back()
        self._finish(TicketState.FAILED)

    def _finish(self, state: TicketState) -> None:
        self.state = state
        self.leave()
        self._tickets.ended(self)


class AcquireTicket(Ticket):
    """An acquire.

    When some blocks are in ram and others on their way there from nvme, `poll` hands it out with
    each piece that came while it is OPEN, and at last when it is done.

    Attributes:
        acquired: What is leased so far: grows in `poll`. None when there is nothing to use, but for
            NOTHING, where its `ended` tells why. Release it, or leave its `with`.
    """

    def __init__(self, tickets: Tickets, opened: Opened | None) -> None:
        """Made by `Namespace.submit_acquire`."""
        super().__init__(tickets, None if opened is None else opened.session)
        self.acquired: Acquired | None = None
        self._opened = opened
        self._coming: Acquired | None = None
        self._over = False
        self._arriving = False
        self._shown = 0

    def submit(self, request: AcquireRequest, timeout_s: float) -> None:
        """Send it. Errors: UnavailableError."""
        assert self._opened is not None
        transport = self._opened.session.transport
        call = transport.pending(CallMethod.CALL_METHOD_ACQUIRE, timeout_s, self.on_reply)
        transport.send(call, request)
        self.follow(call)

    def progress(self) -> bool:
        """See `Ticket`."""
        news = super().progress()
        return self._show() or (news and self.done)

    def take(self, reply: Reply) -> None:
        """See `Ticket`."""
        payload = payload_of(reply, self.what)
        if not self._arriving:
            self._take_first(AcquireResponse.FromString(payload))
        elif reply.more:
            assert self._coming is not None
            self._coming.add(AwaitResponse.FromString(payload))
        else:
            self._over = True

    def _take_first(self, response: AcquireResponse) -> None:
        assert self._opened is not None
        timeout_s = max(0.0, self.until_s - time.monotonic())
        coming = self._coming = Acquired(self._opened, response, timeout_s=timeout_s)
        self._over = not coming.pending
        if not self._over:
            self._arriving = True
            transport = self._opened.session.transport
            method = CallMethod.CALL_METHOD_AWAIT
            self._call = call = transport.pending(method, timeout_s, self.on_reply)
            transport.send(call, AwaitRequest(lease_id=coming.lease_id))

    def _show(self) -> bool:
        """What came, when it can be used; whether there is any."""
        coming = self._coming
        if coming is None or self.done:
            return False
        if not coming.mapped():
            self._tickets.look_again(self)
            return False
        if self._over:
            self._conclude(coming)
            return True
        if not self._usable(coming) or coming.leased == self._shown:
            return False
        self.acquired, self._shown = coming, coming.leased
        return True

    def _usable(self, coming: Acquired) -> bool:
        # A window or a state belongs to the end of what was asked for.
        assert self._opened is not None
        return coming.leased > 0 and (not self._opened.rules or coming.whole)

    def _conclude(self, coming: Acquired) -> None:
        if self._usable(coming):
            self.acquired = coming
            self._finish(TicketState.READY)
        else:
            coming.drop()
            self.acquired = coming
            self._finish(TicketState.NOTHING)

    def take_late(self, reply: Reply) -> None:
        """See `Ticket`."""
        if not (self._arriving or reply.status) and self.session is not None:
            self.session.give_back(AcquireResponse.FromString(reply.payload).lease_id)

    def lapse(self, error: KVKeepError) -> None:
        """See `Ticket`. A part that can be used is used."""
        self.error = error
        coming = self._coming
        if coming is not None and self._usable(coming) and coming.mapped():
            self._conclude(coming)
        else:
            super().lapse(error)

    def give_back(self) -> None:
        """See `Ticket`."""
        coming, self._coming, self.acquired = self._coming, None, None
        if coming is not None:
            coming.drop()


class CommitTicket(Ticket):
    """A commit.

    Attributes:
        result: When it is READY.
    """

    def __init__(
        self, tickets: Tickets, session: Session, parse: Callable[[bytes], CommitResult]
    ) -> None:
        """Made by `Store.submit_commit`."""
        super().__init__(tickets, session)
        self.result: CommitResult | None = None
        self._parse = parse

    def take(self, reply: Reply) -> None:
        """See `Ticket`."""
        self.end(self._parse(payload_of(reply, self.what)))

    def end(self, result: CommitResult) -> None:
        """It is answered."""
        self.result = result
        self._finish(TicketState.READY)


class Tickets:
    """All open tickets of a client. Any thread may call."""

    def __init__(self) -> None:
        """None is open."""
        self._open: set[Ticket] = set()
        self._reset()

    def _reset(self) -> None:
        # Re-entrant, since what is done under it submits and ends tickets.
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Ticket]] = []
        self._news: deque[Ticket] = deque()
        self._again: set[Ticket] = set()
        self._mapped = 0
        self._sockets: dict[CallSocket, Session] = {}
        self._readiness: Readiness | None = None

    def admit(self, ticket: Ticket, timeout_s: float) -> None:
        """Open a ticket. Errors: ResourceExhaustedError."""
        with self._lock:
            if len(self._open) >= TICKETS_OPEN_MAX:
                raise ResourceExhaustedError(
                    f"{TICKETS_OPEN_MAX} tickets are open: poll() ends them, cancel() too",
                    _RETRY_AFTER_S,
                )
            ticket.until_s = time.monotonic() + timeout_s
            self._open.add(ticket)
            heapq.heappush(self._due, (ticket.until_s, next(self._numbers), ticket))

    def followed(self, ticket: Ticket) -> None:
        """A call is under way for it."""
        assert ticket.session is not None
        calls = ticket.session.transport.calls
        with self._lock:
            self._sockets[calls] = ticket.session
            if self._readiness is not None:
                self._readiness.watch(calls)
                self._wake_in_time(self._readiness)

    def hear(self, ticket: Ticket) -> None:
        """Something came for it."""
        self._news.append(ticket)
        self.ring()

    def ring(self) -> None:
        """`poll` has something to do."""
        readiness = self._readiness
        if readiness is not None:
            readiness.ring()

    def on_memory(self) -> None:
        """New memory is mapped; any thread."""
        self._mapped += 1
        self.ring()

    def look_again(self, ticket: Ticket) -> None:
        """It waits for memory that is not mapped yet."""
        self._again.add(ticket)

    def ended(self, ticket: Ticket) -> None:
        """It is done, and is to be told of."""
        self._again.discard(ticket)
        self.hear(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """See `Ticket`."""
        with self._lock:
            if ticket in self._open:
                self._open.discard(ticket)
                self._again.discard(ticket)
                ticket.state = TicketState.CANCELLED
                ticket.give_back()
                ticket.leave()

    def poll(self, limit: int | None = None) -> list[Ticket]:
        """Tickets that are done, or have got another piece, in the order of that."""
        with self._lock:
            mapped = self._mapped
            self._take()
            self._end_overdue()
            again, self._again = self._again, set()
            self._news.extend(again)
            told: dict[Ticket, None] = {}
            while self._news and (limit is None or len(told) < limit):
                ticket = self._news.popleft()
                if ticket.progress() or (ticket.done and ticket in self._open):
                    told[ticket] = None
                if ticket.done:
                    self._open.discard(ticket)
            if self._readiness is not None:
                self._look_ahead(self._readiness, mapped)
            return list(told)

    def _take(self) -> None:
        for calls, session in list(self._sockets.items()):
            while calls.take():
                pass
            if calls.lost and calls.take() is False:
                del self._sockets[calls]
                if self._readiness is not None:
                    self._readiness.forget(calls)
                for ticket in [one for one in self._open if one.session is session]:
                    ticket.progress()
                    if not ticket.done:
                        ticket.lapse(calls.failure(ticket.what))

    def _end_overdue(self) -> None:
        now_s, due = time.monotonic(), self._due
        while due and (due[0][0] <= now_s or due[0][2].done):
            ticket = heapq.heappop(due)[2]
            ticket.progress()  # what came in time counts
            if not ticket.done:
                ticket.overdue()
            elif ticket in self._open:
                self.hear(ticket)  # again: who was interrupted in a poll lost it
        if len(due) > 4 * len(self._open) + 1024:
            self._due = [one for one in due if not one[2].done]
            heapq.heapify(self._due)

    def _look_ahead(self, readiness: Readiness, mapped: int) -> None:
        for calls in self._sockets:
            readiness.watch(calls)
        self._wake_in_time(readiness)
        readiness.hush()
        # What came since it was looked for has rung in vain.
        if self._news or (self._again and self._mapped != mapped):
            readiness.ring()

    def _wake_in_time(self, readiness: Readiness) -> None:
        # None is due where another thread has ended the ticket before its call went out.
        readiness.wake_at(self._due[0][0] if self._due else 0.0)

    def fileno(self) -> int:
        """Readable when `poll` has something to do. Errors: OSError."""
        with self._lock:
            if self._readiness is None:
                self._readiness = Readiness()
                self._readiness.ring()
            return self._readiness.fileno()

    def close(self) -> None:
        """The client is closed: open tickets end with the next `poll`; the descriptor is gone."""
        with self._lock:
            readiness, self._readiness = self._readiness, None
            if readiness is not None:
                readiness.close()

    def after_fork_in_child(self) -> None:
        """Tickets are the parent's, and so is the descriptor."""
        for ticket in self._open:
            ticket.state, ticket.error = TicketState.FAILED, SessionLostError(_PARENTS)
        self._open = set()
        if self._readiness is not None:
            self._readiness.close()
        self._reset()

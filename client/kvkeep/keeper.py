"""Keeps a client attached: a thread waits on the fd socket, and attaches again after its end.

It also sends what the daemon did not take at once, and reads replies that nobody waits for and that
matter all the same: those of the probes to a daemon that does not answer, and late ones. A session
that has been silent for long is given up: a new one may have a way where this has none. Otherwise
it sleeps: in an engine a thread that wakes up takes the GIL from the engine's.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from kvkeep.descriptors import NoDescriptorsError
from kvkeep.errors import KVKeepError, UnavailableError
from kvkeep.forking import CHILD_MAY_USE_GRPC, REFUSAL
from kvkeep.waking import EventFd

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.session import Session

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 0.2
_JOIN_TIMEOUT_S: Final = 5.0

_SILENT: Final = "the daemon does not answer: calls fail at once until it does"
_ANSWERS: Final = "the daemon answers again"

_log = logging.getLogger("kvkeep")


class SessionKeeper:
    """The client's session, now and after each restart of the daemon.

    While there is none, `require` fails at once: an engine must not wait for its cache.
    """

    def __init__(
        self,
        *,
        open_session: Callable[[], Session],
        on_session: Callable[[Session], None],
        on_memory: Callable[[], None],
    ) -> None:
        """`open_session` returns an attached session or raises KVKeepError.

        `on_session` runs in the keeper's thread, before a new session becomes the current one;
        `on_memory` when new memory is mapped.
        """
        self._open_session = open_session
        self._on_session = on_session
        self._on_memory = on_memory
        self._session: Session | None = None
        self._closed = threading.Event()
        self._must_revive = False
        self._forked_in_vain = False
        self._reset()

    def _reset(self) -> None:
        """What a forked child must not share, or cannot use, with its parent."""
        self._revive_lock = threading.Lock()
        self._bell = EventFd()
        self._thread: threading.Thread | None = None
        self._jobs: deque[Callable[[], None]] = deque()

    def start(self) -> None:
        """Attach now, in the caller's thread. Errors: those of `open_session`."""
        self._session = self._open_session()
        self._thread = threading.Thread(target=self._run, name="kvkeep-session", daemon=True)
        self._thread.start()

    def current(self) -> Session | None:
        """The live session, if there is one. Attaches first in a forked child."""
        if self._must_revive:
            self._revive()
        session = self._session
        return session if session is not None and session.alive else None

    def require(self) -> Session:
        """The live session. Errors: UnavailableError."""
        session = self.current()
        if session is None:
            if self._closed.is_set():
                raise UnavailableError("the client is closed")
            if self._forked_in_vain:
                raise UnavailableError(REFUSAL)
            raise UnavailableError("no session with the daemon; attaching again")
        return session

    def later(self, job: Callable[[], None]) -> None:
        """Run `job` in the keeper's thread; it may raise KVKeepError, which is logged."""
        self._jobs.append(job)
        self._bell.ring()

    def close(self) -> None:
        """End the session and the thread. Idempotent."""
        self._closed.set()
        self._must_revive = False
        self._bell.ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)

    def after_fork_in_child(self) -> None:
        """The parent's session is not ours: the next call attaches anew, where gRPC allows it."""
        if self._session is not None:
            self._session.abandon()
            # Never freed: taking gRPC's channel apart in a child waits for threads it has not.
            _abandoned.append(self._session)
            self._session = None
        self._bell.close()
        self._must_revive = CHILD_MAY_USE_GRPC and not self._closed.is_set()
        self._forked_in_vain = not CHILD_MAY_USE_GRPC
        self._reset()

    def _revive(self) -> None:
        with self._revive_lock:
            if not self._must_revive:
                return
            try:
                self.start()
            except KVKeepError as error:
                _log.warning("not attached in the child", extra={"reason": str(error)})
                return
            self._must_revive = False
            if self._session is not None:
                self._on_session(self._session)

    def _run(self) -> None:
        while not self._closed.is_set():
            session = self._session
            if session is None:
                self._attach_again()
                continue
            self._watch(session)
            self._session = None
            session.end()
            if not self._closed.is_set():
                _log.warning("session lost, attaching again")

    def _watch(self, session: Session) -> None:
        """Serve the session until its end."""
        calls, silent_s = session.transport.calls, math.inf
        session.on_change = self._bell.ring
        while not self._closed.is_set():
            poll = select.poll()
            poll.register(session.fileno(), select.POLLIN)
            poll.register(self._bell.fileno(), select.POLLIN)
            wanted = select.POLLIN if calls.unattended else 0
            wanted |= select.POLLOUT if calls.unsent else 0
            if wanted and not calls.lost:
                poll.register(calls.fileno(), wanted)
            ready = dict(poll.poll(_left_ms(silent_s + session.silence_max_s)))
            self._bell.hush()
            if session.fileno() in ready:
                if not _received(session):
                    return
                self._on_memory()
            if ready.get(calls.fileno(), 0) & ~select.POLLOUT:
                calls.take()
            elif calls.fileno() in ready:
                calls.flush()
            calls.breaker.go_on()
            self._work()
            silent_s = _silent_since(session, silent_s)
            # What has just come may be the answer of a daemon that we could not hear.
            over = time.monotonic() >= silent_s + session.silence_max_s
            if over and calls.fileno() not in ready:
                return

    def _work(self) -> None:
        # A job that puts itself back waits for the next turn, after a look at the fd socket.
        for _ in range(len(self._jobs)):
            try:
                self._jobs.popleft()()
            except KVKeepError as error:
                _log.info("job failed", extra={"reason": str(error)})

    def _attach_again(self) -> None:
        backoff_s, told = BACKOFF_FIRST_S, False
        while not self._closed.wait(backoff_s):
            try:
                session = self._open_session()
            except KVKeepError as error:
                # A daemon that is away is no fault of this process, and comes back.
                own = isinstance(error, NoDescriptorsError) and not told
                level, told = (logging.WARNING, True) if own else (logging.DEBUG, told)
                _log.log(level, "not attached", extra={"reason": str(error)})
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                continue
            try:
                self._on_session(session)
            except KVKeepError as error:
                _log.warning("new session not usable", extra={"reason": str(error)})
                session.end()
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                continue
            self._session = session
            _log.info("attached again", extra={"server_epoch": session.server_epoch})
            return


def _received(session: Session) -> bool:
    """Whether the session goes on."""
    try:
        return session.receive()
    except NoDescriptorsError as error:
        _log.warning("new memory of the daemon's did not arrive", extra={"reason": str(error)})
        return False


def _left_ms(until_s: float) -> float | None:
    """For a poll; None = no end."""
    left_s = until_s - time.monotonic()
    return None if left_s == math.inf else max(0.0, left_s) * 1000


def _silent_since(session: Session, before_s: float) -> float:
    """Monotonic seconds of when its daemon stopped to answer, `before_s` if that is known; infinite
    while it answers."""
    if session.silent == (before_s < math.inf):
        return before_s
    _log.warning(_SILENT if session.silent else _ANSWERS)
    return time.monotonic() if session.silent else math.inf


_abandoned: list[Session] = []

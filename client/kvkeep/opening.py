"""How a namespace set is opened in a session, and again in the next one."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from kvkeep.call_socket import SILENT
from kvkeep.convert import open_request
from kvkeep.errors import (
    DeadlineError,
    InvalidArgumentError,
    KVKeepError,
    NotSupportedError,
    ResourceExhaustedError,
    UnavailableError,
)
from kvkeep.remote_opened import opened_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.keeper import SessionKeeper
    from kvkeep.opened import Opened
    from kvkeep.session import Session
    from kvkeep.spec import NamespaceSpec

# What a daemon refuses for these stays refused until it is started with other settings.
_FINAL: Final = (InvalidArgumentError, NotSupportedError)
# Between two attempts in a session that refused it.
_RETRY_S: Final = 0.5

_log = logging.getLogger("kvkeep")


class Opening:
    """A part of `Namespace`; any thread may call."""

    def __init__(
        self,
        keeper: SessionKeeper,
        spec: NamespaceSpec,
        local_ranks: Sequence[int],
        *,
        timeout_s: float,
    ) -> None:
        """Opens nothing: see `open_in`."""
        self.spec = spec
        self._keeper = keeper
        self._local_ranks = tuple(local_ranks)
        self._timeout_s = timeout_s
        self._opening = threading.Lock()
        self._opened: Opened | None = None
        # Never an earlier one, also of a daemon that has forgotten it.
        self._epoch = spec.namespace_epoch
        self._refusal: KVKeepError | None = None
        # When another attempt makes sense after a refusal, monotonic seconds.
        self._again_s = float("inf")

    def open_in(self, session: Session) -> None:
        """Open it in a session; the daemon's refusal is remembered for later calls.

        Errors: UnavailableError, DeadlineError, InvalidArgumentError, NotSupportedError,
        ResourceExhaustedError.
        """
        request = open_request(self.spec, self._local_ranks)
        with self._opening:
            request.spec.namespace_epoch = self._epoch
            try:
                response = session.transport.open_namespace(request, self._timeout_s)
            except KVKeepError as error:
                self._refuse(error)
                raise
            self._opened = opened_in(session, self.spec, response)
            self._epoch = max(self._epoch, response.namespace_epoch)
            self._refusal, self._again_s = None, float("inf")

    def _refuse(self, error: KVKeepError) -> None:
        self._refusal = error
        if not isinstance(error, _FINAL):
            pause_s = error.retry_after_s if isinstance(error, ResourceExhaustedError) else 0.0
            self._again_s = time.monotonic() + max(pause_s, _RETRY_S)

    def reopen_in(self, session: Session) -> None:
        """As `open_in`, for a new session: a refusal is the later calls' business.

        Errors: UnavailableError, DeadlineError: this session is of no use.
        """
        try:
            self.open_in(session)
        except (UnavailableError, DeadlineError):
            raise
        except KVKeepError as error:
            _log.warning("namespace refused", extra={"reason": str(error)})

    def open_present_epoch(self) -> None:
        """As `reopen_in`, if the epoch that is open is over."""
        opened = self._opened
        if opened is not None and opened.over and opened.session.alive:
            self.reopen_in(opened.session)

    def after_fork_in_child(self) -> None:
        """The lock may be held by a thread that the child does not have."""
        self._opening = threading.Lock()

    def _live(self) -> Opened | None:
        """As it is open now, if the daemon answers. Without a call."""
        opened = self._opened
        if opened is None or not opened.session.alive:
            session = self._keeper.current()  # a forked child attaches here
            opened = self._opened
            if session is not None and time.monotonic() >= self._again_s:
                self._again_s = time.monotonic() + self._timeout_s + _RETRY_S
                self._keeper.later(lambda: self._open_refused(session))
        return opened if opened is not None and opened.session.answers else None

    def _open_refused(self, session: Session) -> None:
        if self._refusal is not None and session.alive:
            self.reopen_in(session)

    def _require(self) -> Opened:
        """In the present session and epoch, which may take a call.

        Errors: as `open_in`."""
        opened = self._ready()
        if opened.over:
            self.open_in(opened.session)
            return self._opened or opened
        return opened

    def _ready(self) -> Opened:
        """As `_require`, without a call: its epoch may be over. Errors: as there."""
        opened = self._live()
        if opened is None:
            raise self._away()
        return opened

    def _away(self) -> KVKeepError:
        """Why it is not open in a session with a daemon that answers."""
        if self._refusal is not None:
            return self._refusal.with_traceback(None)
        try:
            session = self._keeper.require()
        except UnavailableError as error:
            return error
        if session.silent:
            return UnavailableError(SILENT)
        return UnavailableError("the namespace is not open in this session yet: try again")

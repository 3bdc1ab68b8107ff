"""Sessions with a daemon on another host: the same as those with this host's, over a bridge."""

from __future__ import annotations

import mmap
import socket
from typing import TYPE_CHECKING

from kvkeep.bridge import Bridge
from kvkeep.errors import DeadlineError, SessionLostError, UnavailableError
from kvkeep.fd_socket import FdSocket
from kvkeep.remote_channel import RemoteChannel
from kvkeep.session import Session
from kvkeep.shared_memory import LAYOUT_VERSION
from kvkeep.staging import Staging
from kvkeep.transport import AttachStream, Transport
from kvkeep.v1.block_cache_pb2 import RemoteHello
from kvkeep.v1.session_pb2 import FdDescription, FdKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvkeep.fetched import FetchedChunk
    from kvkeep.session import SessionSettings
    from kvkeep.v1.block_cache_pb2 import Attached, AttachEvent


class _Life(FdSocket):
    """Of a session that has no fd socket: it is over when this is shut down."""

    def __init__(self) -> None:
        self._socket, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def close(self) -> None:
        self._other.close()
        super().close()


class RemoteSession(Session):
    """As `Session`; its chunks are what leases show, fetched, and its staging is this process's."""

    # Far away: a few round trips across an ocean.
    probe_s = 1.0
    # The way there may be dead where another is not.
    silence_max_s = 5.0

    def __init__(
        self, settings: SessionSettings, *, on_over: Callable[[], None] = lambda: None
    ) -> None:
        """Does nothing yet: see `open`. `on_over`: as of `Session`."""
        super().__init__(settings, on_over=on_over, life=_Life())
        self.server_epoch = 0
        self._bridge: Bridge | None = None
        self._attached: Attached | None = None

    def open(self) -> None:
        """Say hello, and attach.

        Errors: UnavailableError, DeadlineError; OSError (no descriptors).
        """
        settings = self._settings
        hello = RemoteHello(
            client_name=settings.client_name,
            layout_versions=[LAYOUT_VERSION],
            staging_nbytes=settings.staging_nbytes,
        )
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            self.end()
            raise
        try:
            self._map(FdDescription(kind=FdKind.FD_KIND_CALLS), ours.fileno())
            self.transport = Transport(
                target=settings.address,
                session_token=b"",
                calls=self._require_calls(),
                quick=False,
            )
            self._attach = AttachStream(
                self.transport,
                on_event=self._on_event,
                on_unknown_session=self._socket.shut_down,
                hello=hello,
            )
            self._attach.start(settings.timeout_s)
            self._begin(theirs)
        except BaseException as error:
            theirs.close()
            self.end()
            if isinstance(error, UnavailableError | DeadlineError):
                kind = DeadlineError if isinstance(error, DeadlineError) else UnavailableError
                raise kind(
                    f"no session with a daemon on {settings.address}: {error}. Start it there with "
                    "remote.listen, or give its address"
                ) from error
            raise
        finally:
            ours.close()
        self.alive = True

    def _begin(self, end: socket.socket) -> None:
        attached = self._attached
        if attached is None or not attached.session_token or not attached.staging_nbytes:
            raise UnavailableError("the daemon's answer to hello lacks the token or the staging")
        self.server_epoch = attached.server_epoch
        self.transport.use_token(attached.session_token)
        region = memoryview(mmap.mmap(-1, attached.staging_nbytes))
        self.staging = Staging(region)
        self._bridge = Bridge(
            end=end,
            channel=RemoteChannel(self._settings.address, attached.session_token),
            staging=region,
            show=self._show,
            timeout_s=self._settings.timeout_s,
        )
        self._bridge.start()

    def _on_event(self, event: AttachEvent) -> None:
        if event.HasField("attached"):
            self._attached = event.attached
        super()._on_event(event)

    def _show(self, chunks: Mapping[int, FetchedChunk]) -> None:
        self.chunks = chunks
        self._chunk_added.ring()

    @property
    def bridge(self) -> Bridge:
        """Errors: SessionLostError."""
        if self._bridge is None or not self.alive:
            raise SessionLostError("the session that this belongs to has ended")
        return self._bridge

    @property
    def timeout_s(self) -> float:
        """Of calls that name no deadline."""
        return self._settings.timeout_s

    def end(self) -> None:
        """Hang up. What views show stays."""
        if self._bridge is not None:
            self._bridge.close()
        super().end()

"""One attached life with one daemon: the fd socket, what it brought mapped, and its calls."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvkeep.breaker import PROBE_S
from kvkeep.call_socket import CallSocket
from kvkeep.errors import SessionLostError, UnavailableError
from kvkeep.fd_socket import Delivery, FdSocket, close_all
from kvkeep.shared_index import IndexTable
from kvkeep.shared_memory import LAYOUT_VERSION, Chunk, RegionError, TouchRing, map_region
from kvkeep.staging import Staging
from kvkeep.transport import AttachStream, Transport
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1.session_pb2 import FdDescription, FdKind, SideHello
from kvkeep.waking import Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from kvkeep.v1.block_cache_pb2 import AttachEvent

SOCKET_NAME: Final = "kvkeep.sock"
FD_SOCKET_NAME: Final = "kvkeep.fd.sock"
_TABLES_KEPT: Final = 2

_log = logging.getLogger("kvkeep")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What every session of a client is opened with.

    Attributes:
        runtime_dir: Where the daemon's two sockets are.
        client_name: For operators, at most 256 bytes.
        staging_nbytes: 0 = the daemon's default.
        timeout_s: Of each step of attaching.
        private_dir: `runtime_dir` lies where anyone may make it: it must be this user's alone.
        address: Of a daemon on another host, "host:port"; "" = this host's.
    """

    runtime_dir: Path
    client_name: str
    staging_nbytes: int
    timeout_s: float
    private_dir: bool = False
    address: str = ""


class Session:
    """Any thread may read its attributes; `receive` and `end` belong to the keeper's thread.

    Attributes:
        alive: False once the session is over; what is mapped stays readable.
        draining: The daemon said that it is about to stop.
        on_change: Called when the keeper is to look at `calls` or at new chunks; any thread.
        server_epoch: Of the daemon.
        chunks: By chunk id. Replaced, never changed; empty after the end.
        staging: This session's; None after the end.
        touch_ring: This session's.
        transport: For calls.
        modes: Of the namespace sets that are open, as far as the daemon told.
        probe_s: How long the daemon may take to answer a probe.
        silence_max_s: After so long without an answer to a probe it is better to attach anew.
        over: Handles of namespace sets whose epoch is over.
    """

    server_epoch: int
    touch_ring: TouchRing
    transport: Transport
    probe_s = PROBE_S
    # A daemon that was frozen for less goes on with its sessions, and their leases.
    silence_max_s = 60.0

    def __init__(
        self,
        settings: SessionSettings,
        *,
        on_over: Callable[[], None] = lambda: None,
        life: FdSocket | None = None,
    ) -> None:
        """Does nothing yet: see `open`. `on_over` runs in any thread when `over` grows; `life` ends
        with the session, None = the fd socket."""
        self.alive = False
        self.draining = False
        self.chunks: Mapping[int, Chunk] = {}
        self.staging: Staging | None = None
        self.modes: dict[int, pb.NamespaceMode.ValueType] = {}
        self.over: set[int] = set()
        self._on_over = on_over
        self._settings = settings
        self._tables: list[IndexTable] = []
        self._socket = life or FdSocket(settings.runtime_dir / FD_SOCKET_NAME)
        self._calls: CallSocket | None = None
        self.on_change: Callable[[], None] = _nobody
        self._attach: AttachStream | None = None
        self._chunk_added = Bell()
        # By lease: how many objects here hold it. The daemon counts a session once.
        self._holders: dict[int, int] = {}
        self._holders_lock = threading.Lock()

    def open(self) -> None:
        """Say hello, map what the welcome brings, and attach.

        Errors: UnavailableError, DeadlineError, RegionError; OSError (no descriptors).
        """
        settings = self._settings
        hello = SideHello(
            client_name=settings.client_name,
            layout_versions=[LAYOUT_VERSION],
            staging_nbytes=settings.staging_nbytes,
            pid=os.getpid(),
        )
        try:
            if settings.private_dir:
                _check_private(settings.runtime_dir)
            welcome = self._socket.open(hello, settings.timeout_s)
            self._settle(welcome)
            self.transport = Transport(
                target=f"unix:{settings.runtime_dir / SOCKET_NAME}",
                session_token=welcome[0].packet.session_token,
                calls=self._require_calls(),
            )
            self._attach = AttachStream(
                self.transport,
                on_event=self._on_event,
                on_unknown_session=self._socket.shut_down,
            )
            self._attach.start(settings.timeout_s)
        except BaseException:
            self.end()
            raise
        self.alive = True

    def _settle(self, welcome: list[Delivery]) -> None:
        """Map everything; every descriptor is closed, whatever happens."""
        self.server_epoch = welcome[0].packet.server_epoch
        fds = [fd for delivery in welcome for fd in delivery.fds]
        descriptions = [one for delivery in welcome for one in delivery.packet.fds]
        try:
            if welcome[0].packet.layout_version != LAYOUT_VERSION:
                raise RegionError(
                    f"the daemon's layout version is {welcome[0].packet.layout_version}, this "
                    f"client's {LAYOUT_VERSION}: install both from one release"
                )
            for description, fd in zip(descriptions, fds, strict=True):
                self._map(description, fd)
        finally:
            close_all(fds)
        if not (self.staging and hasattr(self, "touch_ring") and self._tables):
            raise RegionError("the daemon's welcome lacks the index, staging or the touch ring")

    def _map(self, description: FdDescription, fd: int) -> None:
        nbytes, epoch = description.nbytes, self.server_epoch
        if description.kind == FdKind.FD_KIND_INDEX:
            table = IndexTable(map_region(fd, nbytes), table_id=description.id, server_epoch=epoch)
            self._tables = [*self._tables, table][-_TABLES_KEPT:]
        elif description.kind == FdKind.FD_KIND_CHUNK:
            chunk = Chunk(map_region(fd, nbytes), chunk_id=description.id, server_epoch=epoch)
            self.chunks = {**self.chunks, chunk.chunk_id: chunk}
            self._chunk_added.ring()
        elif description.kind == FdKind.FD_KIND_STAGING:
            self.staging = Staging(map_region(fd, nbytes, writable=True))
        elif description.kind == FdKind.FD_KIND_TOUCH_RING:
            self.touch_ring = TouchRing(map_region(fd, nbytes, writable=True))
        elif description.kind == FdKind.FD_KIND_CALLS:
            dup = os.dup(fd)
            self._calls = CallSocket(dup, probe_s=self.probe_s, on_change=self._changed)

    def _changed(self) -> None:
        self.on_change()

    def _require_calls(self) -> CallSocket:
        if self._calls is None:
            raise RegionError("the daemon's welcome lacks the call socket")
        return self._calls

    @property
    def silent(self) -> bool:
        """The daemon is there, and does not answer: nothing should be asked of it."""
        return self._calls is not None and self._calls.breaker.open

    @property
    def answers(self) -> bool:
        """Whether it makes sense to ask this session's daemon anything now."""
        calls = self._calls
        return self.alive and calls is not None and not (calls.lost or calls.breaker.open)

    def _on_event(self, event: AttachEvent) -> None:
        # Chunks and tables need nothing here: their descriptors come on the fd socket.
        if event.HasField("draining"):
            self.draining = True
            _log.info("daemon is draining", extra={"grace_ms": event.draining.grace_ms})
        elif event.HasField("namespace_mode_changed"):
            changed = event.namespace_mode_changed
            self.modes[changed.set_index] = changed.mode
        elif event.HasField("namespace_epoch_changed"):
            self.end_epoch(event.namespace_epoch_changed.set_index)

    def end_epoch(self, set_index: int) -> None:
        """From now on nothing is found by this handle; somebody opens the set again."""
        self.over.add(set_index)
        self._on_over()

    def hides(self, set_index: int) -> bool:
        """Whether nothing of this namespace set is to be found, whatever the shared index says."""
        bypassed = self.modes.get(set_index) == pb.NAMESPACE_MODE_BYPASS
        return bypassed or set_index in self.over

    def fileno(self) -> int:
        """Of the fd socket, for polling."""
        return self._socket.fileno()

    def receive(self) -> bool:
        """Take one packet from the fd socket and map what it brings; False at the end.

        Errors: NoDescriptorsError, at the end too. A chunk that did not arrive could be asked for
        with every lease; a new session gets all of them.
        """
        delivery = self._socket.receive()
        if delivery is None:
            return False
        for description, fd in zip(delivery.packet.fds, delivery.fds, strict=True):
            try:
                self._map(description, fd)
            except RegionError as error:
                # What lies there is a miss for this client, and a look-up says nothing false.
                _log.warning("region refused", extra={"reason": str(error)})
            finally:
                os.close(fd)
        return True

    def table(self) -> IndexTable | None:
        """The table that answers now, or one in which every look-up is a miss; None at the end."""
        tables = self._tables
        if not tables:
            return None
        newest = tables[-1]
        if newest.live or len(tables) == 1:
            return newest
        # A new table can arrive before it takes over.
        return next((table for table in reversed(tables) if table.live), newest)

    def mapped_chunks(self, chunk_ids: set[int]) -> Mapping[int, Chunk] | None:
        """These chunks, if all of them are mapped now."""
        chunks = self.chunks
        if not chunk_ids <= chunks.keys():
            return None
        return {chunk_id: chunks[chunk_id] for chunk_id in chunk_ids}

    def wait_for_chunks(self, chunk_ids: Iterable[int], timeout_s: float) -> Mapping[int, Chunk]:
        """These chunks, mapped.

        Errors: UnavailableError when one does not come in time, SessionLostError.
        """
        needed = set(chunk_ids)
        until_s = time.monotonic() + timeout_s
        while True:
            mapped = self.mapped_chunks(needed)
            if mapped is not None:
                return mapped
            if not self.alive:
                raise SessionLostError("the session that this belongs to has ended")
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                missing = sorted(needed - self.chunks.keys())
                raise UnavailableError(
                    f"chunks {missing} of the pool are not mapped here yet: try again"
                )
            self._chunk_added.nap(left_s)

    def require_staging(self) -> Staging:
        """Errors: SessionLostError."""
        staging = self.staging
        if staging is None or not self.alive:
            raise SessionLostError("the session that this belongs to has ended")
        return staging

    def hold(self, lease_id: int) -> None:
        """One more object here holds a lease: each gives it back once."""
        if self.alive and lease_id:  # not in a forked child, where the lock may be held for ever
            with self._holders_lock:
                self._holders[lease_id] = self._holders.get(lease_id, 0) + 1

    def give_back(self, lease_id: int) -> None:
        """Release a lease without waiting, if nobody else here holds it; one of a session that is
        over went with it."""
        if self.alive and lease_id:
            with self._holders_lock:
                left = self._holders.pop(lease_id, 1) - 1
                if left:
                    self._holders[lease_id] = left
            if not left:
                self.transport.release([lease_id])

    def end(self) -> None:
        """Hang up. What views show stays mapped; the rest of the daemon's memory is let go.

        A dead daemon's memory is free for the next one only when its last client unmaps it.
        """
        self.alive = False
        self._socket.shut_down()
        if self._attach is not None:
            self._attach.close()
            self._attach = None
        if self._calls is not None:
            self._calls.close()
        if hasattr(self, "transport"):
            self.transport.close()
        self._socket.close()
        if self.staging is not None:
            self.staging.close()
        self.chunks, self.staging, self._tables = {}, None, []

    def abandon(self) -> None:
        """In a forked child: let go without a word, for the parent goes on using its session."""
        self.alive = False
        if self._calls is not None:
            self._calls.abandon()
        self._socket.close()


def _nobody() -> None:
    pass


def _check_private(directory: Path) -> None:
    """Errors: UnavailableError. A directory that is not there is for connecting to tell."""
    with suppress(FileNotFoundError):
        found = os.lstat(directory)
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not own or found.st_mode & stat.S_IWOTH:
            raise UnavailableError(
                f"{directory} is not trusted: it is no directory of this user's (uid "
                f"{os.geteuid()}), or anyone may write to it, so another could pose as the daemon. "
                "Remove it, or give runtime_dir"
            )

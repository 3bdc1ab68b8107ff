"""Storing blocks: writable staging views, then one Commit."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.copying import bytes_of, release_views
from kvkeep.errors import KVKeepError, UnavailableError
from kvkeep.results import AckLevel, CommitResult, CommitStatus
from kvkeep.spec import deadline_of, invalid, whole
from kvkeep.tickets import CommitTicket, Tickets
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1.session_pb2 import CallMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from kvkeep.call_socket import PendingCall, Reply
    from kvkeep.opened import Opened

_STATUS = {int(status): status for status in CommitStatus}


class Store:
    """Blocks on their way into the cache; a context manager. One thread at a time.

    Fill `views`, then `commit`, or leave the `with` normally, which commits. Leaving it by an
    exception stores nothing. After either the views are dead: using one is a ValueError. One that
    is dropped without either keeps its room in the staging memory until the session ends.

    Attributes:
        new: Positions in the keys that are not stored yet, as the shared index says, of the first
            group of `groups`; in a FULL group a range to the last key.
        views: Writable views for them, each of the group's block_nbytes.
        groups: Groups that are stored: the FULL ones first, then those that `positions` named.
        result: None before the commit.
        ticket: None before `submit_commit`.
    """

    def __init__(
        self,
        opened: Opened,
        template: pb.CommitRequest,
        *,
        keys: range,
        new: Mapping[int, Sequence[int]],
        timeout_s: float,
        tickets: Tickets,
    ) -> None:
        """Made by `Namespace.store`. `template` has everything but the staged blocks.

        `keys` are the positions of its keys among those of the store, `new` those of each group
        that are to be stored. Errors: SessionLostError.
        """
        self.groups = tuple(new)
        self.new = new[self.groups[0]] if new else range(0)
        self._new = new
        self._keys = keys
        self.result: CommitResult | None = None
        self.ticket: CommitTicket | None = None
        self._opened = opened
        self._staging = opened.session.require_staging()
        self._request = template
        self._timeout_s = timeout_s
        self._tickets = tickets
        # The daemon may be reading the staging range: its answer gives it back.
        self._sent = False
        self._offsets: dict[int, list[int]] = {}
        self._views: dict[int, list[memoryview]] = {}

    def allocate(self, within_s: float) -> None:
        """Take room in the staging memory for every new block, waiting so long for it.

        Errors: InvalidArgumentError, ResourceExhaustedError.
        """
        staging = self._staging
        try:
            for group in self.groups:
                nbytes = self._opened.block_nbytes[group]
                offsets = staging.allocate(nbytes, len(self._new[group]), within_s)
                self._offsets[group] = offsets
                self._views[group] = [staging.region[at : at + nbytes] for at in offsets]
        except BaseException:
            self._free()
            raise

    @property
    def views(self) -> list[memoryview]:
        """Writable views for the new blocks, of the first group."""
        return self.group_views(self.groups[0])

    def new_of(self, group: int) -> Sequence[int]:
        """Positions in the keys of the new blocks of one group, ascending.

        Errors: InvalidArgumentError (no such group).
        """
        if whole(group) not in self._new:
            raise invalid("group", group, f"the store's groups {self.groups}", "name one of them")
        return self._new[group]

    def group_views(self, group: int) -> list[memoryview]:
        """Writable views for the new blocks, of one group: one for each of `new_of`.

        Errors: InvalidArgumentError (no such group, or committed already).
        """
        number = whole(group)
        views = None if number is None else self._views.get(number)
        if views is None:
            what = "the open store's groups" if self._views else "none: the store is over"
            raise invalid("group", group, f"{what} {self.groups}", "make a new store")
        return views

    def commit(self, timeout_s: float | None = None) -> CommitResult:
        """Seal the new blocks: they are visible to everyone on this host when it returns.

        All keys are answered for; when there is nothing new, no call is made. A second call
        returns the first one's result.

        Errors: SessionLostError, UnavailableError, DeadlineError, ResourceExhaustedError,
        InvalidArgumentError, NotSupportedError (ack level). After any of them the blocks may or
        may not be stored, and the store is over.
        """
        if self.result is None:
            deadline_s = deadline_of(timeout_s, self._timeout_s)
            self.finish(self.begin(deadline_s))
        assert self.result is not None
        return self.result

    def submit_commit(self, timeout_s: float | None = None) -> CommitTicket:
        """As `commit`, without waiting: `Client.poll` hands the ticket out when it has ended.

        Either way the store is over then; no views are left.

        Errors: InvalidArgumentError (it was over before), ResourceExhaustedError (too many tickets
        are open: the store goes on).
        """
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        self._check_open()
        ticket = CommitTicket(self._tickets, self._opened.session, self.answered_by)
        self._tickets.admit(ticket, deadline_s)
        self.ticket = ticket
        try:
            if any(self._new.values()):
                ticket.follow(self._send(deadline_s, ticket.on_reply))
            else:
                ticket.end(self.answered_by(b""))
        except UnavailableError as error:
            ticket.lapse(error)
        return ticket

    def begin(self, timeout_s: float | None = None) -> PendingCall | None:
        """Send the Commit; None when there is nothing to send. Errors: as `commit`."""
        if not any(self._new.values()):
            return None
        self._check_open()
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        return self._send(deadline_s, None)

    def finish(self, pending: PendingCall | None) -> CommitResult:
        """Wait for the answer to `begin`. Errors: as `commit`."""
        if pending is None:
            self.result = self._result(b"")
        else:
            self.result = self.answered_by(self._opened.session.transport.result(pending))
        return self.result

    def answered_by(self, payload: bytes) -> CommitResult:
        """The result that a response says; of one that nobody had to ask for, when it is empty."""
        return self._result(pb.CommitResponse.FromString(payload).status)

    def _send(
        self, timeout_s: float, on_reply: Callable[[Reply | None], None] | None
    ) -> PendingCall:
        """Send the Commit. No more writing from here on.

        The daemon may be reading the staging range until it answers, in time or late.
        """
        request = self._complete_request()

        def over(reply: Reply | None) -> None:
            self._free()
            if on_reply is not None:
                on_reply(reply)

        transport = self._opened.session.transport
        pending = transport.pending(CallMethod.CALL_METHOD_COMMIT, timeout_s, over)
        try:
            self._release_views()
            self._sent = True
            transport.send(pending, request)
        except BaseException:
            transport.calls.leave(pending)
            raise
        return pending

    def _check_open(self) -> None:
        if self.ticket is not None or (self.groups and not self._views):
            raise invalid("store", "over", "an open store", "make a new store")

    def _complete_request(self) -> pb.CommitRequest:
        self._opened.session.require_staging()
        first = self._keys.start
        for group, offsets in self._offsets.items():
            if offsets:
                at, count = self._new[group], len(offsets)
                positions = [] if count == len(self._keys) else [one - first for one in at]
                self._request.groups.add(
                    group=group,
                    positions=struct.pack(f"<{len(positions)}I", *positions),
                    staging_offsets=struct.pack(f"<{count}Q", *offsets),
                )
        return self._request

    def abort(self) -> None:
        """Store nothing, unless the commit was sent; give the room back. Idempotent."""
        if not self._sent:
            self._free()

    def _result(self, status: bytes) -> CommitResult:
        there = self._keys.stop - len(status)
        all_status = bytes([CommitStatus.ALREADY_STORED]) * there + status
        stored = all_status.count(CommitStatus.STORED)
        there = all_status.count(CommitStatus.ALREADY_STORED)
        return CommitResult(
            status=tuple([_STATUS[number] for number in all_status]),
            stored=stored,
            already_stored=there,
            refused=len(all_status) - stored - there,
        )

    def _free(self) -> None:
        self._release_views()
        offsets, self._offsets = self._offsets, {}
        for group, places in offsets.items():
            self._staging.free(places, self._opened.block_nbytes[group])

    def _release_views(self) -> None:
        """Views end, unless an array was made of one."""
        views, self._views = self._views, {}
        for of_group in views.values():
            release_views(of_group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort()
        elif self.result is None and self.ticket is None:
            self.commit()


class Pipeline:
    """Stores in a row: each is filled while the one before is committed. A context manager.

    However it is left, no staging memory stays with it: what was begun is waited for, at most for
    its deadline, and what was not begun is aborted.

    Attributes:
        status: Of every block of the stores that were answered.
    """

    def __init__(self) -> None:
        """Begins nothing."""
        self.status: list[CommitStatus] = []
        self._under_way: tuple[Store, PendingCall | None] | None = None

    def put(self, store: Store, blocks: Sequence[memoryview]) -> None:
        """Fill `store`, of which `blocks` has one a key, and begin its commit after the last one's.

        Errors: as `Store.commit`, of this store or the one before.
        """
        try:
            for position, view in zip(store.new, store.views, strict=True):
                view[:] = blocks[position]
            self._finish()
            self._under_way = store, store.begin()
        except BaseException:
            store.abort()
            raise

    def _finish(self) -> None:
        if self._under_way is not None:
            store, pending = self._under_way
            try:
                self.status += store.finish(pending).status
            finally:
                store.abort()
                self._under_way = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
            return
        with suppress(KVKeepError):  # the first error is the one to tell
            self._finish()


def ack_level(ack: str) -> pb.AckLevel.ValueType:
    """Its number. Errors: InvalidArgumentError."""
    if not isinstance(ack, str) or ack not in {level.name.lower() for level in AckLevel}:
        raise invalid("ack", ack, "ram, nvme or remote", "name one of them")
    return pb.AckLevel.ValueType(AckLevel[ack.upper()])


def checked_parent(parent_key: object, key_nbytes: int) -> bytes:
    """The key before the first; b"" = none. Errors: InvalidArgumentError."""
    if parent_key is None:
        return b""
    if not isinstance(parent_key, bytes | bytearray | memoryview):
        what = type(parent_key).__name__
        raise invalid("parent_key", what, f"{key_nbytes} bytes or None", "give the whole key")
    parent = bytes(parent_key)
    if len(parent) != key_nbytes:
        what = f"{len(parent)} bytes"
        raise invalid("parent_key", what, f"{key_nbytes} bytes or None", "give the whole key")
    return parent


def parent_before(packed: bytes, position: int, key_nbytes: int) -> bytes:
    """The key before `position`; b"" before the first."""
    return packed[max(0, position - 1) * key_nbytes : position * key_nbytes]


def sources_of(buffers: object, count: int, nbytes: int) -> list[memoryview]:
    """One buffer a block. Errors: InvalidArgumentError."""
    if isinstance(buffers, list | tuple):
        sources = [bytes_of(buffer, f"buffers[{at}]") for at, buffer in enumerate(buffers)]
    else:
        joined = bytes_of(buffers, "buffers")
        sources = [joined[at : at + nbytes] for at in range(0, joined.nbytes, nbytes)]
    if len(sources) != count or any(source.nbytes != nbytes for source in sources):
        allowed = f"{count} blocks of {nbytes} bytes"
        raise invalid("buffers", f"{len(sources)} blocks", allowed, "give one block a key")
    return sources


def summed(status: list[CommitStatus]) -> CommitResult:
    """Of the blocks of several commits."""
    stored = status.count(CommitStatus.STORED)
    there = status.count(CommitStatus.ALREADY_STORED)
    return CommitResult(
        status=tuple(status),
        stored=stored,
        already_stored=there,
        refused=len(status) - stored - there,
    )

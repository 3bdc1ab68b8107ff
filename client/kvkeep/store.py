"""Storing blocks: writable staging views, then one Commit."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.copying import release_views
from kvkeep.errors import (
    DeadlineError,
    InvalidArgumentError,
    KVKeepError,
    NotSupportedError,
    ResourceExhaustedError,
    UnavailableError,
)
from kvkeep.results import CommitResult, CommitStatus
from kvkeep.spec import deadline_of, invalid
from kvkeep.v1.block_cache_pb2 import CommitRequest, CommitResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from kvkeep.opened import Opened
    from kvkeep.transport import PendingCommit

# How long the daemon may take to say that it no longer reads a staging range.
_SETTLE_TIMEOUT_S = 10.0
_SETTLE_TRIES = 3
_STATUS = {int(status): status for status in CommitStatus}
# Answers of a daemon that read nothing from the staging memory, or no longer does.
_DEFINITE = (InvalidArgumentError, NotSupportedError, ResourceExhaustedError)


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
    """

    def __init__(
        self,
        opened: Opened,
        template: CommitRequest,
        *,
        keys: range,
        new: Mapping[int, Sequence[int]],
        timeout_s: float,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Made by `Namespace.store`. `template` has everything but the staged blocks.

        `keys` are the positions of its keys among those of the store, `new` those of each group
        that are to be stored. `later` runs a job in the keeper's thread. Errors: SessionLostError.
        """
        self.groups = tuple(new)
        self.new = new[self.groups[0]] if new else range(0)
        self._new = new
        self._keys = keys
        self.result: CommitResult | None = None
        self._opened = opened
        self._staging = opened.session.require_staging()
        self._request = template
        self._timeout_s = timeout_s
        self._later = later
        # The daemon may be reading the staging range: it is not ours to give back.
        self._sent = False
        self._offsets: dict[int, list[int]] = {}
        self._views: dict[int, list[memoryview]] = {}

    def allocate(self) -> None:
        """Take room in the staging memory for every new block.

        Errors: InvalidArgumentError, ResourceExhaustedError.
        """
        staging = self._staging
        try:
            for group in self.groups:
                nbytes = self._opened.block_nbytes[group]
                offsets = staging.allocate(nbytes, len(self._new[group]), self._timeout_s)
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
        if group not in self._new:
            raise invalid("group", group, f"the store's groups {self.groups}", "name one of them")
        return self._new[group]

    def group_views(self, group: int) -> list[memoryview]:
        """Writable views for the new blocks, of one group: one for each of `new_of`.

        Errors: InvalidArgumentError (no such group, or committed already).
        """
        views = self._views.get(group)
        if views is None:
            what = "the open store's groups" if self._offsets else "none: the store is over"
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
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        if self.result is None:
            if any(self._new.values()):
                request = self._complete_request()
                transport = self._opened.session.transport
                self.result = self._answered(lambda: transport.commit(request, deadline_s))
            else:
                self.result = self._result(b"")
        return self.result

    def begin(self) -> PendingCommit | None:
        """Send the Commit; None when there is nothing to send. Errors: as `commit`."""
        if not any(self._new.values()):
            return None
        request = self._complete_request()
        try:
            self._sent = True
            return self._opened.session.transport.begin_commit(request, self._timeout_s)
        except BaseException:
            self.abort()
            raise

    def finish(self, pending: PendingCommit | None) -> CommitResult:
        """Wait for the answer to `begin`. Errors: as `commit`."""
        self.result = self._result(b"") if pending is None else self._answered(pending.result)
        return self.result

    def _complete_request(self) -> CommitRequest:
        if not self._offsets:
            raise invalid("store", "over", "an open store", "make a new store")
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

    def _answered(self, wait: Callable[[], CommitResponse]) -> CommitResult:
        try:
            self._sent = True
            response = wait()
            self._sent = False
        except _DEFINITE:
            self._sent = False
            raise
        finally:
            self.abort()
        return self._result(response.status)

    def abort(self) -> None:
        """Store nothing more; give the room back, as soon as the daemon surely leaves it alone.

        Idempotent.
        """
        if self._sent:
            self._settle_later()
        else:
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
        for group, places in self._close().items():
            self._staging.free(places, self._opened.block_nbytes[group])

    def _close(self) -> dict[int, list[int]]:
        """No more writing: views end (unless an array was made of one). What they showed."""
        offsets, self._offsets = self._offsets, {}
        views, self._views = self._views, {}
        for of_group in views.values():
            release_views(of_group)
        return offsets

    def _settle_later(self) -> None:
        """After a commit without an answer: the daemon may still be reading the staging range.

        The same Commit again waits for the first one, so its answer says that the range is ours.
        """
        opened, request, staging = self._opened, self._request, self._staging
        offsets = self._close()
        if not offsets:
            return
        tries = iter(range(_SETTLE_TRIES))

        def settle() -> None:
            session = opened.session
            if not session.alive:
                return
            try:
                session.transport.commit(request, _SETTLE_TIMEOUT_S)
            except (DeadlineError, UnavailableError):
                # After the last try the room stays taken until the session ends.
                if next(tries, None) is not None:
                    self._later(settle)
                return
            except KVKeepError:
                pass
            for group, places in offsets.items():
                staging.free(places, opened.block_nbytes[group])

        self._later(settle)

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
        elif self.result is None:
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
        self._under_way: tuple[Store, PendingCommit | None] | None = None

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

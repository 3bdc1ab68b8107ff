"""A namespace set as an engine uses it: look up, acquire, read, store, remove."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvkeep.convert import (
    Terms,
    acquire_request,
    hints_message,
    milliseconds,
    pack_keys,
)
from kvkeep.copying import targets_of
from kvkeep.errors import InvalidArgumentError, KVKeepError, UnavailableError
from kvkeep.leases import Acquired, shared_response
from kvkeep.results import (
    NOTHING_FOUND,
    CommitResult,
    Lookup,
    RemovalResult,
    RemovalStatus,
)
from kvkeep.shared_index import Words
from kvkeep.spec import (
    GroupKind,
    check_flag,
    check_hints,
    check_number,
    check_seconds,
    deadline_of,
    invalid,
)
from kvkeep.store import (
    Pipeline,
    Store,
    ack_level,
    checked_parent,
    parent_before,
    sources_of,
    summed,
)
from kvkeep.tickets import AcquireTicket
from kvkeep.upkeep import Upkeep
from kvkeep.v1 import block_cache_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.convert import Keys
    from kvkeep.copying import Targets
    from kvkeep.keeper import SessionKeeper
    from kvkeep.opened import Opened
    from kvkeep.spec import Hints, NamespaceSpec
    from kvkeep.tickets import Tickets

Ack: TypeAlias = Literal["ram", "nvme", "remote"]
# Of a call's time, that the daemon may spend waiting for a slow tier: its answer needs some too.
_WAIT_SHARE = 0.8
_OPENED_ANEW = "the namespace has another epoch, which is being opened"

_log = logging.getLogger("kvkeep")


class Namespace(Upkeep):
    """Made by `Client.open_namespace`. Any thread may call.

    It outlives the daemon's restarts: handles are renewed when the client has attached again.
    Until then, and while a daemon that is there does not answer, look-ups and reads find nothing,
    and other calls raise UnavailableError at once.
    """

    def __init__(
        self,
        keeper: SessionKeeper,
        tickets: Tickets,
        spec: NamespaceSpec,
        local_ranks: Sequence[int],
        *,
        timeout_s: float,
        optimistic_reads: bool,
    ) -> None:
        """`optimistic_reads`: this machine keeps the order of stores (x86-64)."""
        super().__init__(keeper, spec, local_ranks, timeout_s=timeout_s)
        self._tickets = tickets
        self._optimistic_reads = optimistic_reads

    @property
    def set_id(self) -> bytes:
        """The identity of the namespace set, 16 bytes. Errors: UnavailableError."""
        return self._require().set_id

    def opened(self) -> Opened:
        """For the library's own parts: as it is open now. Errors: UnavailableError."""
        return self._require()

    @property
    def namespace_epoch(self) -> int:
        """The epoch that is open: that of the specification, or a later one.

        Errors: UnavailableError.
        """
        return self._require().namespace_epoch

    @property
    def near_misses(self) -> list[tuple[bytes, tuple[str, ...]]]:
        """Stored sets of this tenant that differ in at most two fields: (set id, field names).

        What to look at when nothing hits. Errors: UnavailableError.
        """
        return self._require().near_misses

    def lookup(self, keys: Keys, *, hints: Hints | None = None) -> Lookup:
        """The longest usable prefix of `keys`. No call, no lease.

        What is found may leave at any time: act on it with `acquire` or `read_into`. From another
        host one call: a daemon that does not answer costs the client's `timeout_s`, and when that
        is known nothing, until it answers again.

        Errors: InvalidArgumentError (keys that are none, or of another length).
        """
        key_nbytes = self.spec.key_nbytes
        words = Words(pack_keys(keys, key_nbytes), key_nbytes)
        if hints is not None:
            check_hints(hints)
        opened = self._live()
        if opened is None or opened.hidden:
            return NOTHING_FOUND
        if not words.count:
            return Lookup(0, 0, opened.answers)
        return opened.lookup(words, hints)

    def acquire(  # noqa: PLR0913 - options of one call, all by name
        self,
        keys: Keys,
        *,
        ttl_s: float | None = None,
        byte_budget: int | None = None,
        hints: Hints | None = None,
        timeout_s: float | None = None,
        skip_blocks: int = 0,
        wait_s: float = 0.05,
    ) -> Acquired:
        """Lease the longest usable prefix of `keys`: use the answer as a context manager.

        What is in ram is leased at once. Blocks that lie on nvme only are brought there: the call
        waits up to `wait_s` for them and leases what came; the rest is pending, and an acquire a
        little later finds it. The default suits an engine's step; one that has nothing better to
        do may wait longer, and 0 waits for nothing.

        `skip_blocks` leading blocks are touched, not leased. Leases of at most `byte_budget`
        bytes of all ranks and groups are given, the rest is deferred; None or 0 = no such limit.
        `ttl_s` None or 0 = the daemon's default, which is also its limit. One call.

        Errors: InvalidArgumentError, UnavailableError, DeadlineError, ResourceExhaustedError.
        """
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        request = acquire_request(
            pack_keys(keys, self.spec.key_nbytes),
            self.spec.key_nbytes,
            Terms(ttl_s, byte_budget, hints, skip_blocks),
        )
        wait_s = min(check_seconds("wait_s", wait_s), deadline_s * _WAIT_SHARE)
        request.wait_ms = milliseconds(wait_s)
        opened = self._require()
        request.set_index = opened.checked_set(request.keys)
        session = opened.session
        response = session.transport.acquire(request, deadline_s, session.give_back)
        acquired = Acquired(opened, response, timeout_s=deadline_s)
        acquired.map_chunks(deadline_s)
        return acquired

    def submit_acquire(
        self,
        keys: Keys,
        *,
        ttl_s: float | None = None,
        byte_budget: int | None = None,
        hints: Hints | None = None,
        timeout_s: float | None = None,
        skip_blocks: int = 0,
    ) -> AcquireTicket:
        """As `acquire`, without waiting: `Client.poll` hands the ticket out when there is news.

        It ends within `timeout_s`, whatever the daemon does. Blocks that lie on nvme are brought
        into ram meanwhile, and the ticket is READY when all are there, or at its deadline with
        those that are.

        Errors: InvalidArgumentError, ResourceExhaustedError (too many tickets are open). A daemon
        that is away is none: the ticket has FAILED.
        """
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        request = acquire_request(
            pack_keys(keys, self.spec.key_nbytes),
            self.spec.key_nbytes,
            Terms(ttl_s, byte_budget, hints, skip_blocks),
        )
        opened = self._live()
        ticket = AcquireTicket(self._tickets, opened)
        if opened is not None:
            request.set_index = opened.checked_set(request.keys)
        self._tickets.admit(ticket, deadline_s)
        try:
            if opened is None:
                raise self._away()
            if opened.over:
                raise UnavailableError(_OPENED_ANEW)
            ticket.submit(request, deadline_s)
        except KVKeepError as error:
            ticket.lapse(error)
        return ticket

    def join(
        self, shared: bytes, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> Acquired:
        """Hold a lease together with the process whose `Acquired.share` told of it.

        The lease is renewed for `ttl_s`, and lasts until the last process that holds it gives it
        back or ends. Blocks of the local ranks have views here. One call; make it before the first
        copy.

        Errors: LeaseLostError (it ran out and a slot was reused, or nobody holds it any more),
        InvalidArgumentError, UnavailableError, DeadlineError, NotSupportedError (of a client on
        another host).
        """
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        opened = self._require()
        opened.check_joins()
        acquired = Acquired(opened, shared_response(opened, shared), timeout_s=deadline_s)
        try:
            acquired.renew(ttl_s, deadline_s)
        except BaseException:
            acquired.drop()  # the daemon may have heard of it
            raise
        acquired.map_chunks(deadline_s)
        return acquired

    def read_into(
        self,
        keys: Keys,
        buffers: object,
        *,
        rank: int | None = None,
        group: int = 0,
    ) -> int:
        """Copy the leading blocks of `keys`, of one group; how many of them are exact copies.

        Other groups and ranks do not count: name just those keys whose blocks are wanted. Those
        of WINDOW and STATE groups are the ones that end the prefix that `lookup` found.

        `buffers` is one contiguous writable buffer of len(keys) * block_nbytes bytes, or a list
        of one such buffer of block_nbytes bytes a key; of plain data, and without strides. Beyond
        the blocks counted their content is undefined. `rank` may be left out when one rank is
        local. No call and no lease on x86-64; elsewhere one `acquire`. For callers that can compute
        at once what is missing. From another host it takes up to the client's `timeout_s`, as
        `lookup` does.

        Errors: InvalidArgumentError. Everything else means fewer blocks.
        """
        key_nbytes = self.spec.key_nbytes
        words = Words(pack_keys(keys, key_nbytes), key_nbytes)
        group = check_number("group", group, 0, len(self.spec.groups) - 1)
        into = targets_of(buffers, words.count, self.spec.groups[group].block_nbytes)
        opened = self._live()
        if opened is None or opened.hidden or not words.count:
            return 0
        rank = opened.rank_or_only(rank)
        if not (self._optimistic_reads or opened.unleased_reads):
            return self._read_leased(keys, into, rank, group)
        return opened.read_into(words, into, rank, group)

    def _read_leased(self, keys: Keys, into: Targets, rank: int, group: int) -> int:
        """Where loads may be reordered only a lease protects a copy."""
        nbytes = self.spec.groups[group].block_nbytes
        try:
            with self.acquire(keys) as acquired:
                for at, view in enumerate(acquired.views(rank, group)):
                    target = (
                        into[at * nbytes : (at + 1) * nbytes]
                        if isinstance(into, memoryview)
                        else into[at]
                    )
                    target[:] = view
                return acquired.leased
        except InvalidArgumentError:
            raise
        except KVKeepError:
            return 0

    def store(  # noqa: PLR0913 - options of one call, all by name
        self,
        keys: Keys,
        *,
        parent_key: bytes | None = None,
        rank: int | None = None,
        positions: Mapping[int, Sequence[int]] | None = None,
        ack: Ack = "ram",
        hints: Hints | None = None,
        timeout_s: float | None = None,
    ) -> Store:
        """Begin to store the blocks of `keys`: fill the answer's views, then commit.

        `parent_key` is the key before the first, None when that one begins its chain. What is
        new is asked of the shared index; room for it is taken in the session's staging memory,
        waiting for other stores to give it back. It takes up to `timeout_s`, all in all. From
        another host what is new is a call; with a `timeout_s` of 0 nothing is asked, every block
        is offered as new, and those that are there answer ALREADY_STORED. All FULL groups of the
        namespace are stored together. `positions` says of which keys, ascending, there are blocks
        of WINDOW and STATE groups, by group; groups that it does not name store nothing. What is
        stored of one key becomes visible together.

        `ack="nvme"`: the commit waits until the blocks are on the medium, for most of `timeout_s`;
        those that are not then have FAILED, and are in ram. Blocks of a REPLAYABLE STATE never
        go there, and are not waited for.

        Errors: InvalidArgumentError (among others: more new blocks than the staging memory
        holds: store fewer, or use `store_blocks`), UnavailableError, ResourceExhaustedError;
        DeadlineError from another host.
        """
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        until_s = time.monotonic() + deadline_s
        key_nbytes = self.spec.key_nbytes
        packed = bytes(pack_keys(keys, key_nbytes))
        parent = checked_parent(parent_key, key_nbytes)
        # Makes no call; a commit into an epoch that is over is refused.
        opened = self._ready()
        rank = opened.rank_or_only(rank)
        words, level = Words(packed, key_nbytes), ack_level(ack)
        new = opened.new_blocks(words, rank, positions, on_nvme=ack != "ram", within_s=deadline_s)
        first = min((own[0] for own in new.values() if own), default=words.count)
        template = pb.CommitRequest(
            set_index=opened.set_index,
            rank=rank,
            parent_key=parent_before(packed, first, key_nbytes) or parent,
            keys=packed[first * key_nbytes :],
            ack_level=level,
            hints=hints_message(hints),
            wait_ms=milliseconds(deadline_s * _WAIT_SHARE),
        )
        store = Store(
            opened,
            template,
            keys=range(first, words.count),
            new=new,
            timeout_s=deadline_s,
            tickets=self._tickets,
        )
        store.allocate(max(0.0, until_s - time.monotonic()))
        return store

    def store_blocks(
        self,
        keys: Keys,
        buffers: object,
        *,
        parent_key: bytes | None = None,
        rank: int | None = None,
        ack: Ack = "ram",
        hints: Hints | None = None,
    ) -> CommitResult:
        """Store blocks that lie in the caller's memory, of any number: one group, all at once.

        `buffers` as for `read_into`, but they may be read-only. Batches that do not fit the staging
        memory go in pieces, and a piece is filled while the one before is committed. A piece that
        is refused ends it: the rest has lost its parent.

        Errors: as `store` and `Store.commit`; InvalidArgumentError for several groups.
        """
        if len(self.spec.groups) != 1:
            allowed = "one group in the specification"
            raise invalid("groups", len(self.spec.groups), allowed, "use store() and group_views()")
        key_nbytes, nbytes = self.spec.key_nbytes, self.spec.groups[0].block_nbytes
        full = self.spec.groups[0].kind is GroupKind.FULL
        packed = bytes(pack_keys(keys, key_nbytes))
        count = len(packed) // key_nbytes
        sources = sources_of(buffers, count, nbytes)
        step = self._piece_blocks(nbytes)
        edges = [*range(0, count, step), count]
        with Pipeline() as pipeline:
            for start, stop in pairwise(edges):
                store = self.store(
                    packed[start * key_nbytes : stop * key_nbytes],
                    parent_key=parent_before(packed, start, key_nbytes) or parent_key,
                    rank=rank,
                    positions=None if full else {0: range(stop - start)},
                    ack=ack,
                    hints=hints,
                )
                pipeline.put(store, sources[start:stop])
        return summed(pipeline.status)

    def remove(
        self, keys: Keys, *, with_descendants: bool = True, timeout_s: float | None = None
    ) -> RemovalResult:
        """Take the blocks of these keys out, of all ranks and groups, in any order of keys.

        From the answer on nobody finds them; who reads them under a lease reads on. Blocks that
        follow one of them in any chain leave too, since nobody could find those; a key that has
        such blocks is KEPT when `with_descendants` is False. One call.

        Errors: InvalidArgumentError, UnavailableError, DeadlineError (they may be gone or not).
        """
        packed = bytes(pack_keys(keys, self.spec.key_nbytes))
        opened = self._require()
        opened.check_count(len(packed) // self.spec.key_nbytes)
        request = pb.RemoveRequest(
            set_index=opened.set_index,
            keys=packed,
            with_descendants=check_flag("with_descendants", with_descendants),
        )
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        response = opened.session.transport.remove(request, deadline_s)
        return RemovalResult(tuple(map(RemovalStatus, response.status)), response.removed)

    def _piece_blocks(self, block_nbytes: int) -> int:
        """Two pieces are in the staging memory at a time."""
        opened = self._require()
        staging = opened.session.require_staging()
        half = staging.nbytes // 2 // staging.stride(block_nbytes)
        return max(1, min(half, opened.limits.keys_max or half))

"""A namespace whose daemon is on another host: look-ups and reads are calls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvkeep.call_socket import Reply
from kvkeep.convert import hints_message
from kvkeep.errors import (
    InvalidArgumentError,
    KVKeepError,
    NotSupportedError,
    UnavailableError,
)
from kvkeep.opened import Opened
from kvkeep.reading import Wanted, put_into, read_blocks
from kvkeep.remote import RemoteSession
from kvkeep.results import NOTHING_FOUND, Lookup
from kvkeep.v1 import block_cache_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.copying import Targets
    from kvkeep.session import Session
    from kvkeep.shared_index import Words
    from kvkeep.spec import Hints, NamespaceSpec
    from kvkeep.v1.block_cache_pb2 import OpenNamespaceResponse

_RELEASE_TIMEOUT_S = 2.0
_DEADLINE_EXCEEDED = 4


class RemoteOpened(Opened):
    """As `Opened`. There is no index here: what it would say, the daemon is asked."""

    unleased_reads = True

    def __init__(
        self, session: RemoteSession, spec: NamespaceSpec, response: OpenNamespaceResponse
    ) -> None:
        """From the daemon's answer."""
        super().__init__(session, spec, response)
        self._remote = session

    def _ask(self, words: Words, request: pb.LookupRequest, within_s: float) -> pb.LookupResponse:
        """The daemon's answer, about as many of the leading keys as one call may have."""
        request.set_index = self.set_index
        most = (self.limits.keys_max or words.count) * self._key_nbytes
        request.keys = bytes(words.packed[:most])
        return self.session.transport.lookup(request, within_s)

    def check_joins(self) -> None:
        """What another process fetched is not here."""
        raise NotSupportedError("leases are shared on the daemon's host; acquire here too")

    def lookup(self, words: Words, hints: Hints | None) -> Lookup:
        """The longest usable prefix of at least one key. One call; no answer finds nothing."""
        try:
            request = pb.LookupRequest(hints=hints_message(hints))
            found = self._ask(words, request, self._remote.timeout_s)
        except InvalidArgumentError:
            raise
        except KVKeepError:
            return NOTHING_FOUND
        cut = 0 < self.limits.keys_max < words.count and found.prefix_blocks == self.limits.keys_max
        bypassed = found.ended == pb.MISS_REASON_BYPASSED
        return Lookup(
            found.prefix_blocks,
            found.prefix_tokens,
            not (cut or bypassed or found.redis_unknown),
            found.replay_tokens,
            tuple(group.prefix_blocks for group in found.groups),
        )

    @property
    def answers(self) -> bool:
        """Whether the daemon can be asked now."""
        return self.session.alive

    def new_blocks(
        self,
        words: Words,
        rank: int,
        positions: Mapping[int, Sequence[int]] | None,
        *,
        on_nvme: bool,
        within_s: float,
    ) -> dict[int, Sequence[int]]:
        """As of `Opened`, as far as one look-up tells: what else is there answers ALREADY_STORED.
        With no time for one that is everything.

        Errors: also those of a call.
        """
        wanted = self._wanted(words, positions)
        new: dict[int, Sequence[int]] = {}
        if self.full_groups:
            found = 0
            if words.count and within_s and not on_nvme:
                groups = self._ask(words, pb.LookupRequest(peek=True), within_s).groups
                found = groups[self.full_groups[0]].prefix_blocks
            new = dict.fromkeys(self.full_groups, range(found, words.count))
        return {**new, **wanted}

    def read_into(self, words: Words, into: Targets, rank: int, group: int) -> int:
        """Copy the leading blocks of one rank and group; how many came.

        They are leased while they are sent. Two calls.
        """
        asked_s = time.monotonic()
        until_s = asked_s + self._remote.timeout_s
        self.check_count(words.count)
        request = pb.AcquireRequest(
            set_index=self.set_index, keys=bytes(words.packed), groups=[group]
        )
        try:
            channel = self._remote.bridge.channel
            self.session.transport.calls.require_answers("Acquire")
        except UnavailableError:
            return 0
        reply = channel.call("Acquire", request.SerializeToString(), self._remote.timeout_s)
        if reply.status == _DEADLINE_EXCEEDED:
            self.session.transport.calls.breaker.timed_out(asked_s)
        response = (
            pb.AcquireResponse() if reply.status else pb.AcquireResponse.FromString(reply.payload)
        )
        if not response.lease_id:
            return 0
        try:
            blocks = _leading(response, rank, group)
            nbytes = self.block_nbytes[group]
            wanted = Wanted(response.lease_id, rank, group, blocks, nbytes)
            return read_blocks(channel, wanted, put_into(into, nbytes), until_s).blocks
        finally:
            release = pb.ReleaseRequest(lease_ids=[response.lease_id]).SerializeToString()
            channel.begin("Release", release, _RELEASE_TIMEOUT_S, _forget)


def opened_in(session: Session, spec: NamespaceSpec, response: OpenNamespaceResponse) -> Opened:
    """A namespace that was opened in a session, wherever its daemon is."""
    if isinstance(session, RemoteSession):
        return RemoteOpened(session, spec, response)
    return Opened(session, spec, response)


def _leading(response: pb.AcquireResponse, rank: int, group: int) -> int:
    """Leading keys that have a leased block of one rank and group."""
    for column in response.columns:
        if (column.rank, column.group) == (rank, group):
            count = len(column.addresses) // 8
            positions = memoryview(column.positions).cast("I")
            at = zip(positions, range(count), strict=False)
            return next((i for position, i in at if position != i), count)
    return 0


def _forget(reply: Reply) -> None:
    """It expires by itself where this failed."""
    del reply

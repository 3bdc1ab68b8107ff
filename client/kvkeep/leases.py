"""Blocks under a lease: read-only views of the pool, and the proof that they were valid."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np
from google.protobuf.message import DecodeError

from kvkeep.convert import milliseconds
from kvkeep.copying import release_views, unchanged, view_blocks
from kvkeep.errors import LeaseLostError, SessionLostError, UnavailableError
from kvkeep.results import BlockStatus, MissReason, RenewStatus
from kvkeep.spec import check_seconds, deadline_of, invalid, whole
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1.block_cache_pb2 import (
    TIER_ID_NVME,
    AcquireResponse,
    AwaitResponse,
    LeasedColumn,
    RenewRequest,
    TierRun,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

    from kvkeep.opened import Opened
    from kvkeep.shared_memory import Chunk

# Between processes of one host and one release: version, bytes of all, server epoch, set id; then
# the response, of which a part could be one as well.
_SHARED: Final = struct.Struct("<IIQ16sI")
_SHARED_VERSION: Final = 0x4B560002
_GIVEN_BACK: Final = "the lease was given back; acquire again"


class _Column:
    """Addresses and generations of one rank and group."""

    def __init__(self, addresses: bytes, generations: bytes) -> None:
        self._packed = addresses
        self.addresses: NDArray[np.uint64] = np.frombuffer(addresses, dtype=np.uint64)
        self.generations: NDArray[np.uint64] = np.frombuffer(generations, dtype=np.uint64)
        self.views: list[memoryview] | None = None

    def extend(self, addresses: bytes, generations: bytes) -> None:
        self._packed += addresses
        self.addresses = np.frombuffer(self._packed, dtype=np.uint64)
        self.generations = np.concatenate([self.generations, np.frombuffer(generations, np.uint64)])

    def make_views(self, chunks: Mapping[int, Chunk], block_nbytes: int) -> list[memoryview]:
        known = self.views or []
        if self.views is None or len(known) < len(self.addresses):
            new = view_blocks(chunks, self.addresses[len(known) :], block_nbytes)
            self.views = [*known, *new]
        return self.views

    def release_views(self) -> None:
        release_views(self.views or ())
        self.views = None

    def chunk_ids(self) -> set[int]:
        # Bytes 4 and 5 of each address: they are sliced and dropped quickly under the GIL.
        low, high = self._packed[4::8], self._packed[5::8]
        if high.count(high[:1]) < len(high):
            return {a | b << 8 for a, b in set(zip(low, high, strict=True))}
        found = set()
        while low:
            found.add(low[0] | high[0] << 8)
            low = low.translate(None, low[:1])
        return found

    def unchanged(self, chunks: Mapping[int, Chunk]) -> int:
        return unchanged(chunks, self.addresses, self.generations)


def shared_response(opened: Opened, shared: bytes) -> AcquireResponse:
    """What `Acquired.share` told. Errors: InvalidArgumentError, LeaseLostError."""
    try:
        version, nbytes, epoch, set_id, crc32 = _SHARED.unpack_from(shared)
        payload = bytes(shared[_SHARED.size :])
        response = AcquireResponse.FromString(payload)
    except (struct.error, TypeError, DecodeError):
        version = nbytes = 0
    if version != _SHARED_VERSION or nbytes != len(shared) or crc32 != zlib.crc32(payload):
        what = "what Acquired.share() of this release gave"
        raise invalid("shared", type(shared).__name__, what, "pass it on as it is")
    if set_id != opened.set_id:
        fix = "open the same namespace"
        raise invalid("shared", "a lease of another namespace", "one of this namespace", fix)
    if epoch != opened.session.server_epoch:
        raise LeaseLostError("the lease ended with the daemon that gave it; acquire again")
    return response


class Acquired:
    """What an acquire gave; a context manager. One thread at a time.

    Leaving the `with` gives the lease back, after a look at the generations: if a slot was reused
    while the views were in use (the lease had expired), it raises LeaseLostError. An expired lease
    whose slots are unchanged is no error. Views are dead afterwards: using one is a ValueError.
    (Arrays made from a view before are not, and nothing protects what they show any more.)

    Attributes:
        blocks: Leading keys that are usable, skipped, pending and deferred ones included.
        skipped: Leading keys that the caller said it has.
        leased: Keys, from `skipped` on, whose blocks are leased: as many views has a FULL column.
        from_nvme: Of the leased keys, those that were not in ram when this was asked.
        pending: Keys behind them that are on their way into ram: acquire again a little later.
        status: A BlockStatus for each key asked for.
        ended: Why the prefix ended; UNSPECIFIED when it did not.
        ttl_s: Life of the lease since it was given or renewed, in seconds.
        lease_id: 0 = nothing was leased.
    """

    def __init__(
        self,
        opened: Opened,
        response: AcquireResponse,
        *,
        timeout_s: float,
    ) -> None:
        """Made by `Namespace.acquire` and `submit_acquire`, which map what it shows."""
        self._opened = opened
        self._timeout_s = timeout_s
        self._status = response.status
        self.lease_id = response.lease_id
        self.blocks = response.prefix_blocks
        self.leased = response.leased_blocks
        self.skipped = self._status.count(BlockStatus.READY) - self.leased
        self.from_nvme = _of_nvme(response.runs, self.skipped, self.skipped + self.leased)
        self.pending = self._status.count(BlockStatus.PENDING)
        self.ended = MissReason(response.ended)
        self.ttl_s = response.lease_ttl_ms / 1000
        self._columns: dict[tuple[int, int], _Column] = {}
        self._positions: dict[tuple[int, int], Sequence[int]] = {}
        self._open = bool(self.lease_id)
        self._cut = False
        self._chunks: Mapping[int, Chunk] = {}
        self._add(response.columns)
        opened.session.hold(self.lease_id)

    def _add(self, columns: Iterable[LeasedColumn]) -> None:
        for column in columns:
            key = (column.rank, column.group)
            known = self._columns.get(key)
            if known is None:
                self._columns[key] = _Column(column.addresses, column.generations)
            else:
                known.extend(column.addresses, column.generations)
            if column.group in self._opened.rules:
                positions = memoryview(column.positions).cast("I")
                self._positions[key] = (*self._positions.get(key, ()), *positions)

    def add(self, arrived: AwaitResponse) -> None:
        """What became of pending blocks: those that came follow the leased ones.

        What comes behind one that will not come is of no use, and the lease shows none of it.
        """
        ready = arrived.status.count(BlockStatus.READY)
        end = arrived.first_block + len(arrived.status)
        self._status = self._status[: arrived.first_block] + arrived.status + self._status[end:]
        self._add(arrived.columns)
        self.leased += ready
        self.from_nvme += ready
        self.pending = self._status.count(BlockStatus.PENDING)
        if ready < len(arrived.status):
            corrupt = BlockStatus.CORRUPT in arrived.status
            self.ended = MissReason.CORRUPT if corrupt else MissReason.TIER_DOWN
            self.blocks = self.skipped + self.leased
            self._cut = True

    @property
    def whole(self) -> bool:
        """Whether all that was leased is there."""
        return not (self.pending or self._cut)

    def drop(self) -> None:
        """Give the lease back, without a word on what was read. Idempotent."""
        self._end()

    def map_chunks(self, timeout_s: float) -> None:
        """Before views are used. The lease is given back where it fails.

        Errors: UnavailableError when a chunk is not mapped in time.
        """
        try:
            self._chunks = self._opened.session.wait_for_chunks(self._chunk_ids(), timeout_s)
        except BaseException:
            self._end()
            raise

    def mapped(self) -> bool:
        """Whether everything that it shows is mapped by now."""
        chunks = self._opened.session.mapped_chunks(self._chunk_ids())
        if chunks is not None:
            self._chunks = chunks
        return chunks is not None

    def _chunk_ids(self) -> set[int]:
        return set().union(*(column.chunk_ids() for column in self._columns.values()))

    @property
    def status(self) -> tuple[BlockStatus, ...]:
        """A BlockStatus for each key asked for."""
        return tuple(map(BlockStatus, self._status))

    def views(self, rank: int | None = None, group: int = 0) -> list[memoryview]:
        """Read-only views of the leased blocks, in chain order: bytes, zero copy.

        In a WINDOW or STATE group only some keys have one: `positions` tells which. `rank` may be
        left out when one rank is local.

        Errors: InvalidArgumentError (no such rank or group), LeaseLostError (given back).
        """
        if self.lease_id and not self._open:
            raise LeaseLostError(_GIVEN_BACK)
        group = self._opened.checked_group(group)
        if not self.leased:
            return []
        nbytes = self._opened.block_nbytes[group]
        return self._column(rank, group).make_views(self._chunks, nbytes)

    def positions(self, rank: int | None = None, group: int = 0) -> Sequence[int]:
        """Positions in the keys of the leased blocks, one for each of `views`.

        Errors: as `views`.
        """
        group = self._opened.checked_group(group)
        if not self.leased:
            return ()
        self._column(rank, group)  # or it is refused
        every = range(self.skipped, self.skipped + self.leased)
        return self._positions.get((self._opened.rank_or_only(rank), group), every)

    def array(self, block: int, rank: int | None = None, group: int = 0) -> NDArray[np.uint8]:
        """Leased block number `block` as a read-only array of shape (block_nbytes,).

        Errors: as `views`; IndexError.
        """
        number = whole(block)
        if number is None:
            raise invalid("block", block, "a number of a leased block", "count from 0")
        return np.frombuffer(self.views(rank, group)[number], dtype=np.uint8)

    def addresses(self, rank: int | None = None, group: int = 0) -> NDArray[np.uint64]:
        """Pool addresses of the leased blocks, a u64 each: page, and chunk id times 2^32."""
        return self._column(rank, group).addresses

    def exact(self, rank: int | None = None, group: int = 0) -> int:
        """How many leading blocks of a column still are what was leased; 0 after the release."""
        return self._column(rank, group).unchanged(self._chunks) if self._open else 0

    def share(self) -> bytes:
        """What another process of this host needs to read under this lease: see `Namespace.join`.

        Errors: LeaseLostError (nothing is leased, or it was given back), NotSupportedError (of a
        client on another host).
        """
        self._opened.check_joins()
        if not self._open:
            raise LeaseLostError(_GIVEN_BACK)
        columns = [
            LeasedColumn(
                rank=rank,
                group=group,
                addresses=column.addresses.tobytes(),
                generations=column.generations.tobytes(),
                positions=struct.pack(f"<{len(at)}I", *at),
            )
            for (rank, group), column in self._columns.items()
            for at in [self._positions.get((rank, group), ())]
        ]
        response = AcquireResponse(
            lease_id=self.lease_id,
            prefix_blocks=self.blocks,
            leased_blocks=self.leased,
            status=self._status,
            columns=columns,
            ended=pb.MissReason.ValueType(self.ended),
        )
        opened = self._opened
        payload = response.SerializeToString()
        nbytes = _SHARED.size + len(payload)
        epoch, set_id = opened.session.server_epoch, opened.set_id
        crc32 = zlib.crc32(payload)
        return _SHARED.pack(_SHARED_VERSION, nbytes, epoch, set_id, crc32) + payload

    def renew(self, ttl_s: float | None = None, timeout_s: float | None = None) -> None:
        """Extend the lease; `ttl_s` None = the daemon's limit.

        An expired lease is renewed when every slot is unchanged.

        Errors: LeaseLostError (also after the release), UnavailableError, DeadlineError,
        InvalidArgumentError.
        """
        ttl_ms = 0 if ttl_s is None else milliseconds(check_seconds("ttl_s", ttl_s))
        if not self.lease_id:
            return
        if not self._open:
            raise LeaseLostError(_GIVEN_BACK)
        request = RenewRequest(lease_ids=[self.lease_id], lease_ttl_ms=ttl_ms)
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        session = self._opened.session
        try:
            response = session.transport.renew(request, deadline_s)
        except UnavailableError as error:
            if session.alive and not isinstance(error, SessionLostError):
                raise
            raise LeaseLostError("the lease ended with its session; acquire again") from error
        if response.status != bytes([RenewStatus.RENEWED]):
            raise LeaseLostError(
                "the lease is lost: a slot was reused, or the daemon forgot it; acquire again"
            )
        self.ttl_s = response.lease_ttl_ms / 1000

    def release(self) -> None:
        """Give the lease back. Idempotent.

        Errors: LeaseLostError when a slot was reused while the views could be in use.
        """
        if not self._end():
            raise LeaseLostError(
                "the lease expired and a slot was reused while its views were in use: "
                "what was read from them is void. Renew in time, or ask for a longer lease"
            )

    def _end(self) -> bool:
        """Give back; whether every slot is unchanged."""
        if not self._open:
            return True
        self._open = False
        exact = not self._chunks or all(
            column.unchanged(self._chunks) == len(column.addresses)
            for column in self._columns.values()
        )
        for column in self._columns.values():
            column.release_views()
        self._chunks = {}  # or a kept object would keep them mapped
        self._opened.session.give_back(self.lease_id)
        return exact

    def _column(self, rank: int | None, group: int) -> _Column:
        rank = self._opened.rank_or_only(rank)
        group = self._opened.checked_group(group)
        column = self._columns.get((rank, group))
        if column is None:
            held = sorted(self._columns)
            fix = "acquire this group too"
            raise invalid("group", group, f"one of the (rank, group) leased: {held}", fix)
        return column

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.release()
        elif not self._end():
            error.add_note("kvkeep: also, a slot was reused while its views were in use")


def _of_nvme(runs: Iterable[TierRun], first: int, stop: int) -> int:
    """Keys from `first` up to `stop` that lie in runs of nvme; runs begin at key 0."""
    count = at = 0
    for run in runs:
        begin, at = at, at + run.blocks
        if run.tier == TIER_ID_NVME:
            count += max(0, min(at, stop) - max(begin, first))
    return count

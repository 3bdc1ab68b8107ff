"""The `Tier` protocol: what every place that holds blocks can do, and what it may not.

A tier may lose a block, refuse one, or be slow. It may not lie: bytes that `read` calls a HIT are
the bytes that were written for that block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import TierId


class Presence(IntEnum):
    """Answer of `Tier.resident` for one block."""

    NO = 0
    YES = 1
    UNKNOWN = 2  # only a look at the medium can tell


class ReadStatus(IntEnum):
    """Answer of `Tier.read` for one block: which kind of no it is."""

    HIT = 1
    MISS = 2
    THROTTLED = 3  # there, but the tier is too busy: read elsewhere
    CORRUPT = 4  # was there; dropped, because its bytes are not those that were written


class WriteStatus(IntEnum):
    """Answer of `WriteBatch.write` for one block."""

    WRITTEN = 1
    THROTTLED = 2
    FAILED = 3


class RemoveStatus(IntEnum):
    """Answer of `Tier.remove` for one block."""

    REMOVED = 1
    ABSENT = 2


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What is written beside blocks where they outlive the process: arrays of one length, in the
    blocks' order.

    Attributes:
        parents: Key of the block before each in its chain; whatever where there is none.
        has_parent: Whether there is one.
        checksums: `tiers.record`'s, of each payload.
        created_ms: When each was first stored, wall time in milliseconds.
        last_used_ms: When each was last used.
        retention_class: Of all of them; 1 to 24 ASCII characters.
        boundary_id: 16 bytes. Blocks of one key and one boundary id are worth something only
            together (all groups and ranks of a boundary).
        boundary_members: How many blocks that are, 1 to 65535.
        boundary_member: Which of them these are, from 0.
    """

    parents: KeyBatch
    has_parent: NDArray[np.bool_]
    checksums: NDArray[np.uint64]
    created_ms: NDArray[np.uint64]
    last_used_ms: NDArray[np.uint64]
    retention_class: str
    boundary_id: bytes
    boundary_members: int
    boundary_member: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """A batch of blocks of one namespace and group, in chain order: everything a tier may need to
    find them.

    A tier on this host finds a block by location, and by stamp knows whether the location still
    holds that block. A tier that hosts share finds it by name. Each uses what it needs and ignores
    the rest.

    Attributes:
        namespace_id: 16 bytes, of one rank.
        group: Index into the namespace's groups.
        keys: The blocks' keys.
        nbytes: Size of each block.
        locations: One u64 a block, as `WriteBatch.locations` gave it; 0 = not known.
        stamps: One u64 a block, as `WriteBatch.commit` gave it.
        facts: Needed by `WriteBatch.write` of a tier whose blocks outlive the process.
    """

    namespace_id: bytes
    group: int
    keys: KeyBatch
    nbytes: int
    locations: NDArray[np.uint64]
    stamps: NDArray[np.uint64]
    facts: BlockFacts | None = None

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.keys)


class WriteBatch(Protocol):
    """Room for a batch of blocks, claimed and not yet visible. One owner.

    Leaving the `with` without `commit` aborts: the room goes back, whatever was written. A second
    `commit`, or one after `abort`, is an AssertionError.
    """

    @property
    def locations(self) -> NDArray[np.uint64]:
        """One a block that found room: the leading ones of those asked for.

        Final when `write` returned; nvme finds the place only then, so there they are 0 until then,
        and 0 for what was not WRITTEN. All 0 in a tier that finds by name.
        """
        ...

    async def write(
        self, blocks: Blocks, sources: Sequence[memoryview], *, durable: bool = True
    ) -> NDArray[np.uint8]:
        """Moves the bytes, and returns when they are as safe as this tier makes them: ram copied,
        nvme synced (fdatasync returned), redis acknowledged.

        Args:
            blocks: One for each of `locations`, in that order; their own locations and stamps are
                ignored.
            sources: The caller's; not touched any more when the call ends, also when it ends by
                cancellation.
            durable: False = return when the bytes can be read; the tier makes them safe behind, and
                tells the owner of its records of those that it loses meanwhile.

        Returns:
            A `WriteStatus` a block. What is not WRITTEN must not be committed.

        Raises:
            TierUnavailableError: the tier is sick as a whole.
        """
        ...

    def commit(self, kept: NDArray[np.bool_] | None = None) -> NDArray[np.uint64]:
        """Makes the blocks readable; no I/O. The room of those not kept goes back.

        A record in a tier that hosts share is complete and tagged as soon as `write` returned, so
        others may read it earlier; through this tier object nobody does.

        Args:
            kept: Which; None = all.

        Returns:
            The stamps of the kept blocks.
        """
        ...

    def abort(self) -> None:
        """Gives all the room back. Idempotent; nothing happens after `commit`."""
        ...

    def __enter__(self) -> Self:
        """The batch itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Aborts unless committed."""
        ...


class Tier(Protocol):
    """A place that holds blocks. Every verb takes a batch.

    Threads: called on the event loop only. What blocks (disk, network, memcpy of more than a few
        blocks) is the tier's
    business to run elsewhere; a verb without `async` does not block.

    Cancellation: a cancelled call leaves nothing behind (no room, no pin), and returns only when
        nothing touches the
    caller's buffers any more.

    Errors: a status a block where blocks differ; `TierUnavailableError` when the tier is sick as a
        whole. Nothing is
    retried here: the caller reads elsewhere.

    Buffers belong to the caller and may be of any alignment.
    """

    @property
    def tier_id(self) -> TierId:
        """Which tier this is."""
        ...

    def resident(self, blocks: Blocks) -> NDArray[np.uint8]:
        """A `Presence` a block, from memory, without I/O. YES does not promise a hit later."""
        ...

    async def read(self, blocks: Blocks, into: Sequence[memoryview]) -> NDArray[np.uint8]:
        """Copies blocks out.

        Args:
            blocks: Which.
            into: One writable buffer of `blocks.nbytes` each; what is in it after anything but a
                HIT is undefined.

        Returns:
            A `ReadStatus` a block.

        Raises:
            TierUnavailableError: the tier is sick as a whole.
        """
        ...

    def reserve(self, nbytes: int, count: int) -> WriteBatch:
        """Claims room for blocks of one size: all, or fewer when there is no more.

        Args:
            nbytes: Size of each block, > 0.
            count: Blocks wanted, >= 0.

        Raises:
            InvalidArgumentError: a block of this size never fits.
        """
        ...

    async def remove(self, blocks: Blocks) -> NDArray[np.uint8]:
        """Forgets blocks; what is not there (any more) is ABSENT. Idempotent.

        Returns:
            A `RemoveStatus` a block.

        Raises:
            TierUnavailableError: the tier is sick as a whole.
        """
        ...

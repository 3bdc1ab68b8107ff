"""What calls answer. Numbers of the enums are those of block_cache.proto."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple


class BlockStatus(IntEnum):
    """Of one block of an acquire."""

    UNSPECIFIED = 0
    READY = 1
    PENDING = 2
    MISS = 3
    DEFERRED = 4
    CORRUPT = 5
    TIMEOUT = 6
    TIER_DOWN = 7
    NO_ROOM = 8


class CommitStatus(IntEnum):
    """Of one block of a store."""

    UNSPECIFIED = 0
    STORED = 1
    ALREADY_STORED = 2
    REFUSED_NO_ROOM = 3
    REFUSED_NOT_ADMITTED = 4
    REFUSED_QUOTA = 5
    REFUSED_COLLISION = 6
    REFUSED_ORPHAN = 7
    FAILED = 8
    REFUSED_READ_ONLY = 9
    REFUSED_EPOCH = 10


class RemovalStatus(IntEnum):
    """Of one key of a removal."""

    UNSPECIFIED = 0
    REMOVED = 1
    ABSENT = 2
    KEPT = 3


class RenewStatus(IntEnum):
    """Of one lease of a renewal."""

    UNSPECIFIED = 0
    RENEWED = 1
    LOST = 2
    UNKNOWN = 3


class AckLevel(IntEnum):
    """How far stored blocks must have come before a commit answers."""

    RAM = 1
    NVME = 2
    REMOTE = 3


class MissReason(IntEnum):
    """Why a prefix ended."""

    UNSPECIFIED = 0
    NEVER_SEEN = 1
    NOT_ADMITTED = 2
    EVICTED = 3
    EXPIRED = 4
    QUOTA = 5
    REMOVED = 6
    CORRUPT = 7
    TIMEOUT = 8
    TIER_DOWN = 9
    NAMESPACE_MISMATCH = 10
    NO_ROOM = 11
    BYPASSED = 12


class Health(Enum):
    """What a client sees of its daemon.

    Attributes:
        ANSWERS: There is a session, and nothing speaks against asking.
        SILENT: There is a session, and the daemon does not answer. Nothing but a probe is asked of
            it until it does.
        AWAY: There is no session; the client attaches again by itself.
    """

    ANSWERS = "answers"
    SILENT = "silent"
    AWAY = "away"


class Tier(IntEnum):
    """A place that holds blocks."""

    UNSPECIFIED = 0
    RAM = 1
    NVME = 2
    REDIS = 3


class ChangeKind(IntEnum):
    """What a watcher is told."""

    UNSPECIFIED = 0
    STORED = 1
    REMOVED = 2
    ALL_CLEARED = 3
    RESYNC_DIGEST = 4


class Lookup(NamedTuple):
    """The longest usable prefix.

    Attributes:
        blocks: Leading keys that are usable: stored for every local rank and FULL group, with what
            the WINDOW and EXACT STATE groups need there.
        tokens: The same in tokens.
        complete: The answer covers everything that this host stores. False when there is no
            session with the daemon, when the namespace is bypassed, and for what the shared index
            cannot say.
        replay_tokens: Of `tokens`, the last ones that can be used only when a missing REPLAYABLE
            STATE is replayed.
        groups: For each group of the specification, the leading keys that it alone would allow, of
            those that all FULL groups have.
    """

    blocks: int
    tokens: int
    complete: bool
    replay_tokens: int = 0
    groups: tuple[int, ...] = ()


NOTHING_FOUND = Lookup(0, 0, complete=False)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a store, block by block.

    Attributes:
        status: One a key of the store, in its order.
        stored: Blocks that are readable now and were not before.
        already_stored: Blocks that were there.
        refused: Blocks that are not there; `status` says why.
    """

    status: tuple[CommitStatus, ...]
    stored: int
    already_stored: int
    refused: int


class Change(NamedTuple):
    """Something that a watcher is told.

    Attributes:
        sequence: Ascending; several may share one. What to go on from when a watch breaks.
        kind: STORED or REMOVED: `keys` came into `tier`, or left it. ALL_CLEARED: what is known of
            all sets that are watched is void, and what follows is all that there is.
            RESYNC_DIGEST: `digest` is that of all keys that are there.
        tier: Which.
        set_id: Of the namespace set.
        rank: Flat rank whose shards they are.
        group: Index into the specification's groups.
        keys: In chain order as a rule.
        parent_key: STORED: of the block before the first of them; None = it has none.
        digest: The sum of xxh3-64 over the keys, modulo 2^64, in any order.
    """

    sequence: int
    kind: ChangeKind
    tier: Tier
    set_id: bytes
    rank: int
    group: int
    keys: tuple[bytes, ...]
    parent_key: bytes | None
    digest: int


class Pin(NamedTuple):
    """Blocks that are kept for a while.

    Attributes:
        pin_id: What names it, in any process; 0 = there was nothing to keep.
        blocks: Leading keys that are kept.
        keep_for_s: How long, in seconds from when it was given.
        budget_left_nbytes: What may be pinned still, by anyone.
    """

    pin_id: int
    blocks: int
    keep_for_s: int
    budget_left_nbytes: int


@dataclass(frozen=True, slots=True)
class RemovalResult:
    """What became of a removal.

    Attributes:
        status: One a key asked for, in their order.
        removed: Keys that left, those that followed the ones asked for included.
    """

    status: tuple[RemovalStatus, ...]
    removed: int

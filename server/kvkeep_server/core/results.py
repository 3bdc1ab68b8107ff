"""What an operation can answer, as enums. Numbers are those of `proto/kvkeep/v1`, held to it by a
test."""

from enum import IntEnum


class TierId(IntEnum):
    """A place that holds blocks."""

    UNSPECIFIED = 0
    RAM = 1
    NVME = 2
    REDIS = 3


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


class StopReason(IntEnum):
    """Why the engine's last output ended; a hint."""

    UNSPECIFIED = 0
    TOOL_USE = 1
    END_TURN = 2
    LENGTH = 3
    OTHER = 4


class BlockStatus(IntEnum):
    """Of one block in an Acquire or Await."""

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
    """Of one block in a Commit."""

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
    """Of one key in a Remove."""

    UNSPECIFIED = 0
    REMOVED = 1
    ABSENT = 2
    KEPT = 3


class AckLevel(IntEnum):
    """How far a stored block has come when Commit answers."""

    UNSPECIFIED = 0
    RAM = 1
    NVME = 2
    REMOTE = 3


class RenewStatus(IntEnum):
    """Of one lease in a Renew."""

    UNSPECIFIED = 0
    RENEWED = 1
    LOST = 2
    UNKNOWN = 3


class GroupKind(IntEnum):
    """What a prefix of this group needs."""

    UNSPECIFIED = 0
    FULL = 1
    WINDOW = 2
    STATE = 3


class StateMode(IntEnum):
    """What the absence of a STATE means."""

    UNSPECIFIED = 0
    REPLAYABLE = 1
    EXACT = 2


class ChangeKind(IntEnum):
    """What a watcher is told."""

    UNSPECIFIED = 0
    STORED = 1
    REMOVED = 2
    ALL_CLEARED = 3
    RESYNC_DIGEST = 4


class NamespaceMode(IntEnum):
    """What a namespace set serves now."""

    UNSPECIFIED = 0
    NORMAL = 1
    READ_ONLY = 2
    BYPASS = 3

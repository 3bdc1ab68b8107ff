"""What becomes of hints, as label values."""

from enum import StrEnum


class Prefetched(StrEnum):
    """What became of hints; names as in `tiering.prefetching`."""

    PLANNED = "planned"
    BROUGHT = "brought"
    FAILED = "failed"
    EXPIRED = "expired"
    REFUSED = "refused"


class Foreseen(StrEnum):
    """Whether what was prefetched was asked for; names as in `tiering.foresight`."""

    USED = "used"
    WASTED = "wasted"

"""Remembers keys that left, with when and why: what turns "miss" into "evicted 3 h ago".

A direct-mapped table of fixed size: a newer ghost overwrites an older one in its place, so memory
is bounded and both verbs are a few numpy calls a batch. Tags are those of the index table; after a
rebuild, which draws another seed, the memory starts empty.
"""

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.results import MissReason


class Ghosts:
    """Keys that left.

    Args:
        places: Number of ghosts kept at most, a power of two; 20 bytes each.
    """

    def __init__(self, *, places: int) -> None:
        """See the class."""
        self._mask = np.uint64(places - 1)
        self._tags = np.zeros(places, np.uint64)
        self._last_used_s = np.zeros(places, np.float64)
        self._reasons = np.zeros(places, np.uint8)

    def remember(
        self, tags: NDArray[np.uint64], last_used_s: NDArray[np.float64], reason: MissReason
    ) -> None:
        """These keys left now, last used at these monotonic seconds."""
        at = (tags & self._mask).view(np.int64)
        self._tags[at] = tags
        self._last_used_s[at] = last_used_s
        self._reasons[at] = reason

    def recall(self, tag: int) -> tuple[MissReason, float]:
        """Why a key is not here, and when it was last used (monotonic seconds; 0.0 for
        NEVER_SEEN)."""
        at = tag & int(self._mask)
        if int(self._tags[at]) != tag:
            return MissReason.NEVER_SEEN, 0.0
        return MissReason(int(self._reasons[at])), float(self._last_used_s[at])

    def clear(self) -> None:
        """Forgets all."""
        self._tags[:] = 0

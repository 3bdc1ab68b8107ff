"""Memory for requests that arrive in pieces: so much of all clients together.

Who has room reads on; who does not waits, unread, until another gives room back. A request that
stays half while others wait for its room is refused, and its client has room behind all that were
refused less often: so who only holds room stands in the way of others once, for a moment.
"""

import asyncio
import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

# A request of 2 MiB that is sent in one piece takes 2 ms.
_LOOK_S = 0.05
_LOOKS_MAX = 2


@dataclass(slots=True, eq=False)
class Claim:
    """Room for one request.

    Attributes:
        nbytes: Of the whole request.
        on_room: Called when there is room for it.
        on_overdue: Called when it was held too long; gives it back.
        refused: Of the client: requests that were held too long.
        looks: How often it was found to be held.
        timer: Of the next look.
    """

    nbytes: int
    on_room: Callable[[], None]
    on_overdue: Callable[[], None]
    refused: int = 0
    looks: int = 0
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class FrameRoom:
    """Event loop only.

    Args:
        nbytes_max: Of all claims together; none may be larger.
    """

    def __init__(self, nbytes_max: int) -> None:
        """See the class."""
        self.nbytes_max = nbytes_max
        self.held_nbytes = 0
        self._holding: set[Claim] = set()
        self._waiting: list[Claim] = []

    def claim(self, claim: Claim) -> bool:
        """Whether there is room now; else `on_room` is called when there is."""
        assert claim.nbytes <= self.nbytes_max, "it would wait for ever"
        first = not self._waiting or claim.refused < self._waiting[0].refused
        if first and self.held_nbytes + claim.nbytes <= self.nbytes_max:
            self._hold(claim)
            return True
        bisect.insort(self._waiting, claim, key=_refused)
        return False

    def give_back(self, claim: Claim) -> None:
        """The request was taken, or its client is gone. Idempotent."""
        if claim in self._holding:
            self._holding.discard(claim)
            self.held_nbytes -= claim.nbytes
            assert claim.timer is not None
            claim.timer.cancel()
        elif claim in self._waiting:
            self._waiting.remove(claim)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting and self.held_nbytes + self._waiting[0].nbytes <= self.nbytes_max:
            claim = self._waiting.pop(0)
            self._hold(claim)
            claim.on_room()

    def _hold(self, claim: Claim) -> None:
        self._holding.add(claim)
        self.held_nbytes += claim.nbytes
        claim.timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look, claim)

    def _look(self, claim: Claim) -> None:
        """A moment of holding: counted one by one, since nobody could be read from while this
        process stood still."""
        claim.looks += 1
        if claim.looks >= _LOOKS_MAX and self._waiting:
            claim.on_overdue()
        else:
            claim.timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look, claim)


def _refused(claim: Claim) -> int:
    return claim.refused

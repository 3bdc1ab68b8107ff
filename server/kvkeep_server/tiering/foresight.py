"""Which units came into ram because somebody said that they would be asked for, and whether they
were: the precision of hints."""

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


class Foresight:
    """Event loop only. Costs a comparison where nothing was prefetched.

    Attributes:
        waiting: Units that were brought, or are on their way, and that nobody has used since.
        used: Units that were used after they were brought.
        wasted: That left ram before anyone used them.
    """

    def __init__(self) -> None:
        """See the class."""
        self.waiting: set[int] = set()
        self.used = 0
        self.wasted = 0

    def bring(self, units: I64) -> None:
        """These are on their way."""
        self.waiting.update(units.tolist())

    def fail(self, units: I64) -> None:
        """These will not come."""
        self.waiting.difference_update(units.tolist())

    def use(self, units: I64) -> None:
        """A request uses these."""
        if self.waiting:
            self.used += self._take(units)

    def leave(self, units: I64) -> None:
        """These leave ram."""
        if self.waiting:
            self.wasted += self._take(units)

    def _take(self, units: I64) -> int:
        taken = self.waiting.intersection(units.tolist())
        self.waiting -= taken
        return len(taken)

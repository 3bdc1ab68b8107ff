"""The block before each in its chain: one column for whoever keeps the chains and for policies."""

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.growth import column, extended
from kvkeep_server.policies import NO_PARENT

_CAPACITY_FIRST = 1024


class Parents:
    """By block id.

    Attributes:
        of: Shape (capacity,), -1 = none.
    """

    def __init__(self) -> None:
        """See the class."""
        self.of: NDArray[np.int32] = column(_CAPACITY_FIRST, np.int32)
        self.of[:] = NO_PARENT

    def reserve(self, capacity: int) -> None:
        """Makes room for ids below `capacity`."""
        have = len(self.of)
        if capacity > have:
            self.of = extended(self.of, capacity)
            self.of[have:] = NO_PARENT

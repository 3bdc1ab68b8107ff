"""Who leaves, what may enter, what comes next: decisions over dense block ids, nothing else.

A policy never sees bytes, keys, clocks, locks, I/O or metrics, so the same object runs in the
daemon and in the simulator. Words used by all three protocols:

- An **id** names a block (all shards of one key of a namespace set on this host): a small number,
  so that a policy can keep what it knows in arrays. After the block left, the id is given to
  another one.
- **now** is monotonic seconds and never runs backwards from one call of a policy to the next.
- **hints** come unverified from engines.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockIds: TypeAlias = NDArray[np.int64]
"""Shape (n,): ids of blocks. As a parent, -1 = none."""

BlockMask: TypeAlias = NDArray[np.bool_]
"""Shape (n,): a yes or no for each id."""

NBytes: TypeAlias = NDArray[np.int64]
"""Shape (n,): bytes that each block takes in the tier, all shards together."""

ClassId: TypeAlias = int
"""Number of a retention class, counted from 0 in the order of the configuration."""

NO_PARENT = -1
"""Parent of a first block of a chain, and of every block of a WINDOW or STATE group."""

__all__ = ["NO_PARENT", "BlockIds", "BlockMask", "ClassId", "NBytes"]

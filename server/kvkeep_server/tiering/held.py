"""How much each tier holds, and what left it."""

from dataclasses import dataclass, field

from kvkeep_server.core.histogram import AGE_BOUNDS_S, Histogram
from kvkeep_server.core.results import MissReason


@dataclass(slots=True)
class Held:
    """What one tier holds.

    Attributes:
        blocks: Now.
        nbytes: Their payload.
        left: Blocks that left since the start, by reason.
        evicted_ages: Since the last use, of blocks that were evicted, demoted ones among them.
        demoted: Of ram: blocks that left and are on nvme still.
        ever: Whether there ever was a block.
    """

    blocks: int = 0
    nbytes: int = 0
    left: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    evicted_ages: Histogram = field(default_factory=lambda: Histogram(AGE_BOUNDS_S))
    demoted: int = 0
    ever: bool = False

    def add(self, blocks: int, nbytes: int) -> None:
        """So many more; negative: fewer."""
        self.blocks += blocks
        self.ever |= blocks > 0
        self.nbytes += nbytes

"""What a replay counts: blocks, failures, latencies. Totals of several clients add up."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

STEPS = ("lookup", "acquire", "read", "store")
# Sixteen for each doubling, from 1 us to 19 h: a bucket is 4.4 % wide.
_A_DOUBLING = 16
_BUCKETS = 36 * _A_DOUBLING


class Latencies:
    """Durations of one step, in buckets: bounded, and percentiles within 5 %."""

    def __init__(self) -> None:
        """Empty."""
        self._counts: npt.NDArray[np.int64] = np.zeros(_BUCKETS, np.int64)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        bucket = int(math.log2(max(seconds * 1e6, 1.0)) * _A_DOUBLING)
        self._counts[min(bucket, _BUCKETS - 1)] += 1
        self.total_s += seconds

    def merge(self, other: "Latencies") -> None:
        """All of another's."""
        self._counts += other._counts  # noqa: SLF001 - of the same class
        self.total_s += other.total_s

    @property
    def count(self) -> int:
        """How many."""
        return int(self._counts.sum())

    def percentile_s(self, share: float) -> float:
        """Seconds that this share of them (0 to 1) took at most; 0.0 of none."""
        upto = np.cumsum(self._counts)
        if not upto[-1]:
            return 0.0
        bucket = int(np.searchsorted(upto, math.ceil(share * int(upto[-1]))))
        return float(2 ** ((bucket + 1) / _A_DOUBLING) / 1e6)


def _latencies() -> dict[str, Latencies]:
    return {step: Latencies() for step in STEPS}


@dataclass(slots=True)
class Totals:
    """What happened so far.

    Attributes:
        boundary_nbytes: Bytes of a block, all ranks.
        tokens_per_block: Tokens that a block stands for.
        requests: Begun.
        blocks_asked: Full blocks of their prompts.
        blocks_verified: Found, read, and every byte right.
        blocks_wrong: Found, read, and a byte wrong.
        blocks_unchecked: Found, and not read.
        blocks_from_nvme: Of those that were found, the ones that were not in ram.
        blocks_stored: That were not there.
        blocks_refused: That found no place.
        states_verified: Blocks of STATE groups that were found, read, and right in every byte.
        states_wrong: Found, read, and a byte wrong.
        tokens_replayed: Of the tokens that were found, those whose STATE was gone.
        leases_lost: Requests whose lease ran out while they read; what they read does not count.
        calls_refused: Requests that met a limit of the daemon.
        deadlines_missed: Requests that the daemon did not answer in time.
        latencies: Of each of `STEPS`.
    """

    boundary_nbytes: int
    tokens_per_block: int
    requests: int = 0
    blocks_asked: int = 0
    blocks_verified: int = 0
    blocks_wrong: int = 0
    blocks_unchecked: int = 0
    blocks_from_nvme: int = 0
    blocks_stored: int = 0
    blocks_refused: int = 0
    states_verified: int = 0
    states_wrong: int = 0
    tokens_replayed: int = 0
    leases_lost: int = 0
    calls_refused: int = 0
    deadlines_missed: int = 0
    latencies: dict[str, Latencies] = field(default_factory=_latencies)

    @property
    def blocks_hit(self) -> int:
        """Blocks that were found, as a prefix, and leased."""
        return self.blocks_verified + self.blocks_wrong + self.blocks_unchecked

    @property
    def verified(self) -> int:
        """Blocks of all groups that were read and right."""
        return self.blocks_verified + self.states_verified

    @property
    def wrong(self) -> int:
        """Blocks of all groups that were read and not right."""
        return self.blocks_wrong + self.states_wrong

    @property
    def blocks_missed(self) -> int:
        """Blocks that were not."""
        return self.blocks_asked - self.blocks_hit

    @property
    def tokens_saved(self) -> int:
        """Tokens that need not be computed."""
        return self.blocks_hit * self.tokens_per_block

    @property
    def nbytes_read(self) -> int:
        """Bytes that were read and checked, all ranks."""
        return (self.blocks_verified + self.blocks_wrong) * self.boundary_nbytes

    @property
    def nbytes_stored(self) -> int:
        """Bytes that were stored, all ranks."""
        return self.blocks_stored * self.boundary_nbytes

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' blocks that were found as a prefix, 0 to 1."""
        return self.blocks_hit / max(1, self.blocks_asked)


def summed(parts: Iterable[Totals]) -> Totals:
    """The totals of all clients together; there is at least one."""
    all_parts = list(parts)
    first = all_parts[0]
    total = Totals(boundary_nbytes=first.boundary_nbytes, tokens_per_block=first.tokens_per_block)
    names = [one.name for one in fields(Totals) if one.default == 0]
    for part in all_parts:
        for name in names:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for step in STEPS:
            total.latencies[step].merge(part.latencies[step])
    return total

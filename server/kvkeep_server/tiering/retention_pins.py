"""Retention pins: chains that a client wants kept for a while, within a budget of bytes.

A pin is soft. It keeps units from eviction and from reclaim, in the tier where they are; it keeps
nothing that is removed, damaged, or of an epoch that is over. What would pass the budget is refused
at once, so whatever is pinned, the rest of the pool goes on to work.
"""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.tiering.chain import Chain
from kvkeep_server.tiering.keyspaces import KeyspaceSet
from kvkeep_server.tiering.residency import Residency

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Limits of retention pins; names as in the configuration's `[pins]`.

    Attributes:
        nbytes_max: Slots of the ram tier that pinned blocks take or would take.
        pins_max: At a time.
        keep_max_s: How long one holds at most, and if it names no time.
    """

    nbytes_max: int
    pins_max: int
    keep_max_s: float


@dataclass(frozen=True, slots=True)
class Pinned:
    """The answer to who pins.

    Attributes:
        pin_id: Random; 0 = there was nothing to pin.
        blocks: Leading keys that are kept.
        keep_for_s: How long.
    """

    pin_id: int
    blocks: int
    keep_for_s: float


@dataclass(slots=True)
class PinCounts:
    """Pins since the start."""

    given: int = 0
    refused: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True)
class _Pin:
    """One of them; `units` are those that it keeps still."""

    set_id: bytes
    units: set[int]
    expires_s: float


@dataclass(slots=True)
class _Kept:
    """A unit that is pinned: by whom, and what it takes of the budget."""

    pins: set[int]
    nbytes: int


class RetentionPins:
    """They belong to the daemon, not to a session, and end with it. Event loop only.

    Args:
        residency: Whose units.
        clock: For their ends.
        source: Draws ids.
        limits: See `PinLimits`.
    """

    def __init__(
        self, *, residency: Residency, clock: Clock, source: random.Random, limits: PinLimits
    ) -> None:
        """See the class."""
        self._residency = residency
        self._clock = clock
        self._source = source
        self.limits = limits
        self._pins: dict[int, _Pin] = {}
        self._kept: dict[int, _Kept] = {}
        self._due: list[tuple[float, int]] = []
        self.nbytes = 0
        self.counts = PinCounts()

    def __len__(self) -> int:
        """Pins that hold."""
        return len(self._pins)

    @property
    def left_nbytes(self) -> int:
        """What may be pinned still."""
        return max(0, self.limits.nbytes_max - self.nbytes)

    def pin(self, spaces: KeyspaceSet, keys: KeyBatch, keep_for_s: float) -> Pinned:
        """Keeps the usable prefix, all of it or, over budget, nothing.

        Args:
            spaces: The namespace set.
            keys: In chain order.
            keep_for_s: 0 = as long as may be.

        Raises:
            ResourceExhaustedError: Over budget, or too many pins.
        """
        self.expire()
        keep_max_s = self.limits.keep_max_s
        keep_for_s = min(keep_for_s, keep_max_s) if keep_for_s > 0 else keep_max_s
        chain = Chain.of(self._residency, spaces, keys)
        own, others = chain.units(self._residency, range(chain.blocks))
        units = np.concatenate([own, *others])
        if not len(units):
            return Pinned(0, 0, 0.0)
        # What its blocks take in ram, or would.
        sizes = self._residency.columns.summed(units, self._residency.slot_nbytes_of)
        new = [place for place, unit in enumerate(units.tolist()) if unit not in self._kept]
        self._check_room(int(sizes[new].sum()))
        pin_id = 0
        while pin_id == 0 or pin_id in self._pins:
            pin_id = self._source.getrandbits(64)
        self._residency.pin(units[new])
        for place in new:
            self._kept[int(units[place])] = _Kept(set(), int(sizes[place]))
        self.nbytes += int(sizes[new].sum())
        for unit in units.tolist():
            self._kept[unit].pins.add(pin_id)
        expires_s = self._clock.monotonic_s() + keep_for_s
        self._pins[pin_id] = _Pin(spaces.set_id, set(units.tolist()), expires_s)
        heapq.heappush(self._due, (expires_s, pin_id))
        self.counts.given += 1
        return Pinned(pin_id, chain.blocks, keep_for_s)

    def _check_room(self, more_nbytes: int) -> None:
        limits, msg = self.limits, ""
        if len(self._pins) >= limits.pins_max:
            msg = f"pins.pins_max = {limits.pins_max} pins hold"
        elif more_nbytes > self.left_nbytes:
            msg = (
                f"{more_nbytes} bytes more are to be pinned, {self.nbytes} are and "
                f"pins.max = {limits.nbytes_max} may be"
            )
        if msg:
            self.counts.refused += 1
            # The soonest end is a guess: it need not give enough back.
            next_s = self._due[0][0] - self._clock.monotonic_s() if self._due else 0.0
            retry_after_s = min(60.0, max(1.0, next_s))
            raise ResourceExhaustedError(f"{msg}; unpin some, or raise it", retry_after_s)

    def unpin(self, pin_ids: Iterable[int], may_unpin: Callable[[bytes], bool]) -> int:
        """Ends pins; how many of them held.

        Args:
            pin_ids: Unknown ones are no error.
            may_unpin: Whether the caller has opened this namespace set.
        """
        ended = 0
        for pin_id in pin_ids:
            pin = self._pins.get(pin_id)
            if pin is not None and may_unpin(pin.set_id):
                self._end(pin_id)
                ended += 1
        return ended

    def _end(self, pin_id: int) -> None:
        free = []
        for unit in self._pins.pop(pin_id).units:
            kept = self._kept[unit]
            kept.pins.discard(pin_id)
            if not kept.pins:
                free.append(unit)
                self.nbytes -= self._kept.pop(unit).nbytes
        self._residency.unpin(np.array(sorted(free), np.int64))

    def expire(self) -> None:
        """Ends pins whose time is over."""
        now_s = self._clock.monotonic_s()
        while self._due and self._due[0][0] <= now_s:
            _, pin_id = heapq.heappop(self._due)
            if pin_id in self._pins:
                self._end(pin_id)
                self.counts.expired += 1
        if len(self._due) > 2 * len(self._pins) + 1024:
            self._due = [(pin.expires_s, pin_id) for pin_id, pin in self._pins.items()]
            heapq.heapify(self._due)

    # --- residency's Retainer

    def keeps(self, units: I64) -> Mask:
        """Which of these units are pinned."""
        if not self._kept:
            return np.zeros(len(units), bool)
        return np.fromiter((unit in self._kept for unit in units.tolist()), bool, len(units))

    def leaving(self, units: I64) -> None:
        """These units leave the index, for whatever reason: nothing keeps them."""
        if not self._kept:
            return
        gone = [unit for unit in units.tolist() if unit in self._kept]
        for unit in gone:
            kept = self._kept.pop(unit)
            self.nbytes -= kept.nbytes
            for pin_id in kept.pins:
                self._pins[pin_id].units.discard(unit)
        self._residency.unpin(np.array(gone, np.int64))

    def check(self) -> None:
        """Audits pins against units and budget.

        Raises:
            AssertionError: They disagree.
        """
        assert self.nbytes == sum(kept.nbytes for kept in self._kept.values()), "pinned bytes"
        assert self.nbytes <= self.limits.nbytes_max, "over budget"
        for pin_id, pin in self._pins.items():
            assert all(pin_id in self._kept[unit].pins for unit in pin.units), "a pin without units"
        units = np.array(sorted(self._kept), np.int64)
        columns = self._residency.columns
        assert (columns.row[units] >= 0).all(), "a pinned unit that left"
        assert (columns.pins[units] > 0).all(), "a pinned unit that may leave"

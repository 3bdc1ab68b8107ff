"""Eviction policies with one fault each, for the test of the contract suite."""

from __future__ import annotations

import random

import numpy as np

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies.eviction.lru import LruEviction


class Unaudited(LruEviction):
    """Its own `check` would notice some of the faults; the suite has to."""

    def check(self):
        pass


class ParentFirst(Unaudited):
    def victims(self, count, now):
        return super().victims(count, now)[::-1].copy()


class OneTooMany(Unaudited):
    def victims(self, count, now):
        return super().victims(count + 1, now)


class BlindForPins(Unaudited):
    def pin(self, ids):
        pass

    def unpin(self, ids):
        pass


class NeverUnpins(Unaudited):
    def unpin(self, ids):
        pass


class RemovesWhatItNames(Unaudited):
    def victims(self, count, now):
        named = super().victims(count, now)
        self.remove(named)
        return named


class NamesEachBlockOnce(Unaudited):
    def victims(self, count, now):
        named = super().victims(count, now)
        self._named = []
        return named


class RefusesInnerBlocks(Unaudited):
    def remove(self, ids):
        assert self._tree.evictable(ids).any() or len(ids) == 0, "not that one"
        super().remove(ids)


class LeavesOldLinks(Unaudited):
    """As if child counts were kept from one life of an id to the next."""

    def insert(self, ids, parents, retention_class, hints, now):
        reused = ids[ids < self._tree.capacity]
        before = self._tree._children[reused].copy() + (self._stamps[reused] > 0)
        super().insert(ids, parents, retention_class, hints, now)
        self._tree._children[reused] += before


class LinksOnlyChains(Unaudited):
    def insert(self, ids, parents, retention_class, hints, now):
        chain = np.concatenate((parents[:1], ids[:-1]))
        super().insert(ids, chain, retention_class, hints, now)


class HeadFirst(Unaudited):
    def touch(self, ids, hints, now):
        super().touch(ids[::-1], hints, now)


class DislikesEmpty(Unaudited):
    def touch(self, ids, hints, now):
        super().touch(ids[ids >= ids.min()], hints, now)


class SortsItsArgument(Unaudited):
    def touch(self, ids, hints, now):
        ids.sort()
        super().touch(ids, hints, now)


class AppliesLater(Unaudited):
    """Keeps the array of a touch until somebody has to leave."""

    def __init__(self):
        super().__init__()
        self._later = []

    def touch(self, ids, hints, now):
        self._later.append(ids)

    def victims(self, count, now):
        for ids in self._later:
            super().touch(ids, Hints(), now)
        self._later = []
        return super().victims(count, now)


class HandsOutItsOwn(Unaudited):
    """What the caller does to the answer changes the next one."""

    def __init__(self):
        super().__init__()
        self._answer = None

    def victims(self, count, now):
        if self._answer is None:
            self._answer = super().victims(count, now)
        return self._answer


class FixedSize(Unaudited):
    def insert(self, ids, parents, retention_class, hints, now):
        assert (ids < 4096).all(), "too large"
        super().insert(ids, parents, retention_class, hints, now)


class TrustsHints(Unaudited):
    def touch(self, ids, hints, now):
        assert hints.output_tokens < 1_000_000, "so long an output"
        super().touch(ids, hints, now)


class TossesCoins(Unaudited):
    """Touches by chance, from a source that no constructor gave."""

    source = random.Random(1)

    def touch(self, ids, hints, now):
        if self.source.randrange(2):
            super().touch(ids, hints, now)


class KeepsAnOldParent(Unaudited):
    """An inner block's removal leaves its children hanging on the id."""

    def remove(self, ids):
        inner = ids[self._tree._children[ids] > 0]
        known = self._tree._parents[: self._tree.capacity]
        children = np.flatnonzero(np.isin(known, inner) & (self._tree._state > 0))
        states = self._tree._state[children].copy()
        super().remove(ids)
        self._tree._state[children] = states

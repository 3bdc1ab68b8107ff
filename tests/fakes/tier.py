"""A Tier in a dict: the smallest thing that keeps the contract of `kvkeep_server.tiers.base`."""

import numpy as np

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.results import TierId
from kvkeep_server.tiers.base import Presence, ReadStatus, RemoveStatus, WriteStatus


class FakeTier:
    """Finds blocks by location and stamp, as ram and nvme do."""

    tier_id = TierId.UNSPECIFIED

    def __init__(self, *, blocks_max, nbytes_max):
        self.blocks_max = blocks_max
        self.nbytes_max = nbytes_max
        self.stored = {}  # location -> (stamp, bytes)
        self.reserved = set()
        self.last_stamp = 0

    def resident(self, blocks):
        held = [
            Presence.YES if self._find(location, stamp) is not None else Presence.NO
            for location, stamp in _pairs(blocks)
        ]
        return np.array(held, np.uint8)

    async def read(self, blocks, into):
        status = []
        for (location, stamp), buffer in zip(_pairs(blocks), into, strict=True):
            data = self._find(location, stamp)
            if data is not None:
                buffer[:] = data
            status.append(ReadStatus.HIT if data is not None else ReadStatus.MISS)
        return np.array(status, np.uint8)

    def reserve(self, nbytes, count):
        if not 0 < nbytes <= self.nbytes_max:
            raise InvalidArgumentError("nbytes", nbytes, f"1 to {self.nbytes_max}", "store less")
        free = [
            location
            for location in range(1, self.blocks_max + 1)
            if location not in self.stored and location not in self.reserved
        ][:count]
        self.reserved |= set(free)
        return FakeBatch(self, free)

    async def remove(self, blocks):
        status = []
        for location, stamp in _pairs(blocks):
            held = self._find(location, stamp) is not None
            if held:
                del self.stored[location]
            status.append(RemoveStatus.REMOVED if held else RemoveStatus.ABSENT)
        return np.array(status, np.uint8)

    def check(self):
        assert not self.reserved & set(self.stored)

    def _find(self, location, stamp):
        held, data = self.stored.get(location, (None, None))
        return data if held == stamp else None


class FakeBatch:
    def __init__(self, tier, locations):
        self.locations = np.array(locations, np.uint64)
        self._tier = tier
        self._written = {}
        self._open = True

    async def write(self, blocks, sources, *, durable=True):
        assert self._open
        assert len(blocks) == len(sources) == len(self.locations)
        for location, source in zip(self.locations.tolist(), sources, strict=True):
            self._written[location] = bytes(source)
        return np.full(len(sources), WriteStatus.WRITTEN, np.uint8)

    def commit(self, kept=None):
        assert self._open
        stamps = []
        for position, location in enumerate(self.locations.tolist()):
            if kept is None or kept[position]:
                self._tier.last_stamp += 2
                stamps.append(self._tier.last_stamp)
                self._tier.stored[location] = (stamps[-1], self._written[location])
        self._close()
        return np.array(stamps, np.uint64)

    def abort(self):
        if self._open:
            self._close()

    def _close(self):
        self._open = False
        self._tier.reserved -= set(self.locations.tolist())

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.abort()


def _pairs(blocks):
    return zip(blocks.locations.tolist(), blocks.stamps.tolist(), strict=True)

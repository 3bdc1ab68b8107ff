"""The client program of P01: reads in every way, verifies every byte, stores what is missing."""

import random
import threading
from dataclasses import dataclass, field

import numpy as np

import kvkeep
from tests.fakes.client_process import Wire
from tests.fakes.generated_blocks import (
    KEY_NBYTES,
    blocks_of,
    chain_keys,
    place_of,
    spec,
    store_chain,
)
from tests.fakes.ways import connect

CHAINS = 32
BLOCKS = 32
_GROUPS = [
    kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=4096),
    kvkeep.Group.full("index", tokens_per_block=16, block_nbytes=12_345),
]
# All under the same keys. Sizes: a page, none of a page, several of the same.
SPECS = {
    "bf16": spec(8192),
    "fp8": spec(8192, kv_dtype="fp8_e4m3"),
    "layout 2": spec(8192, layout_version="2"),
    "switch": spec(8192, layout_switches=("KV_LAYOUT=HND",)),
    "epoch 1": spec(8192, namespace_epoch=1),
    "tp 2": spec(5000, tp_size=2),
    "two groups": spec(0, groups=_GROUPS),
}


@dataclass(slots=True)
class Tally:
    """What one thread found."""

    verified: int = 0
    wrong: list[str] = field(default_factory=list)
    stored: int = 0
    short: int = 0
    incomplete: int = 0
    from_nvme: int = 0
    by_way: dict[str, int] = field(default_factory=dict)


class Reader:
    """One thread's reads."""

    def __init__(self, namespaces: dict[str, kvkeep.Namespace], seed: int) -> None:
        self._namespaces = namespaces
        self._source = random.Random(seed)
        self._ways = {
            "one buffer": self._into_one,
            "buffers": self._into_separate,
            "views": self._views,
            "looked up": self._looked_up,
        }
        self.tally = Tally()

    def run(self, verified_min: int) -> None:
        while self.tally.verified < verified_min:
            name = self._source.choice(list(SPECS))
            # Some chains are read more than others, as everywhere.
            chain = int(CHAINS * self._source.random() ** 3)
            keys = chain_keys(chain, BLOCKS)
            way = self._source.choice(list(self._ways))
            found = self._ways[way](name, keys)
            self.tally.by_way[way] = self.tally.by_way.get(way, 0) + found
            if found < BLOCKS:
                self.tally.short += 1
                for rank in range(SPECS[name].ranks):
                    self.tally.stored += self._store(name, keys, rank)

    def _store(self, name: str, keys: bytes, rank: int) -> int:
        return store_chain(self._namespaces[name], keys, place=name, rank=rank).stored

    def _check(self, way: str, name: str, at: tuple[int, int], keys: bytes, found) -> int:
        rank, group = at
        nbytes = SPECS[name].groups[group].block_nbytes
        expected = blocks_of(place_of(name, rank, group), keys[: len(found) * KEY_NBYTES], nbytes)
        differing = [i for i, block in enumerate(found) if block != expected[i].tobytes()]
        self.tally.verified += len(found)
        self.tally.wrong += [f"{way} {name} {at} block {i}" for i in differing]
        return len(found)

    def _column(self, name: str) -> tuple[int, int, int]:
        """Some rank and group, and its block's size."""
        rank = self._source.randrange(SPECS[name].ranks)
        group = self._source.randrange(len(SPECS[name].groups))
        return rank, group, SPECS[name].groups[group].block_nbytes

    def _into_one(self, name: str, keys: bytes) -> int:
        rank, group, nbytes = self._column(name)
        buffer = np.full(BLOCKS * nbytes, 0xAA, np.uint8)
        count = self._namespaces[name].read_into(keys, buffer, rank=rank, group=group)
        blocks = [row.tobytes() for row in buffer.reshape(BLOCKS, nbytes)[:count]]
        return self._check("one buffer", name, (rank, group), keys, blocks)

    def _into_separate(self, name: str, keys: bytes) -> int:
        rank, group, nbytes = self._column(name)
        buffers = [bytearray(nbytes) for _ in range(BLOCKS)]
        count = self._namespaces[name].read_into(keys, buffers, rank=rank, group=group)
        return self._check("buffers", name, (rank, group), keys, buffers[:count])

    def _views(self, name: str, keys: bytes) -> int:
        with self._namespaces[name].acquire(keys) as acquired:
            for rank in range(SPECS[name].ranks):
                for group in range(len(SPECS[name].groups)):
                    views = acquired.views(rank, group)
                    assert len(views) == acquired.leased
                    self._check("views", name, (rank, group), keys, views)
            # Of what is not in ram it takes what comes in time.
            assert acquired.leased <= acquired.blocks
            self.tally.from_nvme += acquired.from_nvme
            return acquired.leased

    def _looked_up(self, name: str, keys: bytes) -> int:
        """A look-up's answer, acted on by a read of so many."""
        found = self._namespaces[name].lookup(keys)
        # While the index moves, a look-up finds nothing for a moment, and says so.
        self.tally.incomplete += not found.complete
        assert found.complete or not found.blocks
        assert found.tokens == 16 * found.blocks
        if found.blocks:
            self._into_one(name, keys)
        return found.blocks


def read_and_verify(wire: Wire, where: str, seed: int, threads: int, verified: int) -> None:
    """Tells the tallies of all threads."""
    with connect(where, timeout_s=20.0) as client:
        namespaces = {name: client.open_namespace(one) for name, one in SPECS.items()}
        readers = [Reader(namespaces, 1000 * seed + number) for number in range(threads)]
        failures: list[BaseException] = []

        def run(reader: Reader) -> None:
            try:
                reader.run(verified // threads)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        running = [threading.Thread(target=run, args=(reader,)) for reader in readers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if failures:
            raise failures[0]
        wire.tell([reader.tally for reader in readers])

"""Holds index, columns, pool and policy against each other: what every `check()` rests on.

In two parts, so that a daemon can be audited while it serves. `rows` looks at some blocks, in a few
milliseconds of the event loop: it holds between any two steps of the loop. `moment` copies what has
to be seen at one moment, and what it returns judges the copy in any thread.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import TierId
from kvkeep_server.index.table import IndexTable
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiers.ram.tier import RamTier

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Audit:
    """What is audited, as it is now: make it anew for each look.

    Attributes:
        columns: What the daemon keeps of each block.
        table: The index.
        ram: The tier whose slots the rows point to.
        policy: Who leaves next.
        keyspaces: By their index.
        find: Ids of keys of a keyspace, as look-ups have them.
        held: Blocks and their payload bytes in each tier, as counted.
        lost: Units that are about to leave, because no tier has them.
    """

    columns: BlockColumns
    table: IndexTable
    ram: RamTier
    policy: EvictionPolicy
    keyspaces: Sequence[Keyspace]
    find: Callable[[Keyspace, KeyBatch], I64]
    held: Mapping[TierId, tuple[int, int]]
    lost: frozenset[int]

    def whole(self) -> None:
        """Looks at everything.

        Raises:
            AssertionError: Something disagrees.
        """
        self.table.check()
        self.rows(0, self.columns.capacity, self.spaces(0, self.columns.capacity))
        self.moment(self.columns.blank())()
        self.policy.check()

    def spaces(self, start: int, stop: int) -> NDArray[np.uint16]:
        """Numbers of the keyspaces of the blocks with these ids, ascending, each once."""
        there = self.columns.row[start:stop] >= 0
        return np.unique(self.columns.keyspace[start:stop][there])

    def rows(self, start: int, stop: int, spaces_wanted: NDArray[np.uint16]) -> int:
        """Looks at the blocks of these keyspaces with these ids, and at nothing else; their number.

        Raises:
            AssertionError: One is not what its row, its slot or its key says.
        """
        columns, table = self.columns, self.table
        own = columns.row[start:stop] >= 0
        own &= np.isin(columns.keyspace[start:stop], spaces_wanted)
        ids = start + np.flatnonzero(own)
        rows = columns.row[ids].astype(np.int64)
        assert (table.ids[rows] == ids).all(), "row and id point to each other"
        assert (table.on_nvme(rows) == (columns.nvme[ids] != 0)).all(), "locations"
        addresses = table.address_of(rows)
        in_ram = addresses != 0
        generations = self.ram.generations(addresses[in_ram])
        sealed = (generations & np.uint64(1) == 0) & (generations != 0)
        assert sealed.all(), "a visible block is not sealed"
        assert (columns.in_ram[columns.unit_of(ids[in_ram])]).all(), "a policy does not know"
        spaces = columns.keyspace[ids]
        for number in np.unique(spaces).tolist():
            keyspace, own = self.keyspaces[number], ids[spaces == number]
            words = columns.key_words[own][:, : -(-keyspace.key_nbytes // 8)]
            found = self.find(keyspace, KeyBatch(words, keyspace.key_nbytes))
            assert (found == own).all(), "a block is not found by its key"
        return len(ids)

    def moment(self, room: Mapping[str, NDArray[np.generic]]) -> Callable[[], None]:
        """Copies what must be seen at once; returns the audit of the copy, which raises
        AssertionError. `room` is `columns.blank()`."""
        columns = self.columns.snapshot(room)
        slabs, ram = self.ram.slabs.snapshot(), self.ram.stats()
        live, keyspaces = self.table.live_rows, self.keyspaces
        sizes = np.array([keyspace.block_nbytes for keyspace in keyspaces], np.int64)

        def judge() -> None:
            ids, withdrawn = columns.in_use(), columns.withdrawn()
            assert len(ids) == live == columns.used - len(withdrawn), "rows and ids"
            in_ram = columns.address_of(ids)
            addresses = np.concatenate((in_ram, columns.address_of(withdrawn)))
            addresses = addresses[addresses != 0]
            # np.unique would keep the GIL for 0.3 s of a million.
            ordered = np.sort(addresses)
            assert (ordered[1:] != ordered[:-1]).all(), "two blocks in one slot"
            assert slabs.in_use(addresses).all(), "a block in a slot that is free"
            assert (columns.pins[columns.unit_of(withdrawn)] > 0).all(), "withdrawn, held by nobody"
            for tier, place in ((TierId.RAM, in_ram), (TierId.NVME, columns.nvme[ids])):
                there = ids[place != 0]
                counted = len(there), int(sizes[columns.keyspace[there]].sum())
                assert counted == self.held[tier], f"blocks and bytes in {tier.name}"
            _judge_units(columns, ids)
            _judge_tiers(columns, ids, self.lost)
            ram.check(slabs)

        return judge

    def policy_moment(self) -> Callable[[], None]:
        """As `moment`, of the policy: a copy that checks itself."""
        return copy.deepcopy(self.policy).check


def _judge_units(columns: BlockColumns, ids: I64) -> None:
    units = ids[columns.unit_of(ids) == ids]
    assert np.isin(columns.unit_of(ids), units).all(), "a block of no unit"
    assert len(columns.blocks_of(units)) == len(ids), "shards hang together"
    parents = columns.parent[units]
    assert np.isin(parents[parents >= 0], units).all(), "a reachable child without its parent"
    children = np.bincount(parents[parents >= 0], minlength=columns.capacity)
    assert (children[units] == columns.children[units]).all(), "child counts"


def _judge_tiers(columns: BlockColumns, ids: I64, lost: frozenset[int]) -> None:
    units = ids[columns.unit_of(ids) == ids]
    gone = units[~columns.placed(units)].tolist()
    assert set(gone) <= lost, "a unit that no tier has"
    ram = np.zeros(columns.capacity, bool)
    ram[columns.unit_of(ids[columns.address_of(ids) != 0])] = True
    assert (ram[units] == columns.in_ram[units]).all(), "units in ram"

"""Finds blocks by key: keyspaces, fingerprints, the shared index, and a comparison of full keys."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason
from kvkeep_server.index.table import IndexTable
from kvkeep_server.policies.parents import Parents
from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.ghosts import Ghosts
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiers.base import Blocks

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


class BlockFinder:
    """What `Residency` knows without changing it. Event loop only.

    Args:
        table: The index; `Residency` puts another one in its place when it fills.
        parents: A column that the eviction policy sees too.
        clock: For ages.
        ghost_places: Of the ghost table, a power of two.

    Attributes:
        keyspaces: By their index.
        lost: Units that no tier has any more and that are in the index until they are taken out,
            with those that descend from them; and why. Nobody finds them by `prefix`.
    """

    def __init__(
        self, *, table: IndexTable, parents: Parents, clock: Clock, ghost_places: int
    ) -> None:
        """See the class."""
        self.columns = BlockColumns(table, parents)
        self.ghosts = Ghosts(places=ghost_places)
        self.lost: dict[int, MissReason] = {}
        self.collisions_total = 0
        self._clock = clock
        self._starts: dict[int, tuple[np.uint64, np.uint64]] = {}
        self.keyspaces: list[Keyspace] = []
        self._sizes: I64 = np.zeros(0, np.int64)
        self._ram_only: NDArray[np.bool_] = np.zeros(0, bool)

    @property
    def table(self) -> IndexTable:
        """The index."""
        return self.columns.table

    # --- keyspaces and fingerprints

    def add_keyspace(self, keyspace: Keyspace) -> None:
        """Keyspaces are added in the order of their index. One that recovery made is put in place
        of itself when it is opened, and any in place of one that has no block and was forgotten."""
        if keyspace.index < len(self.keyspaces):
            self.keyspaces[keyspace.index] = keyspace
            self._starts.pop(keyspace.index, None)
        else:
            assert keyspace.index == len(self.keyspaces)
            self.keyspaces.append(keyspace)
        if keyspace.index >= len(self._sizes):
            self._sizes = np.resize(self._sizes, 2 * keyspace.index + 1)
            self._ram_only = np.resize(self._ram_only, 2 * keyspace.index + 1)
        self._sizes[keyspace.index] = keyspace.block_nbytes
        self._ram_only[keyspace.index] = keyspace.ram_only
        self.columns.widen_keys(-(-keyspace.key_nbytes // 8))

    def keyspace_of(self, block: int) -> Keyspace:
        """Whose block this is."""
        return self.keyspaces[int(self.columns.keyspace[block])]

    def ram_only(self, blocks: I64) -> NDArray[np.bool_]:
        """Which blocks nvme never gets."""
        return self._ram_only[self.columns.keyspace[blocks]]

    def nbytes_of(self, blocks: I64) -> int:
        """Payload bytes of blocks."""
        return int(self.sizes_of(blocks).sum())

    def sizes_of(self, blocks: I64) -> I64:
        """Payload bytes of each block."""
        return self._sizes[self.columns.keyspace[blocks]]

    def fingerprints(self, keyspace: Keyspace, keys: KeyBatch) -> tuple[U64, U64]:
        """Tags and checks of keys in the present table."""
        start = self._starts.get(keyspace.index)
        if start is None:
            h, s = self.table.multipliers.start(
                keyspace.namespace_id, keyspace.group, keyspace.key_nbytes
            )
            start = self._starts[keyspace.index] = (np.uint64(h), np.uint64(s))
        return self.table.multipliers.fingerprints(keys.words, *start)

    def named(self, blocks: I64) -> Blocks:
        """Blocks of one keyspace, at least one, as tiers take them."""
        columns, keyspace = self.columns, self.keyspace_of(int(blocks[0]))
        words = columns.key_words[blocks][:, : -(-keyspace.key_nbytes // 8)]
        return Blocks(
            keyspace.namespace_id,
            keyspace.group,
            KeyBatch(words, keyspace.key_nbytes),
            keyspace.block_nbytes,
            columns.nvme[blocks],
            columns.stamp_of(blocks),
        )

    def by_keyspace(self, blocks: I64) -> list[I64]:
        """Blocks apart by keyspace, the order kept."""
        spaces = self.columns.keyspace[blocks]
        return [blocks[spaces == number] for number in np.unique(spaces).tolist()]

    # --- look-up

    def find(self, keyspace: Keyspace, keys: KeyBatch) -> I64:
        """Block ids, -1 where no tier has a key. Full keys are compared."""
        return self._identify(keyspace, keys, *self.fingerprints(keyspace, keys))[0]

    def find_or_collide(
        self, keyspace: Keyspace, keys: KeyBatch
    ) -> tuple[I64, U64, U64, NDArray[np.bool_] | None]:
        """Ids (-1: absent), tags, checks, and where another key holds the tag; None there = all
        are absent."""
        tags, checks = self.fingerprints(keyspace, keys)
        ids, collides = self._identify(keyspace, keys, tags, checks)
        return ids, tags, checks, collides

    def _identify(
        self, keyspace: Keyspace, keys: KeyBatch, tags: U64, checks: U64
    ) -> tuple[I64, NDArray[np.bool_] | None]:
        rows, collides = self.table.find(tags, checks)
        if collides is None:
            return rows, None
        ids = self.table.ids[rows].astype(np.int64)
        absent = rows < 0
        if absent.any():
            ids[absent] = -1
        differs = self._differ(keyspace, keys, ids)
        if differs is not None:
            collides |= differs & ~absent
        if collides.any():
            self.collisions_total += int(np.count_nonzero(collides))
            ids[collides] = -1
        return ids, collides

    def _differ(self, keyspace: Keyspace, keys: KeyBatch, ids: I64) -> NDArray[np.bool_] | None:
        """Where the block of an id is not (keyspace, key); None = nowhere. At id -1: anything."""
        spaces = self.columns.keyspace[ids]
        stored = self.columns.key_words[ids]
        width = keys.words.shape[1]
        # Nearly always all are equal, which one pass over the whole array tells.
        same_width = width == stored.shape[1]
        differs: NDArray[np.bool_] = spaces != keyspace.index
        if same_width and np.array_equal(stored, keys.words) and not differs.any():
            return None
        for i in range(width):
            differs |= stored[:, i] != keys.words[:, i]
        return differs

    def find_placed(self, keyspace: Keyspace, keys: KeyBatch) -> I64:
        """As `find`, -1 also for blocks that no tier has any more."""
        ids = self.find(keyspace, keys)
        if self.lost:
            ids[(self.columns.address_of(ids) == 0) & (self.columns.nvme[ids] == 0)] = -1
        return ids

    def prefix(self, keyspaces: Sequence[Keyspace], keys: KeyBatch) -> list[I64]:
        """The leading blocks that are resident in every keyspace: one array of ids each, equally
        long."""
        found: list[I64] = []
        for keyspace in keyspaces:
            ids = self.find_placed(keyspace, keys)
            absent = ids < 0
            if absent.any():
                keys = keys.slice(0, int(absent.argmax()))
            found.append(ids)
        return [ids[: len(keys)] for ids in found]

    def units_of(self, blocks: I64) -> I64:
        """The units of a chain's blocks, without repetitions, in chain order.

        A sane chain has no key twice; a hostile one may.
        """
        units = self.columns.unit_of(blocks)
        # Mostly stored in this order, with ascending ids: no need to sort.
        ordered = units if (units[1:] > units[:-1]).all() else np.sort(units)
        if (ordered[1:] != ordered[:-1]).all():
            return units
        _, first = np.unique(units, return_index=True)
        return units[np.sort(first)]

    def why_absent(
        self, keyspace: Keyspace, keys: KeyBatch, position: int
    ) -> tuple[MissReason, float]:
        """Why the key at this position is not resident, and seconds since its last use (EVICTED
        only)."""
        key = keys.slice(position, position + 1)
        if self.lost:
            block = int(self.find(keyspace, key)[0])
            reason = self.lost.get(self.unit(block)) if block >= 0 else None
            if reason is not None:
                return reason, 0.0
        tags, _ = self.fingerprints(keyspace, key)
        reason, last_used_s = self.ghosts.recall(int(tags[0]))
        return reason, max(0.0, self._clock.monotonic_s() - last_used_s) if last_used_s else 0.0

    def unit_at(self, row: int, version: int, spaces: KeyspaceSet) -> int:
        """Unit of the block in this row, -1 unless it is one of `spaces` and the row did not change
        since.

        For what clients report; nothing of it is trusted.
        """
        if not 0 <= row < self.table.geometry.rows or self.table.version_of(row) != version:
            return -1
        block = int(self.table.ids[row])
        if block < 0:
            return -1
        if not spaces.has(int(self.columns.keyspace[block])):
            return -1
        return self.unit(block)

    def unit(self, block: int) -> int:
        """Of one block."""
        return int(self.columns.unit_of(np.array([block]))[0])

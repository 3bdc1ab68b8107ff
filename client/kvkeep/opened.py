"""A namespace as one session knows it: handles, sizes, and the seeds of its fingerprints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.shared_index import NOTHING, Rows
from kvkeep.spec import GroupKind, invalid, whole

if TYPE_CHECKING:
    from kvkeep.session import Session
    from kvkeep.shared_index import Found, IndexTable, Seed, Words
    from kvkeep.spec import NamespaceSpec
    from kvkeep.v1.block_cache_pb2 import OpenNamespaceResponse


class Opened:
    """Made anew for each session; any thread may use it.

    Attributes:
        session: Whose handles these are.
        set_index: Handle of the namespace set.
        set_id: 16 bytes, the identity.
        ranks: Flat ranks whose shards lie on this host.
        full_groups: Indexes of the groups that a usable prefix needs.
        tokens_per_key: Tokens that one key stands for.
        near_misses: Stored sets that differ in few fields: (set id, names of the fields).
    """

    def __init__(
        self, session: Session, spec: NamespaceSpec, response: OpenNamespaceResponse
    ) -> None:
        """From the daemon's answer."""
        self.session = session
        self.set_index = response.set_index
        self.set_id = response.set_id
        self.ranks = tuple(one.rank for one in response.ranks)
        self.limits = response.limits
        self.near_misses = [
            (near.set_id, tuple(near.differing_fields)) for near in response.near_misses
        ]
        # A replayable STATE shortens no prefix, and other kinds are not opened in this release.
        self.full_groups = tuple(
            i for i, group in enumerate(spec.groups) if group.kind is GroupKind.FULL
        )
        self.tokens_per_key = min(
            (spec.groups[i].tokens_per_block for i in self.full_groups), default=0
        )
        self.block_nbytes = tuple(group.block_nbytes for group in spec.groups)
        self.slot_nbytes = tuple(response.slot_nbytes) or self.block_nbytes
        self._key_nbytes = spec.key_nbytes
        self._namespace_ids = {one.rank: one.namespace_id for one in response.ranks}
        # By table id: holding a table would keep its memory mapped.
        self._all_seeds: tuple[int, list[Seed]] = (0, [])
        self._seeds: dict[tuple[int, int, int], Seed] = {}

    def rank_or_only(self, rank: int | None) -> int:
        """`rank`, or the only local one. Errors: InvalidArgumentError."""
        if rank is None and len(self.ranks) == 1:
            return self.ranks[0]
        number = whole(rank)
        if number is None or number not in self._namespace_ids:
            fix = "name the rank whose shard is meant"
            raise invalid("rank", rank, f"one of the local ranks {self.ranks}", fix)
        return number

    def checked_group(self, group: int) -> int:
        """Errors: InvalidArgumentError."""
        number = whole(group)
        if number is None or number not in self.full_groups:
            fix = "name a FULL group: others are not served in this release"
            raise invalid("group", group, f"one of {self.full_groups}", fix)
        return number

    def check_count(self, keys: int) -> None:
        """Whether one call may have so many keys. Errors: InvalidArgumentError."""
        limit = self.limits.keys_max
        if limit and keys > limit:
            allowed = f"at most {limit} keys a call, the daemon's limit"
            raise invalid("keys", f"{keys} keys", allowed, "split the call")

    def find(self, words: Words) -> Found:
        """Leading keys that are stored for every local rank and FULL group.

        The row is that of the first rank and group.
        """
        table = self.session.table()
        if table is None:
            return NOTHING
        table_id, seeds = self._all_seeds
        if table_id != table.table_id:
            seeds = self._make_seeds(table)
            self._all_seeds = (table.table_id, seeds)
        limit = words.count
        first, *others = seeds
        for seed in others:
            limit = table.find(seed, words, limit).blocks
        return table.find(first, words, limit)

    def find_shard(self, words: Words, rank: int) -> int:
        """Leading keys of which every FULL group of one rank is stored."""
        table = self.session.table()
        if table is None:
            return 0
        limit = words.count
        for group in self.full_groups:
            limit = table.find(self._seed(table, rank, group), words, limit).blocks
        return limit

    def find_on_nvme(self, words: Words, rank: int) -> int:
        """Leading keys of which every FULL group of one rank lies on nvme."""
        table = self.session.table()
        if table is None:
            return 0
        limit = words.count
        for group in self.full_groups:
            limit = table.find_on_nvme(self._seed(table, rank, group), words, limit)
        return limit

    def find_rows(self, words: Words, rank: int, group: int) -> Rows:
        """Where the leading blocks of one rank and group lie in ram."""
        table = self.session.table()
        if table is None:
            return Rows(NOTHING, [])
        return table.find_rows(self._seed(table, rank, group), words, words.count)

    @property
    def answers(self) -> bool:
        """Whether the shared index answers now."""
        table = self.session.table()
        return table is not None and table.live

    def _make_seeds(self, table: IndexTable) -> list[Seed]:
        return [
            table.seed(self._namespace_ids[rank], group, self._key_nbytes)
            for rank in self.ranks
            for group in self.full_groups
        ]

    def _seed(self, table: IndexTable, rank: int, group: int) -> Seed:
        key = (table.table_id, rank, group)
        seed = self._seeds.get(key)
        if seed is None:
            seed = table.seed(self._namespace_ids[rank], group, self._key_nbytes)
            kept = {k: value for k, value in self._seeds.items() if k[0] == table.table_id}
            self._seeds = {**kept, key: seed}
        return seed

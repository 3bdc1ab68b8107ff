"""A namespace as one session knows it: handles, sizes, and the seeds of its fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.copying import copy_blocks, generations_at
from kvkeep.group_rules import BoundaryRule, longest_usable, tokens_of_a_key
from kvkeep.results import Lookup
from kvkeep.shared_index import NOTHING, Found, Rows
from kvkeep.shared_memory import NO_ROW
from kvkeep.spec import GroupKind, Hints, invalid, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.copying import Targets
    from kvkeep.session import Session
    from kvkeep.shared_index import IndexTable, Seed, Words
    from kvkeep.spec import NamespaceSpec
    from kvkeep.v1.block_cache_pb2 import OpenNamespaceResponse

_NO_HINTS = Hints()
_LOOKED_UP = _NO_HINTS.touch_fields(blocks_read=False)
_READ = _NO_HINTS.touch_fields(blocks_read=True)


class Usable(NamedTuple):
    """The longest usable prefix, and what each group alone allows; `replayed` of its keys come
    only with a replay."""

    found: Found
    groups: tuple[int, ...]
    replayed: int


class Opened:
    """Made anew for each session; any thread may use it.

    Attributes:
        unleased_reads: Whether `read_into` protects itself, on a machine that may reorder loads.
        session: Whose handles these are.
        set_index: Handle of the namespace set.
        set_id: 16 bytes, the identity.
        namespace_epoch: That this is open in.
        ranks: Flat ranks whose shards lie on this host.
        full_groups: Indexes of the FULL groups.
        rules: Those of the WINDOW and STATE groups, by index.
        tokens_per_key: Tokens that one key stands for.
        near_misses: Stored sets that differ in few fields: (set id, names of the fields).
    """

    unleased_reads = False

    def __init__(
        self, session: Session, spec: NamespaceSpec, response: OpenNamespaceResponse
    ) -> None:
        """From the daemon's answer."""
        self.session = session
        self.set_index = response.set_index
        self.set_id = response.set_id
        self.ranks = tuple(one.rank for one in response.ranks)
        self.namespace_epoch = response.namespace_epoch
        self.limits = response.limits
        # An event that came already is newer than this answer.
        session.modes.setdefault(response.set_index, response.mode)
        self.near_misses = [
            (near.set_id, tuple(near.differing_fields)) for near in response.near_misses
        ]
        self.tokens_per_key = tokens_of_a_key(spec.groups)
        self.full_groups = tuple(
            i for i, group in enumerate(spec.groups) if group.kind is GroupKind.FULL
        )
        self.rules = {
            i: BoundaryRule(group, self.tokens_per_key)
            for i, group in enumerate(spec.groups)
            if group.kind is not GroupKind.FULL
        }
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
        if number is None or not 0 <= number < len(self.block_nbytes):
            fix = "name one of the specification's groups"
            raise invalid("group", group, f"0 to {len(self.block_nbytes) - 1}", fix)
        return number

    def check_joins(self) -> None:
        """Whether leases can be shared with other processes. Errors: NotSupportedError."""

    def checked_set(self, packed: bytes) -> int:
        """Handle of the set, for a call with these keys. Errors: InvalidArgumentError."""
        self.check_count(len(packed) // self._key_nbytes)
        return self.set_index

    def check_count(self, keys: int) -> None:
        """Whether one call may have so many keys. Errors: InvalidArgumentError."""
        limit = self.limits.keys_max
        if limit and keys > limit:
            allowed = f"at most {limit} keys a call, the daemon's limit"
            raise invalid("keys", f"{keys} keys", allowed, "split the call")

    def lookup(self, words: Words, hints: Hints | None) -> Lookup:
        """The longest usable prefix of at least one key."""
        found, groups, replayed = self.find(words)
        self.session.touch_ring.append(
            self.set_index,
            self.full_groups[0] if self.full_groups else 0,
            words.count,
            *found,
            *(_LOOKED_UP if hints is None else hints.touch_fields(blocks_read=False)),
        )
        blocks, tokens = found.blocks, self.tokens_per_key
        answers = blocks > 0 or self.answers
        return Lookup(blocks, blocks * tokens, answers, replayed * tokens, groups)

    def read_into(self, words: Words, into: Targets, rank: int, group: int) -> int:
        """Copy the leading blocks of one rank and group; how many are exact copies."""
        rows = self.find_rows(words, rank, group)
        block_nbytes, slot_nbytes = self.block_nbytes[group], self.slot_nbytes[group]
        copied = copy_blocks(self.session.chunks, rows.places, block_nbytes, slot_nbytes, into)
        self.session.touch_ring.append(
            self.set_index, group, words.count, copied, *rows.found[1:], *_READ
        )
        return copied

    def find(self, words: Words) -> Usable:
        """The longest usable prefix; at least one key.

        The row is that of its last key, of the first rank and group.
        """
        table = self.session.table()
        if table is None:
            return Usable(NOTHING, (0,) * len(self.block_nbytes), 0)
        found = self._find_full(table, words)
        if not self.rules:
            return Usable(found, (found.blocks,) * len(self.full_groups), 0)
        needs = [
            (number, rule, self._present(table, number, words, found.blocks))
            for number, rule in self.rules.items()
        ]
        shortening = [(rule, present) for _, rule, present in needs if rule.shortens]
        blocks = longest_usable(shortening, found.blocks)
        replayed = blocks - longest_usable([need[1:] for need in needs], blocks)
        groups = [found.blocks] * len(self.block_nbytes)
        for number, rule, present in needs:
            groups[number] = rule.longest(present, found.blocks)
        if blocks and (blocks < found.blocks or not self.full_groups):
            seed = self._seed(table, self.ranks[0], self._first_group(needs, blocks))
            found = table.find_at(seed, words, blocks - 1)
        return Usable(found._replace(blocks=blocks), tuple(groups), replayed)

    def _first_group(self, needs: Sequence[tuple[int, BoundaryRule, bytes]], blocks: int) -> int:
        """A group that has a block at the end of a usable prefix."""
        if self.full_groups:
            return self.full_groups[0]
        return next((number for number, _, present in needs if present[blocks - 1]), 0)

    def _present(self, table: IndexTable, group: int, words: Words, limit: int) -> bytes:
        """Which of the first keys have a block of this group in every local rank: a byte each."""
        there = (1 << 8 * limit) - 1
        for rank in self.ranks:
            present = table.present(self._seed(table, rank, group), words, limit)
            there &= int.from_bytes(present, "little")
        return there.to_bytes(limit, "little")

    def absent(self, words: Words, rank: int, group: int, positions: Sequence[int]) -> list[int]:
        """Of the keys at these positions those without a block of one rank and group."""
        table = self.session.table()
        if table is None or not positions:
            return list(positions)
        present = table.present(self._seed(table, rank, group), words, positions[-1] + 1)
        return [position for position in positions if not present[position]]

    def _find_full(self, table: IndexTable, words: Words) -> Found:
        """Leading keys that are stored for every local rank and FULL group; all without such."""
        if not self.full_groups:
            return Found(words.count, NO_ROW, 0)
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

    def new_blocks(
        self,
        words: Words,
        rank: int,
        positions: Mapping[int, Sequence[int]] | None,
        *,
        on_nvme: bool,
        within_s: float,
    ) -> dict[int, Sequence[int]]:
        """Positions of the keys whose blocks of one rank are to be stored, by group.

        `positions` are those of WINDOW and STATE groups that have a block. With `on_nvme` what
        lies in ram only is to be stored, too. `within_s` is for a call, which this makes none.
        Errors: InvalidArgumentError.
        """
        del within_s
        wanted = self._wanted(words, positions)
        new: dict[int, Sequence[int]] = {}
        if self.full_groups:
            # Children never outlive their parents, so what is stored is a prefix.
            find = self.find_on_nvme if on_nvme else self.find_shard
            new = dict.fromkeys(self.full_groups, range(find(words, rank), words.count))
        for group, own in wanted.items():
            again = on_nvme and self.rules[group].shortens
            new[group] = own if again else self.absent(words, rank, group, own)
        return new

    def _wanted(self, words: Words, positions: object) -> dict[int, Sequence[int]]:
        """Positions of WINDOW and STATE groups, checked, in the order of the groups."""
        if positions is None:
            return {}
        if not isinstance(positions, Mapping):
            fix = "give the positions by group"
            raise invalid("positions", positions, "a mapping from groups, or None", fix)
        wanted: dict[int, Sequence[int]] = {
            self._boundary_group(group): _ascending(group, own, words.count)
            for group, own in positions.items()
        }
        return dict(sorted(wanted.items()))

    def _boundary_group(self, group: int) -> int:
        number = whole(group)
        if number is None or number not in self.rules:
            fix = "name WINDOW and STATE groups; FULL ones have a block for every key"
            raise invalid("positions", group, f"groups {tuple(self.rules)}", fix)
        return number

    def find_rows(self, words: Words, rank: int, group: int) -> Rows:
        """Where the leading blocks of one rank and group lie in ram."""
        table = self.session.table()
        if table is None:
            return Rows(NOTHING, [])
        generations_of = partial(generations_at, self.session.chunks)
        seed = self._seed(table, rank, group)
        return table.find_rows(seed, words, words.count, generations_of)

    @property
    def over(self) -> bool:
        """Whether its epoch is: it is to be opened again."""
        return self.set_index in self.session.over

    @property
    def hidden(self) -> bool:
        """Whether nothing is to be found here, whatever the shared index says."""
        return self.session.hides(self.set_index)

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


def _ascending(group: int, positions: object, keys: int) -> list[int]:
    """Positions as plain integers. Errors: InvalidArgumentError."""
    field, fix = f"positions[{group}]", "name each key that has a block once, in order"
    allowed = f"ascending, 0 to {keys - 1}"
    if not isinstance(positions, Iterable):
        raise invalid(field, positions, allowed, fix)
    numbers = [whole(position) for position in positions]
    plain = [number for number in numbers if number is not None and 0 <= number < keys]
    if len(plain) < len(numbers) or any(a >= b for a, b in pairwise(plain)):
        raise invalid(field, positions, allowed, fix)
    return plain

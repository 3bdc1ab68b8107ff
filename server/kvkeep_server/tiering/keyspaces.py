"""One rank's blocks of one group: what the index and the pool need to know of a namespace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from kvkeep_server.core.results import GroupKind
from kvkeep_server.tiering.boundaries import BoundaryRule
from kvkeep_server.tiers.record import checksum_seed

# Their numbers are u16 in the columns of blocks.
KEYSPACES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Keyspace:
    """(namespace of one rank, group).

    Attributes:
        index: Dense number from 0; another keyspace may get it when this one was forgotten.
        namespace_id: 16 bytes, `service.namespaces`.
        rank: Flat rank, -1 as long as recovery knows the keyspace only.
        group: Index into the specification's groups.
        kind: Of the group.
        key_nbytes: Length of a key.
        block_nbytes: Payload of one block.
        checksum_seed: Binds checksums to (namespace, group, length).
        boundary_id: 16 bytes: blocks of one key whose keyspaces have the same form one unit.
        members: So many blocks of a key and a rank are of use only together.
        member: Which of them these are, from 0.
        ram_only: Whether nvme never gets them.
    """

    index: int
    namespace_id: bytes
    rank: int
    group: int
    kind: GroupKind
    key_nbytes: int
    block_nbytes: int
    checksum_seed: int
    boundary_id: bytes
    members: int
    member: int
    ram_only: bool = False

    @staticmethod
    def seed(namespace_id: bytes, group: int, block_nbytes: int) -> int:
        """`checksum_seed` of these."""
        return checksum_seed(namespace_id, group, block_nbytes)

    def checksum(self, key: bytes, payload: memoryview) -> int:
        """xxh3-64 of the payload, bound to (namespace, group, key, length)."""
        return xxhash.xxh3_64_intdigest(payload, self.seeds([key])[0])

    def seeds(self, keys: Sequence[bytes]) -> list[int]:
        """Seeds of xxh3-64 that bind a checksum to each of the keys."""
        digest, seed = xxhash.xxh3_64_intdigest, self.checksum_seed
        return [digest(key, seed) for key in keys]


class KeyspaceBook(Protocol):
    """Who knows keyspaces by name, also those that nobody opened yet."""

    def by_name(self, namespace_id: bytes, group: int) -> Keyspace | None:
        """The one of this name, if there is one."""

    def find_or_adopt(self, found: Keyspace) -> Keyspace | None:
        """As `by_name`, or made of what was found on nvme; None = of no use."""

    def recovered(self) -> None:
        """Nobody uses the numbers any more that `find_or_adopt` gave."""


@dataclass(frozen=True, slots=True)
class BoundaryGroup:
    """A WINDOW or STATE group. Its blocks have no ancestors; those of one key, all ranks, form a
    unit of their own.

    Attributes:
        group: Index into the specification's groups.
        rule: What a prefix needs of it.
        shortens: Whether a prefix without that is of no use; else it can be replayed.
        local: Keyspaces of the ranks that lie on this host.
        siblings: All keyspaces in which a shard of a unit may lie.
    """

    group: int
    rule: BoundaryRule
    shortens: bool
    local: tuple[Keyspace, ...]
    siblings: Sequence[Keyspace]


@dataclass(frozen=True, slots=True)
class KeyspaceSet:
    """The keyspaces of a namespace set.

    Attributes:
        index: Number of the namespace set in this server epoch.
        set_id: 16 bytes that name it.
        local: Keyspaces of the ranks that lie on this host, FULL groups, rank-major. Their blocks
            of one key form one unit, whose parent is that of the key before.
        siblings: All keyspaces in which a shard of such a unit may lie.
        groups: WINDOW and STATE groups.
    """

    index: int
    set_id: bytes
    local: tuple[Keyspace, ...]
    siblings: Sequence[Keyspace]
    groups: tuple[BoundaryGroup, ...] = ()

    def siblings_of(self, keyspace: Keyspace) -> Sequence[Keyspace]:
        """All keyspaces in which a shard of a unit of this one may lie."""
        for group in self.groups:
            if group.group == keyspace.group:
                return group.siblings
        return self.siblings

    def has(self, number: int) -> bool:
        """Whether the keyspace of this number is a local one."""
        return any(space.index == number for space in self.everywhere)

    @property
    def everywhere(self) -> tuple[Keyspace, ...]:
        """Keyspaces of all groups, of the ranks that lie on this host."""
        return self.local + tuple(space for group in self.groups for space in group.local)

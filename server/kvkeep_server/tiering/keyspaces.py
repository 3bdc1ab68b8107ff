"""One rank's blocks of one group: what the index and the pool need to know of a namespace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from kvkeep_server.core.results import GroupKind
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
        set_id: 16 bytes that name the namespace set.
        members: FULL groups of a rank: so many blocks of a key are stored together.
        member: Which of them these are, from 0.
    """

    index: int
    namespace_id: bytes
    rank: int
    group: int
    kind: GroupKind
    key_nbytes: int
    block_nbytes: int
    checksum_seed: int
    set_id: bytes
    members: int
    member: int

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
class KeyspaceSet:
    """The keyspaces of a namespace set whose blocks of one key form one unit.

    Attributes:
        index: Number of the namespace set in this server epoch.
        local: Keyspaces of the ranks that lie on this host, FULL groups, rank-major.
        siblings: The indices of all keyspaces in which a shard of a unit may lie.
    """

    index: int
    local: tuple[Keyspace, ...]
    siblings: Sequence[Keyspace]

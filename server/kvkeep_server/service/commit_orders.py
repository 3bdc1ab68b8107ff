"""A Commit as it came from the wire, and what it says of groups, positions and staging."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, GroupKind
from kvkeep_server.service.namespaces import OpenedNamespace
from kvkeep_server.tiering.commit_plan import CommitBatch, StagedGroup

I64 = NDArray[np.int64]

# Staging offsets are multiples of a cache line, so that a copy never shares one with another block.
STAGING_ALIGNMENT = 64
# Nobody waits for a slow tier longer, whatever he asks for.
WAIT_MAX_S = 60.0
_NVME_WAIT_S = 1.0
_ZERO = np.uint64(0)
_FIX_GROUPS = "commit all FULL groups of a boundary together, with blocks for the same keys"


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """A Commit as it came from the wire.

    Attributes:
        set_index: Handle of the namespace set.
        rank: Whose shards.
        parent_key: Key before the first, or empty.
        keys: Packed.
        groups: (group, positions packed u32, staging offsets packed u64).
        ack_level: Asked for.
        hints: For the policies.
        wait_s: For levels above RAM: how long at most, 0 = one second.
    """

    set_index: int
    rank: int
    parent_key: bytes
    keys: bytes
    groups: Sequence[tuple[int, bytes, bytes]]
    ack_level: AckLevel
    hints: Hints
    wait_s: float = 0.0


def batch_of(
    order: CommitOrder, opened: OpenedNamespace, keys: KeyBatch, staging: memoryview
) -> CommitBatch:
    """What tiering takes of an order whose keys are `keys`.

    Raises:
        InvalidArgumentError: Names the field.
    """
    spec = opened.namespace_set.spec
    if order.rank not in opened.ranks:
        raise InvalidArgumentError(
            "rank",
            order.rank,
            f"one of {list(opened.ranks)}",
            "open the namespace with this rank as local",
        )
    if len(order.parent_key) not in (0, spec.key_nbytes):
        raise InvalidArgumentError(
            "parent_key",
            f"{len(order.parent_key)} bytes",
            f"0 or {spec.key_nbytes} bytes",
            "give the whole key",
        )
    wait_s = min(order.wait_s or _NVME_WAIT_S, WAIT_MAX_S)
    return CommitBatch(
        opened.spaces,
        KeyBatch.unpack(order.parent_key, spec.key_nbytes, "parent_key"),
        keys,
        _groups(order, opened, len(keys), staging.nbytes),
        staging,
        order.hints,
        wait_s if order.ack_level is AckLevel.NVME else None,
    )


def _groups(
    order: CommitOrder, opened: OpenedNamespace, keys: int, staging_nbytes: int
) -> list[StagedGroup]:
    """FULL groups first."""
    spec = opened.namespace_set.spec
    staged = {group: (positions, offsets) for group, positions, offsets in order.groups}
    full = [g for g, group in enumerate(spec.groups) if group.kind == GroupKind.FULL]
    chained = [group for group in full if group in staged]
    known = all(group < len(spec.groups) for group in staged)
    if not staged or len(staged) < len(order.groups) or not known or chained not in ([], full):
        raise InvalidArgumentError(
            "groups",
            [group for group, _, _ in order.groups[:20]],
            f"indices of groups, 0 to {len(spec.groups) - 1}, each once; the FULL ones {full} "
            "all or none",
            _FIX_GROUPS,
        )
    groups = []
    for number in sorted(staged, key=lambda group: (group not in full, group)):
        packed_positions, packed = staged[number]
        if number in full and packed_positions != staged[full[0]][0]:
            raise InvalidArgumentError(
                "groups.positions",
                f"others in group {number} than in group {full[0]}",
                "the same keys for all FULL groups",
                _FIX_GROUPS,
            )
        positions = _positions(packed_positions, keys)
        count = keys if positions is None else len(positions)
        offsets = _offsets(packed, count, spec.groups[number].block_nbytes, staging_nbytes)
        keyspace = opened.namespace_set.keyspaces[order.rank, number]
        groups.append(StagedGroup(keyspace, offsets, positions))
    return groups


def _positions(packed: bytes, keys: int) -> I64 | None:
    """Positions of the keys that have a block, None = all."""
    if not packed:
        return None
    positions = np.frombuffer(packed[: len(packed) // 4 * 4], "<u4")
    sane = len(packed) % 4 == 0 and bool((positions[1:] > positions[:-1]).all())
    if not sane or int(positions[-1]) >= keys:
        raise InvalidArgumentError(
            "groups.positions",
            positions[:20].tolist() if sane else f"{len(packed)} bytes",
            f"u32 each, ascending, from 0 to {keys - 1}",
            "name the keys that have a block, or none when all have",
        )
    return None if len(positions) == keys else positions.astype(np.int64)


def _offsets(packed: bytes, count: int, nbytes: int, staging_nbytes: int) -> I64:
    if len(packed) != count * 8:
        raise InvalidArgumentError(
            "groups.staging_offsets",
            f"{len(packed)} bytes",
            f"{count * 8} bytes",
            "give one u64 for each block",
        )
    if count and nbytes > staging_nbytes:
        raise InvalidArgumentError(
            "groups.staging_offsets",
            f"a place for {nbytes} bytes",
            f"what lies inside the staging of {staging_nbytes} bytes",
            "attach with a larger staging",
        )
    offsets = np.frombuffer(packed, np.uint64)
    wrong = offsets > np.uint64(max(0, staging_nbytes - nbytes))
    wrong |= (offsets & np.uint64(STAGING_ALIGNMENT - 1)) != _ZERO
    if wrong.any():
        raise InvalidArgumentError(
            "groups.staging_offsets",
            int(offsets[int(wrong.argmax())]),
            f"multiples of {STAGING_ALIGNMENT} from 0 to {staging_nbytes - nbytes}",
            f"a block of {nbytes} bytes must lie inside the staging of {staging_nbytes} bytes",
        )
    return offsets.astype(np.int64)

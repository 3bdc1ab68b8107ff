"""Identity: what must agree before bytes are interchangeable.

The encoding and its hash are written down in `proto/kvkeep/v1/shared_memory.md`, section 7.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep_server.core.results import GroupKind, StateMode


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The KV of one attention kind; fields as in `block_cache.proto`."""

    name: str
    kind: GroupKind
    tokens_per_block: int
    block_nbytes: int
    window_tokens: int = 0
    state_mode: StateMode = StateMode.UNSPECIFIED
    retention_class: str = ""


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What must agree; fields as in `block_cache.proto`. Sizes are at least 1."""

    tenant: str
    model: str
    weights_fingerprint: str
    engine: str
    layout_version: str
    kv_dtype: str
    hash_algorithm: str
    hash_root: bytes
    key_nbytes: int
    tp_size: int
    pp_size: int
    dp_size: int
    cp_size: int
    replicated: bool
    groups: tuple[GroupSpec, ...]
    layout_switches: tuple[str, ...]
    namespace_epoch: int

    @property
    def ranks(self) -> int:
        """Shards of one block."""
        return 1 if self.replicated else self.tp_size * self.pp_size * self.dp_size * self.cp_size


def encode(spec: NamespaceSpec) -> bytes:
    """The length-prefixed encoding of every field."""
    parts = [(0, b"kvkeep-namespace-v1")]
    names = (
        spec.tenant,
        spec.model,
        spec.weights_fingerprint,
        spec.engine,
        spec.layout_version,
        spec.kv_dtype,
    )
    parts += [(1 + i, name.encode()) for i, name in enumerate((*names, spec.hash_algorithm))]
    parts.append((8, spec.hash_root))
    sizes = (spec.key_nbytes, spec.tp_size, spec.pp_size, spec.dp_size, spec.cp_size)
    parts += [(9 + i, struct.pack("<Q", size)) for i, size in enumerate(sizes)]
    parts.append((14, bytes([spec.replicated])))
    parts += [(15, _encode_group(group)) for group in spec.groups]
    parts += [(16, switch.encode()) for switch in spec.layout_switches]
    parts.append((17, struct.pack("<Q", spec.namespace_epoch)))
    return _frame(parts)


def _encode_group(group: GroupSpec) -> bytes:
    numbers = (
        group.kind,
        group.tokens_per_block,
        group.block_nbytes,
        group.window_tokens,
        group.state_mode,
    )
    return _frame(
        [
            (1, group.name.encode()),
            *((2 + i, struct.pack("<Q", number)) for i, number in enumerate(numbers)),
        ]
    )


def _frame(parts: Sequence[tuple[int, bytes]]) -> bytes:
    return b"".join(struct.pack("<BI", number, len(content)) + content for number, content in parts)


def set_id_of(spec: NamespaceSpec) -> bytes:
    """16 bytes that name the namespace set."""
    return hashlib.sha256(encode(spec)).digest()[:16]


def namespace_id_of(set_id: bytes, rank: int) -> bytes:
    """16 bytes that name one rank's namespace."""
    return hashlib.sha256(b"kvkeep-rank-v1" + set_id + struct.pack("<I", rank)).digest()[:16]

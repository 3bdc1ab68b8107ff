"""The specification of a namespace: its fields, their encoding, and what is allowed in them.

The encoding and its hash are written down in `proto/kvkeep/v1/shared_memory.md`, section 7.
"""

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.keys import KEY_NBYTES_MAX, KEY_NBYTES_MIN
from kvkeep_server.core.results import GroupKind, StateMode

STRING_NBYTES_MAX = 1024
GROUPS_MAX = 16
SWITCHES_NBYTES_MAX = 8192
RANKS_MAX = 4096
_GROUP_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


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
    def tokens_per_key(self) -> int:
        """Tokens that one key stands for: those of a FULL block, else of the smallest block."""
        full = [group for group in self.groups if group.kind == GroupKind.FULL]
        return min(group.tokens_per_block for group in full or self.groups)

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


def family_id_of(spec: NamespaceSpec) -> bytes:
    """16 bytes that name the set in all of its epochs."""
    return set_id_of(replace(spec, namespace_epoch=0))


def boundary_id_of(set_id: bytes, group: int) -> bytes:
    """16 bytes that name the units of a WINDOW or STATE group; those of FULL groups have the set's
    own name."""
    return hashlib.sha256(b"kvkeep-group-v1" + set_id + struct.pack("<I", group)).digest()[:16]


def namespace_id_of(set_id: bytes, rank: int) -> bytes:
    """16 bytes that name one rank's namespace."""
    return hashlib.sha256(b"kvkeep-rank-v1" + set_id + struct.pack("<I", rank)).digest()[:16]


def check_spec(spec: NamespaceSpec, block_nbytes_max: int) -> None:
    """What can be said of a specification by itself.

    Raises:
        InvalidArgumentError: Names the field.
    """
    _check_names(spec)
    _check_numbers(spec)
    if not 1 <= len(spec.groups) <= GROUPS_MAX:
        raise InvalidArgumentError(
            "spec.groups",
            len(spec.groups),
            f"1 to {GROUPS_MAX} groups",
            "declare each attention kind once",
        )
    names = [group.name for group in spec.groups]
    if len(set(names)) < len(names):
        raise InvalidArgumentError(
            "spec.groups.name", names, "names that differ", "rename one of them"
        )
    for group in spec.groups:
        _check_group(group, block_nbytes_max)
    _check_tokens(spec)


def _check_group(group: GroupSpec, block_nbytes_max: int) -> None:
    if not _GROUP_NAME.fullmatch(group.name):
        raise InvalidArgumentError(
            "spec.groups.name",
            group.name,
            "1 to 64 characters of [A-Za-z0-9_.-]",
            "give it a short name",
        )
    where = f"spec.groups[{group.name!r}]"
    if not 0 < group.block_nbytes <= block_nbytes_max:
        raise InvalidArgumentError(
            f"{where}.block_nbytes",
            group.block_nbytes,
            f"1 to {block_nbytes_max} (limits.block_max and the pool's slab)",
            "store fewer tokens a block, or raise limits.block_max and ram.size",
        )
    _check_kind(group, where)


_FIX_NAME = "name it exactly; what is not named cannot be told apart"
_NAMES_REQUIRED = (
    "model",
    "weights_fingerprint",
    "engine",
    "layout_version",
    "kv_dtype",
    "hash_algorithm",
)


def _check_names(spec: NamespaceSpec) -> None:
    for name in _NAMES_REQUIRED:
        if not getattr(spec, name):
            raise InvalidArgumentError(f"spec.{name}", "", "a string that is not empty", _FIX_NAME)
    for name in ("tenant", *_NAMES_REQUIRED):
        if len(getattr(spec, name).encode()) > STRING_NBYTES_MAX:
            raise InvalidArgumentError(
                f"spec.{name}",
                getattr(spec, name),
                f"at most {STRING_NBYTES_MAX} bytes of UTF-8",
                "give a digest",
            )
    nbytes = sum(len(switch.encode()) for switch in spec.layout_switches)
    if nbytes > SWITCHES_NBYTES_MAX:
        raise InvalidArgumentError(
            "spec.layout_switches",
            f"{nbytes} bytes",
            f"at most {SWITCHES_NBYTES_MAX} bytes together",
            "give a digest of them",
        )
    for switch in spec.layout_switches:
        if "=" not in switch or len(switch.encode()) > STRING_NBYTES_MAX:
            raise InvalidArgumentError(
                "spec.layout_switches",
                switch,
                f'"NAME=value" of at most {STRING_NBYTES_MAX} bytes',
                "write it so",
            )


def _check_numbers(spec: NamespaceSpec) -> None:
    if not KEY_NBYTES_MIN <= spec.key_nbytes <= KEY_NBYTES_MAX:
        raise InvalidArgumentError(
            "spec.key_nbytes",
            spec.key_nbytes,
            f"{KEY_NBYTES_MIN} to {KEY_NBYTES_MAX}",
            "use a hash of at least 128 bits and never cut it shorter",
        )
    if len(spec.hash_root) > KEY_NBYTES_MAX:
        raise InvalidArgumentError(
            "spec.hash_root",
            spec.hash_root,
            f"at most {KEY_NBYTES_MAX} bytes",
            "give the root's hash",
        )
    size = spec.tp_size * spec.pp_size * spec.dp_size * spec.cp_size
    if size > RANKS_MAX:
        raise InvalidArgumentError(
            "spec.tp_size * pp_size * dp_size * cp_size",
            size,
            f"at most {RANKS_MAX}",
            "check the sizes",
        )


def _check_tokens(spec: NamespaceSpec) -> None:
    """One chain of keys serves all groups, so blocks cover whole keys."""
    tokens = spec.tokens_per_key
    for group in spec.groups:
        where = f"spec.groups[{group.name!r}].tokens_per_block"
        if group.kind == GroupKind.FULL and group.tokens_per_block != tokens:
            raise InvalidArgumentError(
                where,
                group.tokens_per_block,
                f"{tokens}, as the other FULL groups have it",
                "put as many tokens into a block of each FULL group",
            )
        if group.tokens_per_block % tokens:
            raise InvalidArgumentError(
                where,
                group.tokens_per_block,
                f"a multiple of {tokens}, the tokens of one key",
                "let a block cover whole keys",
            )


def _check_kind(group: GroupSpec, where: str) -> None:
    if group.tokens_per_block <= 0:
        raise InvalidArgumentError(
            f"{where}.tokens_per_block", group.tokens_per_block, "above 0", "set it"
        )
    if group.kind == GroupKind.UNSPECIFIED:
        raise InvalidArgumentError(
            f"{where}.kind", group.kind, "FULL, WINDOW or STATE", "say which kind it is"
        )
    if (group.kind == GroupKind.WINDOW) != (group.window_tokens > 0):
        raise InvalidArgumentError(
            f"{where}.window_tokens",
            group.window_tokens,
            "above 0 for WINDOW, 0 otherwise",
            "set it so",
        )
    if (group.kind == GroupKind.STATE) != (group.state_mode != StateMode.UNSPECIFIED):
        raise InvalidArgumentError(
            f"{where}.state_mode",
            group.state_mode,
            "REPLAYABLE or EXACT for STATE, unset otherwise",
            "set it so",
        )


def checked_ranks(spec: NamespaceSpec, local_ranks: Sequence[int]) -> tuple[int, ...]:
    """The local ranks that a caller named, all where none.

    Raises:
        InvalidArgumentError: Names the field.
    """
    if not local_ranks:
        return tuple(range(spec.ranks))
    # Counted before anything walks them: a message may hold millions.
    ranks = tuple(local_ranks) if len(local_ranks) <= spec.ranks else ()
    if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= spec.ranks:
        raise InvalidArgumentError(
            "local_ranks",
            list(ranks) or f"{len(local_ranks)} ranks",
            f"different ranks from 0 to {spec.ranks - 1}"
            + (" (replicated: only 0)" if spec.replicated else ""),
            "give the flat ranks whose shards lie on this host, or none for all",
        )
    return ranks

"""Identity: what must agree before bytes are interchangeable.

The encoding and its hash are written down in `proto/kvkeep/v1/shared_memory.md`, section 7. Two
specifications that differ in any field are different namespaces and miss; a specification that
differs from a known one of the same tenant in few fields is named, because that is how a mistake
looks.
"""

import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from kvkeep_server.core.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)
from kvkeep_server.core.keys import KEY_NBYTES_MAX, KEY_NBYTES_MIN
from kvkeep_server.core.results import GroupKind, StateMode
from kvkeep_server.tiering.keyspaces import KEYSPACES_MAX, Keyspace, KeyspaceSet

STRING_NBYTES_MAX = 1024
GROUPS_MAX = 16
SWITCHES_NBYTES_MAX = 8192
RANKS_MAX = 4096
_GROUP_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NEAR_FIELDS_MAX = 2
_NEAR_SETS_MAX = 16
# Of one tenant's sets the newest so many are compared: an open must not cost more with each before.
_NEAR_LOOKED_AT_MAX = 256


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


@dataclass(slots=True)
class NamespaceSet:
    """All ranks of one engine.

    Attributes:
        spec: Its specification.
        set_id: 16 bytes.
        keyspaces: By (rank, group), of the ranks opened on this host.
        siblings: Those of FULL groups, in the order of opening: where the blocks of one unit may
            lie.
    """

    spec: NamespaceSpec
    set_id: bytes
    keyspaces: dict[tuple[int, int], Keyspace] = field(default_factory=dict)
    siblings: list[Keyspace] = field(default_factory=list)
    identity: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        """What others are compared with."""
        self.identity = _identity(self.spec)


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """A namespace set as one caller opened it: with the ranks that lie on this host.

    Attributes:
        spaces: For tiering; its `index` is the caller's handle.
        namespace_set: The set.
        ranks: Local flat ranks.
    """

    spaces: KeyspaceSet
    namespace_set: NamespaceSet
    ranks: tuple[int, ...]


class Namespaces:
    """The namespace sets that this daemon knows.

    Args:
        namespaces_max: Handles at most.
        block_nbytes_max: Largest block that the ram tier can hold.
        add_keyspace: Told of every new keyspace, in the order of their index.
    """

    def __init__(
        self,
        *,
        namespaces_max: int,
        block_nbytes_max: int,
        add_keyspace: Callable[[Keyspace], None],
    ) -> None:
        """See the class."""
        self._namespaces_max = namespaces_max
        self._block_nbytes_max = block_nbytes_max
        self._add_keyspace = add_keyspace
        self._sets: dict[bytes, NamespaceSet] = {}
        self._of_tenant: dict[str, list[NamespaceSet]] = {}
        self._opened: list[OpenedNamespace] = []
        self._handles: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self._keyspaces = 0
        self._by_name: dict[tuple[bytes, int], Keyspace] = {}
        # Of namespaces that lie on nvme and nobody opened yet.
        self._found: dict[tuple[bytes, int], Keyspace] = {}

    def __len__(self) -> int:
        """Open handles, of which one set of ranks may have several."""
        return len(self._opened)

    def __iter__(self) -> Iterator[NamespaceSet]:
        """In the order of opening."""
        return iter(self._sets.values())

    def open(self, spec: NamespaceSpec, local_ranks: Sequence[int]) -> OpenedNamespace:
        """Checks a specification and gives its handle; the same for the same arguments.

        Raises:
            InvalidArgumentError: Names the field.
            UnsupportedError: A group kind that this release does not serve.
            ResourceExhaustedError: `namespaces_max` handles are open, or more shards than can be
                numbered.
        """
        self._check(spec)
        ranks = _checked_ranks(spec, local_ranks)
        set_id = set_id_of(spec)
        handle = self._handles.get((set_id, ranks))
        if handle is not None:
            return self._opened[handle]
        if len(self._opened) >= self._namespaces_max:
            msg = f"limits.namespaces_max = {self._namespaces_max} namespaces are open; raise it"
            raise ResourceExhaustedError(msg, retry_after_s=60.0)
        shards = [
            (rank, number)
            for rank in ranks
            for number, group in enumerate(spec.groups)
            if group.kind == GroupKind.FULL
        ]
        self._check_room(set_id, shards)
        namespace_set = self._sets.get(set_id)
        if namespace_set is None:
            namespace_set = self._sets[set_id] = NamespaceSet(spec, set_id)
            self._of_tenant.setdefault(spec.tenant, []).append(namespace_set)
        local = [self._keyspace(namespace_set, rank, group) for rank, group in shards]
        handle = len(self._opened)
        spaces = KeyspaceSet(handle, tuple(local), namespace_set.siblings)
        self._opened.append(OpenedNamespace(spaces, namespace_set, ranks))
        self._handles[set_id, ranks] = handle
        return self._opened[handle]

    def get(self, set_index: int) -> OpenedNamespace:
        """By handle.

        Raises:
            NotFoundError: Not open in this server epoch.
        """
        if not 0 <= set_index < len(self._opened):
            msg = f"namespace set {set_index} is not open in this server epoch; call OpenNamespace"
            raise NotFoundError(msg)
        return self._opened[set_index]

    def near_misses(self, spec: NamespaceSpec) -> list[tuple[bytes, list[str]]]:
        """Other sets of the same tenant that differ in at most two fields, and in which; the
        nearest first."""
        near = []
        wanted, set_id = _identity(spec), set_id_of(spec)
        for other in self._of_tenant.get(spec.tenant, [])[-_NEAR_LOOKED_AT_MAX:]:
            if other.set_id != set_id:
                theirs = other.identity
                differing = [name for name, value in wanted.items() if value != theirs[name]]
                if len(differing) <= _NEAR_FIELDS_MAX:
                    near.append((other.set_id, differing))
        near.sort(key=lambda found: len(found[1]))
        return near[:_NEAR_SETS_MAX]

    def _check_room(self, set_id: bytes, shards: Sequence[tuple[int, int]]) -> None:
        known = self._sets.get(set_id)
        new = [shard for shard in shards if known is None or shard not in known.keyspaces]
        if self._keyspaces + len(new) > KEYSPACES_MAX:
            msg = (
                f"{self._keyspaces} shards (a rank's group each) are open and {KEYSPACES_MAX} "
                f"may be; this one has {len(new)}: name the local_ranks of this host only"
            )
            raise ResourceExhaustedError(msg, retry_after_s=60.0)

    def _keyspace(self, namespace_set: NamespaceSet, rank: int, group: int) -> Keyspace:
        keyspace = namespace_set.keyspaces.get((rank, group))
        if keyspace is None:
            groups = namespace_set.spec.groups
            full = [number for number, g in enumerate(groups) if g.kind == GroupKind.FULL]
            keyspace = self._named(
                Keyspace(
                    index=self._keyspaces,
                    namespace_id=namespace_id_of(namespace_set.set_id, rank),
                    rank=rank,
                    group=group,
                    kind=groups[group].kind,
                    key_nbytes=namespace_set.spec.key_nbytes,
                    block_nbytes=groups[group].block_nbytes,
                    checksum_seed=0,
                    set_id=namespace_set.set_id,
                    members=len(full),
                    member=full.index(group),
                )
            )
            namespace_set.keyspaces[rank, group] = keyspace
            namespace_set.siblings.append(keyspace)
        return keyspace

    def _named(self, keyspace: Keyspace) -> Keyspace:
        """Gives a keyspace its number, which is that of what recovery found of it, and its seed."""
        name = (keyspace.namespace_id, keyspace.group)
        found = self._found.pop(name, None)
        if found is not None and (found.key_nbytes, found.block_nbytes) == (
            keyspace.key_nbytes,
            keyspace.block_nbytes,
        ):
            keyspace = replace(keyspace, index=found.index, checksum_seed=found.checksum_seed)
        else:
            seed = Keyspace.seed(*name, keyspace.block_nbytes)
            keyspace = replace(keyspace, index=self._keyspaces, checksum_seed=seed)
            self._keyspaces += 1
        self._add_keyspace(keyspace)
        self._by_name[name] = keyspace
        return keyspace

    def by_name(self, namespace_id: bytes, group: int) -> Keyspace | None:
        """The keyspace of this name, opened or found on nvme."""
        return self._by_name.get((namespace_id, group))

    def find_or_adopt(self, found: Keyspace) -> Keyspace | None:
        """The keyspace of this namespace id and group, made if nobody opened it yet; of `found` the
        number, rank and seed do not count. None when it differs from the one that is known, or
        there are too many."""
        name = (found.namespace_id, found.group)
        known = self._by_name.get(name)
        if known is not None:
            same = (known.key_nbytes, known.block_nbytes) == (found.key_nbytes, found.block_nbytes)
            return known if same else None
        if self._keyspaces >= KEYSPACES_MAX:
            return None
        adopted = self._named(replace(found, rank=-1))
        self._found[name] = adopted
        return adopted

    def _check(self, spec: NamespaceSpec) -> None:
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
            self._check_group(group)
        if not any(group.kind == GroupKind.FULL for group in spec.groups):
            msg = "a namespace without a FULL group is served from the next release on; declare one"
            raise UnsupportedError(msg)

    def _check_group(self, group: GroupSpec) -> None:
        if not _GROUP_NAME.fullmatch(group.name):
            raise InvalidArgumentError(
                "spec.groups.name",
                group.name,
                "1 to 64 characters of [A-Za-z0-9_.-]",
                "give it a short name",
            )
        where = f"spec.groups[{group.name!r}]"
        if not 0 < group.block_nbytes <= self._block_nbytes_max:
            raise InvalidArgumentError(
                f"{where}.block_nbytes",
                group.block_nbytes,
                f"1 to {self._block_nbytes_max} (limits.block_max and the pool's slab)",
                "store fewer tokens a block, or raise limits.block_max and ram.size",
            )
        _check_kind(group, where)
        if group.kind == GroupKind.WINDOW or group.state_mode == StateMode.EXACT:
            msg = (
                f"{where} is a {group.kind.name} group whose absence shortens the usable prefix; "
                "such groups are served from the next release on"
            )
            raise UnsupportedError(msg)


def _identity(spec: NamespaceSpec) -> dict[str, object]:
    """What of a specification makes it another namespace, by field."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    values["groups"] = [replace(group, retention_class="") for group in spec.groups]
    return values


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


def _checked_ranks(spec: NamespaceSpec, local_ranks: Sequence[int]) -> tuple[int, ...]:
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

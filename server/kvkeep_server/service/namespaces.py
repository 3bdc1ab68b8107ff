"""Identity: what must agree before bytes are interchangeable.

Two specifications (`spec`) that differ in any field are different namespaces and miss; one that
differs from a known one of the same tenant in few fields is named, because that is how a mistake
looks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from kvkeep_server.core.errors import NotFoundError, ResourceExhaustedError
from kvkeep_server.core.results import GroupKind, StateMode
from kvkeep_server.service.spec import (
    NamespaceSpec,
    boundary_id_of,
    check_spec,
    checked_ranks,
    namespace_id_of,
    set_id_of,
)
from kvkeep_server.tiering.boundaries import BoundaryRule
from kvkeep_server.tiering.keyspaces import (
    KEYSPACES_MAX,
    BoundaryGroup,
    Keyspace,
    KeyspaceSet,
)

_NEAR_FIELDS_MAX = 2
_NEAR_SETS_MAX = 16
# Of one tenant's sets the newest so many are compared: an open must not cost more with each before.
_NEAR_LOOKED_AT_MAX = 256


@dataclass(slots=True)
class NamespaceSet:
    """All ranks of one engine.

    Attributes:
        spec: Its specification.
        set_id: 16 bytes.
        keyspaces: By (rank, group), of the ranks opened on this host.
        siblings: By boundary id, in the order of opening: where the blocks of one unit may lie.
    """

    spec: NamespaceSpec
    set_id: bytes
    keyspaces: dict[tuple[int, int], Keyspace] = field(default_factory=dict)
    siblings: dict[bytes, list[Keyspace]] = field(default_factory=dict)
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
            ResourceExhaustedError: `namespaces_max` handles are open, or more shards than can be
                numbered.
        """
        check_spec(spec, self._block_nbytes_max)
        ranks = checked_ranks(spec, local_ranks)
        set_id = set_id_of(spec)
        handle = self._handles.get((set_id, ranks))
        if handle is not None:
            return self._opened[handle]
        if len(self._opened) >= self._namespaces_max:
            msg = f"limits.namespaces_max = {self._namespaces_max} namespaces are open; raise it"
            raise ResourceExhaustedError(msg, retry_after_s=60.0)
        shards = [(rank, number) for rank in ranks for number in range(len(spec.groups))]
        self._check_room(set_id, shards)
        namespace_set = self._sets.get(set_id)
        if namespace_set is None:
            namespace_set = self._sets[set_id] = NamespaceSet(spec, set_id)
            self._of_tenant.setdefault(spec.tenant, []).append(namespace_set)
        local = [self._keyspace(namespace_set, rank, group) for rank, group in shards]
        handle = len(self._opened)
        spaces = _spaces(handle, namespace_set, local)
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

    def _keyspace(self, namespace_set: NamespaceSet, rank: int, number: int) -> Keyspace:
        keyspace = namespace_set.keyspaces.get((rank, number))
        if keyspace is None:
            group, set_id = namespace_set.spec.groups[number], namespace_set.set_id
            full = [n for n, g in enumerate(namespace_set.spec.groups) if g.kind == GroupKind.FULL]
            chained = group.kind == GroupKind.FULL
            keyspace = self._named(
                Keyspace(
                    index=self._keyspaces,
                    namespace_id=namespace_id_of(set_id, rank),
                    rank=rank,
                    group=number,
                    kind=group.kind,
                    key_nbytes=namespace_set.spec.key_nbytes,
                    block_nbytes=group.block_nbytes,
                    checksum_seed=0,
                    boundary_id=set_id if chained else boundary_id_of(set_id, number),
                    members=len(full) if chained else 1,
                    member=full.index(number) if chained else 0,
                    # Its absence shortens nothing, and it is of use for minutes only.
                    ram_only=group.state_mode == StateMode.REPLAYABLE,
                )
            )
            namespace_set.keyspaces[rank, number] = keyspace
            namespace_set.siblings.setdefault(keyspace.boundary_id, []).append(keyspace)
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


def _spaces(handle: int, namespace_set: NamespaceSet, local: Sequence[Keyspace]) -> KeyspaceSet:
    """What tiering takes of a set that is open with these keyspaces."""
    spec = namespace_set.spec
    chained = tuple(space for space in local if space.kind == GroupKind.FULL)
    groups = []
    for number, group in enumerate(spec.groups):
        own = tuple(space for space in local if space.group == number)
        if group.kind != GroupKind.FULL:
            window = group.window_tokens or group.tokens_per_block
            rule = BoundaryRule(
                blocks=-(-window // group.tokens_per_block),
                stride=group.tokens_per_block // spec.tokens_per_key,
            )
            shortens = group.state_mode != StateMode.REPLAYABLE
            siblings = namespace_set.siblings[own[0].boundary_id]
            groups.append(BoundaryGroup(number, rule, shortens, own, siblings))
    siblings = namespace_set.siblings.get(namespace_set.set_id, [])
    return KeyspaceSet(handle, chained, siblings, tuple(groups))


def _identity(spec: NamespaceSpec) -> dict[str, object]:
    """What of a specification makes it another namespace, by field."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    values["groups"] = [replace(group, retention_class="") for group in spec.groups]
    return values

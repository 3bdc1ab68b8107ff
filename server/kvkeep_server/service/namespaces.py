"""Which namespace sets there are, who may open them, and when their room comes back.

Two specifications (`spec`) that differ in any field are different namespaces and miss; one that
differs from a known one of the same tenant in few fields is named, because that is how a mistake
looks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice

from kvkeep_server.core.errors import NotFoundError, ResourceExhaustedError
from kvkeep_server.core.results import GroupKind, StateMode
from kvkeep_server.service.keyspace_numbers import KeyspaceNumbers
from kvkeep_server.service.spec import (
    NamespaceSpec,
    boundary_id_of,
    check_spec,
    checked_ranks,
    family_id_of,
    namespace_id_of,
    set_id_of,
)
from kvkeep_server.tiering.boundaries import BoundaryRule
from kvkeep_server.tiering.epochs import Epochs
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
_RETRY_S = 60.0


@dataclass(slots=True)
class NamespaceSet:
    """All ranks of one engine.

    Attributes:
        spec: Its specification.
        set_id: 16 bytes.
        keyspaces: By (rank, group), of the ranks opened on this host.
        siblings: By boundary id, in the order of opening: where the blocks of one unit may lie.
        family_id: 16 bytes that it shares with its other epochs.
        working: Calls that run and hold its keyspaces, also when their session is over.
        watchers: Calls that hold them as well, and bring nothing.
    """

    spec: NamespaceSpec
    set_id: bytes
    keyspaces: dict[tuple[int, int], Keyspace] = field(default_factory=dict)
    siblings: dict[bytes, list[Keyspace]] = field(default_factory=dict)
    working: int = 0
    watchers: int = 0
    identity: dict[str, object] = field(init=False)
    family_id: bytes = field(init=False)

    def __post_init__(self) -> None:
        """What others are compared with."""
        self.identity = _identity(self.spec)
        self.family_id = family_id_of(self.spec)

    @property
    def held(self) -> bool:
        """Whether a call uses its keyspaces."""
        return self.working + self.watchers > 0


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


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """Limits of namespaces; names as in the configuration's `[limits]`.

    Attributes:
        namespaces_max: Handles at a time.
        session_namespaces_max: Of one session.
        session_shards_max: Keyspaces of the handles of one session.
        block_nbytes_max: Largest block that the ram tier can hold.
    """

    namespaces_max: int
    session_namespaces_max: int
    session_shards_max: int
    block_nbytes_max: int


class Namespaces:
    """The namespace sets that this daemon knows.

    A handle is never given twice, so that who still has an old one means nothing by it.

    Args:
        limits: See `NamespaceLimits`.
        numbers: Of keyspaces.
        epochs: Which are over: those cannot be opened any more.
    """

    def __init__(
        self, *, limits: NamespaceLimits, numbers: KeyspaceNumbers, epochs: Epochs
    ) -> None:
        """See the class."""
        self.epochs = epochs
        self._limits = limits
        self._numbers = numbers
        self._sets: dict[bytes, NamespaceSet] = {}
        self._of_tenant: dict[str, dict[bytes, NamespaceSet]] = {}
        self._opened: dict[int, OpenedNamespace] = {}
        self._handles: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self._next_handle = 0

    def __len__(self) -> int:
        """Open handles, of which one set of ranks may have several."""
        return len(self._opened)

    def __iter__(self) -> Iterator[NamespaceSet]:
        """In the order of opening."""
        return iter(self._sets.values())

    def open(
        self, spec: NamespaceSpec, local_ranks: Sequence[int], theirs: Collection[int] = ()
    ) -> OpenedNamespace:
        """Checks a specification and gives the handle of its present epoch; the same for the same
        arguments, until that is over.

        Args:
            spec: What to open.
            local_ranks: Flat ranks on this host; none = all.
            theirs: Handles that the session has opened before.

        Raises:
            InvalidArgumentError: Names the field.
            ResourceExhaustedError: As many handles are open as may be, or more shards than can be
                numbered, of all sessions or of this one.
        """
        check_spec(spec, self._limits.block_nbytes_max)
        ranks = checked_ranks(spec, local_ranks)
        first = self.epochs.of(family_id_of(spec))
        if spec.namespace_epoch < first:
            spec = replace(spec, namespace_epoch=first)
        set_id = set_id_of(spec)
        handle = self._handles.get((set_id, ranks))
        if handle is not None and handle in theirs:
            return self._opened[handle]
        self._check_session(theirs, len(ranks) * len(spec.groups))
        if handle is not None:
            return self._opened[handle]
        if len(self._opened) >= self._limits.namespaces_max:
            msg = f"limits.namespaces_max = {self._limits.namespaces_max} namespaces are open"
            why = "those without a block that no client has open leave; try again, or raise it"
            raise ResourceExhaustedError(f"{msg}; {why}", retry_after_s=_RETRY_S)
        shards = [(rank, number) for rank in ranks for number in range(len(spec.groups))]
        self._check_room(set_id, shards)
        namespace_set = self._sets.get(set_id)
        if namespace_set is None:
            namespace_set = self._sets[set_id] = NamespaceSet(spec, set_id)
            self._of_tenant.setdefault(spec.tenant, {})[set_id] = namespace_set
        local = [self._keyspace(namespace_set, rank, group) for rank, group in shards]
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        spaces = _spaces(handle, namespace_set, local)
        self._opened[handle] = OpenedNamespace(spaces, namespace_set, ranks)
        self._handles[set_id, ranks] = handle
        return self._opened[handle]

    def get(self, set_index: int) -> OpenedNamespace:
        """By handle.

        Raises:
            NotFoundError: Not open in this server epoch, or forgotten.
        """
        opened = self._opened.get(set_index)
        if opened is None:
            msg = f"namespace set {set_index} is not open in this server epoch; call OpenNamespace"
            raise NotFoundError(msg)
        return opened

    def forget(self, live: Collection[int], with_blocks: Iterable[int]) -> int:
        """Takes back handles and keyspaces that nobody uses: no live session opened them, no call
        runs in their set, and no block is theirs. Returns how many.

        Args:
            live: Handles that live sessions opened.
            with_blocks: Numbers of the keyspaces that have a block, in any tier or withdrawn.
        """
        held = self._numbers.held(with_blocks)
        gone = self._numbers.forget_found(held)
        used: set[int] = set()
        idle = []
        for handle, opened in self._opened.items():
            if handle in live or opened.namespace_set.held:
                used.update(space.index for space in opened.spaces.everywhere)
            else:
                idle.append((handle, opened))
        for handle, opened in idle:
            # A block is found by one handle as well as by many.
            own = {space.index for space in opened.spaces.everywhere}
            if (own & held) - used:
                used |= own
            else:
                del self._opened[handle], self._handles[opened.namespace_set.set_id, opened.ranks]
                gone += 1
        kept = used | held
        for namespace_set in {
            one.namespace_set.set_id: one.namespace_set for _, one in idle
        }.values():
            gone += self._forget_keyspaces(namespace_set, kept)
        return gone

    def _forget_keyspaces(self, namespace_set: NamespaceSet, kept: set[int]) -> int:
        """Of a set those that are not to be kept; the set, if none is left. How many."""
        if namespace_set.held:
            return 0
        gone = [space for space in namespace_set.keyspaces.values() if space.index not in kept]
        for space in gone:
            del namespace_set.keyspaces[space.rank, space.group]
            # In place: handles share the list.
            namespace_set.siblings[space.boundary_id].remove(space)
            self._numbers.forget(space)
        if not namespace_set.keyspaces:
            set_id, tenant = namespace_set.set_id, namespace_set.spec.tenant
            del self._sets[set_id], self._of_tenant[tenant][set_id]
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
        return len(gone)

    def near_misses(self, spec: NamespaceSpec) -> list[tuple[bytes, list[str]]]:
        """Other sets of the same tenant that differ in at most two fields, and in which; the
        nearest first."""
        near = []
        wanted, set_id = _identity(spec), set_id_of(spec)
        of_tenant = reversed(self._of_tenant.get(spec.tenant, {}).values())
        for other in islice(of_tenant, _NEAR_LOOKED_AT_MAX):
            if other.set_id != set_id:
                theirs = other.identity
                differing = [name for name, value in wanted.items() if value != theirs[name]]
                if len(differing) <= _NEAR_FIELDS_MAX:
                    near.append((other.set_id, differing))
        near.sort(key=lambda found: len(found[1]))
        return near[:_NEAR_SETS_MAX]

    def _check_session(self, theirs: Collection[int], shards: int) -> None:
        limits = self._limits
        if len(theirs) >= limits.session_namespaces_max:
            msg = (
                f"limits.session_namespaces_max = {limits.session_namespaces_max} namespaces are "
                "open in this session; attach another, or raise it"
            )
            raise ResourceExhaustedError(msg, retry_after_s=_RETRY_S)
        have = sum(len(self._opened[handle].spaces.everywhere) for handle in theirs)
        if have + shards > limits.session_shards_max:
            msg = (
                f"{have} shards (a rank's group each) are open in this session and "
                f"limits.session_shards_max = {limits.session_shards_max} may be; this one has "
                f"{shards}: name the local_ranks of this host only, or raise it"
            )
            raise ResourceExhaustedError(msg, retry_after_s=_RETRY_S)

    def _check_room(self, set_id: bytes, shards: Sequence[tuple[int, int]]) -> None:
        known = self._sets.get(set_id)
        new = [shard for shard in shards if known is None or shard not in known.keyspaces]
        if len(self._numbers) + len(new) > KEYSPACES_MAX:
            msg = (
                f"{len(self._numbers)} shards (a rank's group each) are open and {KEYSPACES_MAX} "
                f"may be; this one has {len(new)}: name the local_ranks of this host only"
            )
            raise ResourceExhaustedError(msg, retry_after_s=_RETRY_S)

    def _keyspace(self, namespace_set: NamespaceSet, rank: int, number: int) -> Keyspace:
        keyspace = namespace_set.keyspaces.get((rank, number))
        if keyspace is None:
            group, set_id = namespace_set.spec.groups[number], namespace_set.set_id
            full = [n for n, g in enumerate(namespace_set.spec.groups) if g.kind == GroupKind.FULL]
            chained = group.kind == GroupKind.FULL
            keyspace = self._numbers.opened(
                Keyspace(
                    index=-1,
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
    return KeyspaceSet(handle, namespace_set.set_id, chained, siblings, tuple(groups))


def _identity(spec: NamespaceSpec) -> dict[str, object]:
    """What of a specification makes it another namespace, by field."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    values["groups"] = [replace(group, retention_class="") for group in spec.groups]
    return values

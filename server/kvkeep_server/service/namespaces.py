"""Which namespace sets there are, who may open them, and when their room comes back.

Two specifications that differ in any field are different namespaces and miss; a specification that
differs from a known one of the same tenant in few fields is named, because that is how a mistake
looks.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from kvkeep_server.core.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)
from kvkeep_server.core.keys import KEY_NBYTES_MAX, KEY_NBYTES_MIN
from kvkeep_server.core.results import GroupKind, StateMode
from kvkeep_server.service.identity import (
    GroupSpec,
    NamespaceSpec,
    namespace_id_of,
    set_id_of,
)
from kvkeep_server.service.keyspace_numbers import KeyspaceNumbers
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
_RETRY_S = 60.0


@dataclass(slots=True)
class NamespaceSet:
    """All ranks of one engine.

    Attributes:
        spec: Its specification.
        set_id: 16 bytes.
        keyspaces: By (rank, group), of the ranks opened on this host.
        siblings: Those of FULL groups, in the order of opening: where the blocks of one unit may
            lie.
        working: Calls that run and hold its keyspaces, also when their session is over.
    """

    spec: NamespaceSpec
    set_id: bytes
    keyspaces: dict[tuple[int, int], Keyspace] = field(default_factory=dict)
    siblings: list[Keyspace] = field(default_factory=list)
    working: int = 0
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
    """

    def __init__(self, *, limits: NamespaceLimits, numbers: KeyspaceNumbers) -> None:
        """See the class."""
        self._limits = limits
        self._numbers = numbers
        self._sets: dict[bytes, NamespaceSet] = {}
        self._of_tenant: dict[str, list[NamespaceSet]] = {}
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
        """Checks a specification and gives its handle; the same for the same arguments.

        Args:
            spec: What to open.
            local_ranks: Flat ranks on this host; none = all.
            theirs: Handles that the session has opened before.

        Raises:
            InvalidArgumentError: Names the field.
            UnsupportedError: A group kind that this release does not serve.
            ResourceExhaustedError: As many handles are open as may be, or more shards than can be
                numbered, of all sessions or of this one.
        """
        self._check(spec)
        ranks = _checked_ranks(spec, local_ranks)
        set_id = set_id_of(spec)
        handle = self._handles.get((set_id, ranks))
        if handle is not None and handle in theirs:
            return self._opened[handle]
        full = [n for n, group in enumerate(spec.groups) if group.kind == GroupKind.FULL]
        self._check_session(theirs, len(ranks) * len(full))
        if handle is not None:
            return self._opened[handle]
        if len(self._opened) >= self._limits.namespaces_max:
            msg = f"limits.namespaces_max = {self._limits.namespaces_max} namespaces are open"
            raise ResourceExhaustedError(f"{msg}; raise it", retry_after_s=_RETRY_S)
        shards = [(rank, number) for rank in ranks for number in full]
        self._check_room(set_id, shards)
        namespace_set = self._sets.get(set_id)
        if namespace_set is None:
            namespace_set = self._sets[set_id] = NamespaceSet(spec, set_id)
            self._of_tenant.setdefault(spec.tenant, []).append(namespace_set)
        local = [self._keyspace(namespace_set, rank, group) for rank, group in shards]
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        spaces = KeyspaceSet(handle, tuple(local), namespace_set.siblings)
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
            if handle in live or opened.namespace_set.working:
                used.update(space.index for space in opened.spaces.local)
            else:
                idle.append((handle, opened))
        for handle, opened in idle:
            # A block is found by one handle as well as by many.
            needed = {space.index for space in opened.spaces.local if space.index in held} - used
            used |= needed
            if not needed:
                del self._opened[handle], self._handles[opened.namespace_set.set_id, opened.ranks]
                gone += 1
        for namespace_set in {
            one.namespace_set.set_id: one.namespace_set for _, one in idle
        }.values():
            gone += self._forget_keyspaces(namespace_set, used | held)
        return gone

    def _forget_keyspaces(self, namespace_set: NamespaceSet, kept: set[int]) -> int:
        """Of a set those that are not to be kept; the set, if none is left. How many."""
        if namespace_set.working:
            return 0
        gone = [space for space in namespace_set.siblings if space.index not in kept]
        for space in gone:
            del namespace_set.keyspaces[space.rank, space.group]
            self._numbers.forget(space)
        # In place: handles share the list.
        namespace_set.siblings[:] = namespace_set.keyspaces.values()
        if not namespace_set.siblings:
            tenant = namespace_set.spec.tenant
            del self._sets[namespace_set.set_id]
            left = [one for one in self._of_tenant[tenant] if one is not namespace_set]
            self._of_tenant[tenant] = left
            if not left:
                del self._of_tenant[tenant]
        return len(gone)

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

    def _check_session(self, theirs: Collection[int], shards: int) -> None:
        limits = self._limits
        if len(theirs) >= limits.session_namespaces_max:
            msg = (
                f"limits.session_namespaces_max = {limits.session_namespaces_max} namespaces are "
                "open in this session; attach another, or raise it"
            )
            raise ResourceExhaustedError(msg, retry_after_s=_RETRY_S)
        have = sum(len(self._opened[handle].spaces.local) for handle in theirs)
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

    def _keyspace(self, namespace_set: NamespaceSet, rank: int, group: int) -> Keyspace:
        keyspace = namespace_set.keyspaces.get((rank, group))
        if keyspace is None:
            groups = namespace_set.spec.groups
            full = [number for number, g in enumerate(groups) if g.kind == GroupKind.FULL]
            keyspace = self._numbers.opened(
                Keyspace(
                    index=-1,
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
        if not 0 < group.block_nbytes <= self._limits.block_nbytes_max:
            raise InvalidArgumentError(
                f"{where}.block_nbytes",
                group.block_nbytes,
                f"1 to {self._limits.block_nbytes_max} (limits.block_max and the pool's slab)",
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

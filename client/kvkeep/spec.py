"""What a caller states: the namespace specification, its groups, and hints. Light to import."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, SupportsFloat

from kvkeep.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

STRING_NBYTES_MAX: Final = 1024
KEY_NBYTES_MIN: Final = 16
KEY_NBYTES_MAX: Final = 64
GROUPS_MAX: Final = 16
SESSION_ID_NBYTES_MAX: Final = 64
_SHOWN_MAX: Final = 100
U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
SECONDS_MAX: Final = U32_MAX / 1000
_GROUP_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class GroupKind(IntEnum):
    """What a usable prefix needs of a group; numbers as in block_cache.proto."""

    FULL = 1
    WINDOW = 2
    STATE = 3


class StateMode(IntEnum):
    """Whether the absence of a STATE shortens the prefix; numbers as in block_cache.proto."""

    NONE = 0
    REPLAYABLE = 1
    EXACT = 2


class StopReason(IntEnum):
    """Why the engine's last output ended; numbers as in block_cache.proto."""

    UNSPECIFIED = 0
    TOOL_USE = 1
    END_TURN = 2
    LENGTH = 3
    OTHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The KV of one attention kind. Make one with `full`, `window` or `state`.

    Attributes:
        name: 1 to 64 characters of [A-Za-z0-9_.-], unique in the specification.
        kind: What a usable prefix needs of it.
        tokens_per_block: Above 0; for STATE the distance of its boundaries.
        block_nbytes: Bytes of one block of one rank.
        window_tokens: WINDOW only, above 0.
        state_mode: STATE only.
        retention_class: "" for the configured default. Not part of the identity.
    """

    name: str
    kind: GroupKind
    tokens_per_block: int
    block_nbytes: int
    window_tokens: int = 0
    state_mode: StateMode = StateMode.NONE
    retention_class: str = ""

    @classmethod
    def full(
        cls, name: str, *, tokens_per_block: int, block_nbytes: int, retention_class: str = ""
    ) -> Group:
        """A group that needs every block from the first one."""
        return cls(
            name=name,
            kind=GroupKind.FULL,
            tokens_per_block=tokens_per_block,
            block_nbytes=block_nbytes,
            retention_class=retention_class,
        )

    @classmethod
    def window(
        cls,
        name: str,
        *,
        tokens_per_block: int,
        block_nbytes: int,
        window_tokens: int,
        retention_class: str = "",
    ) -> Group:
        """A group that needs only the blocks of the last `window_tokens` before the boundary."""
        return cls(
            name=name,
            kind=GroupKind.WINDOW,
            tokens_per_block=tokens_per_block,
            block_nbytes=block_nbytes,
            window_tokens=window_tokens,
            retention_class=retention_class,
        )

    @classmethod
    def state(
        cls,
        name: str,
        *,
        tokens_per_block: int,
        block_nbytes: int,
        state_mode: StateMode = StateMode.REPLAYABLE,
        retention_class: str = "",
    ) -> Group:
        """One snapshot at each boundary."""
        return cls(
            name=name,
            kind=GroupKind.STATE,
            tokens_per_block=tokens_per_block,
            block_nbytes=block_nbytes,
            state_mode=state_mode,
            retention_class=retention_class,
        )

    def validate(self) -> None:
        """Errors: InvalidArgumentError."""
        field = f"groups[{self.name!r}]"
        if not isinstance(self.name, str) or not _GROUP_NAME.fullmatch(self.name):
            allowed = "1 to 64 characters of [A-Za-z0-9_.-]"
            raise invalid("groups.name", self.name, allowed, "give the group a short plain name")
        check_number(f"{field}.tokens_per_block", self.tokens_per_block, 1, U32_MAX)
        check_number(f"{field}.block_nbytes", self.block_nbytes, 1, U64_MAX)
        check_number(f"{field}.window_tokens", self.window_tokens, 0, U32_MAX)
        if not isinstance(self.kind, GroupKind):
            raise invalid(f"{field}.kind", self.kind, "a GroupKind", _FIX_GROUP)
        if not isinstance(self.state_mode, StateMode):
            raise invalid(f"{field}.state_mode", self.state_mode, "a StateMode", _FIX_GROUP)
        check_text(f"{field}.retention_class", self.retention_class, required=False)
        if (self.kind is GroupKind.WINDOW) != (self.window_tokens > 0):
            allowed = "above 0 for a WINDOW group, 0 for any other"
            raise invalid(f"{field}.window_tokens", self.window_tokens, allowed, _FIX_GROUP)
        if (self.kind is GroupKind.STATE) != (self.state_mode is not StateMode.NONE):
            allowed = "REPLAYABLE or EXACT for a STATE group, NONE for any other"
            raise invalid(f"{field}.state_mode", self.state_mode.name, allowed, _FIX_GROUP)


_FIX_GROUP = "use Group.full, Group.window or Group.state"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """Everything that must agree before bytes are interchangeable.

    Two specifications that differ in any field are different namespaces: they simply miss. The
    daemon computes the identity (proto/kvkeep/v1/shared_memory.md, section 7).

    Attributes:
        tenant: "" for the only one.
        model: Name of the model.
        weights_fingerprint: A digest of the weights, not their name.
        engine: Such as "vllm".
        layout_version: The engine's KV layout, with its version.
        kv_dtype: Such as "bfloat16".
        hash_algorithm: Of the chain hash, such as "sha256_cbor".
        groups: 1 to 16.
        key_nbytes: Of a chain hash, 16 to 64.
        hash_root: Root seed of the chain hash, at most 64 bytes.
        tp_size: Tensor-parallel ranks; so are the next three for their dimension.
        pp_size: Pipeline-parallel ranks.
        dp_size: Data-parallel ranks that hold different KV.
        cp_size: Context-parallel ranks.
        replicated: All ranks hold the same bytes (MLA): one shard, rank 0.
        layout_switches: "NAME=value" of every switch that changes the layout; order counts.
        namespace_epoch: Advanced when weights change in place.
    """

    tenant: str = ""
    model: str
    weights_fingerprint: str
    engine: str
    layout_version: str
    kv_dtype: str
    hash_algorithm: str
    groups: Sequence[Group]
    key_nbytes: int = 32
    hash_root: bytes = b""
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    cp_size: int = 1
    replicated: bool = False
    layout_switches: Sequence[str] = ()
    namespace_epoch: int = 0

    @property
    def ranks(self) -> int:
        """Number of shards of one block."""
        if self.replicated:
            return 1
        return self.tp_size * self.pp_size * self.dp_size * self.cp_size

    def validate(self) -> None:
        """What can be said without the daemon. Errors: InvalidArgumentError."""
        check_text("tenant", self.tenant, required=False)
        for name in _REQUIRED_TEXTS:
            check_text(name, getattr(self, name), required=True)
        fix = "give one 'NAME=value' a switch"
        _check_sequence("layout_switches", self.layout_switches, str, fix)
        for switch in self.layout_switches:
            check_text("layout_switches", switch, required=False)
        key_nbytes = whole(self.key_nbytes)
        if key_nbytes is None or not KEY_NBYTES_MIN <= key_nbytes <= KEY_NBYTES_MAX:
            allowed = f"{KEY_NBYTES_MIN} to {KEY_NBYTES_MAX}"
            fix = "use a chain hash of at least 128 bits"
            raise invalid("key_nbytes", self.key_nbytes, allowed, fix)
        _check_bytes("hash_root", self.hash_root, KEY_NBYTES_MAX)
        check_flag("replicated", self.replicated)
        for name in ("tp_size", "pp_size", "dp_size", "cp_size"):
            check_number(name, getattr(self, name), 1, U32_MAX)
        check_number("namespace_epoch", self.namespace_epoch, 0, U64_MAX)
        self._validate_groups()

    def _validate_groups(self) -> None:
        _check_sequence("groups", self.groups, Group, _FIX_GROUP)
        if not 1 <= len(self.groups) <= GROUPS_MAX:
            fix = "name one group for each attention kind"
            raise invalid("groups", f"{len(self.groups)} groups", f"1 to {GROUPS_MAX}", fix)
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise invalid("groups.name", names, "names that differ", "rename one of them")
        for group in self.groups:
            group.validate()


_REQUIRED_TEXTS = (
    *("model", "weights_fingerprint", "engine", "layout_version", "kv_dtype", "hash_algorithm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """All optional; they feed the daemon's policies.

    Attributes:
        stop_reason: Why the session's last output ended.
        output_tokens: Length of that output.
        sub_agent: The request is one of an agent's helpers.
        session_id: Names the conversation, at most 64 bytes.
        engine_hit_tokens: Tokens that the engine's own cache already had.
        return_expected_s: When the session is expected back, 0 = unknown.
        ttl_s: How long the blocks should stay, 0 = as their class says.
    """

    stop_reason: StopReason = StopReason.UNSPECIFIED
    output_tokens: int = 0
    sub_agent: bool = False
    session_id: bytes = b""
    engine_hit_tokens: int = 0
    return_expected_s: float = 0.0
    ttl_s: float = 0.0

    def __post_init__(self) -> None:
        """Errors: InvalidArgumentError."""
        check_number("hints.output_tokens", self.output_tokens, 0, U32_MAX)
        check_number("hints.engine_hit_tokens", self.engine_hit_tokens, 0, U64_MAX)
        _check_bytes("hints.session_id", self.session_id, SESSION_ID_NBYTES_MAX)
        check_number("hints.stop_reason", self.stop_reason, 0, max(StopReason))
        check_flag("hints.sub_agent", self.sub_agent)
        check_seconds("hints.return_expected_s", self.return_expected_s)
        check_seconds("hints.ttl_s", self.ttl_s)

    def touch_fields(self, *, blocks_read: bool) -> tuple[int, ...]:
        """The last seven fields of a touch record, from the hit tokens to the session."""
        return (
            self.engine_hit_tokens,
            self.output_tokens,
            self.stop_reason & 0xFF,
            self.sub_agent & 1,
            blocks_read & 1,
            0,
            int.from_bytes(self.session_id[:8], "little"),
        )


def check_hints(hints: object) -> None:
    """Errors: InvalidArgumentError for what is no Hints."""
    if not isinstance(hints, Hints):
        raise invalid("hints", hints, "kvkeep.Hints or None", "give kvkeep.Hints(...)")


def invalid(field: str, value: object, allowed: str, fix: str) -> InvalidArgumentError:
    """The error of an argument, as one sentence with its four parts; a long value is cut."""
    try:
        shown = repr(value)
    except ValueError:
        # Python writes no integer of thousands of digits.
        shown = f"a huge {type(value).__name__}"
    if len(shown) > _SHOWN_MAX:
        shown = f"{shown[:_SHOWN_MAX]}..."
    return InvalidArgumentError(f"{field} is {shown}; allowed is {allowed}: {fix}")


def check_text(
    field: str, value: object, *, required: bool, nbytes_max: int = STRING_NBYTES_MAX
) -> None:
    """Errors: InvalidArgumentError for what is no text, or longer than that in UTF-8."""
    if not isinstance(value, str):
        raise invalid(field, value, "text", "give a str")
    try:
        nbytes = len(value.encode())
    except UnicodeEncodeError:
        fix = "decode it properly, without surrogateescape"
        raise invalid(field, value, "text that UTF-8 can encode", fix) from None
    if required and not nbytes:
        fix = "name it, so that unlike bytes never mix"
        raise invalid(field, value, "not empty", fix)
    if nbytes > nbytes_max:
        allowed = f"at most {nbytes_max} bytes of UTF-8"
        what = f"{value[:40]}... ({nbytes} bytes)"
        raise invalid(field, what, allowed, "shorten it, or give a digest of it")


def whole(value: object) -> int | None:
    """An integer of any library as an int; None for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type] # what is none is the question
    except TypeError:
        return None


def check_number(field: str, value: object, low: int, high: int) -> int:
    """`value` as an int. Errors: InvalidArgumentError unless it is whole and within the range."""
    number = whole(value)
    if number is None or not low <= number <= high:
        raise invalid(field, value, f"{low} to {high}", "give a whole number in that range")
    return number


def check_flag(field: str, value: object) -> bool:
    """Errors: InvalidArgumentError for what is no bool."""
    if not isinstance(value, bool):
        raise invalid(field, value, "True or False", "give a bool")
    return value


def check_seconds(field: str, value: object, *, zero: bool = True) -> float:
    """`value` as a float. Errors: InvalidArgumentError unless it fits u32 milliseconds."""
    try:
        seconds = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # Arrays and tensors of several elements have a __float__, too.
        seconds = math.nan
    if not 0 <= seconds <= SECONDS_MAX or not (seconds or zero):
        allowed = f"{'0' if zero else 'above 0'} to {SECONDS_MAX}"
        raise invalid(field, value, allowed, "give a number of seconds in that range")
    return seconds


def deadline_of(timeout_s: float | None, default_s: float) -> float:
    """The deadline of one call, in seconds. Errors: InvalidArgumentError."""
    return default_s if timeout_s is None else check_seconds("timeout_s", timeout_s)


def _check_bytes(field: str, value: object, nbytes_max: int) -> None:
    if not isinstance(value, bytes):
        raise invalid(field, value, f"at most {nbytes_max} bytes", "give bytes")
    if len(value) > nbytes_max:
        allowed = f"at most {nbytes_max} bytes"
        raise invalid(field, f"{len(value)} bytes", allowed, "give a digest of it")


def _check_sequence(field: str, value: object, kind: type, fix: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(one, kind) for one in value):
        raise invalid(field, value, f"a list or tuple of {kind.__name__}", fix)

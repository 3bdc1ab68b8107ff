"""Between the caller's values and the messages of kvkeep.v1; packed keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from kvkeep.shared_memory import LAYOUT_VERSION
from kvkeep.spec import U64_MAX, check_hints, check_number, check_seconds, invalid
from kvkeep.v1 import block_cache_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.spec import Group, Hints, NamespaceSpec


class PackedKeys(Protocol):
    """Something that holds keys, such as a hasher's result."""

    def pack(self) -> bytes:
        """The keys one after the other."""
        ...


Keys: TypeAlias = "bytes | bytearray | memoryview | Sequence[bytes] | PackedKeys"
"""Chain hashes in chain order: packed in one buffer (the fast way), or one by one."""


def pack_keys(keys: Keys, key_nbytes: int) -> bytes | bytearray | memoryview:
    """The keys one after the other.

    Errors: InvalidArgumentError when one is no bytes or of another length than `key_nbytes`.
    """
    packed: bytes | bytearray | memoryview
    if isinstance(keys, list | tuple):
        packed = _joined(keys, key_nbytes)
    else:
        given: object = keys.pack() if hasattr(keys, "pack") else keys
        if isinstance(given, bytes | bytearray):
            packed = given
        elif isinstance(given, memoryview) and given.c_contiguous:
            packed = given.cast("B")
        else:
            allowed = "packed bytes, a list of bytes, or what has pack()"
            raise invalid("keys", type(keys).__name__, allowed, "convert it")
    if len(packed) % key_nbytes:
        allowed = f"a multiple of key_nbytes = {key_nbytes}"
        raise invalid("keys", f"{len(packed)} bytes", allowed, "give whole keys")
    return packed


def _joined(keys: Sequence[bytes], key_nbytes: int) -> bytes:
    try:
        lengths = set(map(len, keys))
        packed = b"".join(keys)
    except TypeError:
        kinds = ", ".join(sorted({type(key).__name__ for key in keys}))
        allowed = f"bytes, {key_nbytes} each"
        raise invalid("keys", f"a list of {kinds}", allowed, "give chain hashes") from None
    # An element of a memoryview may have several bytes.
    if lengths - {key_nbytes} or len(packed) != len(keys) * key_nbytes:
        wrong = sorted({memoryview(key).nbytes for key in keys} - {key_nbytes})
        fix = "give the whole chain hash of this namespace"
        raise invalid("keys", f"keys of {wrong} bytes", f"{key_nbytes} bytes each", fix)
    return packed


def _group_message(group: Group) -> pb.GroupSpec:
    return pb.GroupSpec(
        name=group.name,
        kind=pb.GroupKind.ValueType(group.kind),
        tokens_per_block=group.tokens_per_block,
        block_nbytes=group.block_nbytes,
        window_tokens=group.window_tokens,
        state_mode=pb.StateMode.ValueType(group.state_mode),
        retention_class=group.retention_class,
    )


def open_request(spec: NamespaceSpec, local_ranks: Sequence[int]) -> pb.OpenNamespaceRequest:
    """OpenNamespace of a valid specification."""
    message = pb.NamespaceSpec(
        tenant=spec.tenant,
        model=spec.model,
        weights_fingerprint=spec.weights_fingerprint,
        engine=spec.engine,
        layout_version=spec.layout_version,
        kv_dtype=spec.kv_dtype,
        hash_algorithm=spec.hash_algorithm,
        hash_root=spec.hash_root,
        key_nbytes=spec.key_nbytes,
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
        dp_size=spec.dp_size,
        cp_size=spec.cp_size,
        replicated=spec.replicated,
        groups=[_group_message(group) for group in spec.groups],
        layout_switches=spec.layout_switches,
        namespace_epoch=spec.namespace_epoch,
    )
    return pb.OpenNamespaceRequest(
        spec=message, local_ranks=local_ranks, layout_version=LAYOUT_VERSION
    )


def hints_message(hints: Hints | None) -> pb.Hints | None:
    """None stays None. Errors: InvalidArgumentError for what is no Hints."""
    if hints is None:
        return None
    check_hints(hints)
    return pb.Hints(
        stop_reason=pb.StopReason.ValueType(hints.stop_reason),
        output_tokens=hints.output_tokens,
        sub_agent=hints.sub_agent,
        session_id=hints.session_id,
        engine_hit_tokens=hints.engine_hit_tokens,
        return_expected_ms=milliseconds(hints.return_expected_s),
        ttl_ms=milliseconds(hints.ttl_s),
    )


class Terms(NamedTuple):
    """What an acquire may ask for beside its keys; see `Namespace.acquire`."""

    ttl_s: float | None
    byte_budget: int | None
    hints: Hints | None
    skip_blocks: int


def acquire_request(
    packed: bytes | bytearray | memoryview, key_nbytes: int, terms: Terms
) -> pb.AcquireRequest:
    """Acquire, without the handle of the set. Errors: InvalidArgumentError."""
    ttl_s = 0 if terms.ttl_s is None else terms.ttl_s
    byte_budget = 0 if terms.byte_budget is None else terms.byte_budget
    return pb.AcquireRequest(
        keys=bytes(packed),
        lease_ttl_ms=milliseconds(check_seconds("ttl_s", ttl_s)),
        byte_budget=check_number("byte_budget", byte_budget, 0, U64_MAX),
        hints=hints_message(terms.hints),
        skip_blocks=check_number("skip_blocks", terms.skip_blocks, 0, len(packed) // key_nbytes),
    )


def milliseconds(seconds: float) -> int:
    """For the wire: whole, at least 1 unless 0, within a u32."""
    if seconds <= 0:
        return 0
    return max(1, min(round(seconds * 1000), 2**32 - 1))

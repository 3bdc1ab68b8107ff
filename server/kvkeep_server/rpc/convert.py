"""Between the wire and the core: messages to values and back, and the only table from errors to
status codes."""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import grpc
import numpy as np
from numpy.typing import NDArray

from kvkeep.v1 import admin_pb2 as admin
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVKeepError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    SessionUnknownError,
    TierUnavailableError,
    UnsupportedError,
)
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.results import (
    AckLevel,
    BlockStatus,
    CommitStatus,
    GroupKind,
    MissReason,
    NamespaceMode,
    RemovalStatus,
    StateMode,
    StopReason,
)
from kvkeep_server.index.layout import LAYOUT_VERSION
from kvkeep_server.service.checking import CheckOrder, CheckReport
from kvkeep_server.service.commit_orders import CommitOrder
from kvkeep_server.service.namespaces import NamespaceSet, OpenedNamespace
from kvkeep_server.service.sessions import Event, HelloFacts
from kvkeep_server.service.spec import GROUPS_MAX, SWITCHES_NBYTES_MAX, GroupSpec, NamespaceSpec
from kvkeep_server.tiering.chain import Needed
from kvkeep_server.tiering.manager import Arrived, Grant, Prefix
from kvkeep_server.tiering.removal import Removed
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.sending import Chunk, SendOrder
from kvkeep_server.tiering.watching import Change

RETRY_AFTER_KEY = "kvkeep-retry-after-ms"

_CODES: tuple[tuple[type[KVKeepError], grpc.StatusCode], ...] = (
    (InvalidArgumentError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (SessionUnknownError, grpc.StatusCode.UNAUTHENTICATED),
    (FailedPreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (TierUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (OutOfRangeError, grpc.StatusCode.OUT_OF_RANGE),
    (ResourceExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)


def _values(kind: type[IntEnum]) -> frozenset[int]:
    return frozenset(member.value for member in kind)


_GROUP_KINDS = _values(GroupKind)
_STATE_MODES = _values(StateMode)
_STOP_REASONS = _values(StopReason)
_ACK_LEVELS = _values(AckLevel)
_MODES = _values(NamespaceMode)
_NO_HINTS = Hints()
_LAYOUT_VERSIONS_MAX = 64


def status_code(error: KVKeepError) -> grpc.StatusCode:
    """The status code of an error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def trailing(error: KVKeepError) -> tuple[tuple[str, str], ...]:
    """Metadata that goes with an error."""
    milliseconds = retry_after_ms(error)
    return ((RETRY_AFTER_KEY, str(milliseconds)),) if milliseconds else ()


def retry_after_ms(error: KVKeepError) -> int:
    """After how long another try makes sense; 0 = it does not."""
    if isinstance(error, ResourceExhaustedError):
        return max(1, round(error.retry_after_s * 1000))
    return 0


def spec_of(message: pb.NamespaceSpec) -> NamespaceSpec:
    """The specification; what a field may hold is checked by `service.namespaces`.

    Raises:
        InvalidArgumentError: An enum value that this release does not know.
    """
    _few("spec.groups", len(message.groups), GROUPS_MAX)
    _few("spec.layout_switches", len(message.layout_switches), SWITCHES_NBYTES_MAX // 2)
    return NamespaceSpec(
        tenant=message.tenant,
        model=message.model,
        weights_fingerprint=message.weights_fingerprint,
        engine=message.engine,
        layout_version=message.layout_version,
        kv_dtype=message.kv_dtype,
        hash_algorithm=message.hash_algorithm,
        hash_root=message.hash_root,
        key_nbytes=message.key_nbytes,
        tp_size=message.tp_size or 1,
        pp_size=message.pp_size or 1,
        dp_size=message.dp_size or 1,
        cp_size=message.cp_size or 1,
        replicated=message.replicated,
        groups=tuple(_group_of(group) for group in message.groups),
        layout_switches=tuple(message.layout_switches),
        namespace_epoch=message.namespace_epoch,
    )


def _few(field: str, count: int, most: int) -> None:
    """Refuses a long list before anything walks it: a message of 4 MiB holds millions of
    entries."""
    if count > most:
        raise InvalidArgumentError(field, f"{count} entries", f"at most {most}", "give fewer")


def _group_of(message: pb.GroupSpec) -> GroupSpec:
    if int(message.kind) not in _GROUP_KINDS:
        raise InvalidArgumentError(
            "spec.groups.kind",
            message.kind,
            "1 FULL, 2 WINDOW, 3 STATE",
            "install client and daemon of one release",
        )
    if int(message.state_mode) not in _STATE_MODES:
        raise InvalidArgumentError(
            "spec.groups.state_mode",
            message.state_mode,
            "0 unset, 1 REPLAYABLE, 2 EXACT",
            "install client and daemon of one release",
        )
    return GroupSpec(
        name=message.name,
        kind=GroupKind(message.kind),
        tokens_per_block=message.tokens_per_block,
        block_nbytes=message.block_nbytes,
        window_tokens=message.window_tokens,
        state_mode=StateMode(message.state_mode),
        retention_class=message.retention_class,
    )


def spec_message(spec: NamespaceSpec) -> pb.NamespaceSpec:
    """The wire form."""
    return pb.NamespaceSpec(
        **{name: getattr(spec, name) for name in _SPEC_FIELDS},
        groups=[
            pb.GroupSpec(
                name=group.name,
                kind=pb.GroupKind.ValueType(group.kind),
                tokens_per_block=group.tokens_per_block,
                block_nbytes=group.block_nbytes,
                window_tokens=group.window_tokens,
                state_mode=pb.StateMode.ValueType(group.state_mode),
                retention_class=group.retention_class,
            )
            for group in spec.groups
        ],
    )


_SPEC_FIELDS = [
    "tenant",
    "model",
    "weights_fingerprint",
    "engine",
    "layout_version",
    "kv_dtype",
    "hash_algorithm",
    "hash_root",
    "key_nbytes",
    "tp_size",
    "pp_size",
    "dp_size",
    "cp_size",
    "replicated",
    "layout_switches",
    "namespace_epoch",
]


def hints_of(message: pb.Hints) -> Hints:
    """Hints; an unknown stop reason is OTHER.

    Raises:
        InvalidArgumentError: The session id is too long.
    """
    if not message.ByteSize():
        return _NO_HINTS
    if len(message.session_id) > 64:
        raise InvalidArgumentError(
            "hints.session_id",
            f"{len(message.session_id)} bytes",
            "at most 64 bytes",
            "give a digest of it",
        )
    known = int(message.stop_reason) in _STOP_REASONS
    return Hints(
        StopReason(message.stop_reason) if known else StopReason.OTHER,
        message.output_tokens,
        message.sub_agent,
        message.session_id,
        message.engine_hit_tokens,
        message.return_expected_ms / 1000,
        message.ttl_ms / 1000,
    )


def opened_message(
    opened: OpenedNamespace,
    near: Sequence[tuple[bytes, list[str]]],
    limits: pb.Limits,
    server_epoch: int,
    slot_nbytes: Sequence[int],
    mode: NamespaceMode,
) -> pb.OpenNamespaceResponse:
    """Answer to OpenNamespace."""
    namespace_set = opened.namespace_set
    keyspaces = namespace_set.keyspaces
    return pb.OpenNamespaceResponse(
        set_index=opened.spaces.index,
        set_id=namespace_set.set_id,
        ranks=[
            pb.RankNamespace(
                rank=rank,
                namespace_id=keyspaces[rank, 0].namespace_id,
                namespace_index=keyspaces[rank, 0].index,
            )
            for rank in opened.ranks
        ],
        limits=limits,
        server_epoch=server_epoch,
        namespace_epoch=namespace_set.spec.namespace_epoch,
        layout_version=LAYOUT_VERSION,
        near_misses=[pb.NearMiss(set_id=set_id, differing_fields=names) for set_id, names in near],
        slot_nbytes=slot_nbytes,
        mode=mode_message(mode),
    )


def lookup_message(opened: OpenedNamespace, prefix: Prefix) -> pb.LookupResponse:
    """Answer to Lookup."""
    spec = opened.namespace_set.spec
    tokens = spec.tokens_per_key
    return pb.LookupResponse(
        prefix_blocks=prefix.blocks,
        prefix_tokens=prefix.blocks * tokens,
        groups=[
            pb.GroupPrefix(group=group, prefix_blocks=keys, prefix_tokens=keys * tokens)
            for group, keys in enumerate(prefix.groups)
        ],
        replay_tokens=prefix.replayed * tokens,
        runs=_runs(prefix),
        ended=pb.MissReason.ValueType(prefix.ended),
        evicted_age_s=_age(prefix),
    )


def grant_message(
    grant: Grant, asked: int, residency: Residency, life_s: float
) -> pb.AcquireResponse:
    """Answer to Acquire."""
    status = bytearray([BlockStatus.MISS]) * asked
    # Leading blocks that the caller has are not leased; they count as ready, since they are there.
    ready = grant.first + grant.leased
    status[:ready] = bytes([BlockStatus.READY]) * ready
    coming = ready + grant.pending
    status[ready:coming] = bytes([BlockStatus.PENDING]) * grant.pending
    deferred = grant.prefix.blocks - coming
    status[coming : grant.prefix.blocks] = bytes([BlockStatus.DEFERRED]) * deferred
    return pb.AcquireResponse(
        lease_id=grant.lease.lease_id if grant.lease else 0,
        lease_ttl_ms=round(life_s * 1000) if grant.lease else 0,
        prefix_blocks=grant.prefix.blocks,
        leased_blocks=grant.leased,
        status=bytes(status),
        columns=_leased(grant.columns, residency),
        runs=_runs(grant.prefix),
        ended=pb.MissReason.ValueType(grant.prefix.ended),
        evicted_age_s=_age(grant.prefix),
    )


def arrived_message(arrived: Arrived, residency: Residency) -> pb.AwaitResponse:
    """One answer of Await."""
    return pb.AwaitResponse(
        first_block=arrived.first,
        status=arrived.status,
        columns=_leased(arrived.columns, residency),
    )


def _leased(columns: Sequence[Needed], residency: Residency) -> list[pb.LeasedColumn]:
    return [
        pb.LeasedColumn(
            rank=needed.keyspace.rank,
            group=needed.keyspace.group,
            addresses=addresses.tobytes(),
            generations=generations.tobytes(),
            positions=_packed(needed.positions),
        )
        for needed in columns
        for addresses, generations in [residency.slots_of(needed.ids)]
    ]


def _packed(positions: NDArray[np.int64] | None) -> bytes:
    return b"" if positions is None else positions.astype("<u4").tobytes()


def _runs(prefix: Prefix) -> list[pb.TierRun]:
    return [pb.TierRun(tier=pb.TierId.ValueType(t), blocks=blocks) for t, blocks in prefix.runs]


def _age(prefix: Prefix) -> int:
    return round(prefix.evicted_age_s) if prefix.ended == MissReason.EVICTED else 0


def order_of(request: pb.CommitRequest) -> CommitOrder:
    """A Commit.

    Raises:
        InvalidArgumentError: An ack level that this release does not know.
    """
    if int(request.ack_level) not in _ACK_LEVELS:
        raise InvalidArgumentError(
            "ack_level", request.ack_level, "1 RAM, 2 NVME, 3 REMOTE", "use RAM"
        )
    _few("groups", len(request.groups), GROUPS_MAX)
    return CommitOrder(
        set_index=request.set_index,
        rank=request.rank,
        parent_key=request.parent_key,
        keys=request.keys,
        groups=[(group.group, group.positions, group.staging_offsets) for group in request.groups],
        ack_level=AckLevel(request.ack_level),
        hints=hints_of(request.hints),
        wait_s=request.wait_ms / 1000,
    )


def commit_message(request: pb.CommitRequest, status: NDArray[np.uint8]) -> pb.CommitResponse:
    """Answer to Commit; what did not come as far as was asked for has FAILED."""
    number = np.bincount(status, minlength=len(CommitStatus))
    stored, there = int(number[CommitStatus.STORED]), int(number[CommitStatus.ALREADY_STORED])
    return pb.CommitResponse(
        status=status.tobytes(),
        stored=stored,
        already_stored=there,
        refused=len(status) - stored - there,
        ack_level=request.ack_level or pb.ACK_LEVEL_RAM,
    )


def hello_of(message: pb.RemoteHello) -> HelloFacts:
    """What a client on another host says of itself; nobody vouches for any of it."""
    _few("hello.layout_versions", len(message.layout_versions), _LAYOUT_VERSIONS_MAX)
    return HelloFacts(
        client_name=message.client_name,
        layout_versions=tuple(message.layout_versions),
        staging_nbytes=message.staging_nbytes,
        credential=message.credential,
        uid=-1,
        gid=-1,
        pid=0,
    )


def send_order_of(request: pb.ReadRequest) -> SendOrder:
    """A Read."""
    return SendOrder(
        request.lease_id,
        request.rank,
        request.group,
        request.first_block,
        request.blocks,
        request.range_offset,
        request.range_nbytes,
        request.message_crc32,
    )


def chunk_message(chunk: Chunk) -> pb.ReadResponse:
    """One answer of Read."""
    return pb.ReadResponse(
        block=chunk.block,
        offset=chunk.offset,
        data=chunk.data,
        status=pb.BlockStatus.ValueType(chunk.status),
        crc32=chunk.crc32,
    )


def removed_message(_: pb.RemoveRequest, removed: Removed) -> pb.RemoveResponse:
    """Answer to Remove."""
    return pb.RemoveResponse(
        removed=removed.units,
        unknown=int(np.count_nonzero(removed.status == RemovalStatus.ABSENT)),
        status=removed.status.tobytes(),
    )


def event_message(event: Event) -> pb.AttachEvent:
    """An event of the Attach stream."""
    message = pb.AttachEvent(sequence=event.sequence)
    inner = getattr(message, event.name)
    inner.SetInParent()
    for name, value in event.values.items():
        setattr(inner, name, value)
    return message


def change_message(change: Change) -> pb.WatchResponse:
    """One answer of Watch."""
    return pb.WatchResponse(
        sequence=change.sequence,
        kind=pb.WatchResponse.Kind.ValueType(change.kind),
        tier=pb.TierId.ValueType(change.tier),
        set_id=change.set_id,
        rank=change.rank,
        group=change.group,
        keys=change.keys,
        parent_key=change.parent_key,
        digest=change.digest,
    )


def miss_counts(missed_by: Mapping[MissReason, int]) -> list[admin.MissCount]:
    """Misses by reason."""
    return [
        admin.MissCount(reason=pb.MissReason.ValueType(reason), blocks=blocks)
        for reason, blocks in sorted(missed_by.items())
    ]


def check_order_of(request: admin.CheckRequest) -> CheckOrder:
    """A Check."""
    return CheckOrder(
        request.verify_checksums, request.verify_nbytes_max, request.verify_nbytes_per_s
    )


def check_message(report: CheckReport) -> admin.CheckResponse:
    """Answer to Check."""
    return admin.CheckResponse(
        ok=not report.findings,
        findings=report.findings,
        blocks_checked=report.blocks_checked,
        nbytes_verified=report.nbytes_verified,
        blocks_verified=report.blocks_verified,
        blocks_corrupt=report.blocks_corrupt,
        blocks_removed=report.blocks_removed,
        longest_step_us=round(report.longest_step_s * 1e6),
    )


def namespace_message(
    namespace_set: NamespaceSet, blocks: int, payload_nbytes: int, mode: NamespaceMode
) -> admin.NamespaceInfo:
    """One row of ListNamespaces."""
    return admin.NamespaceInfo(
        set_id=namespace_set.set_id,
        spec=spec_message(namespace_set.spec),
        ranks=sorted({rank for rank, _ in namespace_set.keyspaces}),
        blocks=blocks,
        payload_nbytes=payload_nbytes,
        mode=mode_message(mode),
    )


def mode_of(mode: int) -> NamespaceMode:
    """A mode; one that this release does not know is UNSPECIFIED."""
    return NamespaceMode(mode) if mode in _MODES else NamespaceMode.UNSPECIFIED


def mode_message(mode: NamespaceMode) -> pb.NamespaceMode.ValueType:
    """The wire form."""
    return pb.NamespaceMode.ValueType(mode)

"""The core's enums have the numbers of the wire, so that columns of bytes need no table."""

import pytest

from kvkeep.v1 import block_cache_pb2, session_pb2
from kvkeep_server.core import results
from kvkeep_server.service.session_memory import FdKind

PAIRS = [
    (results.TierId, block_cache_pb2.TierId, "TIER_ID_"),
    (results.MissReason, block_cache_pb2.MissReason, "MISS_REASON_"),
    (results.StopReason, block_cache_pb2.StopReason, "STOP_REASON_"),
    (results.BlockStatus, block_cache_pb2.BlockStatus, "BLOCK_STATUS_"),
    (results.CommitStatus, block_cache_pb2.CommitStatus, "COMMIT_STATUS_"),
    (results.AckLevel, block_cache_pb2.AckLevel, "ACK_LEVEL_"),
    (results.RenewStatus, block_cache_pb2.RenewStatus, "RENEW_STATUS_"),
    (results.RemovalStatus, block_cache_pb2.RemovalStatus, "REMOVAL_STATUS_"),
    (results.GroupKind, block_cache_pb2.GroupKind, "GROUP_KIND_"),
    (results.StateMode, block_cache_pb2.StateMode, "STATE_MODE_"),
    (results.ChangeKind, block_cache_pb2.WatchResponse.Kind, "KIND_"),
    (results.NamespaceMode, block_cache_pb2.NamespaceMode, "NAMESPACE_MODE_"),
]


@pytest.mark.parametrize(("ours", "wire", "prefix"), PAIRS, ids=str)
def test_numbers_are_those_of_the_wire(ours, wire, prefix) -> None:
    assert {member.name: member.value for member in ours} == {
        name.removeprefix(prefix): number for name, number in wire.items()
    }


def test_fd_kinds_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("FD_KIND_"): number for name, number in session_pb2.FdKind.items()}
    del wire["UNSPECIFIED"]
    assert {member.name: member.value for member in FdKind} == wire

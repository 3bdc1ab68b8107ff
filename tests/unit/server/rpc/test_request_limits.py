"""What is of use is let through whatever it is; what costs most is refused before it is parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.rpc.request_limits import RequestLimits
from kvkeep_server.service.spec import (
    GROUPS_MAX,
    RANKS_MAX,
    STRING_NBYTES_MAX,
    SWITCHES_NBYTES_MAX,
)

KEYS = 32768
MESSAGE_MAX = 16 << 20
LIMITS = RequestLimits(keys_max=KEYS, message_nbytes_max=MESSAGE_MAX)
U32, U64 = (1 << 32) - 1, (1 << 64) - 1
PACKED = b"k" * (KEYS * 64)
HINTS = pb.Hints(
    stop_reason=4,
    output_tokens=U32,
    sub_agent=True,
    session_id=b"s" * 64,
    engine_hit_tokens=U64,
    return_expected_ms=U32,
    ttl_ms=U32,
)
NAME = "n" * STRING_NBYTES_MAX
SPEC = pb.NamespaceSpec(
    **dict.fromkeys(("tenant", "model", "weights_fingerprint", "engine", "layout_version"), NAME),
    kv_dtype=NAME,
    hash_algorithm=NAME,
    hash_root=b"r" * 64,
    key_nbytes=64,
    groups=[
        pb.GroupSpec(
            name="g" * 64,
            kind=1,
            tokens_per_block=U32,
            block_nbytes=U64,
            window_tokens=U32,
            state_mode=2,
            retention_class="c" * 64,
        )
    ]
    * GROUPS_MAX,
    layout_switches=["A="] * (SWITCHES_NBYTES_MAX // 2),
    namespace_epoch=U64,
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "cp_size"), U32),
)
STAGED = pb.StagedGroup(group=15, positions=b"p" * (KEYS * 4), staging_offsets=b"o" * (KEYS * 8))
ASKED = {"set_index": U32, "keys": PACKED}
LARGEST = [
    pb.OpenNamespaceRequest(spec=SPEC, local_ranks=list(range(RANKS_MAX)), layout_version=2),
    pb.LookupRequest(**ASKED, hints=HINTS),
    pb.AcquireRequest(
        **ASKED,
        hints=HINTS,
        groups=range(GROUPS_MAX),
        byte_budget=U64,
        **dict.fromkeys(("lease_ttl_ms", "skip_blocks", "wait_ms"), U32),
    ),
    pb.ReleaseRequest(lease_ids=[U64] * KEYS),
    pb.RenewRequest(lease_ids=[U64] * KEYS, lease_ttl_ms=U32),
    pb.CommitRequest(
        **ASKED, rank=U32, parent_key=b"k" * 64, groups=[STAGED] * GROUPS_MAX, hints=HINTS
    ),
    pb.RemoveRequest(**ASKED, with_descendants=True),
]


def name_of(request):
    return type(request).__name__.removesuffix("Request")


def test_lease_ids_need_not_be_packed():
    payload = (b"\x08" + b"\xff" * 9 + b"\x01") * KEYS
    assert len(pb.RenewRequest.FromString(payload).lease_ids) == KEYS
    assert LIMITS.refusal("Renew", payload) is None
    assert LIMITS.refusal("Release", payload) is None


@pytest.mark.parametrize("request_", LARGEST, ids=name_of)
def test_the_largest_request_of_use_is_let_through(request_):
    payload = request_.SerializeToString()
    assert LIMITS.refusal(name_of(request_), payload) is None
    # And the limit is not far from it.
    assert LIMITS.of(name_of(request_)) < 2.5 * len(payload)


@pytest.mark.parametrize("name", [name_of(request) for request in LARGEST] + ["Prefetch"])
def test_one_byte_more_is_refused_with_a_sentence(name):
    nbytes = LIMITS.of(name)
    assert LIMITS.too_large(name, nbytes) is None
    refused = str(LIMITS.too_large(name, nbytes + 1))
    assert f"'a {name} of {nbytes + 1} bytes'; allowed: at most {nbytes} bytes" in refused


def test_no_limit_is_above_that_of_all_messages():
    small = RequestLimits(keys_max=KEYS, message_nbytes_max=65536)
    assert {small.of(name_of(request)) for request in LARGEST} == {65536}


@pytest.mark.parametrize(("groups", "refused"), [(32_000, False), (40_000, True)])
def test_a_large_message_of_nothing_but_fields_is_refused(groups, refused):
    payload = pb.CommitRequest(groups=[pb.StagedGroup()] * groups).SerializeToString()
    assert (LIMITS.refusal("Commit", payload) is not None) is refused


@pytest.mark.parametrize("groups", [1, 63, 64, 65, 1000])
def test_fields_are_counted_at_the_top_only(groups):
    staged = pb.StagedGroup(positions=b"\x08\x01" * 40_000)
    payload = pb.CommitRequest(groups=[staged] * min(groups, 50)).SerializeToString()
    payload += pb.CommitRequest(
        groups=[pb.StagedGroup()] * (groups - min(groups, 50))
    ).SerializeToString()
    assert (LIMITS.refusal("Commit", payload) is not None) is (groups > 64)


@given(st.binary(max_size=300))
def test_what_is_no_message_is_left_to_the_parser(end):
    """Whatever it is, looking at it ends, and raises nothing."""
    payload = pb.CommitRequest(keys=b"k" * 70_000).SerializeToString() + end
    LIMITS.refusal("Commit", payload)

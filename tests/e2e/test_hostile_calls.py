"""Calls that are made to hurt: each is refused with a sentence before anything walks its content.

While one is on its way others are answered; the daemon's log does not grow with them.
"""

import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeep.v1 import admin_pb2, admin_pb2_grpc, block_cache_pb2
from tests.fakes.daemon_process import DaemonProcess, running_daemon
from tests.fakes.frames import CALLS
from tests.fakes.raw_session import RawSession

MANY = 1_500_000
# A walk over MANY entries in Python takes longer than this; reading them off the wire does not.
ANSWERED_S = 1.0
METHODS = {name: method for method, (name, _) in CALLS.items()}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon")) as process:
        yield process


@pytest.fixture
def session(daemon):
    with RawSession(daemon.runtime_dir) as raw:
        yield raw


def slowest_health_s(daemon: DaemonProcess, attack) -> float:
    """How long the slowest health check took that ran beside the attack."""
    slowest, over = [0.0], threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not over.is_set():
                began = time.monotonic()
                health.Check(health_pb2.HealthCheckRequest(), timeout=60)
                slowest[0] = max(slowest[0], time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        attack()
    finally:
        over.set()
        asking.join()
    return slowest[0]


def requests(set_index: int):
    spec = block_cache_pb2.NamespaceSpec(model="m")
    group = block_cache_pb2.GroupSpec(name="g")
    staged = block_cache_pb2.StagedGroup()
    return {
        "Acquire": block_cache_pb2.AcquireRequest(
            set_index=set_index, keys=b"k" * 32, groups=[0] * MANY
        ),
        "OpenNamespace": block_cache_pb2.OpenNamespaceRequest(
            spec=block_cache_pb2.NamespaceSpec(
                model="m",
                weights_fingerprint="w",
                engine="e",
                layout_version="1",
                kv_dtype="d",
                hash_algorithm="h",
                key_nbytes=32,
                groups=[
                    block_cache_pb2.GroupSpec(
                        name="kv",
                        kind=block_cache_pb2.GROUP_KIND_FULL,
                        tokens_per_block=1,
                        block_nbytes=1,
                    )
                ],
            ),
            layout_version=2,
            local_ranks=[0] * MANY,
        ),
        "OpenNamespace groups": block_cache_pb2.OpenNamespaceRequest(
            spec=block_cache_pb2.NamespaceSpec(model=spec.model, groups=[group] * 90_000),
            layout_version=2,
        ),
        "Commit": block_cache_pb2.CommitRequest(
            set_index=set_index, keys=b"k" * 32, groups=[staged] * 500_000
        ),
        "Release": block_cache_pb2.ReleaseRequest(lease_ids=[1] * MANY),
        "Renew": block_cache_pb2.RenewRequest(lease_ids=[1] * MANY),
    }


@pytest.mark.parametrize("name", list(requests(0)))
def test_a_list_of_a_million_is_refused_at_once(daemon, session, name):
    opened = session.open_namespace(4096)
    request = requests(opened.set_index)[name]

    def attack() -> None:
        with pytest.raises(grpc.RpcError) as refused:
            session.call(name.split()[0], request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "allowed: " in refused.value.details()
        assert len(refused.value.details()) < 1000

    assert slowest_health_s(daemon, attack) < ANSWERED_S


@pytest.mark.parametrize("name", list(requests(0)))
def test_on_the_call_socket_as_well(daemon, session, name):
    opened = session.open_namespace(4096)
    request = requests(opened.set_index)[name]

    def attack() -> None:
        status, sentence = session.frame_call(METHODS[name.split()[0]], request)
        assert status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert b"allowed: " in sentence
        assert len(sentence) < 1000

    assert slowest_health_s(daemon, attack) < ANSWERED_S


@pytest.mark.parametrize("token", ["9" * 5000, "٣", "-1", "x", "99999999999"])
def test_a_page_token_that_is_none_is_refused(daemon, token):
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            admin.ListNamespaces(admin_pb2.ListNamespacesRequest(page_token=token), timeout=10)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "page_token" in refused.value.details()


def test_listing_counts_all_blocks_once(daemon, session):
    """However many sets there are: one pass over the index for all of a page."""
    for number in range(200):
        session.open_namespace(4096, model=f"model {number}")
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        listed = admin.ListNamespaces(admin_pb2.ListNamespacesRequest(page_size=1000), timeout=10)
    assert len(listed.namespaces) >= 200
    assert not any(namespace.blocks for namespace in listed.namespaces)


def test_what_is_no_protobuf_leaves_no_traceback(daemon):
    before = len(daemon.log)
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        send = channel.unary_unary("/kvkeep.v1.BlockCache/Commit")
        for _ in range(50):
            with pytest.raises(grpc.RpcError) as refused:
                send(b"\xff\xff\xff", timeout=10)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "no CommitRequest" in refused.value.details()
    assert daemon.serving()
    assert "Traceback" not in daemon.log[before:]

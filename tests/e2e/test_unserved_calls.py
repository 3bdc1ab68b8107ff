"""The calls that this release does not serve say so; the list here is the release's promise."""

from pathlib import Path

import grpc
import pytest

from kvkeep.v1 import admin_pb2, admin_pb2_grpc, block_cache_pb2, block_cache_pb2_grpc
from tests.fakes.daemon_process import running_daemon

SERVED = {
    "BlockCache": {
        "OpenNamespace",
        "Attach",
        "Lookup",
        "Acquire",
        "Await",
        "Release",
        "Renew",
        "Commit",
        "Read",
        "Write",
        "Remove",
        "AdvanceEpoch",
        "Prefetch",
        "Pin",
        "Unpin",
        "Watch",
    },
    "Admin": {"Stats", "ListNamespaces", "SetNamespaceMode", "Check"},
}
MODULES = {
    "BlockCache": (block_cache_pb2, block_cache_pb2_grpc.BlockCacheStub),
    "Admin": (admin_pb2, admin_pb2_grpc.AdminStub),
}


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory):
    directory: Path = tmp_path_factory.mktemp("daemon")
    with (
        running_daemon(directory) as daemon,
        grpc.insecure_channel(f"unix:{daemon.socket}") as opened,
    ):
        yield opened


def status_of(channel: grpc.Channel, service: str, method) -> grpc.RpcError | None:
    """Calls a method with an empty request, whatever its shape, and gives the error."""
    stub = MODULES[service][1](channel)
    request = method.input_type._concrete_class()
    sent = iter([request]) if method.client_streaming else request
    try:
        answer = getattr(stub, method.name)(sent, timeout=5)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return error
    return None


def methods(service: str) -> list:
    return list(MODULES[service][0].DESCRIPTOR.services_by_name[service].methods)


@pytest.mark.parametrize("service", MODULES)
def test_every_other_call_is_unimplemented_with_a_sentence(channel, service) -> None:
    for method in methods(service):
        if method.name in SERVED[service]:
            continue
        error = status_of(channel, service, method)
        assert error is not None, method.name
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED, method.name
        assert method.name in error.details(), method.name
        assert "not served in this release" in error.details(), method.name


@pytest.mark.parametrize("service", MODULES)
def test_the_served_calls_are_served(channel, service) -> None:
    for method in methods(service):
        if method.name in SERVED[service]:
            error = status_of(channel, service, method)
            code = error.code() if error else None
            assert code != grpc.StatusCode.UNIMPLEMENTED, method.name
            # Without a token the engine-facing calls go no further.
            if service == "BlockCache":
                assert code == grpc.StatusCode.UNAUTHENTICATED, method.name


def test_no_call_is_forgotten() -> None:
    for service, served in SERVED.items():
        assert served <= {method.name for method in methods(service)}

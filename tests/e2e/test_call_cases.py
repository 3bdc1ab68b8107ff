"""Cases of public bug reports about calls: large ones, too many, storms of them, pings, forks."""

import ast
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvkeep_server
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import block_cache_pb2_grpc, session_pb2
from tests.fakes.client_process import ClientProcess, client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.raw_session import PAGE, RawSession
from tests.fakes.rounds import rounds_within
from tests.fakes.waiting import wait_until

MIB = 1 << 20
RUNNING = 16
CONFIG = f"""
[ram]
size = "64MiB"
[sessions]
staging = "64KiB"
staging_max = "1GiB"
staging_total_max = "16GiB"
[limits]
message_max = "64MiB"
calls_running_max = {RUNNING}
"""
# P24 and the cases name these.
HEALTH_S = 0.1
REFUSED_S = 0.05
STAGING_MIB = 256
PING_S = 1


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as process:
        yield process
        process.check_log()


def p99(seconds):
    return sorted(seconds)[int(len(seconds) * 0.99)]


def health_p99_s(daemon, work) -> float:
    """Of health checks beside `work`."""
    seconds, over = [], threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while not over.is_set():
                began_s = time.monotonic()
                check(health_pb2.HealthCheckRequest(), timeout=60)
                seconds.append(time.monotonic() - began_s)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        work()
    finally:
        over.set()
        asking.join()
    return p99(seconds)


def refusal_of(send, payload: bytes) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        send(payload, timeout=60)
    return refused.value.code()


def test_b078_large_messages_do_not_block_the_loop(daemon):
    """The largest that the daemon takes at all, and one that it does not take."""
    largest, larger = bytes(64 * MIB), bytes(64 * MIB + 1)
    channel_options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options=channel_options) as channel:
        send = channel.unary_unary("/kvkeep.v1.BlockCache/Lookup")

        def work() -> None:
            for _ in range(3):
                assert refusal_of(send, largest) is grpc.StatusCode.INVALID_ARGUMENT
                assert refusal_of(send, larger) is grpc.StatusCode.RESOURCE_EXHAUSTED

        rounds_within(lambda: health_p99_s(daemon, work), HEALTH_S)


def test_b079_what_is_above_the_limit_is_refused_at_once(daemon):
    with RawSession(daemon.runtime_dir) as session:
        session.open_namespace(PAGE)
        mine = session.metadata
        watching = [session.stub.Watch(pb.WatchRequest(), metadata=mine) for _ in range(RUNNING)]
        try:
            rounds_within(lambda: refused_s(session, mine), REFUSED_S)
        finally:
            for stream in watching:
                stream.cancel()
        wait_until(lambda: not refused(session, mine), 5.0, "there is room again")


def refused(session, mine) -> bool:
    call = session.stub.Renew.future(pb.RenewRequest(), metadata=mine, timeout=10)
    if call.code() is grpc.StatusCode.OK:
        return False
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(call.trailing_metadata())["kvkeep-retry-after-ms"]) > 0
    return True


def refused_s(session, mine) -> float:
    """p99 of ten times the limit, one after the other: none of them queues."""
    wait_until(lambda: refused(session, mine), 5.0, "as many run as may")
    seconds = []
    for _ in range(10 * RUNNING):
        began_s = time.monotonic()
        assert refused(session, mine)
        seconds.append(time.monotonic() - began_s)
    return p99(seconds)


@pytest.mark.promise("P24", gate=10_000, nightly=100_000, unit="connections closed at once")
def test_b081_a_storm_of_connections_leaves_the_listener_alive(daemon, promise_count):
    for _ in range(promise_count):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(daemon.socket))
    assert daemon.serving()
    with RawSession(daemon.runtime_dir) as session:
        assert session.open_namespace(PAGE).set_index >= 0


def test_b082_the_daemon_never_forks():
    """A fork beside gRPC's threads deadlocks. Commands that start processes are no daemon."""
    package = Path(kvkeep_server.__file__).parent
    forking = {"subprocess", "multiprocessing", "pty"}
    calls = {"fork", "forkpty", "system", "popen", "posix_spawn", "ProcessPoolExecutor"}
    looked_at = [path for path in package.rglob("*.py") if "cli" not in path.parts]
    assert len(looked_at) > 50
    for path in looked_at:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forking & {name.name.partition(".")[0] for name in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in forking, path
                assert not calls & {name.name for name in node.names}, path
            if isinstance(node, ast.Attribute):
                assert node.attr not in calls or ast.unparse(node.value) != "os", path


@pytest.mark.promise("P24", gate=6, nightly=600, unit="pings of two clients that are idle")
def test_b083_pings_of_an_idle_client_end_nothing(daemon, promise_count):
    """Who pings more often than the daemon allows is sent away. Ten times as often as usual; one
    with a stream and one without."""
    options = [
        ("grpc.keepalive_time_ms", 1000 * PING_S),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    target, states = f"unix:{daemon.socket}", {"streaming": [], "silent": []}
    with (
        RawSession(daemon.runtime_dir) as session,
        grpc.insecure_channel(target, options=options) as streaming,
        grpc.insecure_channel(target, options=options) as silent,
    ):
        session.open_namespace(PAGE)
        for channel, seen in zip((streaming, silent), states.values(), strict=True):
            grpc.channel_ready_future(channel).result(10)
            channel.subscribe(seen.append)
        stub = block_cache_pb2_grpc.BlockCacheStub(streaming)
        stream = stub.Watch(pb.WatchRequest(), metadata=session.metadata)
        time.sleep(PING_S * promise_count)
        assert stream.is_active()
        for seen in states.values():
            assert [state.name for state in seen] == ["READY"], states
        stream.cancel()


def fill_staging(wire, runtime_dir, nbytes):
    """Touches all of it, says so, and is killed."""
    with RawSession(Path(runtime_dir), staging_nbytes=nbytes) as session:
        for at in range(0, nbytes, PAGE):
            session.staging[at] = 1
        wire.tell("filled")
        wire.hear()


def look_ups_s(session, request) -> list[float]:
    seconds, until_s = [], time.monotonic() + 1.0
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        session.frame_call(session_pb2.CALL_METHOD_LOOKUP, request)
        seconds.append(time.monotonic() - began_s)
        time.sleep(0.002)
    return seconds


@pytest.mark.promise("P09", gate=1024, nightly=8192, unit="MiB of staging of killed clients")
def test_b070_a_client_that_dies_with_much_memory_holds_up_nobody(daemon, promise_count):
    with client_processes() as start, RawSession(daemon.runtime_dir) as session:
        opened = session.open_namespace(PAGE)
        request = pb.LookupRequest(set_index=opened.set_index, keys=b"k" * 32)
        rounds = []
        for _ in range(promise_count // (4 * STAGING_MIB)):
            clients = [
                start(fill_staging, str(daemon.runtime_dir), STAGING_MIB * MIB) for _ in range(4)
            ]
            for client in clients:
                assert client.hear() == "filled"
            with ThreadPoolExecutor() as killing:
                killed = killing.map(ClientProcess.kill, clients)
                seconds = look_ups_s(session, request)
                list(killed)
            wait_until(lambda: session.stats().sessions == 1, 5.0, "their sessions are over")
            rounds.append(p99(seconds))
        assert statistics.median(rounds) <= HEALTH_S, rounds

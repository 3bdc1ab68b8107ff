"""Attaching to an address: what else may answer there, and what of it a caller is told."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import kvkeep
from kvkeep.remote import RemoteSession
from kvkeep.results import NOTHING_FOUND
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import block_cache_pb2_grpc as pb_grpc
from kvkeep_server.rpc.checksums import sealed
from tests.fakes.waiting import wait_until
from tests.unit.client.conftest import BLOCK_NBYTES, chain, spec

TIMEOUT_S = 5.0
# An HTTP/2 client says this first; then frames: three bytes of length, type, flags, stream.
PREFACE_NBYTES = 24
SETTINGS, HEADERS, END = 4, 1, 0x5
STATUS = {401: b"\x08\x03401", 403: b"\x08\x03403", 404: b"\x8d", 503: b"\x08\x03503"}


def frame(kind, flags, stream, payload=b""):
    return b"".join(
        [len(payload).to_bytes(3, "big"), bytes([kind, flags]), stream.to_bytes(4, "big"), payload]
    )


@contextlib.contextmanager
def listening(serve):
    """An address behind which `serve` gets each connection, as a file, in a thread."""

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                with connection, connection.makefile("rwb", buffering=0) as file:
                    serve(file)

    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # gRPC goes on with an attempt to connect for 20 s, closed or not.
            for one in [listener, *connections]:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def web_server(status):
    """Python's own, HTTP/1."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_one_request(self):
            self.rfile.readline()
            self.raw_requestline, self.requestline, self.command = b"", "", "GET"
            self.request_version = "HTTP/1.1"
            self.send_error(status)
            self.close_connection = True

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def proxy(status):
    """One that speaks HTTP/2, and has nobody behind it."""

    def serve(file):
        file.read(PREFACE_NBYTES)
        file.write(frame(SETTINGS, 0, 0))
        while header := file.read(9):
            file.read(int.from_bytes(header[:3], "big"))
            if header[3] == HEADERS:
                stream = int.from_bytes(header[5:], "big")
                file.write(frame(HEADERS, END, stream, STATUS[status]))

    return listening(serve)


@contextlib.contextmanager
def other_service():
    """gRPC, but of something else."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


OTHERS = {
    "a web server that says 403": lambda: web_server(403),
    "a web server that says 404": lambda: web_server(404),
    "a proxy that says 401": lambda: proxy(401),
    "a proxy that says 403": lambda: proxy(403),
    "a proxy that says 404": lambda: proxy(404),
    "a proxy that says 503": lambda: proxy(503),
    "another service": other_service,
    "another protocol": lambda: listening(lambda file: file.write(b"SSH-2.0-x\r\n")),
    "who hangs up": lambda: listening(lambda _: None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_daemon_is_told_at_once_with_its_address(name):
    with OTHERS[name]() as address:
        began_s = time.monotonic()
        with pytest.raises(kvkeep.UnavailableError) as failed:
            kvkeep.connect(address=address, timeout_s=TIMEOUT_S)
        assert time.monotonic() - began_s < TIMEOUT_S / 2
    assert type(failed.value) is kvkeep.UnavailableError
    assert f"no session with a daemon on {address}" in str(failed.value)
    assert "remote.listen" in str(failed.value)


class HalfDaemon(pb_grpc.BlockCacheServicer):
    """Takes heartbeats, and does no more than a test says.

    Attributes:
        hears: It answers them.
        attached: How often a session began.
        asked: Releases that came; none is answered until `released`.
        looked_up: Look-ups that came, of which the same holds; and so it is of acquires.
    """

    def __init__(self):
        self.hears = True
        self.attached = self.asked = self.looked_up = 0
        self.released = threading.Event()

    def Attach(self, request_iterator, context):  # noqa: N802 - a method of the wire
        self.attached += 1
        attached = pb.Attached(
            server_epoch=1, session_timeout_ms=600, session_token=bytes(32), staging_nbytes=1 << 20
        )
        yield pb.AttachEvent(attached=attached)
        with contextlib.suppress(grpc.RpcError):
            for beat in request_iterator:
                if self.hears:
                    yield pb.AttachEvent(heard=pb.Heard(heartbeat=beat.heartbeat))

    def OpenNamespace(self, request, context):  # noqa: N802 - a method of the wire
        ranks = [pb.RankNamespace(rank=0, namespace_id=bytes(16))]
        response = pb.OpenNamespaceResponse(set_index=1, ranks=ranks, slot_nbytes=[12288])
        return sealed(response, request.message_crc32)

    def Lookup(self, request, context):  # noqa: N802 - a method of the wire
        self.looked_up += 1
        self.released.wait(10.0)
        response = pb.LookupResponse(groups=[pb.GroupPrefix(group=0)])
        return sealed(response, request.message_crc32)

    def Acquire(self, request, context):  # noqa: N802 - a method of the wire
        self.released.wait(10.0)
        return sealed(pb.AcquireResponse(), request.message_crc32)

    def Release(self, request, context):  # noqa: N802 - a method of the wire
        self.asked += 1
        self.released.wait(10.0)
        return sealed(pb.ReleaseResponse(), request.message_crc32)


@pytest.fixture
def half_daemon():
    server, servicer = grpc.server(ThreadPoolExecutor(16)), HalfDaemon()
    pb_grpc.add_BlockCacheServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    servicer.released.set()
    server.stop(0).wait()


def test_heartbeats_that_nobody_answers_end_the_session(half_daemon):
    """A proxy between may answer pings for a daemon that it lost."""
    with kvkeep.connect(address=half_daemon.address, timeout_s=TIMEOUT_S):
        time.sleep(1.5)
        assert half_daemon.attached == 1
        half_daemon.hears = False
        wait_until(lambda: half_daemon.attached == 2, 5.0, "it attaches anew")


def test_calls_that_nobody_answers_end_the_session(half_daemon, monkeypatch):
    monkeypatch.setattr(RemoteSession, "silence_max_s", 0.5)
    monkeypatch.setattr(RemoteSession, "probe_s", 0.1)
    with kvkeep.connect(address=half_daemon.address, timeout_s=TIMEOUT_S) as client:
        session = client._keeper.require()
        for _ in range(3):
            with pytest.raises((kvkeep.UnavailableError, kvkeep.DeadlineError)):
                session.transport.lookup(pb.LookupRequest(), 0.15)
        wait_until(lambda: client.health is kvkeep.Health.SILENT, 5.0, "it is silent")
        wait_until(lambda: half_daemon.attached == 2, 5.0, "it attaches anew")
        assert not session.alive
        assert half_daemon.asked == 1


def took_s(call):
    """Seconds that a call took, and what it came to."""
    began_s = time.monotonic()
    try:
        answer = call()
    except kvkeep.KVKeepError as error:
        answer = error
    return time.monotonic() - began_s, answer


def test_a_store_waits_no_longer_than_it_may(half_daemon):
    keys = chain(3)
    with kvkeep.connect(address=half_daemon.address, timeout_s=TIMEOUT_S) as client:
        namespace = client.open_namespace(spec())
        within_s, store = took_s(lambda: namespace.store(keys, timeout_s=0))
        assert (list(store.new), half_daemon.looked_up) == ([0, 1, 2], 0)
        assert within_s < TIMEOUT_S / 2
        store.abort()
        within_s, error = took_s(lambda: namespace.store(keys, timeout_s=0.2))
        assert isinstance(error, kvkeep.DeadlineError)
        assert half_daemon.looked_up == 1
        assert within_s < TIMEOUT_S / 2


def test_room_is_waited_for_in_what_is_left(half_daemon):
    """The look-up, and another store that has it all."""
    with kvkeep.connect(address=half_daemon.address, timeout_s=TIMEOUT_S) as client:
        namespace = client.open_namespace(spec())
        full = namespace.store(chain(80), timeout_s=0)
        threading.Timer(1.0, half_daemon.released.set).start()
        within_s, error = took_s(lambda: namespace.store(chain(30, "b"), timeout_s=1.5))
        assert isinstance(error, kvkeep.ResourceExhaustedError)
        assert within_s < 2.3
        full.abort()


def test_what_is_silent_is_not_asked(half_daemon, monkeypatch):
    """Also when nobody but a read asks."""
    monkeypatch.setattr(RemoteSession, "silence_max_s", 60.0)
    monkeypatch.setattr(RemoteSession, "probe_s", 0.1)
    keys, timeout_s = chain(3), 0.3
    into = bytearray(3 * BLOCK_NBYTES)
    with kvkeep.connect(address=half_daemon.address, timeout_s=timeout_s) as client:
        namespace = client.open_namespace(spec())
        assert took_s(lambda: namespace.read_into(keys, into))[1] == 0
        time.sleep(0.3)
        within_s, read = took_s(lambda: namespace.read_into(keys, into))
        assert (read, client.health) == (0, kvkeep.Health.SILENT)
        assert within_s < timeout_s / 2
        within_s, found = took_s(lambda: namespace.lookup(keys))
        assert (found, half_daemon.looked_up) == (NOTHING_FOUND, 0)
        assert within_s < timeout_s / 2


def read_on(file):
    while file.read(1 << 16):
        pass


def test_what_says_nothing_is_told_with_its_address():
    with (
        listening(read_on) as address,
        pytest.raises(kvkeep.DeadlineError) as failed,
    ):
        kvkeep.connect(address=address, timeout_s=0.3)
    assert address in str(failed.value)

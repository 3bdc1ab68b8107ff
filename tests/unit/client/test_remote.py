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
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import block_cache_pb2_grpc as pb_grpc
from tests.fakes.waiting import wait_until

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
    """

    def __init__(self):
        self.hears = True
        self.attached = self.asked = 0
        self.released = threading.Event()

    def Attach(self, request_iterator, context):  # noqa: N802 - a method of the wire
        self.attached += 1
        attached = pb.Attached(
            server_epoch=1, session_timeout_ms=600, session_token=bytes(32), staging_nbytes=4096
        )
        yield pb.AttachEvent(attached=attached)
        with contextlib.suppress(grpc.RpcError):
            for beat in request_iterator:
                if self.hears:
                    yield pb.AttachEvent(heard=pb.Heard(heartbeat=beat.heartbeat))

    def Lookup(self, request, context):  # noqa: N802 - a method of the wire
        self.released.wait(10.0)
        return pb.LookupResponse()

    def Release(self, request, context):  # noqa: N802 - a method of the wire
        self.asked += 1
        self.released.wait(10.0)
        return pb.ReleaseResponse()


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
    with kvkeep.connect(address=half_daemon.address, timeout_s=TIMEOUT_S) as client:
        session = client._keeper.require()
        for _ in range(3):
            with pytest.raises((kvkeep.UnavailableError, kvkeep.DeadlineError)):
                session.transport.lookup(pb.LookupRequest(), 0.15)
        wait_until(lambda: client.health is kvkeep.Health.SILENT, 5.0, "it is silent")
        wait_until(lambda: half_daemon.attached == 2, 5.0, "it attaches anew")
        assert not session.alive
        assert half_daemon.asked == 1


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

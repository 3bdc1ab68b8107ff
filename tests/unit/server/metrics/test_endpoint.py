"""The endpoint: answers, and what slow, greedy or broken scrapers and a hanging loop do to it."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.metrics.endpoint import Endpoint, EndpointLimits
from kvkeep_server.metrics.readings import Reading
from tests.fakes.scraping import Page, get

WAIT_S = 120.0


class FakeReadings:
    """Counts how often it was asked; may fail or hang the loop."""

    def __init__(self):
        self.serving = True
        self.taken = 0
        self.error: Exception | None = None
        self.hang: threading.Event | None = None

    def take(self):
        if self.hang is not None:
            self.hang.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.taken += 1
        return [Reading("kvkeep_commits_total", (), self.taken)]


class Served:
    """An endpoint whose daemon's loop runs in a thread, so that the test may scrape or hang it."""

    def __init__(self, **limits):
        self.readings = FakeReadings()
        self.endpoint = Endpoint(
            host="127.0.0.1",
            port=0,
            readings=self.readings,
            clock=SystemClock(),
            limits=EndpointLimits(**{"loop_timeout_s": WAIT_S, "reused_s": 0.0} | limits),
        )
        self.errors: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(str(context)))
        self.thread = threading.Thread(target=self.loop.run_forever)

    @property
    def port(self) -> int:
        return self.endpoint.address[1]

    def call(self, work):
        async def run():
            work()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def page(self) -> Page:
        status, text = get(self.port)
        assert status == 200
        return Page.parse(text)


@contextlib.contextmanager
def serving(**limits):
    served = Served(**limits)
    served.thread.start()
    try:
        served.call(served.endpoint.start)
        yield served
    finally:
        served.call(served.endpoint.close)
        served.loop.call_soon_threadsafe(served.loop.stop)
        served.thread.join()
        served.loop.close()


@pytest.fixture
def served():
    with serving() as it:
        yield it


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def test_every_scrape_is_fresh(served):
    first, second = served.page(), served.page()
    assert second.sum("kvkeep_commits_total") > first.sum("kvkeep_commits_total")
    assert second.sum("kvkeep_snapshot_age_seconds") < WAIT_S
    assert second.sum("process_resident_memory_bytes") > 0
    assert second.sum("kvkeep_process_anonymous_bytes") > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics", 200),
        ("GET", "/metrics?name[]=x", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 200),
        ("GET", "/", 404),
        ("GET", "/metrics/../etc/passwd", 404),
        ("POST", "/metrics", 405),
        ("BREW", "/healthz", 405),
    ],
)
def test_paths_and_methods(served, method, path, status):
    found, body = get(served.port, path, method)
    assert found == status
    assert bool(body) == (method != "HEAD")


def test_ready_is_not_alive(served):
    served.readings.serving = False
    assert get(served.port, "/readyz")[0] == 503
    assert get(served.port, "/healthz")[0] == 200


def test_scrapes_share_readings():
    with serving(reused_s=WAIT_S) as served:
        pages = {served.page().sum("kvkeep_commits_total") for _ in range(5)}
        assert pages == {1}
        assert served.readings.taken == 1


def test_a_loop_that_hangs_is_told_and_the_last_page_stays():
    with serving(loop_timeout_s=0.1) as served:
        before = served.page().sum("kvkeep_commits_total")
        served.readings.hang = threading.Event()
        try:
            page = served.page()
            assert page.sum("kvkeep_commits_total") == before
            assert page.sum("kvkeep_snapshot_age_seconds") >= 0.1
            assert get(served.port, "/healthz")[0] == 503
        finally:
            hang, served.readings.hang = served.readings.hang, None
            hang.set()
        deadline = time.monotonic() + WAIT_S
        while get(served.port, "/healthz")[0] != 200:
            assert time.monotonic() < deadline
        assert served.page().sum("kvkeep_commits_total") > before


def test_readings_that_fail_are_no_500():
    with serving() as served:
        before = served.page().sum("kvkeep_commits_total")
        served.readings.error = KVKeepError("a bug")
        assert served.page().sum("kvkeep_commits_total") == before
        assert get(served.port, "/healthz")[0] == 503
        served.readings.error = None
        assert served.page().sum("kvkeep_commits_total") > before
        assert any("a bug" in error for error in served.errors)


def test_a_request_in_single_bytes_is_answered(served):
    with served.connect() as connection:
        for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"\0" * 100 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET  \r\n\r\n",
        b"\xff\xfe /metrics\r\n\r\n",
        b"GET /%6detrics HTTP/9\r\nHost: \r\n\r\n",
    ],
)
def test_garbage_is_refused(served, garbage):
    with served.connect() as connection:
        connection.sendall(garbage)
        assert read_all(connection).split()[1] in {b"404", b"405"}
    served.page()


def test_a_request_without_end_is_cut_off(served):
    with served.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert read_all(connection) == b""
    assert served.page().sum("kvkeep_scrapes_dropped_total") == 1


def test_who_says_nothing_is_cut_off():
    with serving(request_timeout_s=0.1) as served:
        with served.connect() as connection:
            assert read_all(connection) == b""
        assert served.page().sum("kvkeep_scrapes_dropped_total") == 1


def test_the_oldest_gives_way():
    with serving(connections_max=2) as served, contextlib.ExitStack() as held:
        silent = [held.enter_context(served.connect()) for _ in range(6)]
        served.page()
        # Those before the last one made room for each other, for it, or for the scrape.
        assert read_all(silent[0]) == b""
        deadline = time.monotonic() + WAIT_S
        while served.page().sum("kvkeep_scrapes_dropped_total") < 5:
            assert time.monotonic() < deadline


def test_scrapers_that_die_leave_nothing(served):
    for number in range(100):
        with served.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if number % 2:
                connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    deadline = time.monotonic() + WAIT_S
    while served.endpoint._open:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.page()
    assert served.errors == []


def test_closing_does_not_wait_for_scrapers():
    with contextlib.ExitStack() as held:
        with serving() as served:
            silent = held.enter_context(served.connect())
            served.page()
        assert read_all(silent) == b""
        with pytest.raises(ConnectionRefusedError):
            served.connect()
    assert not served.errors


def test_a_port_that_is_taken_is_an_os_error():
    with serving() as served:
        second = Endpoint(
            host="127.0.0.1", port=served.port, readings=FakeReadings(), clock=SystemClock()
        )
        with pytest.raises(OSError, match="in use"):
            second.start()
        second.close()


def test_it_listens_on_ipv6():
    endpoint = Endpoint(host="::1", port=0, readings=FakeReadings(), clock=SystemClock())

    async def once():
        endpoint.start()
        endpoint.close()
        endpoint.close()

    asyncio.run(once())
    assert endpoint.address[0] == "::1"

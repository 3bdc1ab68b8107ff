"""/metrics, /healthz and /readyz over HTTP, from a thread of its own.

The daemon's event loop does one thing for it: it takes the readings, at most once in `reused_s`
however many scrapers there are. Parsing, rendering and slow or hostile scrapers stay in the thread,
so they cannot hold a look-up up; and when the loop hangs, this page still says so.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.settings_kinds import listen_address
from kvkeep_server.metrics.collector import CONTENT_TYPE, process_readings, render
from kvkeep_server.metrics.metric import Reading
from kvkeep_server.metrics.readings import Readings

_HEAD_NBYTES_MAX = 8192
_ACCEPT_PAUSE_S = 0.1
# Who finds it full tries again after a second.
_BACKLOG = 128
_PLAIN = "text/plain; charset=utf-8"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """What scrapers may make the endpoint hold.

    Attributes:
        connections_max: Above it the oldest is closed.
        request_timeout_s: Until a request must have come.
        send_timeout_s: Until its answer must have been read.
        loop_timeout_s: How long the daemon's event loop is waited for.
        reused_s: Readings younger than this are not taken again.
    """

    connections_max: int = 16
    request_timeout_s: float = 5.0
    send_timeout_s: float = 10.0
    loop_timeout_s: float = 2.0
    reused_s: float = 0.1


class Endpoint:
    """One listener. `start` and `close` belong to the daemon's event loop.

    Args:
        host: An address, IPv4 or IPv6.
        port: 0 = the kernel chooses; `address` says which.
        readings: Taken on the daemon's event loop.
        clock: For the age of readings.
        limits: See `EndpointLimits`.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        readings: Readings,
        clock: Clock,
        limits: EndpointLimits = EndpointLimits(),
    ) -> None:
        """See the class."""
        self.limits = limits
        self.dropped_total = 0
        self.address = (host, port)
        self._readings = readings
        self._clock = clock
        # Readings and when they were taken, in one assignment: two threads meet here.
        self._taken: tuple[list[Reading], float] = ([], float("-inf"))
        self._taking: Future[None] | None = None
        self._page = b""
        self._page_s = float("-inf")
        self._main: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._open: dict[asyncio.Task[None], None] = {}

    # --- the daemon's event loop ------------------------------------------------------------------

    def start(self) -> None:
        """Binds, listens, and begins to answer.

        Raises:
            OSError: The address is taken, or not this machine's.
        """
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self.address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self.address = listener.getsockname()[:2]
        self._main = asyncio.get_running_loop()
        self._take()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, listener), name="kvkeep-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Closes everything and waits for the thread. Idempotent; nothing happens before
        `start`."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None

    def _take(self) -> None:
        self._taken = (self._readings.take(), self._clock.monotonic_s())

    def _take_for(self, taking: "Future[None]") -> None:
        if self._thread is None:
            return  # closed meanwhile: nobody waits
        try:
            self._take()
        except Exception as error:
            taking.set_exception(error)
            raise  # a bug: the loop logs it, the page repeats the last readings and their age
        taking.set_result(None)

    # --- its own thread ---------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        accepting = asyncio.create_task(self._accept(listener))
        await self._stop.wait()
        accepting.cancel()
        listener.close()
        for task in self._open:
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("scrape not accepted", extra={"error": str(error)})
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._open) >= self.limits.connections_max:
                next(iter(self._open)).cancel()
            task = asyncio.create_task(self._answer(connection))
            self._open[task] = None
            task.add_done_callback(self._open.pop)
            # A storm of connections must not keep the others from their turn.
            await asyncio.sleep(0)

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            try:
                async with asyncio.timeout(self.limits.request_timeout_s):
                    head = await _head(connection)
                answer = await self._response(head)
                async with asyncio.timeout(self.limits.send_timeout_s):
                    await loop.sock_sendall(connection, answer)
                    connection.shutdown(socket.SHUT_WR)
            except (OSError, TimeoutError, EOFError):
                self.dropped_total += 1
            except asyncio.CancelledError:
                self.dropped_total += 1
                raise

    async def _response(self, head: bytes) -> bytes:
        """What a request gets, as bytes. Anybody may have sent it."""
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        kind, status = _PLAIN, "200 OK"
        if method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b"only GET\n"
        elif path == b"/metrics":
            kind, body = CONTENT_TYPE, await self._metrics()
        elif path in (b"/healthz", b"/readyz"):
            fresh = await self._freshen()
            well = fresh and (path == b"/healthz" or self._readings.serving)
            status, body = ("200 OK", b"ok\n") if well else ("503 Service Unavailable", b"not ok\n")
        else:
            status, body = "404 Not Found", b"/metrics, /healthz, /readyz\n"
        lines = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == b"HEAD" else body)

    async def _freshen(self) -> bool:
        """Has the readings taken anew if they are old; whether they are young now."""
        if self._age_s(self._taken[1]) < self.limits.reused_s:
            return True
        assert self._main is not None
        if self._taking is None or self._taking.done():
            self._taking = Future()
            try:
                self._main.call_soon_threadsafe(self._take_for, self._taking)
            except RuntimeError:
                return False  # that loop is closed
        taking = asyncio.wrap_future(self._taking)
        done, _ = await asyncio.wait([taking], timeout=self.limits.loop_timeout_s)
        return bool(done) and taking.exception() is None

    async def _metrics(self) -> bytes:
        await self._freshen()
        readings, taken_s = self._taken
        age_s = self._age_s(taken_s)
        if self._page_s != taken_s or age_s > self.limits.reused_s:
            own = [
                Reading("kvkeep_snapshot_age_seconds", (), age_s),
                Reading("kvkeep_scrapes_dropped_total", (), self.dropped_total),
            ]
            self._page = render([*readings, *own, *process_readings()])
            self._page_s = taken_s
        return self._page

    def _age_s(self, taken_s: float) -> float:
        return max(0.0, self._clock.monotonic_s() - taken_s)


async def _head(connection: socket.socket) -> bytes:
    """The first line of a request, once its headers have come.

    Raises:
        EOFError: It ended before, or is too long.
    """
    loop = asyncio.get_running_loop()
    received = bytearray()
    while b"\r\n\r\n" not in received:
        part = await loop.sock_recv(connection, _HEAD_NBYTES_MAX + 1 - len(received))
        if not part or len(received) + len(part) > _HEAD_NBYTES_MAX:
            raise EOFError
        received += part
    return bytes(received).partition(b"\r\n")[0]


def scraped_at(listen: str, readings: Readings, clock: Clock) -> contextlib.ExitStack:
    """The metrics endpoint, started if there is to be one; close what is returned.

    Raises:
        FailedPreconditionError: It cannot listen there.
    """
    ending = contextlib.ExitStack()
    if listen:
        host, port = listen_address(listen)
        endpoint = Endpoint(host=host, port=port, readings=readings, clock=clock)
        try:
            endpoint.start()
        except OSError as error:
            msg = f"metrics.listen is {listen}: {error.strerror}; name another address or port"
            raise FailedPreconditionError(msg) from error
        _log.info("metrics", extra={"host": endpoint.address[0], "port": endpoint.address[1]})
        ending.callback(endpoint.close)
    return ending

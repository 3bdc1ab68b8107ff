"""A network between a client and a daemon that can lose connections without a word."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class BlackHole:
    """Passes bytes on, until `swallow`: what is open then passes nothing more, and is not closed.

    Attributes:
        address: Where clients connect to.
        connections: That came.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._swallowed = 0
        self._damaged: set[tuple[int, bool]] = set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        """All that are open now."""
        self._swallowed = self.connections

    def damage(self, *, upwards: bool) -> None:
        """The length of the next frame that goes to the daemon, or comes from it, on each
        connection that is open now: 64 KiB more."""
        self._damaged = {(number + 1, upwards) for number in range(self.connections)}

    def close(self) -> None:
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                daemon = socket.create_connection(self._target)
                self._open += [client, daemon]
                self.connections += 1
                for upwards, *ends in ((True, client, daemon), (False, daemon, client)):
                    way = self.connections, upwards
                    threading.Thread(target=self._pass_on, args=(way, *ends), daemon=True).start()

    def _pass_on(self, way: tuple[int, bool], source: socket.socket, target: socket.socket) -> None:
        number = way[0]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if way in self._damaged:
                    self._damaged.discard(way)
                    data = bytes([data[0] ^ 1]) + data[1:]
                if number > self._swallowed:
                    target.sendall(data)
        if number > self._swallowed:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def black_hole(address: str) -> Iterator[BlackHole]:
    """One in front of a daemon."""
    hole = BlackHole(address)
    try:
        yield hole
    finally:
        hole.close()

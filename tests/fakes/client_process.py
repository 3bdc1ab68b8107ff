"""Clients as processes of their own, that a test talks with, stops and kills by pid.

A program is a function `program(wire, *args)` of an importable module. The processes are forked
from a server that has imported kvkeep and attached nothing: a real process costs 10 ms so, not the
half second of an interpreter that imports grpc and numpy.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kvkeep.client", "tests.fakes.generated_blocks"])

HEAR_S = 30.0


class Wire:
    """The client's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, what: object) -> None:
        self._connection.send(("told", what))

    def hear(self) -> Any:
        return self._connection.recv()

    def asked(self) -> bool:
        """Whether something can be heard at once."""
        return self._connection.poll()


def _run(program: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    try:
        program(Wire(connection), *args)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("failed", traceback.format_exc()))
        raise


class ClientProcess:
    """The test's end."""

    def __init__(self, program: Callable[..., None], *args: Any) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(program, theirs, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def check_alive(self) -> None:
        """An AssertionError with its traceback or its exit code, if it ended."""
        while not self.alive:
            self.hear()

    def tell(self, what: object) -> None:
        self._connection.send(what)

    def asked(self) -> bool:
        """Whether something can be heard at once."""
        return self._connection.poll()

    def hear(self, wait_s: float = HEAR_S) -> Any:
        """What the client tells next; its traceback as an AssertionError."""
        assert self._connection.poll(wait_s), f"client {self.pid} says nothing for {wait_s} s"
        try:
            kind, what = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(HEAR_S)
            raise AssertionError(f"client ended, code {self._process.exitcode}") from None
        assert kind == "told", what
        return what

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(HEAR_S)

    def end(self, wait_s: float = HEAR_S) -> None:
        """Waits for the program's own end."""
        self._process.join(wait_s)
        assert self._process.exitcode == 0, f"client ended with {self._process.exitcode}"


@contextlib.contextmanager
def client_processes() -> Iterator[Callable[..., ClientProcess]]:
    """A function that starts clients; none is left after the `with`."""
    started: list[ClientProcess] = []

    def start(program: Callable[..., None], *args: Any) -> ClientProcess:
        started.append(ClientProcess(program, *args))
        return started[-1]

    try:
        yield start
    finally:
        for client in started:
            client.kill()

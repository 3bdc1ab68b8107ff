"""Standard output and error that can be full: which error is theirs, and what is left undone."""

import os
import sys
from collections.abc import Callable
from typing import TextIO, TypeVar, cast

from kvkeep_server.core.errors import KVKeepError

# EX_IOERR of sysexits.h.
EXIT_OUTPUT = 74

Result = TypeVar("Result")


class OutputError(KVKeepError):
    """Standard output cannot be written.

    Attributes:
        reader_left: As `head` does, which is no fault.
    """

    def __init__(self, error: OSError) -> None:
        """See the class; `error` is the kernel's."""
        super().__init__(f"standard output cannot be written: {error.strerror}")
        self.reader_left = isinstance(error, BrokenPipeError)


class _Output:
    """A stream whose errors say that they are its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return _telling(lambda: self._stream.write(text))

    def flush(self) -> None:
        _telling(self._stream.flush)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _telling(step: Callable[[], Result]) -> Result:
    try:
        return step()
    except OSError as error:
        raise OutputError(error) from error


def telling(stream: TextIO | None) -> TextIO | None:
    """The stream, with OutputError for what the kernel says; None, a closed one, stays it."""
    return None if stream is None else cast("TextIO", _Output(stream))


def discard(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere: Python would complain while it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def to_stderr(words: Callable[[], None]) -> None:
    """Something on standard error, as far as that can be written: the exit code says it too."""
    try:
        words()
    except OSError:
        discard(sys.stderr)

"""Reads the text of a settings file, within bounds."""

import errno
import os
import select
from pathlib import Path

from kvkeep_server.core.quantities import format_size

FILE_NBYTES_MAX = 1 << 20
# A pipe may be read, from a shell's `<(...)` for instance, if somebody writes to it.
_PATIENCE_S = 5.0


def read_settings(path: Path) -> str:
    """The text of the file.

    Raises:
        ValueError: It cannot be read, or is no text; what is wrong, and the fix.
    """
    try:
        content = _read(path)
        if len(content) <= FILE_NBYTES_MAX:
            return content.decode()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; fix: name a readable TOML file, or none"
        raise ValueError(problem) from error
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start}; fix: save the file as UTF-8"
        raise ValueError(problem) from error
    raise ValueError(f"is larger than {format_size(FILE_NBYTES_MAX)}; fix: name a TOML file")


def _read(path: Path) -> bytes:
    """At most one byte more than is allowed. Raises OSError."""
    content = b""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while len(content) <= FILE_NBYTES_MAX:
            if not poll.poll(_PATIENCE_S * 1000):
                raise OSError(errno.ETIMEDOUT, "nobody writes to it")
            piece = os.read(fd, FILE_NBYTES_MAX + 1 - len(content))
            if not piece:
                break
            content += piece
    finally:
        os.close(fd)
    return content

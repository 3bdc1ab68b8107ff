"""What a process that has no descriptor left is told: it is its own limit, not the daemon."""

from __future__ import annotations

import errno
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE)


class NoDescriptorsError(UnavailableError):
    """This process, or its host, has no descriptor left."""

    def __init__(self, why: str) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().__init__(
            f"{why}: this process may have {soft} descriptors open (RLIMIT_NOFILE), and they are "
            "most likely in use. Raise it (`ulimit -n`), or close some"
        )


@contextmanager
def telling_shortage() -> Iterator[None]:
    """Within, the kernel's error for no descriptor is NoDescriptorsError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _SHORTAGES:
            raise
        raise NoDescriptorsError(f"no session with the daemon ({error.strerror})") from error

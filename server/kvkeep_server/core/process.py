"""What the daemon asks of the kernel for its own process."""

import ctypes
import importlib
import os
import resource

# One of the daemon's threads may hold the GIL for so long before the event loop gets it.
SWITCH_INTERVAL_S = 0.0002
_PR_SET_DUMPABLE = 4


def forbid_inspection() -> None:
    """Closes /proc/<pid>/mem, ptrace and core dumps to everyone but root, also to processes of the
    same uid.

    The pool holds what users typed; a client of the daemon's own uid could otherwise write into it
    through /proc/<pid>/mem, past every seal.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE): {os.strerror(number)}")


def import_ahead() -> None:
    """Imports what numpy would at the first `np.unique`: 50 to 100 ms without an answer."""
    importlib.import_module("numpy.ma")


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open descriptors to the hard one and returns it.

    Each session takes a handful, and those on their way to clients count against the same limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

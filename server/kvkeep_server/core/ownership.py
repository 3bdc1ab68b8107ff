"""One daemon per runtime directory: a lock that dies with its holder, and a record of who holds
it."""

import errno
import fcntl
import os
import re
import socket
import stat
import struct
import threading
from pathlib import Path

from kvkeep_server.core.errors import FailedPreconditionError

_LOCK_NAME = "kvkeep.lock"
# pid, uid, gid
_UCRED = struct.Struct("=3i")
# The holder writes its name right after it took the lock: how often, and how long apart, to look.
_NAME_LOOKS = 50
_NAME_PAUSE_S = 0.01
# What connect() says when somebody listens there: its backlog is full, or it is of another kind.
_SERVED = {errno.EAGAIN, errno.EPROTOTYPE}


class Ownership:
    """Holds a directory for this process: that of the sockets, or one with data.

    The lock is `flock`: the kernel gives it back when the holder dies, so a stale file never locks
    anybody out. The file's content (pid, server epoch) is for the message to whom comes second.

    Args:
        runtime_dir: Made with mode 0700 where it is missing.
        server_epoch: Of this daemon.
        instead: What the operator can do where this directory is not to be had; for messages.
    """

    def __init__(
        self,
        runtime_dir: Path,
        *,
        server_epoch: int,
        instead: str = "name another directory with --runtime-dir",
    ) -> None:
        """See the class; `acquire` does the work."""
        self._dir = runtime_dir
        self._server_epoch = server_epoch
        self._instead = instead
        self._fd = -1

    def acquire(self) -> None:
        """Takes the directory.

        Raises:
            FailedPreconditionError: Another daemon has it (named by pid), or it is not ours to use.
        """
        try:
            self._make()
            status = self._dir.stat()
            if status.st_uid != os.geteuid():
                msg = f"{self._dir} belongs to uid {status.st_uid}; {self._instead}"
                raise FailedPreconditionError(msg)
            if status.st_mode & stat.S_IWOTH:
                msg = f"{self._dir} is writable by everybody; chmod o-w it, or {self._instead}"
                raise FailedPreconditionError(msg)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._dir / _LOCK_NAME, flags, 0o600)
            os.fchmod(fd, 0o600)
        except OSError as error:
            msg = f"{self._dir}: {error.strerror}; {self._instead}"
            raise FailedPreconditionError(msg) from error
        self._lock(fd, fcntl.LOCK_EX)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()}, server epoch {self._server_epoch}\n".encode(), 0)
        except OSError as error:
            os.close(fd)
            msg = f"{self._dir}: {error.strerror}; make room, or {self._instead}"
            raise FailedPreconditionError(msg) from error
        self._fd = fd

    def _make(self) -> None:
        """Makes the directory where it is missing, with mode 0700 whatever the umask takes."""
        if not self._dir.is_dir():
            self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._dir.chmod(0o700)

    def acquire_to_look(self) -> None:
        """Keeps daemons out while somebody looks at the directory; others may look too.

        Writes nothing. A directory without a lock was never a daemon's, and is not locked.

        Raises:
            FailedPreconditionError: A daemon has it (named by pid), or it cannot be looked at.
        """
        try:
            fd = os.open(self._dir / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._dir.is_dir():
                return
            msg = f"{self._dir}: {error.strerror}; {self._instead}"
            raise FailedPreconditionError(msg) from error
        self._lock(fd, fcntl.LOCK_SH)
        self._fd = fd

    def _lock(self, fd: int, kind: int) -> None:
        """Locks an open lock file, or closes it."""
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _name_of_holder(fd)
            os.close(fd)
            msg = f"another daemon serves {self._dir} ({holder}); stop it, or {self._instead}"
            raise FailedPreconditionError(msg) from None

    def clear_socket(self, path: Path, kind: socket.SocketKind) -> None:
        """Removes a socket that a dead daemon left.

        Raises:
            FailedPreconditionError: Somebody listens there, or it is no socket.
        """
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                msg = f"{path} is not a socket; move it away, or {self._instead}"
                raise FailedPreconditionError(msg)
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            holder = "another process"
            try:
                probe.connect(str(path))
                credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
                holder = f"pid {_UCRED.unpack(credentials)[0]}"
            except ConnectionRefusedError:
                path.unlink()
                return
            except OSError as error:
                if error.errno not in _SERVED:
                    msg = f"{path}: {error.strerror}; remove it, or {self._instead}"
                    raise FailedPreconditionError(msg) from error
        msg = f"{path} is served by {holder}; stop it, or {self._instead}"
        raise FailedPreconditionError(msg)

    def release(self) -> None:
        """Gives the directory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _name_of_holder(fd: int) -> str:
    """What the holder of the lock wrote into it. Until then a dead one's name may stand there."""
    pause, name = threading.Event(), ""
    for _ in range(_NAME_LOOKS):
        name = os.pread(fd, 200, 0).decode(errors="replace").strip()
        pid = re.match(r"pid (\d+)\b", name)
        if pid is not None and Path("/proc", pid[1]).exists():
            return name
        pause.wait(_NAME_PAUSE_S)
    # Whoever only looks leaves the name of a dead one.
    return f"{name}, which is not to be seen here" if name else "pid unknown"

"""The side socket that carries descriptors: hello, welcome, and what events bring later.

proto/kvkeep/v1/shared_memory.md, section 1. Its life is the session's: EOF here is the end.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.message import DecodeError

from kvkeep.descriptors import NoDescriptorsError
from kvkeep.errors import DeadlineError, UnavailableError
from kvkeep.v1.session_pb2 import SideHello, SidePacket

if TYPE_CHECKING:
    from pathlib import Path

FDS_A_PACKET_MAX: Final = 64
_PACKET_NBYTES_MAX: Final = 65536
_FD_NBYTES: Final = 4


class Delivery(NamedTuple):
    """One packet and its descriptors, which are the receiver's to close."""

    packet: SidePacket
    fds: list[int]


def close_all(fds: list[int]) -> None:
    """Close descriptors that were received."""
    for fd in fds:
        os.close(fd)


class FdSocket:
    """The client's end. `receive` is for one thread; `shut_down` may come from any."""

    def __init__(self, path: Path) -> None:
        """`path` is the daemon's fd socket."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)

    def open(self, hello: SideHello, timeout_s: float) -> list[Delivery]:
        """Connect, say hello, and return the welcome's packets.

        Errors: UnavailableError (nobody listens, or the daemon's sentence why not), DeadlineError.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(os.fspath(self._path))
            self._socket.send(hello.SerializeToString())
        except TimeoutError as error:
            raise DeadlineError(f"no daemon answered on {self._path} in {timeout_s} s") from error
        except OSError as error:
            raise UnavailableError(
                f"no daemon listens on {self._path} ({error}): start it with `kvkeep serve`, "
                "or give its runtime_dir"
            ) from error
        welcome: list[Delivery] = []
        try:
            while not welcome or welcome[-1].packet.more:
                welcome.append(self._receive_welcome(timeout_s))
        except BaseException:
            close_all([fd for delivery in welcome for fd in delivery.fds])
            raise
        self._socket.settimeout(None)
        return welcome

    def _receive_welcome(self, timeout_s: float) -> Delivery:
        try:
            delivery = self.receive()
        except TimeoutError as error:
            raise DeadlineError(f"no welcome on {self._path} in {timeout_s} s") from error
        if delivery is None:
            raise UnavailableError(f"the daemon on {self._path} hung up before its welcome")
        if delivery.packet.error:
            close_all(delivery.fds)
            raise UnavailableError(f"the daemon refused the session: {delivery.packet.error}")
        return delivery

    def receive(self) -> Delivery | None:
        """The next packet; None at the end of the session.

        Errors: TimeoutError while `open` has a deadline; NoDescriptorsError, which is the end of
        the session too: what the packet brought is gone.
        """
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _PACKET_NBYTES_MAX,
                socket.CMSG_SPACE(FDS_A_PACKET_MAX * _FD_NBYTES),
                socket.MSG_CMSG_CLOEXEC,
            )
        except TimeoutError:
            raise
        except OSError:
            return None
        fds = _descriptors(ancillary)
        try:
            packet = SidePacket.FromString(data)
        except DecodeError:
            close_all(fds)
            return None
        if flags & socket.MSG_CTRUNC and len(fds) < len(packet.fds) <= FDS_A_PACKET_MAX:
            close_all(fds)
            raise NoDescriptorsError(
                f"the daemon sent {len(packet.fds)} descriptors and {len(fds)} found room"
            )
        cut = flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        if not data or cut or len(packet.fds) != len(fds):
            close_all(fds)
            return None
        return Delivery(packet, fds)

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def shut_down(self) -> None:
        """End the session: the daemon and this side's reader see EOF."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back, without a word to the peer of a process that was forked."""
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % _FD_NBYTES
            fds += [fd for (fd,) in struct.iter_unpack("<i", data[:whole])]
    return fds

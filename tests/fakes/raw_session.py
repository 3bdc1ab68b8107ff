"""A session without the client library: fd socket, maps, stubs. For what the library never does."""

import mmap
import os
import socket
from pathlib import Path

import grpc
import numpy as np

from kvkeep.v1 import admin_pb2, admin_pb2_grpc, block_cache_pb2, block_cache_pb2_grpc, session_pb2
from tests.fakes.frames import HEADER, received, wire_spec

DEADLINE_S = 10.0
PAGE = 4096
KEY_NBYTES = 32


class RawSession:
    """Attached to the daemon of a runtime directory from `__enter__` to `__exit__`."""

    def __init__(self, runtime_dir: Path, *, staging_nbytes: int = 0) -> None:
        self._dir = runtime_dir
        self._staging_nbytes = staging_nbytes
        self.chunks: dict[int, mmap.mmap] = {}
        self.fds: dict[int, list[int]] = {}

    def __enter__(self):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(self._dir / "kvkeep.fd.sock"))
        hello = session_pb2.SideHello(
            client_name="raw", layout_versions=[2], staging_nbytes=self._staging_nbytes
        )
        self.socket.send(hello.SerializeToString())
        more = True
        while more:
            payload, fds, _, _ = socket.recv_fds(self.socket, 65536, 64)
            packet = session_pb2.SidePacket.FromString(payload)
            assert not packet.error, packet.error
            more = packet.more
            for description, fd in zip(packet.fds, fds, strict=True):
                self._take(description, fd)
        self.token = packet.session_token
        self.server_epoch = packet.server_epoch
        self.target = f"unix:{self._dir / 'kvkeep.sock'}"
        self.channel = grpc.insecure_channel(self.target)
        self.stub = block_cache_pb2_grpc.BlockCacheStub(self.channel)
        return self

    def _take(self, description, fd: int) -> None:
        self.fds.setdefault(description.kind, []).append(fd)
        if description.kind == session_pb2.FD_KIND_CHUNK:
            self.chunks[description.id] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        if description.kind == session_pb2.FD_KIND_STAGING:
            self.staging = mmap.mmap(fd, 0)
        if description.kind == session_pb2.FD_KIND_CALLS:
            self.calls = socket.socket(fileno=os.dup(fd))
            self.calls.settimeout(DEADLINE_S)

    def __exit__(self, *_) -> None:
        self.channel.close()
        self.calls.close()
        self.socket.close()
        self.staging.close()
        for chunk in self.chunks.values():
            chunk.close()
        for fd in (fd for fds in self.fds.values() for fd in fds):
            socket.close(fd)

    @property
    def metadata(self):
        return (("kvkeep-session-bin", self.token),)

    def call(self, name: str, request):
        return getattr(self.stub, name)(request, metadata=self.metadata, timeout=DEADLINE_S)

    def frame_call(self, method: int, request) -> tuple[int, bytes]:
        """(status, payload) of a call on the call socket."""
        payload = request.SerializeToString()
        self.calls.sendall(HEADER.pack(len(payload), method, 0, 0, 1) + payload)
        nbytes, status, _, _, call_id = HEADER.unpack(received(self.calls, HEADER.size))
        assert call_id == 1
        return status, received(self.calls, nbytes)

    def open_namespace(self, block_nbytes: int, model: str = "raw"):
        """One FULL group, one rank."""
        spec = wire_spec(block_nbytes, model)
        request = block_cache_pb2.OpenNamespaceRequest(spec=spec, layout_version=2)
        return self.call("OpenNamespace", request)

    def commit(self, set_index: int, keys: bytes, offsets: list[int]):
        """Commits blocks that lie at these offsets of staging."""
        packed = np.array(offsets, np.uint64).tobytes()
        return self.call(
            "Commit",
            block_cache_pb2.CommitRequest(
                set_index=set_index,
                keys=keys,
                groups=[block_cache_pb2.StagedGroup(staging_offsets=packed)],
            ),
        )

    def acquire(self, set_index: int, keys: bytes):
        """Leases; the answer and the addresses of its blocks."""
        request = block_cache_pb2.AcquireRequest(set_index=set_index, keys=keys)
        answer = self.call("Acquire", request)
        if not answer.columns:
            return answer, []
        return answer, np.frombuffer(answer.columns[0].addresses, np.uint64).tolist()

    def stats(self):
        """The daemon's figures."""
        stub = admin_pb2_grpc.AdminStub(self.channel)
        return stub.Stats(admin_pb2.StatsRequest(), timeout=DEADLINE_S)

    def block(self, address: int, nbytes: int) -> bytes:
        """A block's bytes, as the pool holds them."""
        start = (address & 0xFFFFFFFF) * PAGE
        return self.chunks[address >> 32][start : start + nbytes]

# ruff: noqa: N802 - the methods have the names of the wire
"""A small daemon in the test's own process, for what a real one does only by accident.

It speaks the fd socket and BlockCache, stores blocks in one FakeChunk, never evicts by itself, and
fails or waits where a test says so. Threads, not asyncio, and no limits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import block_cache_pb2_grpc as pb_grpc
from kvkeep.v1 import session_pb2
from kvkeep.v1.admin_pb2 import StatsResponse
from kvkeep.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from tests.fakes import frames
from tests.fakes.late_blocks import LateBlocks
from tests.fakes.regions import FakeChunk, FakeIndex, FakeRegion, FakeTouchRing
from tests.vectors.make_vectors import namespace_encoding

MiB = 1 << 20


@dataclass
class Failure:
    """What the next call of one method answers instead."""

    code: grpc.StatusCode
    details: str = "planted"
    trailing: tuple[tuple[str, str], ...] = ()
    after_work: bool = False


@dataclass
class FakeSession:
    token: bytes
    connection: socket.socket
    staging: FakeRegion
    ring: FakeTouchRing
    hello: session_pb2.SideHello
    calls: socket.socket
    sequence: int = 0
    heartbeats: int = 0
    events: deque[pb.AttachEvent] = field(default_factory=deque)
    wake: threading.Condition = field(default_factory=threading.Condition)
    over: bool = False
    ended: bool = False


@dataclass
class OpenSet:
    spec: pb.NamespaceSpec
    ranks: list[int]
    set_id: bytes

    def namespace_id(self, rank: int) -> bytes:
        data = b"kvkeep-rank-v1" + self.set_id + struct.pack("<I", rank)
        return hashlib.sha256(data).digest()[:16]


def set_id_of(spec: pb.NamespaceSpec) -> bytes:
    fields: dict[str, Any] = {
        name: getattr(spec, name)
        for name in ("tenant", "model", "weights_fingerprint", "engine", "layout_version")
    }
    fields |= {
        name: getattr(spec, name)
        for name in ("kv_dtype", "hash_algorithm", "key_nbytes", "tp_size", "pp_size", "dp_size")
    }
    fields |= {name: getattr(spec, name) for name in ("cp_size", "replicated", "namespace_epoch")}
    fields["hash_root"] = spec.hash_root.hex()
    fields["layout_switches"] = list(spec.layout_switches)
    names = ("name", "kind", "tokens_per_block", "block_nbytes", "window_tokens", "state_mode")
    fields["groups"] = [{name: getattr(g, name) for name in names} for g in spec.groups]
    return hashlib.sha256(namespace_encoding(fields)).digest()[:16]


class _End:
    """One end of a call socket, offered like a region."""

    nbytes = 0

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def client_fd(self) -> int:
        return os.dup(self._end.fileno())


class FakeDaemon(pb_grpc.BlockCacheServicer):
    """Use as a context manager."""

    def __init__(
        self, directory: Path, *, chunk_nbytes: int = 4 * MiB, staging_nbytes: int = MiB
    ) -> None:
        self.directory = directory
        self.server_epoch = secrets.randbits(62) + 1
        self.index = FakeIndex(64, server_epoch=self.server_epoch)
        self.chunks = [FakeChunk(0, chunk_nbytes, server_epoch=self.server_epoch)]
        self.staging_nbytes = staging_nbytes
        self.session_timeout_ms = 30_000
        self.lease_ttl_ms = 30_000
        self.sessions: dict[bytes, FakeSession] = {}
        self.opened: list[OpenSet] = []
        self.leases: set[int] = set()
        self.calls: list[str] = []
        self.failures: dict[str, deque[Failure]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.open_to_calls = frames.opened()
        self.refuse_hello = ""
        self.late = LateBlocks()
        self.welcome_kinds = set(session_pb2.FdKind.values())
        self._next_lease = 1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = grpc.server(ThreadPoolExecutor(16))

    # --- life

    def __enter__(self) -> Self:
        self._listener.bind(str(self.directory / "kvkeep.fd.sock"))
        self._listener.listen(64)
        pb_grpc.add_BlockCacheServicer_to_server(self, self._server)
        add_AdminServicer_to_server(_Admin(self), self._server)
        self._server.add_insecure_port(f"unix:{self.directory / 'kvkeep.sock'}")
        self._server.start()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As a daemon that is killed: sockets close, nothing is said."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        self._listener.close()
        for gate in (*self.gates.values(), self.open_to_calls):
            gate.set()
        for session in list(self.sessions.values()):
            self.end(session)
        self._server.stop(0).wait()
        for name in ("kvkeep.sock", "kvkeep.fd.sock"):
            (self.directory / name).unlink(missing_ok=True)
        for region in (self.index, *self.chunks):
            region.close()

    def end(self, session: FakeSession) -> None:
        """Hang up on one client."""
        self.sessions.pop(session.token, None)
        with session.wake:
            if session.ended:
                return  # the serving thread and stop() may meet here
            session.ended = session.over = True
            session.wake.notify_all()
        # Closing alone says nothing to the peer while another thread waits in recv().
        for end in (session.connection, session.calls):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        session.staging.close()
        session.ring.close()

    def only_session(self) -> FakeSession:
        (session,) = self.sessions.values()
        return session

    def fail_next(self, method: str, code: grpc.StatusCode, **more: Any) -> None:
        self.failures.setdefault(method, deque()).append(Failure(code, **more))

    # --- the fd socket

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # The client may go, or the daemon be stopped, at any moment.
        with contextlib.suppress(OSError):
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        hello = session_pb2.SideHello.FromString(connection.recv(4096))
        if self.refuse_hello:
            connection.send(session_pb2.SidePacket(error=self.refuse_hello).SerializeToString())
            connection.close()
            return
        staging = FakeRegion(hello.staging_nbytes or self.staging_nbytes, client_writes=True)
        own, theirs = socket.socketpair()
        token = secrets.token_bytes(32)
        session = FakeSession(token, connection, staging, FakeTouchRing(64), hello, own)
        self.sessions[token] = session
        threading.Thread(target=frames.serve, args=(own, self, token), daemon=True).start()
        offers = [
            (session_pb2.FD_KIND_INDEX, self.index.table_id, self.index),
            (session_pb2.FD_KIND_STAGING, 0, staging),
            (session_pb2.FD_KIND_TOUCH_RING, 0, session.ring),
            *((session_pb2.FD_KIND_CHUNK, chunk.chunk_id, chunk) for chunk in self.chunks),
            (session_pb2.FD_KIND_CALLS, 0, _End(theirs)),
        ]
        offers = [offer for offer in offers if offer[0] in self.welcome_kinds]
        try:
            # Two packets, so that `more` is tried.
            self._send(session, 0, offers[:1], more=True)
            self._send(session, 0, offers[1:])
            theirs.close()
            connection.recv(1)
        finally:
            self.end(session)

    def _send(
        self,
        session: FakeSession,
        sequence: int,
        offers: list[tuple[int, int, FakeRegion | _End]],
        *,
        more: bool = False,
    ) -> None:
        packet = session_pb2.SidePacket(
            sequence=sequence,
            session_token=b"" if sequence else session.token,
            server_epoch=self.server_epoch,
            layout_version=2,
            more=more,
            fds=[session_pb2.FdDescription(kind=k, id=i, nbytes=r.nbytes) for k, i, r in offers],
        )
        fds = [region.client_fd() for _, _, region in offers]
        socket.send_fds(session.connection, [packet.SerializeToString()], fds)
        for fd in fds:
            os.close(fd)

    def add_chunk(self, nbytes: int) -> FakeChunk:
        """A further chunk, and everyone is told."""
        chunk = FakeChunk(len(self.chunks), nbytes, server_epoch=self.server_epoch)
        self.chunks.append(chunk)
        for session in self.sessions.values():
            session.sequence += 1
            self._send(
                session, session.sequence, [(session_pb2.FD_KIND_CHUNK, chunk.chunk_id, chunk)]
            )
            added = pb.ChunkAdded(chunk_id=chunk.chunk_id, nbytes=nbytes)
            self.tell(session, pb.AttachEvent(sequence=session.sequence, chunk_added=added))
        return chunk

    def move_index(self, buckets: int) -> FakeIndex:
        """An empty table takes over."""
        old = self.index
        table_id = old.table_id + 1
        self.index = FakeIndex(buckets, table_id=table_id, server_epoch=self.server_epoch, seed=7)
        old.state = 2
        for session in self.sessions.values():
            session.sequence += 1
            self._send(
                session, session.sequence, [(session_pb2.FD_KIND_INDEX, table_id, self.index)]
            )
            moved = pb.IndexMoved(table_id=table_id)
            self.tell(session, pb.AttachEvent(sequence=session.sequence, index_moved=moved))
        old.close()
        return self.index

    @staticmethod
    def tell(session: FakeSession, event: pb.AttachEvent) -> None:
        with session.wake:
            session.events.append(event)
            session.wake.notify_all()

    # --- RPCs

    def _begin(self, method: str, context: grpc.ServicerContext) -> FakeSession:
        self.calls.append(method)
        metadata = dict(context.invocation_metadata())
        session = self.sessions.get(metadata.get("kvkeep-session-bin", b""))
        if session is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no live session has this token")
        gate = self.gates.get(method)
        if gate is not None:
            gate.wait(30)
        waiting = self.failures.get(method)
        if waiting and not waiting[0].after_work:
            self._fail(waiting.popleft(), context)
        return session

    def _end(self, method: str, context: grpc.ServicerContext) -> None:
        waiting = self.failures.get(method)
        if waiting and waiting[0].after_work:
            self._fail(waiting.popleft(), context)

    @staticmethod
    def _fail(failure: Failure, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(failure.trailing)
        context.abort(failure.code, failure.details)

    def OpenNamespace(self, request, context):
        self._begin("OpenNamespace", context)
        spec = request.spec
        size = spec.tp_size * spec.pp_size * spec.dp_size * spec.cp_size
        ranks = list(request.local_ranks) or list(range(1 if spec.replicated else size))
        opened = OpenSet(spec, ranks, set_id_of(spec))
        self.opened.append(opened)
        return pb.OpenNamespaceResponse(
            set_index=len(self.opened) - 1,
            set_id=opened.set_id,
            ranks=[
                pb.RankNamespace(rank=rank, namespace_id=opened.namespace_id(rank))
                for rank in ranks
            ],
            limits=pb.Limits(keys_max=32768, lease_ttl_ms=self.lease_ttl_ms),
            server_epoch=self.server_epoch,
            layout_version=2,
            slot_nbytes=[-(-group.block_nbytes // 4096) * 4096 for group in spec.groups],
            near_misses=[
                pb.NearMiss(set_id=other.set_id, differing_fields=["kv_dtype"])
                for other in self.opened
                if other.spec.kv_dtype != spec.kv_dtype
            ],
        )

    def Attach(self, request_iterator, context):
        session = self._begin("Attach", context)

        def beats() -> None:
            # The iterator raises when the call is over.
            with contextlib.suppress(Exception):
                for _ in request_iterator:
                    session.heartbeats += 1

        threading.Thread(target=beats, daemon=True).start()
        timeout_ms = self.session_timeout_ms
        attached = pb.Attached(server_epoch=self.server_epoch, session_timeout_ms=timeout_ms)
        yield pb.AttachEvent(attached=attached)
        while not session.over and context.is_active():
            with session.wake:
                session.wake.wait(0.05)
                events = [session.events.popleft() for _ in range(len(session.events))]
            yield from events

    def Acquire(self, request, context):
        self._begin("Acquire", context)
        opened = self.opened[request.set_index]
        keys = _split(request.keys, opened.spec.key_nbytes)
        shards = [(rank, g) for rank in opened.ranks for g in range(len(opened.spec.groups))]
        columns: dict[tuple[int, int], list[int]] = {shard: [] for shard in shards}
        blocks = 0
        for key in keys:
            rows = [self.index.row_of(opened.namespace_id(r), g, key) for r, g in shards]
            if any(row is None for row in rows):
                break
            for shard, row in zip(shards, rows, strict=True):
                columns[shard].append(row)
            blocks += 1
        skip = min(request.skip_blocks, blocks)
        leased = blocks - skip
        if request.byte_budget:
            unit = sum(g.block_nbytes for g in opened.spec.groups) * len(opened.ranks)
            leased = min(leased, request.byte_budget // unit)
        lease_id = 0
        if leased:
            lease_id, self._next_lease = self._next_lease, self._next_lease + 1
            self.leases.add(lease_id)
        ready = self.late.keep_back(lease_id, range(skip, skip + leased), columns, self._column)
        rest, leased = 4 if ready == leased else 2, ready
        status = bytes([1] * (skip + leased) + [rest] * (blocks - skip - leased))
        return pb.AcquireResponse(
            lease_id=lease_id,
            lease_ttl_ms=request.lease_ttl_ms or self.lease_ttl_ms,
            prefix_blocks=blocks,
            leased_blocks=leased,
            status=status + bytes([3]) * (len(keys) - blocks),
            columns=[
                self._column(shard, rows[skip : skip + leased])
                for shard, rows in columns.items()
                if leased
            ],
            ended=pb.MISS_REASON_NEVER_SEEN if blocks < len(keys) else 0,
        )

    def _column(self, shard: tuple[int, int], rows: Sequence[int]) -> pb.LeasedColumn:
        addresses = self.index.place[list(rows)]
        return pb.LeasedColumn(
            rank=shard[0],
            group=shard[1],
            addresses=addresses.tobytes(),
            generations=self._generations(addresses),
        )

    def Await(self, request, context):
        """A piece each time that its gate is opened, if there is one."""
        self._begin("Await", context)
        yield from self.late.pieces(request.lease_id, self.gates.get("Await"))

    def _generations(self, addresses: np.ndarray) -> bytes:
        """An address that is no slot's has one all the same."""
        generations = []
        for address in addresses.tolist():
            page, known = address & 0xFFFFFFFF, address >> 32 < len(self.chunks)
            column = self.chunks[address >> 32].generations if known else ()
            generations.append(int(column[page]) if page < len(column) else 2)
        return struct.pack(f"<{len(generations)}Q", *generations)

    def Release(self, request, context):
        self._begin("Release", context)
        self.leases -= set(request.lease_ids)
        return pb.ReleaseResponse(released=len(request.lease_ids))

    def Renew(self, request, context):
        self._begin("Renew", context)
        status = bytes(1 if lease in self.leases else 3 for lease in request.lease_ids)
        return pb.RenewResponse(status=status, lease_ttl_ms=request.lease_ttl_ms or 30_000)

    def Commit(self, request, context):
        session = self._begin("Commit", context)
        opened = self.opened[request.set_index]
        keys = _split(request.keys, opened.spec.key_nbytes)
        namespace_id = opened.namespace_id(request.rank)
        status = []
        for at, key in enumerate(keys):
            there = self.index.row_of(namespace_id, 0, key) is not None
            status.append(pb.COMMIT_STATUS_ALREADY_STORED if there else pb.COMMIT_STATUS_STORED)
            for group in request.groups if not there else ():
                (offset,) = struct.unpack_from("<Q", group.staging_offsets, 8 * at)
                nbytes = opened.spec.groups[group.group].block_nbytes
                data = session.staging.buffer[offset : offset + nbytes]
                self.put(namespace_id, group.group, key, data)
        self._end("Commit", context)
        stored = status.count(pb.COMMIT_STATUS_STORED)
        return pb.CommitResponse(
            status=bytes(status), stored=stored, already_stored=len(status) - stored
        )

    def Remove(self, request, context):
        """Knows no parents, so nothing follows a key."""
        self._begin("Remove", context)
        opened = self.opened[request.set_index]
        status = []
        for key in _split(request.keys, opened.spec.key_nbytes):
            shards = [
                (opened.namespace_id(rank), group)
                for rank in opened.ranks
                for group in range(len(opened.spec.groups))
                if self.index.row_of(opened.namespace_id(rank), group, key) is not None
            ]
            for namespace_id, group in shards:
                self.index.remove(namespace_id, group, key)
            there = pb.REMOVAL_STATUS_REMOVED if shards else pb.REMOVAL_STATUS_ABSENT
            status.append(there)
        removed = status.count(pb.REMOVAL_STATUS_REMOVED)
        return pb.RemoveResponse(
            removed=removed, unknown=len(status) - removed, status=bytes(status)
        )

    def put(
        self, namespace_id: bytes, group: int, key: bytes, data: bytes, chunk_id: int = 0
    ) -> int:
        """Store one block behind the client's back; its page."""
        chunk = self.chunks[chunk_id]
        page = chunk.allocate(len(data))
        chunk.write(page, data)
        self.index.insert(namespace_id, group, key, chunk.address(page))
        return page


class _Admin(AdminServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Stats(self, request, context):
        return StatsResponse(
            server_epoch=self._daemon.server_epoch, leases=len(self._daemon.leases)
        )


def _split(packed: bytes, nbytes: int) -> list[bytes]:
    return [packed[at : at + nbytes] for at in range(0, len(packed), nbytes)]


def block_bytes(key: bytes, nbytes: int) -> bytes:
    """Different for each key, and different at each place."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(nbytes)

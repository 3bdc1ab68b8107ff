"""Answers a session's call socket from another host.

What a client does is the same wherever its daemon is: it sends frames on a call socket, and finds
blocks in chunks and staging memory. Here the other end of that socket is in this process: each call
goes on over gRPC, and where it is about bytes they travel with it. An Acquire is answered when the
blocks of its lease have been fetched, a Commit sends what lies in the staging memory.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import struct
import threading
import time
import zlib
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from kvkeep.call_socket import Reply
from kvkeep.checksums import seal
from kvkeep.fetched import FetchedChunk
from kvkeep.fetching import RemoteLease, cut_acquired, cut_arrived
from kvkeep.reading import STREAM_MAX_S, Came
from kvkeep.results import BlockStatus
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1.session_pb2 import CallMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.remote_channel import RemoteChannel

_HEADER: Final = struct.Struct("<IHHII")
_MORE: Final = 1
_RESOURCE_EXHAUSTED: Final = 8
_INTERNAL: Final = 13
_UNAVAILABLE: Final = 14
_CHUNK_NBYTES_MAX: Final = 1 << 20
# Room for the other fields of a message.
_FIELDS_NBYTES: Final = 4096
_CALL_TIMEOUT_S: Final = 10.0
# As many streams as the daemon gives one client by default.
_STREAMS: Final = 4
# What the daemon may take long for; a caller who waits less hangs up before.
_LONG: Final = frozenset({CallMethod.CALL_METHOD_ACQUIRE, CallMethod.CALL_METHOD_REMOVE})
# A lease that ran out is forgotten so much later: its answer may just be on its way to its caller.
_KEPT_S: Final = 10.0
_NO_MEMORY_AGAIN_S: Final = 1.0
_NAMES: Final[dict[int, str]] = {
    method: CallMethod.Name(method).removeprefix("CALL_METHOD_").title().replace("_", "")
    for method in CallMethod.values()
}

_log = logging.getLogger("kvkeep")


class OpenedSet(NamedTuple):
    """What is known of a namespace set by its handle.

    Attributes:
        block_nbytes: Of each group.
        full: Groups that need every block from the first one.
    """

    block_nbytes: tuple[int, ...]
    full: frozenset[int]


class Bridge:
    """Between a socket and a channel, from `start` to `close`.

    Attributes:
        sets: By handle; those that were opened in this session.
        chunks: What live leases show, by chunk id. Replaced, never changed.
    """

    def __init__(
        self,
        *,
        end: socket.socket,
        channel: RemoteChannel,
        staging: memoryview,
        show: Callable[[dict[int, FetchedChunk]], None],
        timeout_s: float,
    ) -> None:
        """`end` is the daemon's end of the call socket; `show` gets all chunks at each change.

        `timeout_s` is what a caller waits for an answer that says nothing else.
        """
        self.channel = channel
        self.sets: dict[int, OpenedSet] = {}
        self.chunks: dict[int, FetchedChunk] = {}
        self._end = end
        self._staging = staging
        self._show = show
        self._timeout_s = timeout_s
        self._message_nbytes_max = _CHUNK_NBYTES_MAX + _FIELDS_NBYTES
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._leases: dict[int, RemoteLease] = {}
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._streams: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to answer."""
        for work in [self._receive, self._send, *[self._stream] * _STREAMS]:
            self._start(work)

    @staticmethod
    def _start(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="kvkeep-remote", daemon=True).start()

    def close(self) -> None:
        """Answer nothing more. Idempotent."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._replies.put(None)
        for _ in range(_STREAMS):
            self._streams.put(None)
        self.channel.close()

    # --- threads

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._end.makefile("rb") as frames:
            while header := frames.read(_HEADER.size):
                if len(header) < _HEADER.size:
                    return
                nbytes, method, _, _, call_id = _HEADER.unpack(header)
                payload = frames.read(nbytes)
                if len(payload) < nbytes:
                    return
                answer: Callable[[Reply], None] = partial(self._answer, call_id)
                _or_fail(answer, self._take, method, payload, answer)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._replies.get()) is not None:
                self._end.sendall(frame)
        self._end.close()

    def _stream(self) -> None:
        while (work := self._streams.get()) is not None:
            work()

    # --- calls

    def _take(self, method: int, payload: bytes, answer: Callable[[Reply], None]) -> None:
        name = _NAMES.get(method, "Unknown")
        if method == CallMethod.CALL_METHOD_COMMIT:
            self._streams.put(partial(_or_fail, answer, self._commit, payload, answer))
            return
        if method == CallMethod.CALL_METHOD_AWAIT:
            # It lives as long as blocks come: not in the place of those who have work.
            self._start(partial(_or_fail, answer, self._await, payload, answer))
            return
        on_reply = answer
        if method == CallMethod.CALL_METHOD_RELEASE:
            self._forget(pb.ReleaseRequest.FromString(payload).lease_ids)
        elif method == CallMethod.CALL_METHOD_ACQUIRE:
            on_reply = partial(_or_fail, answer, self._acquired, payload, time.monotonic(), answer)
        elif method == CallMethod.CALL_METHOD_OPEN_NAMESPACE:
            on_reply = partial(_or_fail, answer, self._opened, payload, answer)
        elif method == CallMethod.CALL_METHOD_RENEW:
            on_reply = partial(_or_fail, answer, self._renewed, payload, answer)
        timeout_s = STREAM_MAX_S if method in _LONG else _CALL_TIMEOUT_S
        self.channel.begin(name, payload, timeout_s, on_reply)

    def _answer(self, call_id: int, reply: Reply) -> None:
        retry_ms = round(reply.retry_after_s * 1000)
        flags = _MORE if reply.more else 0
        header = _HEADER.pack(len(reply.payload), reply.status, flags, retry_ms, call_id)
        self._replies.put(header + reply.payload)

    def _opened(self, payload: bytes, answer: Callable[[Reply], None], reply: Reply) -> None:
        if not reply.status:
            groups = pb.OpenNamespaceRequest.FromString(payload).spec.groups
            response = pb.OpenNamespaceResponse.FromString(reply.payload)
            full = [i for i, one in enumerate(groups) if one.kind == pb.GROUP_KIND_FULL]
            self._message_nbytes_max = response.limits.message_nbytes_max
            self.sets[response.set_index] = OpenedSet(
                tuple(group.block_nbytes for group in groups), frozenset(full)
            )
        answer(reply)

    def _acquired(
        self, payload: bytes, began_s: float, answer: Callable[[Reply], None], reply: Reply
    ) -> None:
        if reply.status:
            answer(reply)
            return
        self._forget(())
        response = pb.AcquireResponse.FromString(reply.payload)
        if not response.lease_id:
            answer(reply)
            return
        request = pb.AcquireRequest.FromString(payload)
        opened = self.sets[request.set_index]
        over_s = time.monotonic() + response.lease_ttl_ms / 1000
        lease = RemoteLease(response.lease_id, over_s, opened.block_nbytes, opened.full)
        with self._lock:
            self._leases[response.lease_id] = lease
        # A caller who lets the daemon wait for long waits for that long himself.
        until_s = began_s + max(0.8 * self._timeout_s, request.wait_ms / 1000)
        fetch = partial(self._fetch_acquired, lease, response, until_s, answer)
        self._streams.put(partial(_or_fail, answer, fetch))

    def _fetch_acquired(
        self,
        lease: RemoteLease,
        response: pb.AcquireResponse,
        until_s: float,
        answer: Callable[[Reply], None],
    ) -> None:
        try:
            if response.columns:
                cut_acquired(response, self._fetch(lease, response.columns, until_s))
        except BaseException:
            given_back = pb.ReleaseRequest(lease_ids=[lease.lease_id])
            self._forget(given_back.lease_ids)
            payload = given_back.SerializeToString()
            self.channel.begin("Release", payload, _CALL_TIMEOUT_S, lambda _: None)
            raise
        answer(Reply(0, 0.0, response.SerializeToString()))

    def _renewed(self, payload: bytes, answer: Callable[[Reply], None], reply: Reply) -> None:
        if not reply.status:
            response = pb.RenewResponse.FromString(reply.payload)
            over_s = time.monotonic() + response.lease_ttl_ms / 1000
            ids = pb.RenewRequest.FromString(payload).lease_ids
            with self._lock:
                for lease_id, status in zip(ids, response.status, strict=False):
                    lease = self._leases.get(lease_id)
                    if lease is not None and status == pb.RENEW_STATUS_RENEWED:
                        lease.over_s = over_s
        answer(reply)

    def _await(self, payload: bytes, answer: Callable[[Reply], None]) -> None:
        request = pb.AwaitRequest.FromString(payload)
        lease, until_s = self._leases.get(request.lease_id), time.monotonic() + STREAM_MAX_S

        def arrived(response: pb.AwaitResponse) -> bool:
            came = Came(0, BlockStatus.READY)
            if response.columns:
                came = self._fetch_arrived(lease, response, until_s)
                cut_arrived(response, came)
            answer(Reply(0, 0.0, response.SerializeToString(), more=True))
            return came.why is BlockStatus.READY

        answer(self.channel.arrivals(request, STREAM_MAX_S, arrived))

    def _fetch_arrived(
        self, lease: RemoteLease | None, response: pb.AwaitResponse, until_s: float
    ) -> Came:
        try:
            if lease is not None:
                return self._fetch(lease, response.columns, until_s)
        except (OSError, MemoryError):
            _log.warning("no memory for blocks that arrived")
        # Its addresses are those of the daemon's pool, and say nothing here.
        del response.columns[:]
        return Came(0, BlockStatus.TIER_DOWN)

    def _fetch(
        self, lease: RemoteLease, columns: Sequence[pb.LeasedColumn], until_s: float
    ) -> Came:
        """What came of these columns, which name it from now on."""
        chunk = FetchedChunk(self._next_id(), lease.pages(columns))
        came = lease.fetch(self.channel, columns, chunk, until_s)
        with self._lock:
            if lease.lease_id in self._leases:  # or it was given back meanwhile
                self._show_all({**self.chunks, chunk.chunk_id: chunk})
        return lease.cut(columns, came)

    def _next_id(self) -> int:
        """A chunk id that no live lease has."""
        with self._lock:
            return next(i % 0x10000 for i in self._ids if i % 0x10000 not in self.chunks)

    def _forget(self, lease_ids: Iterable[int]) -> None:
        """Leases that are given back, and those that ran out; what their views show stays with the
        views."""
        before_s = time.monotonic() - _KEPT_S
        with self._lock:
            over = {one.lease_id for one in self._leases.values() if one.over_s < before_s}
            ended = [self._leases.pop(one) for one in {*over, *lease_ids} & self._leases.keys()]
            gone = {chunk_id for lease in ended for chunk_id in lease.chunk_ids}
            if gone:
                self._show_all({i: one for i, one in self.chunks.items() if i not in gone})

    def _show_all(self, chunks: dict[int, FetchedChunk]) -> None:
        self.chunks = chunks
        self._show(chunks)

    def _commit(self, payload: bytes, answer: Callable[[Reply], None]) -> None:
        request = pb.CommitRequest.FromString(payload)
        until_s = time.monotonic() + max(self._timeout_s, request.wait_ms / 1000)
        first = seal("Write", pb.WriteRequest(header=request))
        while True:
            messages = self._messages(first)
            reply = self.channel.write(messages, STREAM_MAX_S, first.message_crc32)
            again = reply.status == _RESOURCE_EXHAUSTED and reply.retry_after_s > 0
            if not again or time.monotonic() + reply.retry_after_s > until_s:
                answer(reply)
                return
            self.channel.pause(reply.retry_after_s)

    def _messages(self, first: pb.WriteRequest) -> Iterator[pb.WriteRequest]:
        """A Write: the header, then the bytes that lie in the staging memory."""
        yield first
        crc32 = first.message_crc32
        most = min(_CHUNK_NBYTES_MAX, self._message_nbytes_max - _FIELDS_NBYTES)
        parts: list[memoryview] = []
        offset = waiting = 0
        for part in self._parts(first.header, most):
            if waiting + len(part) > most:
                yield _message(parts, offset, crc32)
                offset, parts, waiting = offset + waiting, [], 0
            parts.append(part)
            waiting += len(part)
        if parts:
            yield _message(parts, offset, crc32)

    def _parts(self, request: pb.CommitRequest, most: int) -> Iterator[memoryview]:
        """Pieces of blocks, in the order of the header."""
        sizes = self.sets[request.set_index].block_nbytes
        for group in request.groups:
            nbytes = sizes[group.group]
            for start in np.frombuffer(group.staging_offsets, dtype="<u8").tolist():
                for at in range(start, start + nbytes, most):
                    yield self._staging[at : min(at + most, start + nbytes)]


def _or_fail(
    answer: Callable[[Reply], None], work: Callable[..., None], *arguments: object
) -> None:
    """A piece of work for one call: whatever it raises is that call's failure, and no more."""
    try:
        work(*arguments)
    except (OSError, MemoryError):
        answer(Reply(_RESOURCE_EXHAUSTED, _NO_MEMORY_AGAIN_S, b"no memory here for its blocks"))
    except DecodeError:
        answer(Reply(_UNAVAILABLE, 0.0, b"the daemon's answer came damaged; try again"))
    except Exception as error:  # noqa: BLE001 - its caller waits for an answer, whatever it is
        _log.exception("a call to another host failed")
        answer(Reply(_INTERNAL, 0.0, f"failed in this process: {error!r}".encode()))


def _message(parts: list[memoryview], offset: int, crc32: int) -> pb.WriteRequest:
    data = b"".join(parts)
    return pb.WriteRequest(data=data, offset=offset, crc32=zlib.crc32(data, crc32))

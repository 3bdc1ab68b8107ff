"""The calls of a session on another host, as they are on the wire, and its streams of bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kvkeep.transport import REMOTE_OPTIONS, call_failed, metadata_of, retry_after_of

# isort: split
import grpc

from kvkeep.call_socket import Reply
from kvkeep.checksums import crc32_of, ended, right, seal
from kvkeep.errors import SessionLostError
from kvkeep.v1.block_cache_pb2 import (
    AwaitRequest,
    AwaitResponse,
    WriteRequest,
    WriteResponse,
)
from kvkeep.v1.block_cache_pb2_grpc import BlockCacheStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.v1.block_cache_pb2 import ReadRequest, ReadResponse

# A window of 1 MiB holds a stream up where a round trip takes more than 2 ms; gRPC's own probing
# lets a reader that is held up buffer 16 MiB a stream.
_STREAMING_OPTIONS: Final = (
    *REMOTE_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
)
_CLOSED: Final = Reply(grpc.StatusCode.UNAUTHENTICATED.value[0], 0.0, b"the session was closed")
_DAMAGED: Final = Reply(
    grpc.StatusCode.UNAVAILABLE.value[0],
    0.0,
    b"the daemon's answer came damaged: its CRC-32 is another; look at the network",
)


class RemoteChannel:
    """The calls of a session on another host, as they are on the wire. Any thread may call."""

    def __init__(self, address: str, session_token: bytes) -> None:
        """Opens nothing: the channel connects with the first call."""
        self._channel = grpc.insecure_channel(address, options=_STREAMING_OPTIONS)
        self._stub: BlockCacheStub = BlockCacheStub(self._channel)
        self._metadata = metadata_of(session_token)
        self._closed = threading.Event()

    def begin(
        self, name: str, payload: bytes, timeout_s: float, on_reply: Callable[[Reply], None]
    ) -> None:
        """A unary call of BlockCache, by its name; `on_reply` runs in a thread of gRPC's."""
        try:
            crc32 = crc32_of(name, payload)
            future = self._unary(name).future(
                ended(payload, crc32), timeout=timeout_s, metadata=self._metadata
            )
            future.add_done_callback(lambda done: on_reply(_ended(done, crc32)))
        except ValueError:
            # grpc says so when the channel is closed.
            on_reply(_CLOSED)

    def call(self, name: str, payload: bytes, timeout_s: float) -> Reply:
        """As `begin`, and wait."""
        try:
            crc32 = crc32_of(name, payload)
            answer = self._unary(name)(
                ended(payload, crc32), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            return _refused(error)
        except ValueError:
            return _CLOSED
        return _answered(answer, crc32)

    def _unary(self, name: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        """Of bytes, as they are."""
        return self._channel.unary_unary(f"/kvkeep.v1.BlockCache/{name}")

    def read(self, request: ReadRequest, timeout_s: float) -> Iterator[ReadResponse]:
        """Read, of a request that is sealed. Errors: as `Transport`."""
        try:
            yield from self._stub.Read(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise call_failed(error, "Read") from error
        except ValueError as error:
            raise SessionLostError("Read: the session was closed") from error

    def arrivals(
        self,
        request: AwaitRequest,
        timeout_s: float,
        on_arrival: Callable[[AwaitResponse], bool],
    ) -> Reply:
        """Await, until its end or until `on_arrival` says that no more is wanted; how it ended."""
        try:
            crc32 = seal("Await", request).message_crc32
            call: grpc.UnaryStreamMultiCallable[AwaitRequest, bytes] = self._channel.unary_stream(
                "/kvkeep.v1.BlockCache/Await", request_serializer=AwaitRequest.SerializeToString
            )
            answers = call(request, timeout=timeout_s, metadata=self._metadata)
            for answer in answers:
                if not right(answer, crc32):
                    answers.cancel()
                    return _DAMAGED
                if not on_arrival(AwaitResponse.FromString(answer)):
                    answers.cancel()
                    break
        except grpc.RpcError as error:
            return _refused(error)
        except ValueError:
            return _CLOSED
        return Reply(0, 0.0, b"")

    def write(self, requests: Iterator[WriteRequest], timeout_s: float, crc32: int) -> Reply:
        """Write, of a first message that is sealed with this; the payload is a CommitResponse."""
        try:
            call: grpc.StreamUnaryMultiCallable[WriteRequest, bytes] = self._channel.stream_unary(
                "/kvkeep.v1.BlockCache/Write", request_serializer=WriteRequest.SerializeToString
            )
            response = call(requests, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            return _refused(error)
        except ValueError:
            return _CLOSED
        reply = _answered(response, crc32)
        if reply.status:
            return reply
        return Reply(0, 0.0, WriteResponse.FromString(reply.payload).commit.SerializeToString())

    def pause(self, seconds: float) -> None:
        """Wait before another try, but not when there can be none."""
        self._closed.wait(max(0.0, seconds))

    def close(self) -> None:
        """Ends every call under way."""
        self._closed.set()
        self._channel.close()


def _answered(payload: bytes | None, crc32: int) -> Reply:
    """To a request with this CRC-32; gRPC has None for a message that did not come, where only its
    status did."""
    whole = payload is not None and right(payload, crc32)
    return Reply(0, 0.0, payload) if payload is not None and whole else _DAMAGED


def _ended(done: grpc.Future[bytes], crc32: int) -> Reply:
    """What a call came to."""
    try:
        return _answered(done.result(), crc32)
    except grpc.RpcError as error:
        return _refused(error)
    except grpc.FutureCancelledError:
        return _CLOSED


def _refused(error: grpc.RpcError) -> Reply:
    code = error.code()
    return Reply(code.value[0], retry_after_of(error), (error.details() or str(code)).encode())

"""The daemon's end of a call socket, for a fake daemon: frames to methods of its servicer."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from google.protobuf.empty_pb2 import Empty

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2

MORE = 1
HEADER = struct.Struct("<IHHII")
CALLS: dict[int, tuple[str, Any]] = {
    session_pb2.CALL_METHOD_OPEN_NAMESPACE: ("OpenNamespace", pb.OpenNamespaceRequest),
    session_pb2.CALL_METHOD_LOOKUP: ("Lookup", pb.LookupRequest),
    session_pb2.CALL_METHOD_ACQUIRE: ("Acquire", pb.AcquireRequest),
    session_pb2.CALL_METHOD_RELEASE: ("Release", pb.ReleaseRequest),
    session_pb2.CALL_METHOD_RENEW: ("Renew", pb.RenewRequest),
    session_pb2.CALL_METHOD_COMMIT: ("Commit", pb.CommitRequest),
    session_pb2.CALL_METHOD_REMOVE: ("Remove", pb.RemoveRequest),
    session_pb2.CALL_METHOD_AWAIT: ("Await", pb.AwaitRequest),
}


def wire_spec(block_nbytes: int, model: str = "raw") -> pb.NamespaceSpec:
    """One FULL group, one rank, keys of 32 bytes, as it goes over the wire."""
    group = pb.GroupSpec(
        name="kv", kind=pb.GROUP_KIND_FULL, tokens_per_block=16, block_nbytes=block_nbytes
    )
    return pb.NamespaceSpec(
        model=model,
        weights_fingerprint="sha256:1",
        engine="test",
        layout_version="1",
        kv_dtype="bfloat16",
        hash_algorithm="sha256",
        key_nbytes=32,
        groups=[group],
    )


class _AbortedError(Exception):
    pass


class _Context:
    """What a servicer uses of gRPC's."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self.status, self.details, self.retry_after_ms = 0, "", 0

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("kvkeep-session-bin", self._token),)

    def set_trailing_metadata(self, trailing: Any) -> None:
        self.retry_after_ms = int(dict(trailing).get("kvkeep-retry-after-ms", 0))

    def abort(self, code: Any, details: str) -> None:
        self.status, self.details = code.value[0], details
        raise _AbortedError


def received(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes. Raises EOFError."""
    parts = b""
    while len(parts) < nbytes:
        part = sock.recv(nbytes - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


def opened() -> threading.Event:
    """Cleared, it keeps `serve` from reading the call after the next."""
    event = threading.Event()
    event.set()
    return event


def serve(sock: socket.socket, servicer: Any, token: bytes) -> None:
    """Answers calls until the other end or this one is closed, each in a thread of its own."""
    lock = threading.Lock()

    def answer(method: int, call_id: int, payload: bytes) -> None:
        name, kind = CALLS[method]
        context = _Context(token)

        def send(message: bytes, flags: int) -> None:
            retry_ms = context.retry_after_ms
            header = HEADER.pack(len(message), context.status, flags, retry_ms, call_id)
            with lock, suppress(OSError):
                sock.sendall(header + message)

        try:
            result = getattr(servicer, name)(kind.FromString(payload), context)
            if isinstance(result, Iterator):
                for one in result:
                    send(one.SerializeToString(), MORE)
                result = Empty()
            answer = result.SerializeToString()
        except _AbortedError:
            answer = context.details.encode()
        send(answer, 0)

    with suppress(EOFError, OSError):
        while True:
            servicer.open_to_calls.wait(30)
            nbytes, method, _, _, call_id = HEADER.unpack(received(sock, HEADER.size))
            call = (method, call_id, received(sock, nbytes))
            threading.Thread(target=answer, args=call, daemon=True).start()

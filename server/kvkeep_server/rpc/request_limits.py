"""How large the request of each call may be: what the largest one of use needs, no more.

To parse a message is work of the event loop that nobody can interrupt, and it goes by what is in
it, not by what of it is of use: 4 MiB of empty groups take 100 ms. So it is bounded before.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.keys import KEY_NBYTES_MAX
from kvkeep_server.rpc import checksums
from kvkeep_server.service.spec import GROUPS_MAX
from kvkeep_server.service.writing import CHUNK_NBYTES_MAX

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

# Hints, numbers, and tags of all fields of a request.
_REST_NBYTES = 4096
# A namespace: names and switches of 16 KiB, 4096 switches and local ranks at 2 and 6 bytes, groups.
_SMALL_NBYTES = 64 << 10
# As varint, with a tag each from who does not pack them.
_LEASE_ID_NBYTES = 11
# Position and staging offset.
_STAGED_NBYTES = 12
# Below this a message of nothing but fields takes 1 ms.
_WALKED_NBYTES = 64 << 10
_FIELDS_MAX = 64
# Fields that hold a message in which there may be many.
_INNER: Mapping[str, int] = {"Write": 1}
# Their ids may come unpacked, and their limit is low.
_MANY_FIELDS = frozenset({"Release", "Renew", "Unpin"})
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_NBYTES = {_FIXED64: 8, _FIXED32: 4}


class RequestLimits:
    """Bounds of requests, by the name of the call.

    Args:
        keys_max: Keys, leases or pins of one call.
        message_nbytes_max: Of any request.
    """

    def __init__(self, *, keys_max: int, message_nbytes_max: int) -> None:
        """See the class."""
        self.message_nbytes_max = message_nbytes_max
        keys = keys_max * KEY_NBYTES_MAX + _REST_NBYTES
        leases = keys_max * _LEASE_ID_NBYTES + _REST_NBYTES
        staged = GROUPS_MAX * (keys_max * _STAGED_NBYTES + _REST_NBYTES)
        of: Mapping[str, int] = {
            "Lookup": keys,
            "Acquire": keys,
            "Remove": keys,
            "Pin": keys,
            "Prefetch": keys,
            "Unpin": leases,
            "Release": leases,
            "Renew": leases,
            "Commit": keys + staged,
            "Write": max(keys + staged, CHUNK_NBYTES_MAX) + _REST_NBYTES,
        }
        self._of = {name: min(nbytes, message_nbytes_max) for name, nbytes in of.items()}
        self._others = min(_SMALL_NBYTES, message_nbytes_max)

    def of(self, name: str) -> int:
        """Bytes of the largest request of this call."""
        return self._of.get(name, self._others)

    def too_large(self, name: str, nbytes: int) -> InvalidArgumentError | None:
        """Why a request of this size is refused; None = it is not."""
        if nbytes <= self.of(name):
            return None
        return InvalidArgumentError(
            "request",
            f"a {name} of {nbytes} bytes",
            f"at most {self.of(name)} bytes, as limits.keys_max and limits.message_max give",
            "split the call",
        )

    def refusal(self, name: str, payload: bytes) -> InvalidArgumentError | None:
        """Why a request is not even parsed; None = it may be."""
        refused = self.too_large(name, len(payload))
        walked = len(payload) > _WALKED_NBYTES and name not in _MANY_FIELDS
        if refused is None and walked and not _few_fields(payload, _INNER.get(name)):
            return InvalidArgumentError(
                "request",
                f"a {name} of {len(payload)} bytes with more than {_FIELDS_MAX} fields",
                f"at most {_FIELDS_MAX} fields of a request above {_WALKED_NBYTES} bytes",
                "give each group and each packed field once",
            )
        return refused


def no_message(name: str, nbytes: int) -> InvalidArgumentError:
    """Of a call whose payload cannot be parsed."""
    return InvalidArgumentError(
        "request",
        f"{nbytes} bytes that are no {name}Request",
        "its request message, in protobuf's encoding",
        "use the stubs that come with kvkeep, or make some of proto/kvkeep/v1",
    )


def _few_fields(message: bytes, inner: int | None) -> bool:
    """Whether an encoded message has at most `_FIELDS_MAX` fields, those in it not counted, but for
    each field of the number `inner` by itself; what is no message has none more than were
    found."""
    at = 0
    for _ in range(_FIELDS_MAX + 1):
        if at >= len(message):
            return True
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind == _LENGTH:
            nbytes, at = _varint(message, at)
            if tag >> 3 == inner and not _few_fields(message[at : at + nbytes], None):
                return False
            at += nbytes
        elif kind in _FIXED_NBYTES:
            at += _FIXED_NBYTES[kind]
        else:
            return False  # a group of the old kind: no message of ours has one
    return False


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends; cut short where the message ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte, at = message[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value, at


class RequestGuard(grpc.aio.ServerInterceptor):
    """Holds the requests of our services to their limits before they are parsed.

    A method gets an `InvalidArgumentError` in place of a request that is refused, and raises it
    (`calls.accept`), also of one that is no message: gRPC's answer would be UNKNOWN or INTERNAL.

    Args:
        methods: Full names, "/kvkeep.v1.BlockCache/Acquire"; others are not ours.
        limits: See there.
        summed: What comes and goes is held against its CRC-32: see `checksums`.
    """

    def __init__(self, *, methods: Iterable[str], limits: RequestLimits, summed: bool) -> None:
        """See the class."""
        self._summed = summed
        self._names = {method: method.rpartition("/")[2] for method in methods}
        self._limits = limits
        self._guarded: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:  # noqa: ANN401 - grpc gives no type
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        name = self._names.get(handler_call_details.method)
        if handler is None or name is None:
            return handler
        guarded = self._guarded.get(handler_call_details.method)
        if guarded is None:
            guarded = self._guard(name, handler)
            self._guarded[handler_call_details.method] = guarded
        return guarded

    def _guard(self, name: str, handler: Any) -> Any:  # noqa: ANN401 - see above
        parse, limits = handler.request_deserializer, self._limits
        summed = self._summed and name in checksums.REQUESTS

        def parse_bounded(payload: bytes) -> object:
            refused = limits.refusal(name, payload)
            if refused is not None:
                return refused
            try:
                request = parse(payload)
            except DecodeError:
                return no_message(name, len(payload))
            # A chunk of a Write has a CRC-32 of its bytes.
            if summed and (name != "Write" or request.HasField("header")):
                return checksums.damage(name, payload) or request
            return request

        kind = "_".join(
            "stream" if streaming else "unary"
            for streaming in (handler.request_streaming, handler.response_streaming)
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        method = getattr(handler, kind)
        if self._summed and name in checksums.ANSWERS:
            method = _summed(kind, method)
        return make(method, parse_bounded, handler.response_serializer)


def _summed(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose answers have their CRC-32. That of a Write puts it there itself: only it sees
    the first message."""

    async def one(request: Any, context: object) -> object:  # noqa: ANN401 - any that has the field
        return checksums.sealed(await method(request, context), request.message_crc32)

    async def each(request: Any, context: object) -> AsyncIterator[object]:  # noqa: ANN401 - as above
        async for answer in method(request, context):
            yield checksums.sealed(answer, request.message_crc32)

    return {"unary_unary": one, "unary_stream": each}.get(kind, method)

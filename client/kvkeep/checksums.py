"""The CRC-32 of messages to and from other hosts: `message_crc32` of block_cache.proto."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:

    class Summed(Protocol):
        """A message that has the field."""

        message_crc32: int

        def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's
            """Its bytes."""
            ...

    Request = TypeVar("Request", bound=Summed)

# The field as it ends a message: its tag, number 15 and of 32 bits, and the value.
_END: Final = struct.Struct("<BI")
_TAG: Final = 15 << 3 | 5


def crc32_of(name: str, payload: bytes) -> int:
    """Of the request of a call, as it is encoded without the field."""
    return zlib.crc32(payload, zlib.crc32(name.encode()))


def ended(payload: bytes, crc32: int) -> bytes:
    """An encoded request with the field."""
    return payload + _END.pack(_TAG, crc32)


def seal(name: str, request: Request) -> Request:
    """The request of a call with the field, which it has not had."""
    request.message_crc32 = crc32_of(name, request.SerializeToString())
    return request


def right(answer: bytes, request_crc32: int) -> bool:
    """Whether an encoded answer is whole, and that of this request."""
    if len(answer) < _END.size:
        return False
    tag, crc32 = answer[-_END.size], int.from_bytes(answer[1 - _END.size :], "little")
    return tag == _TAG and crc32 == zlib.crc32(answer[: -_END.size], request_crc32)

"""The CRC-32 of messages from and to other hosts: `message_crc32` of `block_cache.proto`.

TCP's own 16 bits miss one damaged segment in 65,000, and a bit that flips in a key, a handle or a
position is another block's name: it would store acknowledged bytes under a key that nobody asked
for, or read those of another.
"""

import struct
import zlib
from typing import Protocol, TypeVar

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.core.errors import TierUnavailableError


class Summed(Protocol):
    """A message that has the field."""

    message_crc32: int

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's
        """Its bytes."""
        ...


Answer = TypeVar("Answer", bound=Summed)
_FIELD = "message_crc32"
# The field as it ends a message: its tag, number 15 and of 32 bits, and the value.
_END = struct.Struct("<BI")
_TAG = 15 << 3 | 5
_METHODS = pb.DESCRIPTOR.services_by_name["BlockCache"].methods
# Calls whose requests have the field, and those whose answers have it.
REQUESTS = frozenset(one.name for one in _METHODS if _FIELD in one.input_type.fields_by_name)
ANSWERS = frozenset(one.name for one in _METHODS if _FIELD in one.output_type.fields_by_name)


def damage(name: str, payload: bytes) -> TierUnavailableError | None:
    """What is wrong with a request as it came; None = nothing.

    Args:
        name: Of the call.
        payload: The encoded request.
    """
    if len(payload) >= _END.size:
        tag, crc32 = _END.unpack_from(payload, len(payload) - _END.size)
        own = memoryview(payload)[: -_END.size]
        if tag == _TAG and crc32 == zlib.crc32(own, zlib.crc32(name.encode())):
            return None
    return TierUnavailableError(
        f"the {name} came damaged: its CRC-32 is another, or it does not end with {_FIELD}; send "
        "it again, and look at the network"
    )


def sealed(answer: Answer, request_crc32: int) -> Answer:
    """The answer to a request, with its CRC-32: no other request's."""
    answer.message_crc32 = zlib.crc32(answer.SerializeToString(), request_crc32)
    return answer

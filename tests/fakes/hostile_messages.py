"""Messages at random: valid ones, half valid ones, nonsense, and bytes that are no message at all.

What a field is about is told by its name, so that a call that is new here meets them as well.
"""

from random import Random

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tests.fakes.frames import wire_spec

PAGE = 4096
NUMBERS = (0, 1, 2, 3, 7, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
TEXTS = ("", "m", "../evil", "org/model-SEP-name", "x" * 300, "\0", "\u202e", "ü" * 2000)
LENGTHS = (0, 1, 2, 3, 50, 3000)
DEPTH_MAX = 4
BITS = {
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_UINT64: 64,
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_INT64: 63,
}


class HostileMessages:
    """Makes them.

    Args:
        source: Of all that is random.

    Attributes:
        known: What the daemon answered, by name of the field: handles, leases, pins.
        keys: Packed keys of 32 bytes, of which some are stored.
    """

    def __init__(self, source: Random) -> None:
        self.source = source
        self.keys = source.randbytes(32 * 64)
        self.known: dict[str, list[object]] = {"layout_version": [2], "layout_versions": [2]}

    def learn(self, answer: Message) -> None:
        """Remembers the handles of an answer."""
        for name in ("set_index", "set_id", "lease_id", "pin_id", "namespace_epoch", "sequence"):
            value = getattr(answer, name, None)
            if value:
                values = self.known.setdefault(name, [])
                values.append(value)
                del values[:-32]

    def payload(self, kind: Descriptor) -> bytes:
        """An encoded message of this kind, or what was one."""
        payload = self.message(kind).SerializeToString()
        return payload if self.source.random() < 0.7 else self._spoilt(payload)

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        made = kind._concrete_class()
        if kind.name == "NamespaceSpec" and self.source.random() < 0.8:
            made.CopyFrom(wire_spec(PAGE, f"model {self.source.randrange(4)}"))
            if self.source.random() < 0.5:
                return made
        given = 0.9 if made.ByteSize() == 0 else 0.1
        for field in kind.fields:
            if self.source.random() < given and depth < DEPTH_MAX:
                self._fill(made, field, depth)
        return made

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None:
            if field.is_repeated:
                for _ in range(self.source.choice(LENGTHS[:4])):
                    getattr(made, field.name).append(self.message(field.message_type, depth + 1))
            else:
                part = self.message(field.message_type, depth + 1)
                getattr(made, field.name).CopyFrom(part)
        elif field.is_repeated:
            count = self.source.choice(LENGTHS)
            getattr(made, field.name).extend(self._value(field) for _ in range(count))
        else:
            setattr(made, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> object:
        known = self.known.get(field.name) or self.known.get(_singular(field.name))
        named = field.type != FieldDescriptor.TYPE_STRING
        if known and named and self.source.random() < 0.8:
            return self.source.choice(known)
        if field.cpp_type in BITS:
            numbers = (*NUMBERS, self.source.getrandbits(64))
            return self.source.choice(numbers) & ((1 << BITS[field.cpp_type]) - 1)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes(field.name)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.source.choice(TEXTS)
        if field.type == FieldDescriptor.TYPE_ENUM:
            return self.source.choice((0, 1, 2, 3, 9, 77, 2**31 - 1))
        return self.source.random() < 0.5

    def _bytes(self, name: str) -> bytes:
        first, count = self.source.randrange(8), self.source.randrange(16)
        if self.source.random() < 0.2:
            return self.source.randbytes(self.source.choice((1, 31, 32, 33, 64, 40_000)))
        if name == "keys":
            return self.keys[: 32 * count] if first < 6 else self.keys[32 * first :]
        if name == "parent_key":
            return self.keys[32 * first : 32 * first + 32] if first < 4 else b""
        if name == "staging_offsets":
            return (np.arange(count, dtype=np.uint64) * np.uint64(PAGE)).tobytes()
        if name == "positions":
            return np.arange(count, dtype=np.uint32).tobytes() if first < 2 else b""
        return self.source.randbytes(self.source.choice((0, 16, 4096)))

    def _spoilt(self, payload: bytes) -> bytes:
        spoilt = bytearray(payload)
        for _ in range(self.source.randrange(1, 6)):
            at = self.source.randrange(len(spoilt) + 1)
            what = self.source.randrange(4)
            if what == 0:
                spoilt[at:at] = self.source.randbytes(self.source.randrange(1, 20))
            elif what == 1:
                del spoilt[at : at + self.source.randrange(1, 20)]
            elif what == 2:
                spoilt[at:at] = spoilt[at // 2 : at]
            elif at < len(spoilt):
                spoilt[at] ^= 1 << self.source.randrange(8)
        return bytes(spoilt)


def _singular(name: str) -> str:
    """Of the name of a repeated field."""
    return {"set_indexes": "set_index"}.get(name, name.removesuffix("s"))

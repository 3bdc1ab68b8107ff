"""The two byte encodings of values that vLLM's block hashes are taken over. Encoders only.

`cbor` is canonical CBOR (RFC 8949, section 4.2.1). `opcodes` is what CPython's object serializer
(protocol 5) makes of the same values: vLLM's default hash is defined over it. Nothing here reads
either encoding back, and nothing that is read anywhere in kvkeep is in either.
"""

import struct
from collections.abc import Callable

from kvkeep.errors import InvalidArgumentError

Value = int | str | bytes | None | tuple["Value", ...]
"""What both encodings can hold."""

_CACHED_TOKENS_MAX = 1 << 18
_CBOR_FORMS = ((">BB", 1 << 8), (">BH", 1 << 16), (">BI", 1 << 32), (">BQ", 1 << 64))
_SHORT_TUPLE = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class TokenCodes(dict[int, bytes]):
    """The encoding of each token id; remembers those of an ordinary vocabulary.

    Args:
        encode_one: The encoding.
    """

    def __init__(self, encode_one: Callable[[int], bytes]) -> None:
        """See the class."""
        super().__init__()
        self._encode_one = encode_one

    def __missing__(self, token: int) -> bytes:
        """Encodes a token id that was not seen before."""
        code = self._encode_one(token)
        if token < _CACHED_TOKENS_MAX:
            self[token] = code
        return code

    def join(self, token_ids: list[int]) -> bytes:
        """Returns the joined encodings of some token ids."""
        return b"".join(map(self.__getitem__, token_ids))


def refusal(field: str, value: object, allowed: str, fix: str) -> InvalidArgumentError:
    """Returns the error that names an argument, its value (cut), what is allowed and the fix."""
    return InvalidArgumentError(f"{field} is {value!r:.100}; allowed is {allowed}: {fix}")


def _refused_part(value: object) -> InvalidArgumentError:
    allowed = "None, bool, str, bytes, int (64 bits in CBOR, 255 bytes else), tuples of them"
    return refusal("extra_keys", value, allowed, "convert it to one of these")


def cbor_head(major: int, number: int) -> bytes:
    """Encodes a CBOR head in its shortest form.

    Args:
        major: The major type, in the upper three bits.
        number: Value, length or count, 0 to 2**64 - 1.

    Raises:
        InvalidArgumentError: The number is larger.
    """
    if number < 24:
        return bytes((major | number,))
    for code, (form, limit) in enumerate(_CBOR_FORMS):
        if number < limit:
            return struct.pack(form, major | (24 + code), number)
    raise _refused_part(number)


def cbor(value: Value) -> bytes:
    """Encodes a value as canonical CBOR; tuples become arrays.

    Raises:
        InvalidArgumentError: A part of the value has another type, or an int needs over 64 bits.
    """
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return cbor_head(0x00, value) if value >= 0 else cbor_head(0x20, -1 - value)
        case bytes():
            return cbor_head(0x40, len(value)) + value
        case str():
            encoded = value.encode("utf-8")
            return cbor_head(0x60, len(encoded)) + encoded
        case tuple():
            return cbor_head(0x80, len(value)) + b"".join(map(cbor, value))
        case _:
            raise _refused_part(value)


def framed(*body: bytes) -> tuple[bytes, ...]:
    """Puts the protocol and the frame opcode before the parts of a body below 64 KiB."""
    return (b"\x80\x05\x95", sum(map(len, body)).to_bytes(8, "little"), *body)


def tuple_ends(count: int) -> tuple[bytes, bytes]:
    """Returns the opcodes before and after the elements of a tuple of `count`, 1 or more."""
    short = _SHORT_TUPLE.get(count)
    return (b"", short + b"\x94") if short else (b"(", b"t\x94")


def opcode_int(value: int) -> bytes:
    """Encodes an int, in opcodes.

    Raises:
        InvalidArgumentError: It needs more than 255 bytes.
    """
    if 0 <= value < 1 << 8:
        return struct.pack("<cB", b"K", value)
    if 0 <= value < 1 << 16:
        return struct.pack("<cH", b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    # Two's complement in the fewest bytes that hold the sign.
    nbytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if nbytes > 255:
        raise _refused_part(value)
    return b"\x8a" + bytes((nbytes,)) + value.to_bytes(nbytes, "little", signed=True)


def opcodes(value: Value, references: dict[int, int]) -> bytes:
    """Encodes a value in opcodes, without frame and stop.

    An object that occurs again (the same one: equality does not count) is written as a reference.

    Args:
        value: What to encode.
        references: From id() of each object written so far to its number; grows.

    Raises:
        InvalidArgumentError: A part of the value has another type.
    """
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return opcode_int(value)
        case ():
            return b")"
        case bytes() | str() | tuple():
            number = references.get(id(value))
            if number is None:
                code = _opcodes_once(value, references)
                references[id(value)] = len(references)
                return code
            return b"h" + bytes((number,)) if number < 256 else b"j" + struct.pack("<I", number)
        case _:
            raise _refused_part(value)


def _opcodes_once(value: str | bytes | tuple[Value, ...], references: dict[int, int]) -> bytes:
    match value:
        case bytes():
            return _sized(b"C", b"B", value)
        case str():
            return _sized(b"\x8c", b"X", value.encode("utf-8", "surrogatepass"))
        case tuple():
            begin, end = tuple_ends(len(value))
            return b"".join((begin, *(opcodes(part, references) for part in value), end))


def _sized(short: bytes, long: bytes, data: bytes) -> bytes:
    if len(data) < 256:
        return b"".join((short, bytes((len(data),)), data, b"\x94"))
    return b"".join((long, struct.pack("<I", len(data)), data, b"\x94"))

"""How a file of epochs looks: which epochs of namespaces are over. No I/O.

`proto/kvkeep/v1/record.md` says it to the byte.
"""

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from kvkeep_server.tiers.record import PAGE_NBYTES

EPOCHS_VERSION = 1
EPOCHS_MAGIC = b"KVKEPOC1"
ID_NBYTES = 16
# Numbers count changes: nobody makes so many, and a name with a higher one is not ours.
EPOCHS_NUMBER_MAX = (1 << 48) - 1
# More than this no file of ours has; so much of it is read at most.
EPOCHS_NBYTES_MAX = 64 << 20
# Under this name a file is written before it gets its own.
UNFINISHED_NAME = "epochs.kvke.new"
# How `why_unreadable` begins of such a file, which is no damage.
NEWER_RELEASE = "is of a newer release"
_NAME = re.compile(r"epochs-([0-9a-f]{16})\.kvke")
# Above, a version is a damaged field.
_VERSION_LIKELY_MAX = 256
_HEADER = struct.Struct("<8sIIIIQ")
_FAMILY = struct.Struct(f"<{ID_NBYTES}sQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class EpochState:
    """Which epochs are over.

    Attributes:
        epochs: Of each family of namespace sets, by its id: earlier epochs than this one are over.
        retired: Boundary ids of sets that are over, the one that was over first in front; blocks
            of theirs are of no use.
    """

    epochs: Mapping[bytes, int]
    retired: tuple[bytes, ...]

    @classmethod
    def merged(cls, states: Iterable["EpochState"]) -> "EpochState":
        """What all of these say together: an epoch that was over once is over."""
        epochs: dict[bytes, int] = {}
        retired: dict[bytes, None] = {}
        for state in states:
            retired.update(dict.fromkeys(state.retired))
            for family_id, epoch in state.epochs.items():
                epochs[family_id] = max(epoch, epochs.get(family_id, 0))
        return cls(epochs, tuple(retired))


def file_name(number: int) -> str:
    """Of the file with this number; the highest counts."""
    return f"epochs-{number:016x}.kvke"


def number_of(name: str) -> int | None:
    """The number of the file of this name, None = it is no such file."""
    match = _NAME.fullmatch(name)
    number = int(match[1], 16) if match else None
    return None if number is None or number > EPOCHS_NUMBER_MAX else number


def encode(state: EpochState, number: int) -> bytes:
    """The content of the file of this number, whole pages."""
    sizes = len(state.epochs), len(state.retired)
    parts = [_HEADER.pack(EPOCHS_MAGIC, EPOCHS_VERSION, *sizes, 0, number)]
    parts += [_FAMILY.pack(*family) for family in state.epochs.items()]
    parts += state.retired
    body = b"".join(parts)
    content = body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))
    return content.ljust(-(-len(content) // PAGE_NBYTES) * PAGE_NBYTES, b"\0")


def decode(content: bytes | memoryview, number: int) -> EpochState | None:
    """What a file of this number says; None = it is none of this version, or damaged."""
    if len(content) < _HEADER.size:
        return None
    magic, version, families, retired, zero, own = _HEADER.unpack_from(content)
    if (magic, version, zero, own) != (EPOCHS_MAGIC, EPOCHS_VERSION, 0, number):
        return None
    names_at = _HEADER.size + families * _FAMILY.size
    end = names_at + retired * ID_NBYTES
    if len(content) < end + _CHECKSUM.size:
        return None
    if _CHECKSUM.unpack_from(content, end)[0] != xxhash.xxh3_64_intdigest(content[:end]):
        return None
    names = bytes(content[names_at:end])
    return EpochState(
        dict(_FAMILY.iter_unpack(content[_HEADER.size : names_at])),
        tuple(names[at : at + ID_NBYTES] for at in range(0, len(names), ID_NBYTES)),
    )


def why_unreadable(head: bytes | memoryview, nbytes: int, number: int) -> str:
    """What there is to say of a file that `decode` does not take, in words that follow its path;
    "" = nothing in it is of ours, so it says nothing of epochs.

    Args:
        head: Its first page, as far as it has one.
        nbytes: Its size. Ours are whole pages, and a page can be destroyed as a whole.
        number: In its name.
    """
    head = bytes(head[: _HEADER.size])
    begins = EPOCHS_MAGIC.startswith(head[: len(EPOCHS_MAGIC)])
    if not begins and nbytes % PAGE_NBYTES and head[-8:] != number.to_bytes(8, "little"):
        return ""
    version = int.from_bytes(head[8:12], "little")
    if begins and EPOCHS_VERSION < version < _VERSION_LIKELY_MAX:
        return f"{NEWER_RELEASE}, format version {version}"
    return "is damaged"

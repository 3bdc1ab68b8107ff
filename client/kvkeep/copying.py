"""Optimistic reads: copy from the pool, then prove by the generations that the copy is exact.

Everything here keeps the GIL: beside a busy thread, giving it up costs up to 5 ms to get it back.
"""

from __future__ import annotations

import re
from itertools import repeat
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from kvkeep.shared_index import PIECE_KEYS
from kvkeep.shared_memory import ELEMENT_NBYTES, PAGE_NBYTES, RegionError
from kvkeep.spec import invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from kvkeep.shared_index import Places
    from kvkeep.shared_memory import Chunk

_PAGE_MASK: Final = 2**32 - 1
_PAGE_SHIFT: Final = 12
assert 1 << _PAGE_SHIFT == PAGE_NBYTES
# One assignment keeps the GIL for all of its bytes: 1 MiB is about 0.1 ms.
_RUN_NBYTES_MAX: Final = 1024 * 1024

# The C library copies blocks with `rep movsb`. Where the target lies 1 to 31 bytes behind the
# source, modulo the page, AMD's takes 2 to 6 times as long (57 KiB: 3.4 us, then 8 or 20), and that
# is where numpy puts large arrays. Copies of 512 bytes are done in other instructions.
_SLOW_SHIFT: Final = 32
_SHIFT_MATTERS_NBYTES: Final = 4096

# Of a buffer's format (PEP 3118): Python objects, C's strings, pointers and functions, alone or in
# a record, whose fields' names stand between colons. A Z before a letter of floats is "complex".
_ADDRESSES: Final = re.compile("[OPzX&]|Z(?![fdg])")
_FIELD_NAME: Final = re.compile(":[^:]*:")

_ELEMENT: Final = np.dtype(f"V{ELEMENT_NBYTES}")
_ELEMENT_INDEXES: Final = np.arange(PIECE_KEYS)

_U32_MASK: Final = np.array(_PAGE_MASK, dtype=np.uint64)
_U32_BITS: Final = np.array(32, dtype=np.uint64)

Targets: TypeAlias = "list[memoryview] | memoryview"
"""One buffer a block, or one for all of them in order."""

Pieces: TypeAlias = "Iterable[tuple[int, int, int]]"
"""(address in the pool, place in the target, bytes)."""


def targets_of(buffers: object, count: int, block_nbytes: int) -> Targets:
    """The caller's buffers as writable bytes, checked.

    Errors: InvalidArgumentError (sizes, read-only, not contiguous, addresses instead of data).
    """
    if isinstance(buffers, list | tuple):
        if len(buffers) != count:
            raise invalid("buffers", f"{len(buffers)} buffers", f"{count}, one a key", "give them")
        return [_writable(one, block_nbytes, f"buffers[{i}]") for i, one in enumerate(buffers)]
    return _writable(buffers, count * block_nbytes, "buffers")


def _writable(buffer: object, nbytes: int, name: str) -> memoryview:
    view = bytes_of(buffer, name)
    if view.readonly or view.nbytes != nbytes:
        what = f"{view.nbytes} {'read-only ' if view.readonly else ''}bytes"
        raise invalid(name, what, f"{nbytes} writable bytes", "give blocks of the group's size")
    return view


def bytes_of(buffer: object, name: str) -> memoryview:
    """A buffer as bytes, without a copy. Errors: InvalidArgumentError."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type] # the error below is ours to word
        plain = _ADDRESSES.search(_FIELD_NAME.sub("", view.format)) is None
        bare = view.format == "B" and view.ndim == 1 and view.c_contiguous
        taken = view if bare else view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        allowed = "a contiguous buffer, or a list of them"
        raise invalid(name, type(buffer).__name__, allowed, f"give such memory ({error})") from None
    if not plain:
        # A block's bytes in the place of an address end the process at its next use.
        what = f"memory of addresses, format {view.format}"
        raise invalid(name, what, "plain data, no addresses of objects", "give numbers or bytes")
    return taken


def copy_blocks(
    chunks: Mapping[int, Chunk],
    places: Places,
    block_nbytes: int,
    slot_nbytes: int,
    into: Targets,
) -> int:
    """Copy the blocks at `places` into `into`; how many leading ones are exact."""
    exact = 0
    for addresses, generations in places:
        numbers = addresses.tolist()
        if isinstance(into, memoryview):
            pieces = _pieces(numbers, block_nbytes, slot_nbytes)
            copied = _copy(chunks, pieces, into[exact * block_nbytes :]) // block_nbytes
        else:
            copied = _copy_to_each(chunks, numbers, block_nbytes, into[exact:])
        held = unchanged(chunks, addresses[:copied], generations)
        exact += held
        if held < len(numbers):
            break
    return exact


def _pieces(addresses: list[int], block_nbytes: int, slot_nbytes: int) -> Pieces:
    """(address, place in the target, bytes) of each copy. What lies in one run is one copy."""
    blocks = len(addresses)
    step, blocks_max = slot_nbytes // PAGE_NBYTES, _RUN_NBYTES_MAX // block_nbytes
    starts = range(0, blocks * block_nbytes, block_nbytes)
    if slot_nbytes != block_nbytes or blocks_max < 2:
        return zip(addresses, starts, repeat(block_nbytes))
    pieces = []
    first = 0
    for at in range(1, blocks + 1):
        if at == blocks or addresses[at] != addresses[at - 1] + step or at - first == blocks_max:
            pieces.append((addresses[first], starts[first], (at - first) * block_nbytes))
            first = at
    return pieces


def _copy(chunks: Mapping[int, Chunk], pieces: Pieces, into: memoryview) -> int:
    """Copy until a piece is not mapped; the number of bytes copied."""
    shift = -1
    chunk: Chunk | None = None
    chunk_id = -1
    copied = 0
    for address, start, nbytes in pieces:
        if address >> 32 != chunk_id:
            chunk_id = address >> 32
            chunk = chunks.get(chunk_id)
        source = (address & _PAGE_MASK) << _PAGE_SHIFT
        end = source + nbytes
        if chunk is None or source < chunk.data_offset or end > chunk.nbytes:
            break
        if shift < 0:
            shift = _shift_of(into) if nbytes >= _SHIFT_MATTERS_NBYTES else 0
        if 0 < (shift + start) % PAGE_NBYTES < _SLOW_SHIFT:
            _copy_by_elements(into, start, chunk, source, nbytes)
        else:
            into[start : start + nbytes] = chunk.buffer[source:end]
        copied = start + nbytes
    return copied


def _copy_to_each(
    chunks: Mapping[int, Chunk], addresses: list[int], block_nbytes: int, into: list[memoryview]
) -> int:
    for at, address in enumerate(addresses):
        if _copy(chunks, ((address, 0, block_nbytes),), into[at]) < block_nbytes:
            return at
    return len(addresses)


def _shift_of(target: memoryview) -> int:
    """Where in its page a buffer begins. Blocks in the pool begin on a page."""
    address: int = np.frombuffer(target, dtype=np.uint8).__array_interface__["data"][0]
    return address % PAGE_NBYTES


def _copy_by_elements(into: memoryview, start: int, chunk: Chunk, source: int, nbytes: int) -> None:
    """Copy in elements of 512 bytes: numpy copies one by one what an index array names."""
    count, rest = divmod(nbytes, ELEMENT_NBYTES)
    first = source // ELEMENT_NBYTES
    to = np.frombuffer(into, _ELEMENT, count, start)
    if count <= PIECE_KEYS:
        to[_ELEMENT_INDEXES[:count]] = chunk.elements[first : first + count]
    else:
        for at in range(0, count, PIECE_KEYS):
            piece = to[at : at + PIECE_KEYS]
            stop = first + at + len(piece)
            piece[_ELEMENT_INDEXES[: len(piece)]] = chunk.elements[first + at : stop]
    if rest:
        end = start + nbytes
        into[end - rest : end] = chunk.buffer[source + nbytes - rest : source + nbytes]


def view_blocks(
    chunks: Mapping[int, Chunk], addresses: NDArray[np.uint64], block_nbytes: int
) -> list[memoryview]:
    """Read-only views of the blocks at these addresses.

    Errors: RegionError when one lies outside of what is mapped.
    """
    views = []
    for address in addresses.tolist():
        chunk = chunks.get(address >> 32)
        start = (address & _PAGE_MASK) << _PAGE_SHIFT
        end = start + block_nbytes
        if chunk is None or start < chunk.data_offset or end > chunk.nbytes:
            raise RegionError(f"address {address:#x} of {block_nbytes} bytes is not mapped here")
        views.append(chunk.buffer[start:end])
    return views


def release_views(views: Iterable[memoryview]) -> None:
    """End views, but for those of which somebody made an array: these are kept by it."""
    for view in views:
        try:
            view.release()
        except BufferError:
            continue


def unchanged(
    chunks: Mapping[int, Chunk], addresses: NDArray[np.uint64], generations: NDArray[np.uint64]
) -> int:
    """How many leading slots still have these generations."""
    count = len(addresses)
    for start in range(0, count, PIECE_KEYS):
        piece = addresses[start : min(start + PIECE_KEYS, count)]
        now = generations_at(chunks, piece)
        changed: int = (now != generations[start : start + len(piece)]).tobytes().find(1)
        if changed >= 0:
            return start + changed
    return count


def generations_at(
    chunks: Mapping[int, Chunk], addresses: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Generations of at most PIECE_KEYS slots; 1, an odd one, where no chunk is mapped."""
    ids = addresses >> _U32_BITS
    pages = (addresses & _U32_MASK).view(np.int64)
    numbers = set(ids.tolist())
    if len(numbers) == 1 and (chunk := chunks.get(next(iter(numbers)))) is not None:
        return chunk.generations_at(pages)
    generations = np.ones(len(addresses), dtype=np.uint64)
    for number in numbers & chunks.keys():
        here = (ids == np.uint64(number)).nonzero()[0]
        generations[here] = chunks[number].generations_at(pages[here])
    return generations

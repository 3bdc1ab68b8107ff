"""Optimistic reads: copy from the pool, then prove by the generations that the copy is exact.

Everything here keeps the GIL: beside a busy thread, giving it up costs up to 5 ms to get it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from kvkeep.shared_index import PIECE_KEYS
from kvkeep.shared_memory import PAGE_NBYTES, RegionError
from kvkeep.spec import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

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
_ELEMENT: Final = np.dtype("V512")
_ELEMENT_INDEXES: Final = np.arange(PIECE_KEYS)

_U32_MASK: Final = np.array(_PAGE_MASK, dtype=np.uint64)
_U32_BITS: Final = np.array(32, dtype=np.uint64)

Targets: TypeAlias = "list[memoryview] | memoryview"
"""One buffer a block, or one for all of them in order."""


def targets_of(buffers: object, count: int, block_nbytes: int) -> Targets:
    """The caller's buffers as writable bytes, checked.

    Errors: InvalidArgumentError (sizes, read-only, not contiguous).
    """
    if isinstance(buffers, list | tuple):
        if len(buffers) != count:
            raise invalid("buffers", f"{len(buffers)} buffers", f"{count}, one a key", "give them")
        return [_writable(one, block_nbytes, f"buffers[{i}]") for i, one in enumerate(buffers)]
    return _writable(buffers, count * block_nbytes, "buffers")


def _writable(buffer: object, nbytes: int, name: str) -> memoryview:
    try:
        view = memoryview(buffer)  # type: ignore[arg-type] # the error below is ours to word
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except TypeError as error:
        allowed = "a contiguous buffer, or a list of them"
        raise invalid(name, type(buffer).__name__, allowed, f"give such memory ({error})") from None
    if view.readonly or view.nbytes != nbytes:
        what = f"{view.nbytes} {'read-only ' if view.readonly else ''}bytes"
        raise invalid(name, what, f"{nbytes} writable bytes", "give blocks of the group's size")
    return view


def copy_blocks(
    chunks: Mapping[int, Chunk],
    places: Places,
    block_nbytes: int,
    slot_nbytes: int,
    into: Targets,
) -> int:
    """Copy the blocks at `places` into `into`; how many leading ones are exact.

    Blocks that lie in one run, here and there, are copied in one go.
    """
    one_run = isinstance(into, memoryview) and slot_nbytes == block_nbytes
    step = slot_nbytes // PAGE_NBYTES if one_run and 2 * block_nbytes <= _RUN_NBYTES_MAX else 0
    exact = 0
    for addresses, generations in places:
        numbers = addresses.tolist()
        if isinstance(into, memoryview):
            copied = _copy_to_one(chunks, numbers, block_nbytes, step, into[exact * block_nbytes :])
        else:
            copied = _copy_to_each(chunks, numbers, block_nbytes, into[exact:])
        held = unchanged(chunks, addresses[:copied], generations)
        exact += held
        if held < len(numbers):
            break
    return exact


def _copy_to_one(
    chunks: Mapping[int, Chunk],
    addresses: list[int],
    block_nbytes: int,
    step: int,
    into: memoryview,
) -> int:
    """`step` is the distance in pages of blocks that lie in one run, 0 = there are no runs."""
    blocks = len(addresses)
    base = _shift_of(into) if block_nbytes >= _SHIFT_MATTERS_NBYTES else 0
    at = 0
    while at < blocks:
        run_end = at + 1
        if step:
            run_end = _run_end(addresses, at, step, at + _RUN_NBYTES_MAX // block_nbytes)
        nbytes = (run_end - at) * block_nbytes
        source = _bytes_at(chunks, addresses[at], nbytes)
        if source is None:
            return at
        start = at * block_nbytes
        if 0 < (base + start) % PAGE_NBYTES < _SLOW_SHIFT:
            _copy_by_elements(into[start : start + nbytes], source)
        else:
            into[start : start + nbytes] = source
        at = run_end
    return blocks


def _run_end(addresses: list[int], at: int, step: int, limit: int) -> int:
    """End of the run of neighbouring slots that begins at `at`."""
    end, limit = at + 1, min(limit, len(addresses))
    while end < limit and addresses[end] == addresses[end - 1] + step:
        end += 1
    return end


def _copy_to_each(
    chunks: Mapping[int, Chunk], addresses: list[int], block_nbytes: int, into: list[memoryview]
) -> int:
    shift_matters = block_nbytes >= _SHIFT_MATTERS_NBYTES
    for at, address in enumerate(addresses):
        source = _bytes_at(chunks, address, block_nbytes)
        if source is None:
            return at
        if shift_matters and 0 < _shift_of(into[at]) < _SLOW_SHIFT:
            _copy_by_elements(into[at], source)
        else:
            into[at][:] = source
    return len(addresses)


def _shift_of(target: memoryview) -> int:
    """Where in its page a buffer begins. Blocks in the pool begin on a page."""
    address: int = np.frombuffer(target, dtype=np.uint8).__array_interface__["data"][0]
    return int(address % PAGE_NBYTES)


def _copy_by_elements(target: memoryview, source: memoryview) -> None:
    """Copy in elements of 512 bytes: numpy copies one by one what an index array names."""
    count = source.nbytes // _ELEMENT.itemsize
    to = np.frombuffer(target, dtype=_ELEMENT, count=count)
    of = np.frombuffer(source, dtype=_ELEMENT, count=count)
    for start in range(0, count, PIECE_KEYS):
        piece = to[start : start + PIECE_KEYS]
        piece[_ELEMENT_INDEXES[: len(piece)]] = of[start : start + PIECE_KEYS]
    copied = count * _ELEMENT.itemsize
    target[copied:] = source[copied:]


def _bytes_at(chunks: Mapping[int, Chunk], address: int, nbytes: int) -> memoryview | None:
    """The bytes at an address of the pool; None when its chunk is not mapped or too short."""
    chunk = chunks.get(address >> 32)
    page = address & _PAGE_MASK
    if chunk is None or not chunk.holds(page, nbytes):
        return None
    start = page << _PAGE_SHIFT
    return chunk.buffer[start : start + nbytes]


def view_blocks(
    chunks: Mapping[int, Chunk], addresses: NDArray[np.uint64], block_nbytes: int
) -> list[memoryview]:
    """Read-only views of the blocks at these addresses.

    Errors: RegionError when one lies outside of what is mapped.
    """
    views = []
    for address in addresses.tolist():
        view = _bytes_at(chunks, address, block_nbytes)
        if view is None:
            raise RegionError(f"address {address:#x} of {block_nbytes} bytes is not mapped here")
        views.append(view)
    return views


def unchanged(
    chunks: Mapping[int, Chunk], addresses: NDArray[np.uint64], generations: NDArray[np.uint64]
) -> int:
    """How many leading slots still have these generations."""
    count = len(addresses)
    for start in range(0, count, PIECE_KEYS):
        piece = addresses[start : min(start + PIECE_KEYS, count)]
        now = _generations_at(chunks, piece)
        changed = (now != generations[start : start + len(piece)]).tobytes().find(1)
        if changed >= 0:
            return start + changed
    return count


def _generations_at(
    chunks: Mapping[int, Chunk], addresses: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Generations of at most PIECE_KEYS slots in mapped chunks."""
    ids = addresses >> _U32_BITS
    pages = (addresses & _U32_MASK).view(np.int64)
    numbers = set(ids.tolist())
    if len(numbers) == 1:
        return chunks[numbers.pop()].generations[pages]
    generations = np.empty(len(addresses), dtype=np.uint64)
    for number in numbers:
        here = (ids == np.uint64(number)).nonzero()[0]
        generations[here] = chunks[number].generations[pages[here]]
    return generations

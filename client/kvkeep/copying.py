"""Optimistic reads: copy from the pool, then prove by the generations that the copy is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from kvkeep.shared_memory import PAGE_NBYTES, RegionError
from kvkeep.spec import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.shared_index import Rows
    from kvkeep.shared_memory import Chunk

_PAGE_MASK: Final = 2**32 - 1
_PAGE_SHIFT: Final = 12
assert 1 << _PAGE_SHIFT == PAGE_NBYTES
# One assignment keeps the GIL for all of its bytes: 1 MiB is about 0.1 ms.
_RUN_NBYTES_MAX: Final = 1024 * 1024

Targets: TypeAlias = "list[memoryview] | memoryview"
"""One buffer a block, or one for all of them in order."""


def targets_of(buffers: object, count: int, block_nbytes: int) -> Targets:
    """The caller's buffers as writable bytes, checked.

    Errors: InvalidArgumentError (sizes, read-only, not contiguous).
    """
    if isinstance(buffers, (list, tuple)):
        if len(buffers) != count:
            raise invalid("buffers", f"{len(buffers)} buffers", f"{count}, one a key", "give them")
        return [
            _writable(buffer, block_nbytes, f"buffers[{i}]") for i, buffer in enumerate(buffers)
        ]
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
    chunks: Mapping[int, Chunk], rows: Rows, block_nbytes: int, slot_nbytes: int, into: Targets
) -> int:
    """Copy the blocks of `rows` into `into`; how many leading ones are exact.

    Slice assignment of a memoryview keeps the GIL; numpy's copies give it up and wait up to 5 ms
    beside a busy thread to get it back. Blocks that lie in one run are copied in one go.
    """
    addresses = rows.addresses
    if isinstance(into, memoryview):
        step = slot_nbytes // PAGE_NBYTES if slot_nbytes == block_nbytes else 0
        copied = _copy_to_one(chunks, addresses, block_nbytes, step, into)
    else:
        copied = _copy_to_each(chunks, addresses, block_nbytes, into)
    return unchanged(chunks, addresses[:copied], rows.generations)


def _copy_to_one(
    chunks: Mapping[int, Chunk],
    addresses: list[int],
    block_nbytes: int,
    step: int,
    into: memoryview,
) -> int:
    """`step` is the distance in pages of blocks that lie in one run, 0 = there are no runs."""
    blocks = len(addresses)
    at = run_end = 0
    if 2 * block_nbytes > _RUN_NBYTES_MAX:
        step = 0
    while at < blocks:
        address = addresses[at]
        run_end = at + 1
        if step:
            while (
                run_end < blocks
                and addresses[run_end] == addresses[run_end - 1] + step
                and (run_end - at) * block_nbytes < _RUN_NBYTES_MAX
            ):
                run_end += 1
        source = _bytes_at(chunks, address, (run_end - at) * block_nbytes)
        if source is None:
            return at
        into[at * block_nbytes : run_end * block_nbytes] = source
        at = run_end
    return blocks


def _copy_to_each(
    chunks: Mapping[int, Chunk], addresses: list[int], block_nbytes: int, into: list[memoryview]
) -> int:
    for at, address in enumerate(addresses):
        source = _bytes_at(chunks, address, block_nbytes)
        if source is None:
            return at
        into[at][:] = source
    return len(addresses)


def _bytes_at(chunks: Mapping[int, Chunk], address: int, nbytes: int) -> memoryview | None:
    """The bytes at an address of the pool; None when its chunk is not mapped or too short."""
    chunk = chunks.get(address >> 32)
    page = address & _PAGE_MASK
    if chunk is None or not chunk.holds(page, nbytes):
        return None
    start = page << _PAGE_SHIFT
    return chunk.buffer[start : start + nbytes]


def view_blocks(
    chunks: Mapping[int, Chunk], addresses: Sequence[int], block_nbytes: int
) -> list[memoryview]:
    """Read-only views of the blocks at these addresses.

    Errors: RegionError when one lies outside of what is mapped.
    """
    views = []
    for address in addresses:
        view = _bytes_at(chunks, address, block_nbytes)
        if view is None:
            raise RegionError(f"address {address:#x} of {block_nbytes} bytes is not mapped here")
        views.append(view)
    return views


def unchanged(
    chunks: Mapping[int, Chunk], addresses: Sequence[int], generations: Sequence[int]
) -> int:
    """How many leading slots still have these generations."""
    for at, address in enumerate(addresses):
        if chunks[address >> 32].generations[address & _PAGE_MASK] != generations[at]:
            return at
    return len(addresses)

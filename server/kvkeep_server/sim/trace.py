"""Reads a recorded stream of requests.

A trace is an .npz of flat arrays. Blocks have dense ids, and equal ids mean equal whole prefixes,
so a request is given by its last block: the blocks before it are found by walking `par`.

    par   int[blocks]      parent of each block, -1 = first of its chain; below the block's own id
    leaf  int[requests]    last block of each request
    ts    float[requests]  arrival in seconds, ascending
    typ   int[requests]    hint; its meaning is the trace's own (coding agents: 1 tool use, 2 end of
                           turn, 0 other; +4 = of a sub-agent)
    outl  int[requests]    output tokens
    sess  int[requests]    session, negative = unknown

A block is 512 tokens. Files are untrusted: all is checked, and nothing in them is executed.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkeep_server.core.errors import InvalidArgumentError

TRACE_BLOCK_TOKENS = 512
UNPACKED_NBYTES_MAX = 1 << 30
_FIX = "give a trace in the format that kvkeep_server/sim/trace.py describes"


class TraceError(InvalidArgumentError):
    """A trace that is refused: names the file, the line where it has lines, and the field."""


# What a damaged archive makes zipfile, zlib and numpy raise.
_UNREADABLE = (
    OSError,
    EOFError,
    KeyError,
    MemoryError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival_s: Seconds since the trace's zero.
        blocks: Ids of its blocks of 512 tokens, first to last; never empty.
        hint: What the recorder noted, as in the file.
        output_tokens: Tokens that the engine produced.
        input_tokens: Tokens of the prompt; the last of `blocks` may be partly filled.
        session: The conversation; negative = unknown.
    """

    arrival_s: float
    blocks: list[int]
    hint: int
    output_tokens: int
    session: int
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A checked trace.

    Attributes:
        parents: Parent of each block, -1 = none; shape (blocks,).
        leaves: Last block of each request; shape (requests,), as the next ones.
        arrival_s: Seconds, ascending.
        hints: As in the file.
        output_tokens: Tokens.
        sessions: Negative = unknown.
    """

    parents: Ints
    leaves: Ints
    arrival_s: npt.NDArray[np.float64]
    hints: Ints
    output_tokens: Ints
    sessions: Ints

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.leaves)

    def requests(self) -> Iterator[TraceRequest]:
        """Yields the requests in order of arrival."""
        # One number at a time: as lists, the columns would take ten times their room.
        parent_of = self.parents.item
        for at in range(len(self)):
            blocks = []
            block = self.leaves.item(at)
            while block >= 0:
                blocks.append(block)
                block = parent_of(block)
            blocks.reverse()
            yield TraceRequest(
                arrival_s=self.arrival_s.item(at),
                blocks=blocks,
                hint=self.hints.item(at),
                output_tokens=self.output_tokens.item(at),
                session=self.sessions.item(at),
                input_tokens=len(blocks) * TRACE_BLOCK_TOKENS,
            )


def read_trace(path: Path) -> Trace:
    """Reads and checks a trace.

    Raises:
        TraceError: The file is missing, damaged, too large or contradicts itself.
    """
    arrays = _read_arrays(path)

    def column(name: str, kinds: str) -> npt.NDArray[np.generic]:
        return _column(path, arrays.get(name), name, kinds)

    trace = Trace(
        parents=column("par", "iu").astype(np.int64),
        leaves=column("leaf", "iu").astype(np.int64),
        arrival_s=column("ts", "f").astype(np.float64),
        hints=column("typ", "iu").astype(np.int64),
        output_tokens=column("outl", "iu").astype(np.int64),
        sessions=column("sess", "iu").astype(np.int64),
    )
    _check(path, trace)
    return trace


def _read_arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked_nbytes = sum(entry.file_size for entry in archive.infolist())
        if unpacked_nbytes > UNPACKED_NBYTES_MAX:
            raise TraceError(
                f"{path}",
                f"{unpacked_nbytes} bytes",
                f"at most {UNPACKED_NBYTES_MAX} bytes unpacked",
                "cut the trace",
            )
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except _UNREADABLE as error:
        raise TraceError(f"{path}", "damaged", f"a readable .npz ({error})", _FIX) from error


def _column(
    path: Path, column: npt.NDArray[np.generic] | None, name: str, kinds: str
) -> npt.NDArray[np.generic]:
    if column is None or column.ndim != 1 or column.dtype.kind not in kinds:
        found = "missing" if column is None else f"{column.dtype}{list(column.shape)}"
        wanted = "floats" if kinds == "f" else "integers"
        raise TraceError(f"{path}: {name}", found, f"a flat array of {wanted}", _FIX)
    return column


def _check(path: Path, trace: Trace) -> None:
    requests, blocks = len(trace.leaves), len(trace.parents)
    sides = (trace.arrival_s, trace.hints, trace.output_tokens, trace.sessions)
    ascending = np.isfinite(trace.arrival_s).all() and (np.diff(trace.arrival_s) >= 0).all()
    below_own_id = (trace.parents >= -1) & (trace.parents < np.arange(blocks))
    findings = (
        ("leaf", "one entry a request in every array", all(len(s) == requests for s in sides)),
        ("leaf", "at least one request", requests > 0),
        ("leaf", "ids of blocks", ((trace.leaves >= 0) & (trace.leaves < blocks)).all()),
        # Without this a damaged file would make a walk to the root endless.
        ("par", "ids below the block's own, or -1", below_own_id.all()),
        ("ts", "finite seconds, ascending", ascending),
        ("outl", "0 or more", (trace.output_tokens >= 0).all()),
    )
    for name, allowed, holds in findings:
        if not holds:
            raise TraceError(f"{path}: {name}", "something else", allowed, _FIX)

"""The one workload that every peer of ``make bench-peers`` runs, and the loop that a peer's process
serves.

Each store runs in a process of its own (their packages do not share an environment). The driver,
``compare.py``, tells them in turn what to do, over a socket with one JSON object a line, so that
their rounds interleave on the same machine:

* ``put``: batches that were not stored yet, 64 blocks each. A store's source lies where that store
  wants it (Mooncake: its shared memory; kvkeep: its staging ring), filled before the clock runs.
* ``get``: random batches of those stored. Bytes count only when they lie in a buffer that the
  caller owns.
* ``verify``: one batch, every byte compared with its source; answers the number of wrong blocks.

Only numpy is needed beside the store's own client.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MIB = 1 << 20
SEED = 7


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, counts in blocks; ``directory`` is a scratch folder for sockets and logs."""

    block_nbytes: int
    batch_blocks: int
    batches: int
    source_nbytes: int
    directory: Path

    @property
    def batch_nbytes(self) -> int:
        return self.block_nbytes * self.batch_blocks

    @property
    def working_set_nbytes(self) -> int:
        return self.batch_nbytes * self.batches


@dataclass(frozen=True)
class Target:
    """Where a batch is read to: one buffer of the caller's, and its piece for each block."""

    whole: np.ndarray
    blocks: list[np.ndarray]


class Peer(Protocol):
    """A store under measurement; ``buffer`` is memory that it may read and write directly."""

    warm_share: float  # how much the warm-up stores, of what the measured rounds will

    def open(self, plan: Plan) -> None: ...
    def buffer(self, nbytes: int) -> np.ndarray: ...
    def stage(self, keys: list[bytes], sources: list[np.ndarray]) -> Any: ...  # untimed
    def put(self, staged: Any) -> int: ...  # blocks stored
    def get(self, keys: list[bytes], into: Target) -> int: ...  # blocks that lie in `into`
    def warm_done(self) -> None: ...  # forget what the warm-up stored
    def close(self) -> None: ...


class Workload:
    """Keys, sources and buffers of one block size; the same numbers in every process."""

    def __init__(self, peer: Peer, plan: Plan) -> None:
        self.peer = peer
        self.plan = plan
        self.source = peer.buffer(plan.source_nbytes)
        rng = np.random.default_rng(SEED)
        step = 16 * MIB
        for first in range(0, plan.source_nbytes, step):
            piece = self.source[first : first + step]
            piece[:] = np.frombuffer(rng.bytes(piece.nbytes), np.uint8)
        whole = peer.buffer(plan.batch_nbytes)
        whole[:] = 0
        self.into = Target(whole, self._cut(whole))

    def _cut(self, memory: np.ndarray) -> list[np.ndarray]:
        size = self.plan.block_nbytes
        return [memory[i * size : (i + 1) * size] for i in range(self.plan.batch_blocks)]

    def keys(self, batch: int) -> list[bytes]:
        """32 bytes each; batches below 0 are the warm-up's."""
        first = (batch + (1 << 20)) * self.plan.batch_blocks
        return [
            b"%032x" % (((first + i) * 0x9E3779B97F4A7C15F39CC0605CEDC835) % (1 << 128))
            for i in range(self.plan.batch_blocks)
        ]

    def sources(self, batch: int) -> list[np.ndarray]:
        size, room = self.plan.block_nbytes, self.plan.source_nbytes - self.plan.block_nbytes
        first = (batch + (1 << 20)) * self.plan.batch_blocks
        offsets = [
            ((first + i) * 2654435761 * 64) % room & ~63 for i in range(self.plan.batch_blocks)
        ]
        return [self.source[offset : offset + size] for offset in offsets]

    def put(self, batches: Sequence[int]) -> dict[str, Any]:
        staged = [self.peer.stage(self.keys(b), self.sources(b)) for b in batches]
        return self._timed(self.peer.put, [(s,) for s in staged])

    def get(self, batches: Sequence[int]) -> dict[str, Any]:
        return self._timed(self.peer.get, [(self.keys(b), self.into) for b in batches])

    def warm(self) -> dict[str, Any]:
        """Touch the memory that the rounds will use: first touch costs ten times a warm write."""
        blocks = 0
        for batch in range(1, max(1, round(self.plan.batches * self.peer.warm_share)) + 1):
            blocks += self.put([-batch])["blocks"]
        self.get([-1])
        self.peer.warm_done()
        return {"blocks": blocks}

    def verify(self, batch: int) -> dict[str, Any]:
        self.into.whole[:] = 0
        found = self.peer.get(self.keys(batch), self.into)
        pairs = zip(self.into.blocks, self.sources(batch), strict=True)
        return {"found": found, "wrong": sum(not np.array_equal(got, want) for got, want in pairs)}

    @staticmethod
    def _timed(call: Callable[..., int], calls: list[tuple[Any, ...]]) -> dict[str, Any]:
        seconds, blocks = [], 0
        for arguments in calls:
            start = time.perf_counter()
            blocks += call(*arguments)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "blocks": blocks}


def private_buffer(nbytes: int) -> np.ndarray:
    """Touched memory of this process."""
    memory = np.empty(nbytes, np.uint8)
    memory[::4096] = 0
    return memory


def serve(peer: Peer) -> None:
    """Parse the driver's arguments, open the store, answer commands until the driver hangs up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    for name in ("block-nbytes", "batch-blocks", "batches", "source-nbytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = vars(parser.parse_args())
    connection = socket.socket(fileno=arguments.pop("fd"))
    plan = Plan(**arguments)
    status = 0
    with connection, connection.makefile("rw", encoding="ascii") as stream:
        try:
            peer.open(plan)
            workload = Workload(peer, plan)
            _reply(stream, {"ready": True})
            for command in _commands(stream):
                operation = getattr(workload, command.pop("do"))
                _reply(stream, operation(**command))
        except Exception as error:  # noqa: BLE001 - the driver prints it, and counts the rows as missing
            status = 1
            with contextlib.suppress(OSError):
                _reply(stream, {"error": f"{type(error).__name__}: {error}"})
        finally:
            peer.close()
    sys.stdout.flush()
    os._exit(status)  # some native clients hang in their destructors


def _commands(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        yield json.loads(line)


def _reply(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()

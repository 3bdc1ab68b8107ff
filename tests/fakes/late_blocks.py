"""Blocks of a fake daemon's leases that are not ready at once, and come by Await."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.v1 import block_cache_pb2 as pb

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Shard = tuple[int, int]

PIECE_BLOCKS = 2


class LateBlocks:
    """Which blocks come late, and what Await tells of them.

    Attributes:
        ready_at_once: Of each acquire; None = all.
        never_come: Of the rest, the last ones.
    """

    def __init__(self) -> None:
        self.ready_at_once: int | None = None
        self.never_come = 0
        self._coming: dict[int, list[pb.AwaitResponse]] = {}

    def keep_back(
        self,
        lease_id: int,
        keys: range,
        rows: Mapping[Shard, Sequence[int]],
        column: Callable[[Shard, Sequence[int]], pb.LeasedColumn],
    ) -> int:
        """How many of a lease's keys are ready; what becomes of the others is told by `pieces`."""
        if self.ready_at_once is None or len(keys) <= self.ready_at_once:
            return len(keys)
        answers = self._coming[lease_id] = []
        last = keys.stop - self.never_come
        for first in range(keys.start + self.ready_at_once, last, PIECE_BLOCKS):
            stop = min(first + PIECE_BLOCKS, last)
            columns = [column(shard, own[first:stop]) for shard, own in rows.items()]
            status = bytes([pb.BLOCK_STATUS_READY] * (stop - first))
            answers.append(pb.AwaitResponse(first_block=first, status=status, columns=columns))
        if self.never_come:
            status = [pb.BLOCK_STATUS_CORRUPT] + [pb.BLOCK_STATUS_MISS] * (self.never_come - 1)
            answers.append(pb.AwaitResponse(first_block=last, status=bytes(status)))
        return self.ready_at_once

    def pieces(self, lease_id: int, gate: threading.Event | None) -> Iterator[pb.AwaitResponse]:
        """One after the other; the gate is closed behind each."""
        for answer in self._coming.pop(lease_id):
            yield answer
            if gate is not None:
                gate.clear()
                gate.wait(30)

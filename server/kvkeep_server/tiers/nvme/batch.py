"""A batch of blocks on its way into the nvme tier."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import TierUnavailableError
from kvkeep_server.tiers.base import Blocks
from kvkeep_server.tiers.nvme.appender import Append
from kvkeep_server.tiers.nvme.log import Log
from kvkeep_server.tiers.record import Rows, rows_of

U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]


class NvmeBatch:
    """Room for blocks in one directory; a `WriteBatch`. Places are found while it writes."""

    def __init__(self, log: Log, nbytes: int, count: int) -> None:
        """Use `NvmeTier.reserve`."""
        log.claim(nbytes, count)
        self._log = log
        self._nbytes = nbytes
        self._locations: U64 = np.zeros(count, np.uint64)
        self._rows: Rows | None = None
        self._append: Append | None = None
        self._open = True
        self._claimed = True

    @property
    def locations(self) -> U64:
        """See `WriteBatch`."""
        return self._locations

    async def write(
        self, blocks: Blocks, sources: Sequence[memoryview], *, durable: bool = True
    ) -> NDArray[np.uint8]:
        """See `WriteBatch`. Sources of any alignment; page-aligned ones are not copied."""
        assert self._open
        assert self._rows is None, "written before"
        assert len(blocks) == len(self._locations) == len(sources)
        if not len(blocks):
            return np.empty(0, np.uint8)
        if not self._log.directory.admits:
            raise TierUnavailableError(f"nvme: {self._log.directory.sick}")
        rows = rows_of(blocks)
        rows["record_seq"] = self._log.directory.sequence.take_seqs(len(rows))
        append = Append.of(rows, sources, durable=durable, hold=True)
        self._rows, self._append = rows, append
        assert blocks.facts is not None
        try:
            await self._log.append(blocks.facts.retention_class, append)
        finally:
            self._locations = rows["location"].copy()
            self._unclaim()
        return append.status

    def commit(self, kept: Mask | None = None) -> U64:
        """See `WriteBatch`. Records that are not kept never counted."""
        assert self._open, "committed or aborted before"
        self._close()
        if self._rows is None:
            assert not len(self._locations), "nothing is written"
            return np.empty(0, np.uint64)
        if kept is None:
            kept = np.ones(len(self._rows), np.bool_)
        assert (self._locations[kept] > 0).all(), "what is not WRITTEN must not be committed"
        self._log.discard(self._rows[~kept])
        return self._rows["record_seq"][kept]

    def abort(self) -> None:
        """See `WriteBatch`."""
        if self._open:
            self._close()
            if self._rows is not None:
                self._log.discard(self._rows)

    def _close(self) -> None:
        self._open = False
        self._unclaim()
        if self._append is not None:
            self._append.release()

    def _unclaim(self) -> None:
        if self._claimed:
            self._claimed = False
            self._log.unclaim(self._nbytes, len(self._locations))

    def __enter__(self) -> Self:
        """The batch itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Aborts unless committed."""
        self.abort()

"""Which epochs of namespace sets are over, in memory and on nvme."""

import asyncio
import logging
from collections.abc import Iterable

from kvkeep_server.core.errors import ResourceExhaustedError, TierUnavailableError
from kvkeep_server.tiers.nvme.epoch_files import EpochFiles
from kvkeep_server.tiers.nvme.epoch_format import EpochState

# 24 bytes each in memory that is written whole at each change.
FAMILIES_MAX = 65536
# Whose blocks may still lie on nvme; of earlier ones nobody can find any either.
RETIRED_MAX = 4096

_log = logging.getLogger(__name__)


class Epochs:
    """Only ever goes forward. Event loop only.

    Attributes:
        files: Where it outlives this daemon; None = blocks do not either.
    """

    def __init__(self) -> None:
        """See the class."""
        self._epochs: dict[bytes, int] = {}
        self._retired: dict[bytes, None] = {}
        # One that is in memory, and not in all directories.
        self._unsaved = False
        self._saving = asyncio.Lock()
        self.files: EpochFiles | None = None
        self.advanced_total = 0

    def of(self, family_id: bytes) -> int:
        """The earliest epoch of a family that is not over."""
        return self._epochs.get(family_id, 0)

    def is_over(self, boundary_id: bytes) -> bool:
        """Whether blocks of this boundary id are those of an epoch that is over."""
        return boundary_id in self._retired

    async def load(self) -> None:
        """Reads what earlier daemons left, before anything is served.

        Raises:
            FailedPreconditionError: It cannot be read.
            OSError: A directory cannot be read.
        """
        if self.files is not None:
            self._take(await self.files.load())
            for path, reason in self.files.unused.items():
                _log.warning("nvme: of no use", extra={"path": path, "reason": reason})

    async def advance(self, family_id: bytes, epoch: int, boundary_ids: Iterable[bytes]) -> None:
        """Ends the epochs of a family before this one, first on the medium, then here.

        Args:
            family_id: 16 bytes.
            epoch: Later than that of now, or equal to it: then it is only made sure of.
            boundary_ids: Of the sets that are over.

        Raises:
            ResourceExhaustedError: Too many families; nothing has changed.
            TierUnavailableError: They are over, but that may be forgotten at a restart.
        """
        if family_id not in self._epochs and len(self._epochs) >= FAMILIES_MAX:
            msg = f"weights of {FAMILIES_MAX} namespace sets were replaced in place; open this one"
            raise ResourceExhaustedError(f"{msg} with a higher namespace_epoch instead")
        wanted = EpochState({family_id: epoch}, tuple(boundary_ids))
        forward = epoch > self.of(family_id)
        async with self._saving:
            state = EpochState.merged((EpochState(self._epochs, tuple(self._retired)), wanted))
            state = EpochState(state.epochs, state.retired[-RETIRED_MAX:])
            try:
                if self.files is not None and (forward or self._unsaved):
                    await self.files.save(state)
                self._unsaved = False
            except TierUnavailableError:
                self._unsaved = True
                raise
            finally:
                self._take(state)
        self.advanced_total += forward

    def _take(self, state: EpochState) -> None:
        self._epochs = dict(state.epochs)
        self._retired = dict.fromkeys(state.retired)

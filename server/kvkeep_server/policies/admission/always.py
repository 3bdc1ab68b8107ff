"""Admits everything: for a tier that nothing wears out, and the control for other policies."""

import numpy as np

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds, BlockMask, NBytes


class AlwaysAdmission:
    """Every candidate may enter."""

    def admit(self, ids: BlockIds, nbytes: NBytes, hints: Hints, now: float) -> BlockMask:
        """All True."""
        return np.ones(len(ids), np.bool_)

"""Loads gRPC so that a forked child can use it, as far as that is still to be decided.

gRPC's default poller keeps its descriptors in an epoll set, which a forked child shares with its
parent: once the child makes a call, it also takes the parent's answers from the parent's sockets.
Its other poller, `poll`, has no such set (150 of 150 children and their parent went on, beside
threads with calls under way; with epoll 4 of 60 died, and the parent's calls ran into deadlines).
It costs 5 % of a call. Which one it is is decided when the process first imports grpc.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

_VARIABLE: Final = "GRPC_POLL_STRATEGY"
_FORKABLE: Final = "poll"

REFUSAL: Final = (
    "this process was forked from one that had gRPC loaded with a poller that no child may use: "
    "start it with the spawn method, import kvkeep.client (or call kvkeep.connect) before anything "
    f"imports grpc, or set {_VARIABLE}={_FORKABLE}"
)


def _load_grpc() -> bool:
    """Import grpc; whether a forked child may use it."""
    environment = os.environ  # noqa: TID251 - gRPC has no other switch for this
    chosen = environment.get(_VARIABLE)
    if "grpc" in sys.modules or chosen is not None:
        return chosen == _FORKABLE
    environment[_VARIABLE] = _FORKABLE
    try:
        importlib.import_module("grpc")
    finally:
        # grpc has read it; the engine's other children are not concerned.
        del environment[_VARIABLE]
    return True


CHILD_MAY_USE_GRPC: Final = _load_grpc()

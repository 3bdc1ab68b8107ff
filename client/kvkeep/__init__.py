"""kvkeep's client library: KV blocks of LLM inference engines, kept by the daemon of this host.

>>> with kvkeep.connect() as client:
...     namespace = client.open_namespace(spec)
...     found = namespace.lookup(keys)

Importing it is cheap: numpy and grpc are loaded when `connect` is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvkeep.errors import (
    DeadlineError,
    InvalidArgumentError,
    KVKeepError,
    LeaseLostError,
    NotSupportedError,
    ResourceExhaustedError,
    SessionLostError,
    UnavailableError,
)
from kvkeep.results import (
    AckLevel,
    BlockStatus,
    Change,
    ChangeKind,
    CommitResult,
    CommitStatus,
    Health,
    Lookup,
    MissReason,
    Pin,
    RemovalResult,
    RemovalStatus,
    Tier,
)
from kvkeep.spec import Group, GroupKind, Hints, NamespaceSpec, StateMode, StopReason

if TYPE_CHECKING:
    from kvkeep import chain_hash
    from kvkeep.client import Client, connect
    from kvkeep.leases import Acquired
    from kvkeep.namespace import Namespace
    from kvkeep.store import Store
    from kvkeep.tickets import AcquireTicket, CommitTicket, Ticket, TicketState
    from kvkeep.watching import Watch

__all__ = [
    "AckLevel",
    "AcquireTicket",
    "Acquired",
    "BlockStatus",
    "Change",
    "ChangeKind",
    "Client",
    "CommitResult",
    "CommitStatus",
    "CommitTicket",
    "DeadlineError",
    "Group",
    "GroupKind",
    "Health",
    "Hints",
    "InvalidArgumentError",
    "KVKeepError",
    "LeaseLostError",
    "Lookup",
    "MissReason",
    "Namespace",
    "NamespaceSpec",
    "NotSupportedError",
    "Pin",
    "RemovalResult",
    "RemovalStatus",
    "ResourceExhaustedError",
    "SessionLostError",
    "StateMode",
    "StopReason",
    "Store",
    "Ticket",
    "TicketState",
    "Tier",
    "UnavailableError",
    "Watch",
    "chain_hash",
    "connect",
]

_LOADED_ON_USE = {
    "AcquireTicket": "kvkeep.tickets",
    "Acquired": "kvkeep.leases",
    "Client": "kvkeep.client",
    "CommitTicket": "kvkeep.tickets",
    "Namespace": "kvkeep.namespace",
    "Store": "kvkeep.store",
    "Ticket": "kvkeep.tickets",
    "TicketState": "kvkeep.tickets",
    "Watch": "kvkeep.watching",
    "connect": "kvkeep.client",
}


def __getattr__(name: str) -> object:
    if name == "chain_hash":
        return importlib.import_module("kvkeep.chain_hash")
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    return getattr(importlib.import_module(_LOADED_ON_USE[name]), name)

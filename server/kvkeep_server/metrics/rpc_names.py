"""The names of calls and of their status codes, as label values."""

# The names of gRPC and of our services stand here once more, because nothing below `rpc/` sees
# them; a test holds them to it.
RPC_METHODS = (
    *(
        f"BlockCache/{name}"
        for name in [
            "OpenNamespace",
            "Attach",
            "Lookup",
            "Acquire",
            "Await",
            "Release",
            "Renew",
            "Commit",
            "Read",
            "Write",
            "Prefetch",
            "Pin",
            "Unpin",
            "Remove",
            "AdvanceEpoch",
            "Watch",
        ]
    ),
    *(
        f"Admin/{name}"
        for name in [
            "Stats",
            "ListNamespaces",
            "SetNamespaceMode",
            "Explain",
            "Purge",
            "SetQuota",
            "Drain",
            "Check",
        ]
    ),
)
RPC_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)

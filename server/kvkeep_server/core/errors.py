"""What can go wrong, as types. `rpc/convert.py` owns the one table from these to gRPC status codes.

KVKeepError
├── InvalidArgumentError       the caller's input; names field, value, what is allowed, the fix
├── NotFoundError              a handle that is not open in this server epoch
├── SessionUnknownError        no live session behind the token
├── FailedPreconditionError    right input, wrong state (layout versions, ack level, mode)
├── UnsupportedError           a call that this release does not serve
├── TierUnavailableError       a tier is sick; the manager reads elsewhere
├── OutOfRangeError            a sequence that is not in a buffer any more
└── ResourceExhaustedError     a limit; carries when to try again
    └── PoolExhaustedError     no room in the ram tier
"""


class KVKeepError(Exception):
    """Root of all errors that kvkeep raises on purpose."""


class InvalidArgumentError(KVKeepError):
    """A value that is not allowed.

    Args:
        field: Name of the field, as the caller wrote it.
        value: The value; shown with `repr`, cut at 100 characters.
        allowed: What is allowed there, cut at 300 characters.
        fix: What the caller should do.
    """

    def __init__(self, field: str, value: object, allowed: str, fix: str) -> None:
        """See the class."""
        shown = f"{field} is {_cut(repr(value), 100)}; allowed: {_cut(allowed, 300)}; fix: {fix}"
        super().__init__(shown)
        self.field = field


def _cut(text: str, length: int) -> str:
    """Messages travel in headers, which have to be short."""
    return text if len(text) <= length else text[: length - 3] + "..."


class NotFoundError(KVKeepError):
    """A handle (namespace set, lease) that is not open in this server epoch."""


class SessionUnknownError(KVKeepError):
    """The session token names no live session: attach again."""


class FailedPreconditionError(KVKeepError):
    """The request is well formed, but the daemon's state does not allow it."""


class UnsupportedError(KVKeepError):
    """A call or option that this release does not serve."""


class TierUnavailableError(KVKeepError):
    """A tier cannot answer now."""


class OutOfRangeError(KVKeepError):
    """A sequence that cannot be had any more."""


class ResourceExhaustedError(KVKeepError):
    """A limit is reached.

    Args:
        message: Which limit, its value, and the fix.
        retry_after_s: When another try may succeed, in seconds.
    """

    def __init__(self, message: str, retry_after_s: float = 0.1) -> None:
        """See the class."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PoolExhaustedError(ResourceExhaustedError):
    """The ram tier has no room and may not grow."""

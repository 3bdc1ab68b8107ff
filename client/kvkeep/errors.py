"""What can go wrong, as the caller of the client library sees it.

KVKeepError
├── InvalidArgumentError      an argument is wrong; also a ValueError. Fix the caller.
├── NotSupportedError         this daemon, release or machine cannot do it. Do without.
├── UnavailableError          no session with the daemon now; the client re-attaches by itself.
│   └── SessionLostError      the session that this object belongs to is over. Make a new object.
├── DeadlineError             no answer in time; also a TimeoutError. Compute instead.
├── ResourceExhaustedError    a limit is reached; `retry_after_s` says when another try makes sense.
└── LeaseLostError            a slot was reused while its views were in use: what was read is void.

A bare KVKeepError is what gRPC makes of trouble on the way that no daemon speaks of (INTERNAL,
UNKNOWN), as UnavailableError, and in `connect` shared memory that this process cannot map.

Look-ups and `read_into` never raise for a daemon that is away: they answer with fewer blocks.
"""

from __future__ import annotations


class KVKeepError(Exception):
    """Base of everything that this library raises on purpose."""


class InvalidArgumentError(KVKeepError, ValueError):
    """Names the field, the value, what is allowed and the fix."""


class NotSupportedError(KVKeepError):
    """This daemon, release or machine cannot do it."""


class UnavailableError(KVKeepError):
    """There is no session with the daemon at the moment."""


class SessionLostError(UnavailableError):
    """The session that the object was made in has ended."""


class DeadlineError(KVKeepError, TimeoutError):
    """The daemon did not answer before the deadline."""


class ResourceExhaustedError(KVKeepError):
    """A limit is reached; another try makes sense after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LeaseLostError(KVKeepError):
    """A slot was reused, or may have been, while the caller used it: throw away what was read."""

"""Waiting for something that another process does: polls, with a deadline."""

import time
from collections.abc import Callable

_POLL_S = 0.005


def wait_until(condition: Callable[[], object], wait_s: float, what: str) -> float:
    """Seconds until `condition()` was true; an AssertionError with `what` after `wait_s`."""
    start = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start
        assert waited_s < wait_s, f"not within {wait_s} s: {what}"
        time.sleep(_POLL_S)
    return time.monotonic() - start

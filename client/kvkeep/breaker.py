"""Whether a daemon that is there still answers: opens after calls without an answer, and closes
when it answers a probe in time. One probe is under way at most.

A frozen daemon closes nothing, so only silence tells of it. The first call that gets no answer in
its time begins a probe, the cheapest call there is. While that is young, calls go on: their own
deadlines may just have been short. When it has had its time, nothing more is asked of the daemon
until it answers one: a late answer only begins the next probe.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# A daemon that lives answers a probe in less than a millisecond, and in this even under load.
PROBE_S: Final = 0.1


class Breaker:
    """Of one session. Any thread may call; where two meet, a probe is sent twice at worst.

    Attributes:
        open: Nothing should be asked of the daemon.
    """

    def __init__(self, *, send_probe: Callable[[], None], on_change: Callable[[], None]) -> None:
        """`send_probe` leads to `probed`. `on_change` hears of `open`, and when to `go_on`."""
        self.open = False
        self._send_probe = send_probe
        self._on_change = on_change
        self._sent_s: float | None = None

    def timed_out(self) -> None:
        """A call got no answer in its time."""
        if self._sent_s is None:
            self._probe()
        self.check()

    def check(self) -> None:
        """Open, if a probe is overdue. Cheap: for every call."""
        sent_s = self._sent_s
        if sent_s is not None and not self.open and time.monotonic() - sent_s > PROBE_S:
            self.open = True
            self._on_change()

    def probed(self) -> None:
        """The probe was answered."""
        self.check()
        sent_s, self._sent_s = self._sent_s, None
        if not self.open:
            return
        if sent_s is not None and time.monotonic() - sent_s <= PROBE_S:
            self.open = False
            self._on_change()
        else:
            self._probe()

    def go_on(self) -> None:
        """Probe again if nothing is under way: who was interrupted may have left it so."""
        if self.open and self._sent_s is None:
            self._probe()

    def _probe(self) -> None:
        try:
            self._sent_s = time.monotonic()
            self._send_probe()
        except BaseException:
            self._sent_s = None
            self._on_change()
            raise

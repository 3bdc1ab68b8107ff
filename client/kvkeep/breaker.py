"""Whether a daemon that is there still answers: opens after calls without an answer, and closes
when it answers a probe in time. One probe is under way at most.

A frozen daemon closes nothing, so only silence tells of it. The first call that gets no answer in
its time begins a probe, the cheapest call there is. While that is young, calls go on: their own
deadlines may just have been short, so silence is counted from when the call was sent, not from when
its caller had enough. When the probe has had its time, and nothing waits to be read either (a
client that stood still itself has heard nothing yet), nothing more is asked of the daemon until it
answers one: a late answer only begins the next probe.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# A daemon that lives answers a probe in less than a millisecond, and in this even under load.
PROBE_S: Final = 0.1
# What a daemon that is well may take on a busy host, from the call on: three calls of 0.1 s that
# follow each other are enough to know (P08).
SILENCE_S: Final = 0.25


class Breaker:
    """Of one session. Any thread may call; where two meet, a probe is sent twice at worst.

    Attributes:
        open: Nothing should be asked of the daemon.
    """

    def __init__(
        self,
        *,
        send_probe: Callable[[], None],
        take: Callable[[], bool | None],
        on_change: Callable[[], None],
        probe_s: float = PROBE_S,
    ) -> None:
        """`send_probe` leads to `probed`, in `take` at the latest: that takes what has come, and
        says whether there was something, None = another is at it. `on_change` hears of `open`, and
        when to `go_on`. `probe_s`: how long the way there and back and an answer may take."""
        self.open = False
        self._send_probe = send_probe
        self._take = take
        self._on_change = on_change
        self._probe_s = probe_s
        # When the probe that is under way is overdue.
        self._due_s: float | None = None

    def timed_out(self, asked_s: float) -> None:
        """A call got no answer in its time; it was sent at `asked_s`, monotonic seconds."""
        if self._due_s is None:
            self._probe(asked_s + SILENCE_S)
        self.check()

    def check(self) -> None:
        """Open, if a probe is overdue. Cheap: for every call."""
        if self.open or not self._overdue():
            return
        took: bool | None = True
        while took and self._overdue():
            took = self._take()
        if took is not None and not self.open and self._overdue():
            self.open = True
            self._on_change()

    def _overdue(self) -> bool:
        due_s = self._due_s
        return due_s is not None and time.monotonic() > due_s

    def probed(self) -> None:
        """The probe was answered."""
        late, self._due_s = self._due_s is None or self._overdue(), None
        if not self.open:
            return
        if late:
            self._probe()
        else:
            self.open = False
            self._on_change()

    def go_on(self) -> None:
        """Probe again if nothing is under way: who was interrupted may have left it so."""
        if self.open and self._due_s is None:
            self._probe()

    def _probe(self, due_s: float = 0.0) -> None:
        try:
            self._due_s = max(time.monotonic() + self._probe_s, due_s)
            self._send_probe()
        except BaseException:
            self._due_s = None
            self._on_change()
            raise

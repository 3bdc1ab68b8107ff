"""The middle of `kvkeep demo`: its daemon is killed, and the next one begins with what is on disk.

The client is the same before and after, as an engine's would be: it attaches again by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess
from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import KVKeepError

# The client tries every 0.2 s at most; recovery reads a gigabyte of unsealed segments a second.
_WAIT_S = 120.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Crash:
    """What a SIGKILL cost.

    Attributes:
        on_nvme: Blocks that were on the medium, by the daemon's last word.
        in_ram_only: Blocks that were not: they died with it.
        serving_s: From the kill until the next daemon served and the client was attached.
        recovered_s: From the kill until all that it found was in its index.
        came_back: Blocks that it found.
    """

    on_nvme: int
    in_ram_only: int
    serving_s: float
    recovered_s: float
    came_back: int

    @property
    def lost(self) -> int:
        """Blocks that had been acknowledged as being on the medium, and are gone."""
        return max(0, self.on_nvme - self.came_back)


def crash(daemon: DaemonProcess, client: kvkeep.Client, clock: Clock) -> Crash:
    """Kills the daemon, starts it again, and waits until it has recovered.

    Raises:
        DaemonError: It did not start again.
        KVKeepError: The client did not attach, or recovery took minutes.
    """
    before, epoch = client.stats(), client.server_epoch
    killed_s = clock.monotonic_s()
    daemon.kill()
    daemon.start()
    _wait(clock, "the client attaches again", lambda: _serves_anew(client, epoch))
    serving_s = clock.monotonic_s() - killed_s
    _wait(clock, "the index is recovered", lambda: not client.stats().nvme.recovering)
    return Crash(
        on_nvme=before.nvme.blocks,
        in_ram_only=before.index.blocks - before.nvme.blocks,
        serving_s=serving_s,
        recovered_s=clock.monotonic_s() - killed_s,
        came_back=client.stats().nvme.blocks,
    )


def _serves_anew(client: kvkeep.Client, epoch: int) -> bool:
    try:
        return client.server_epoch != epoch
    except kvkeep.UnavailableError:
        return False


def _wait(clock: Clock, what: str, holds: Callable[[], bool]) -> None:
    deadline_s, pause = clock.monotonic_s() + _WAIT_S, Event()
    while not holds():
        if clock.monotonic_s() > deadline_s:
            raise KVKeepError(f"waited {_WAIT_S:.0f} s in vain until {what}")
        pause.wait(_POLL_S)

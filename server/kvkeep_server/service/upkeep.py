"""What the daemon does regularly beside answering."""

import asyncio

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.histogram import Histogram
from kvkeep_server.service.block_service import BlockService
from kvkeep_server.tiering.room import RoomMaker

_PERIOD_S = 0.05


async def keep_up(
    service: BlockService, room: RoomMaker, clock: Clock, loop_lag: Histogram
) -> None:
    """Credits look-ups, ends what is over, grows the pool ahead of need. Ends with the daemon.

    After a time in which this process did not run (it was stopped, or its machine was) nothing is
    ended for a while: nobody could be heard, and heartbeats still wait to be read.
    """
    session_timeout_s = service.sessions.limits.timeout_s
    ran_s = judge_from_s = clock.monotonic_s()
    while True:
        now_s = clock.monotonic_s()
        if now_s - ran_s > session_timeout_s / 4:
            judge_from_s = now_s + session_timeout_s / 2
        ran_s = now_s
        service.drain_touches()
        if now_s >= judge_from_s:
            service.sweep()
        room.grow_ahead()
        wake_s = clock.monotonic_s() + _PERIOD_S
        await asyncio.sleep(_PERIOD_S)
        loop_lag.add_one(max(0.0, clock.monotonic_s() - wake_s))

"""Engines side by side: threads that take requests from one stream, each with its own session.

Threads, because one stream in one process needs nothing between processes and has one order. Of
blocks of 16 KiB and 114 KB two threads replay 1.2 times as many as one, two commands side by side
1.5 times: who wants to load a daemon fully starts several commands.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import kvkeep
from kvkeep_server.cli.replay_engine import PIECE_NBYTES, Replay, replay_spec
from kvkeep_server.cli.replay_totals import Totals, summed
from kvkeep_server.core.clock import Clock
from kvkeep_server.sim.trace import TraceRequest

_CALL_S = 60.0  # a busy machine is slow, and that is no failure of the daemon


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How a trace is replayed.

    Attributes:
        runtime_dir: Of the daemon.
        clients: Engines side by side.
        rate: Recorded seconds a second, None = do not wait.
        tokens_per_block: A divisor of 512.
        block_size: Bytes of a block of one rank.
        ranks: All on this host.
        namespace: Name of the model.
        check_one_in: Bytes of one hit block in so many are checked.
    """

    runtime_dir: str
    clients: int
    rate: float | None
    tokens_per_block: int
    block_size: int
    ranks: int
    namespace: str
    check_one_in: int


class ReplayClients:
    """Attaches on entering, and starts; a context manager.

    Args:
        plan: How.
        requests: In order of arrival; taken one by one, never ahead.
        clock: For durations and arrivals.
    """

    def __init__(self, plan: ReplayPlan, requests: Iterator[TraceRequest], clock: Clock) -> None:
        """See the class."""
        self._plan = plan
        self._requests = requests
        self._clock = clock
        self._taking = threading.Lock()
        self._stop = threading.Event()
        self._held = ExitStack()
        self._replays: list[Replay] = []
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._first_s: float | None = None
        self._began_s = 0.0

    def __enter__(self) -> Self:
        """Errors: kvkeep.KVKeepError, when the daemon is away or refuses the namespace."""
        plan = self._plan
        hasher = kvkeep.chain_hash.KvkeepBlake2b(plan.tokens_per_block)
        spec = replay_spec(
            hasher=hasher,
            block_nbytes=plan.block_size,
            ranks=plan.ranks,
            names=("replay", plan.namespace),
        )
        staging_nbytes = 2 * max(PIECE_NBYTES, plan.block_size + 4096)
        with self._held as held:
            for number in range(plan.clients):
                client = kvkeep.connect(
                    plan.runtime_dir,
                    client_name=f"kvkeep replay {number}",
                    staging_nbytes=staging_nbytes,
                    timeout_s=_CALL_S,
                )
                held.enter_context(client)
                self._replays.append(
                    Replay(
                        namespace=client.open_namespace(spec),
                        ranks=plan.ranks,
                        hasher=hasher,
                        clock=self._clock,
                        check_one_in=plan.check_one_in,
                    )
                )
            self._held = held.pop_all()
        self._began_s = self._clock.monotonic_s()
        for replay in self._replays:
            thread = threading.Thread(target=self._work, args=(replay,), name="kvkeep-replay")
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        """Stops after the requests under way, and detaches."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._held.close()

    def running(self, wait_s: float) -> bool:
        """Waits a moment for the end; whether there are requests to do still.

        Raises:
            Exception: What ended one of the clients: the others stop.
        """
        for thread in self._threads:
            if thread.is_alive():
                thread.join(wait_s)
                break
        if self._failures:
            self._stop.set()
            raise self._failures[0]
        return any(thread.is_alive() for thread in self._threads)

    def totals(self) -> Totals:
        """Of all clients so far."""
        return summed(replay.totals for replay in self._replays)

    @property
    def seconds(self) -> float:
        """Since the first request."""
        return self._clock.monotonic_s() - self._began_s

    def _work(self, replay: Replay) -> None:
        try:
            while (request := self._take()) is not None:
                replay.run(request)
        except Exception as error:  # noqa: BLE001 - raised again by `running`
            self._failures.append(error)

    def _take(self) -> TraceRequest | None:
        """The next request, when it is due; None at the end."""
        with self._taking:
            request = None if self._stop.is_set() else next(self._requests, None)
        if request is None or self._plan.rate is None:
            return request
        if self._first_s is None:
            self._first_s = request.arrival_s
        due_s = self._began_s + (request.arrival_s - self._first_s) / self._plan.rate
        if self._stop.wait(max(0.0, due_s - self._clock.monotonic_s())):
            return None
        return request

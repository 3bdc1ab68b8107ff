"""`kvkeep bench engine`, the measuring: what a loop that never waits notices of its cache.

What the rows mean, for each PHASE
    healthy     a daemon that answers
    frozen      SIGSTOP for 2 s, in the middle
    slow        SIGSTOP and SIGCONT in turn: 2 s of standing still, 50 ms of work
    killed      SIGKILL, a second without a daemon, then another one
    PHASE/calls/median  of the steps: how long all of our calls in it took together; over 1 ms
    PHASE/calls/p99     over 5 ms
    PHASE/late          how long after its deadline a ticket was handed out at most; over 50 ms
    PHASE/back          from the end of the fault to the first hit; over 2 s
    healthy/step        a step that asks, and copies and compares what came, over one that does not
"""

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess
from kvkeep_server.cli.bench_load import WrongBytesError
from kvkeep_server.cli.bench_rows import Row
from kvkeep_server.cli.engine_loop import EngineLoop, LoopPlan, Timing

FROZEN_S = 2.0
AWAKE_S = 0.05
AWAY_S = 1.0
BACK_MAX_S = 20.0
MEDIAN_S, P99_S, LATE_S, BACK_S = 0.001, 0.005, 0.05, 2.0
_TURN_STEPS = 25
_PULSES = 2


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How much is asked for.

    Attributes:
        requests: Of the phase without a fault; those with one take as long as the fault does, and
            as many steps after it as make a tenth of these.
        loop: See there.
    """

    requests: int = 10_000
    loop: LoopPlan = field(default_factory=LoopPlan)

    @property
    def steps(self) -> int:
        """Of the phase without a fault."""
        return max(1, self.requests // self.loop.requests_a_step)


class EngineBench:
    """One run.

    Attributes:
        loop: The engine's.
        requests: So far, without those that only warm it up.
        timings: Of each phase so far.
    """

    def __init__(
        self,
        plan: EnginePlan,
        *,
        client: kvkeep.Client,
        daemon: DaemonProcess,
        progress: Callable[[str], None],
    ) -> None:
        """`progress` gets a line when another part begins."""
        self._plan = plan
        self._daemon = daemon
        self._progress = progress
        self.loop = EngineLoop(client, plan.loop, np.random.default_rng(11))
        self.requests = 0
        self.timings: dict[str, Timing] = {}

    def rows(self) -> Iterator[Row]:
        """All rows, in the order of the report.

        Raises:
            WrongBytesError: What came back is not what was stored.
        """
        self._warm_up()
        yield from self._healthy()
        for name, fault in (
            ("frozen", self._freeze),
            ("slow", self._pulse),
            ("killed", self._kill),
        ):
            yield from self._faulty(name, fault)

    def _warm_up(self) -> None:
        self._progress("storing what is asked for")
        timing = Timing()
        while self.loop.counts["hits"] < 4 * self._plan.loop.chains:
            self.loop.run(timing, _TURN_STEPS)
        self.loop.finish(timing)

    def _healthy(self) -> Iterator[Row]:
        self._progress(f"{self._plan.steps} steps")
        asking, resting = Timing(), Timing()
        for _ in range(-(-self._plan.steps // _TURN_STEPS)):
            self.loop.run(asking, _TURN_STEPS)
            self.loop.rest(resting, _TURN_STEPS)
        self.loop.finish(asking)
        yield from self._report("healthy", asking)
        with_calls, without = (statistics.median(t.steps_s) for t in (asking, resting))
        yield Row("step", without * 1e3, _p99(resting.steps_s) * 1e3, "ms")
        ratio = with_calls / without
        yield Row("healthy/step", with_calls * 1e3, _p99(asking.steps_s) * 1e3, "ms", "step", ratio)

    def _faulty(self, name: str, fault: Callable[[], None]) -> Iterator[Row]:
        self._progress(f"steps beside a daemon that is {name}")
        timing = Timing()
        self.loop.run(timing, _TURN_STEPS)
        with _beside(fault) as over:
            while not over.is_set():
                self.loop.run(timing, 1)
        ended_s, hits = time.monotonic(), self.loop.counts["hits"]
        while self.loop.counts["hits"] == hits and time.monotonic() - ended_s < BACK_MAX_S:
            self.loop.run(timing, 1)
        back_s = time.monotonic() - ended_s
        self.loop.run(timing, self._plan.steps // 10)
        self.loop.finish(timing)
        yield from self._report(name, timing)
        yield _row(f"{name}/back", back_s, back_s, BACK_S)

    def _report(self, name: str, timing: Timing) -> Iterator[Row]:
        if self.loop.counts["wrong"]:
            raise WrongBytesError(f"{self.loop.counts['wrong']} blocks had wrong bytes")
        self.timings[name] = timing
        self.requests += len(timing.calls_s) * self._plan.loop.requests_a_step
        median, p99 = statistics.median(timing.calls_s), _p99(timing.calls_s)
        yield _row(f"{name}/calls/median", median, p99, MEDIAN_S)
        yield _row(f"{name}/calls/p99", median, p99, P99_S, figure=p99)
        late = max(timing.lateness_s)
        yield _row(f"{name}/late", statistics.median(timing.lateness_s), late, LATE_S, figure=late)

    # ---- faults, in a thread that sleeps ---------------------------------------------------------

    def _freeze(self) -> None:
        os.kill(self._daemon.pid, signal.SIGSTOP)
        _pause(FROZEN_S)
        os.kill(self._daemon.pid, signal.SIGCONT)

    def _pulse(self) -> None:
        for _ in range(_PULSES):
            self._freeze()
            _pause(AWAKE_S)

    def _kill(self) -> None:
        self._daemon.kill()
        _pause(AWAY_S)
        self._daemon.start()


@contextmanager
def _beside(fault: Callable[[], None]) -> Iterator[threading.Event]:
    """Runs it in a thread; the event is set at its end. What it raised is raised here."""
    over, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            fault()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=run, name="fault", daemon=True)
    thread.start()
    yield over
    thread.join()
    if failures:
        raise failures[0]


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _p99(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99, method="higher"))


def _row(
    name: str, median_s: float, p99_s: float, over_s: float, *, figure: float | None = None
) -> Row:
    """In milliseconds; the ratio is that of the median, or of `figure`, over `over_s`."""
    ratio = (median_s if figure is None else figure) / over_s
    return Row(name, median_s * 1e3, p99_s * 1e3, "ms", f"{over_s * 1e3:g} ms", ratio)

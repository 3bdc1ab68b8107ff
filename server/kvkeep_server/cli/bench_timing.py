"""The stop-watch of the benchmarks: operations, interleaved rounds, paced loops, a busy thread.

The machine is noisy, so nothing is compared with a figure of another minute: a baseline and what is
measured against it take turns in short rounds, and a ratio is the median over the rounds.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Operation:
    """What is timed, with what surrounds it.

    Attributes:
        name: As in the report: "lookup/64".
        run: The timed part; gets what `prepare` returned.
        prepare: Before the clock runs; returns the argument of `run`.
        finish: After it stopped; gets the argument and the result, and raises when that is wrong.
        settle: After a round or a loop of it: gives back what the calls left.
    """

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    finish: Callable[[Any, Any], None] = lambda _given, _result: None
    settle: Callable[[], None] = lambda: None

    def once(self) -> float:
        """Runs it; returns the seconds of the timed part."""
        given = self.prepare()
        start = time.perf_counter()
        result = self.run(given)
        seconds = time.perf_counter() - start
        self.finish(given, result)
        return seconds


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of every call, a list a round."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> list[float]:
        """All calls."""
        return list(itertools.chain.from_iterable(self.rounds))

    @property
    def median_s(self) -> float:
        """Of all calls."""
        return statistics.median(self.seconds)

    @property
    def p99_s(self) -> float:
        """Of all calls; below 100 calls it is the slowest."""
        return float(np.percentile(self.seconds, 99, method="higher"))

    @property
    def mean_s(self) -> float:
        """Of all calls."""
        return statistics.fmean(self.seconds)

    def over(self, baseline: "Samples") -> float:
        """Median over the rounds of (our median / the baseline's median in the same round)."""
        pairs = zip(self.rounds, baseline.rounds, strict=True)
        return statistics.median(
            statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs
        )


def interleaved(turns: Sequence[tuple[Operation, int]], rounds: int) -> dict[str, Samples]:
    """Samples by name: in each round every operation runs its number of calls, in turn."""
    measured: dict[str, list[tuple[float, ...]]] = {operation.name: [] for operation, _ in turns}
    for _ in range(rounds):
        for operation, calls in turns:
            measured[operation.name].append(tuple(operation.once() for _ in range(calls)))
            operation.settle()
    return {name: Samples(tuple(rounds_)) for name, rounds_ in measured.items()}


def loop(operation: Operation, seconds: float, *, pause_s: float) -> Samples:
    """Calls for at least `seconds`; a `pause_s` above 0 gives the GIL up between two calls."""
    pause = threading.Event()
    taken: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not taken:
        if pause_s:
            pause.wait(pause_s)
        taken.append(operation.once())
    operation.settle()
    return Samples((tuple(taken),))


class BusyThread:
    """A thread of this process that computes in pure Python and keeps the GIL while it may."""

    def __init__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._compute, name="busy", daemon=True)
        self.turns = 0

    def _compute(self) -> None:
        while not self._stop:
            self.turns += 1

    def __enter__(self) -> Self:
        """Starts it."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops it and waits."""
        self._stop = True
        self._thread.join()


def memcpy(source: np.ndarray, nbytes: int, name: str) -> Operation:
    """The baseline: one `np.copyto` of `nbytes`; the source moves, the destination is fixed.

    Args:
        source: Touched memory, uint8, at least 256 MiB for figures that count.
        nbytes: All bytes of one batch, at most those of `source`.
        name: In the report.
    """
    destination = np.zeros(nbytes, np.uint8)
    destination[::4096] = 1  # np.zeros alone maps pages that nothing has touched
    steps = itertools.cycle(range(0, source.nbytes - nbytes + 1, nbytes))

    def prepare() -> np.ndarray:
        first = next(steps)
        return source[first : first + nbytes]

    return Operation(name, lambda window: np.copyto(destination, window), prepare)

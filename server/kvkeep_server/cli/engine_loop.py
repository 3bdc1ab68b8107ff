"""A stand-in for an engine's scheduler: steps of pure Python that submit, collect and check.

One step: collect what is ready, take what was found (every byte is compared with what was stored),
store what was not, submit new requests, then compute. Requests that find nothing are computed and
stored, as an engine does.
"""

import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import kvkeep

KEY_NBYTES = 32
COLLECTED_MAX = 16
_CALIBRATED_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """What one loop asks for.

    Attributes:
        step_s: Work of a step, in seconds.
        requests_a_step: New ones.
        chains: Different prompts.
        chain_blocks: Of each.
        block_nbytes: Of each block.
        deadline_s: Of each ticket.
    """

    step_s: float = 0.005
    requests_a_step: int = 2
    chains: int = 64
    chain_blocks: int = 32
    block_nbytes: int = 8192
    deadline_s: float = 0.25


@dataclass(slots=True)
class Timing:
    """Of the steps of one phase.

    Attributes:
        calls_s: Of each step the seconds that our calls took.
        steps_s: Of each step all of it.
        slept: Steps in which our calls gave the processor up by themselves.
        lateness_s: Of each ticket, how long after its deadline it was handed out; 0 = in time.
    """

    calls_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    slept: int = 0
    lateness_s: list[float] = field(default_factory=list)


class Worker:
    """Computes in pure Python for a fixed number of rounds, so that any delay shows in its time."""

    def __init__(self, step_s: float) -> None:
        """Measures how many rounds take `step_s`."""
        fastest_s = min(self._timed(_CALIBRATED_ROUNDS) for _ in range(100))
        self._rounds = round(_CALIBRATED_ROUNDS * step_s / fastest_s)

    @staticmethod
    def _compute(rounds: int) -> int:
        total = 0
        for number in range(rounds):
            total += number ^ (total & 7)
        return total

    def _timed(self, rounds: int) -> float:
        began_s = time.perf_counter()
        self._compute(rounds)
        return time.perf_counter() - began_s

    def step(self) -> None:
        """One step's work."""
        self._compute(self._rounds)


class EngineLoop:
    """The loop. One thread."""

    def __init__(self, client: kvkeep.Client, plan: LoopPlan, source: np.random.Generator) -> None:
        """Opens its namespace; stores nothing yet. Errors: those of `open_namespace`."""
        self._client = client
        self._plan = plan
        self._source = source
        self._worker = Worker(plan.step_s)
        spec = kvkeep.NamespaceSpec(
            tenant="bench",
            model="engine loop",
            weights_fingerprint="none",
            engine="bench",
            layout_version="1",
            kv_dtype="uint8",
            hash_algorithm="random",
            key_nbytes=KEY_NBYTES,
            groups=[
                kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=plan.block_nbytes),
            ],
        )
        self._namespace = client.open_namespace(spec)
        self._keys = [source.bytes(plan.chain_blocks * KEY_NBYTES) for _ in range(plan.chains)]
        self._content = [
            [source.bytes(plan.block_nbytes) for _ in range(plan.chain_blocks)]
            for _ in range(plan.chains)
        ]
        self._open: dict[object, int] = {}
        self._in_calls_s = 0.0
        self._switches = 0
        self.counts: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Requests whose tickets were not handed out as done."""
        return len(self._open)

    def add_call(self, seconds: float, switches: int) -> None:
        """A call of ours in this step took so long, and gave the processor up so often."""
        self._in_calls_s += seconds
        self._switches += switches

    def run(self, timing: Timing, steps: int) -> None:
        """So many steps, with requests."""
        for _ in range(steps):
            began_s = time.perf_counter()
            self._in_calls_s, self._switches = 0.0, 0
            self._collect(timing)
            for _ in range(self._plan.requests_a_step):
                self._submit()
            self._worker.step()
            timing.calls_s.append(self._in_calls_s)
            timing.steps_s.append(time.perf_counter() - began_s)
            timing.slept += self._switches > 0

    def rest(self, timing: Timing, steps: int) -> None:
        """So many steps that ask for nothing."""
        for _ in range(steps):
            began_s = time.perf_counter()
            self._worker.step()
            timing.steps_s.append(time.perf_counter() - began_s)

    def finish(self, timing: Timing) -> None:
        """Steps until every ticket is handed out."""
        while self._open:
            self._collect(timing)
            self._worker.step()

    def _collect(self, timing: Timing) -> None:
        with _Timed(self):
            told = self._client.poll(COLLECTED_MAX)
        now_s = time.monotonic()
        for ticket in told:
            if not ticket.done:
                continue
            timing.lateness_s.append(max(0.0, now_s - ticket.until_s))
            self.counts[ticket.state.value] += 1
            chain = self._open.pop(ticket)
            if isinstance(ticket, kvkeep.AcquireTicket):
                self._use(ticket, chain)

    def _use(self, ticket: kvkeep.AcquireTicket, chain: int) -> None:
        acquired = ticket.acquired
        if ticket.state is kvkeep.TicketState.READY and acquired is not None:
            self._check(acquired.views(), self._content[chain])
            with _Timed(self):
                acquired.release()
            if acquired.blocks == self._plan.chain_blocks:
                return
        self._store(chain)

    def _check(self, views: Sequence[memoryview], content: Sequence[bytes]) -> None:
        self.counts["hits"] += len(views) > 0
        self.counts["verified"] += len(views)
        for view, block in zip(views, content, strict=False):
            # Views compare byte by byte, which would be most of a step.
            self.counts["wrong"] += bytes(view) != block

    def _submit(self) -> None:
        chain = int(self._source.integers(self._plan.chains))
        with _Timed(self):
            ticket = self._namespace.submit_acquire(
                self._keys[chain], timeout_s=self._plan.deadline_s
            )
        self._open[ticket] = chain

    def _store(self, chain: int) -> None:
        try:
            with _Timed(self):
                store = self._namespace.store(self._keys[chain], timeout_s=0.0)
        except kvkeep.KVKeepError as error:
            # No daemon, or no room in the staging memory: it is not stored this time.
            self.counts[type(error).__name__] += 1
            return
        content = self._content[chain]
        for position, view in zip(store.new, store.views, strict=True):
            view[:] = content[position]
        with _Timed(self):
            ticket = store.submit_commit(self._plan.deadline_s)
        self._open[ticket] = chain
        self.counts["stores"] += 1


class _Timed:
    """Adds up the time in our calls, and whether they slept."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._switched = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._loop.add_call(
            time.perf_counter() - self._began_s,
            resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - self._switched,
        )

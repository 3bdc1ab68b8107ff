"""The client program of the overload test: each call stores or reads bytes that are verified."""

from collections import Counter
from pathlib import Path

import numpy as np

import kvkeep
from tests.fakes.client_process import Wire
from tests.fakes.generated_blocks import blocks_of, chain_keys, spec, split

BLOCK_NBYTES = 4096
BLOCKS = 4
SHARED_CHAINS = 16
SPEC = spec(BLOCK_NBYTES)
# Longer than the daemon needs for what all clients have under way: who waits longer was lost.
TIMEOUT_S = 30.0
REFUSALS_MAX = 100


class _Caller:
    """Makes calls until they are answered; counts what became of them."""

    def __init__(self, namespace: kvkeep.Namespace) -> None:
        self._namespace = namespace
        self.counts: Counter[str] = Counter()

    def store(self, chain: object) -> None:
        keys = chain_keys(chain, BLOCKS)

        def call() -> None:
            store = self._namespace.store(keys, timeout_s=TIMEOUT_S)
            new = b"".join(split(keys)[position] for position in store.new)
            for view, block in zip(store.views, blocks_of("load", new, BLOCK_NBYTES), strict=True):
                view[:] = block.data
            result = store.commit(TIMEOUT_S)
            self.counts["stored"] += result.stored

        self._until_answered(call)

    def read(self, chain: object) -> None:
        keys = chain_keys(chain, BLOCKS)

        def call() -> None:
            with self._namespace.acquire(keys, timeout_s=TIMEOUT_S) as acquired:
                expected = blocks_of("load", keys, BLOCK_NBYTES)
                for view, block in zip(acquired.views(), expected, strict=False):
                    same = np.array_equal(np.frombuffer(view, np.uint8), block)
                    self.counts["verified" if same else "wrong"] += 1

        self._until_answered(call)

    def _until_answered(self, call) -> None:
        for _ in range(REFUSALS_MAX):
            try:
                call()
            except kvkeep.ResourceExhaustedError:
                self.counts["refused"] += 1
                continue
            except kvkeep.KVKeepError as error:
                self.counts["lost"] += 1
                self.counts[f"{type(error).__name__}: {error}"] += 1
                return
            self.counts["completed"] += 1
            return
        self.counts["given up"] += 1


def overload(wire: Wire, runtime_dir: Path, number: int, rounds: int) -> None:
    """So many rounds of calls, as fast as they go, after a word from the test; then the counts."""
    staging_nbytes = 2 * BLOCKS * BLOCK_NBYTES
    with kvkeep.connect(runtime_dir, staging_nbytes=staging_nbytes, timeout_s=TIMEOUT_S) as client:
        caller = _Caller(client.open_namespace(SPEC))
        wire.tell("attached")
        wire.hear()
        for turn in range(rounds):
            caller.store((number, turn))
            caller.read((number, turn))
            caller.store(("shared", turn % SHARED_CHAINS))
            caller.read(("shared", (turn + number) % SHARED_CHAINS))
        wire.tell(dict(caller.counts))

"""The client program of P13: works on while daemons die, verifies all it reads, keeps old views."""

import random
import threading
import time
from collections import Counter, deque

import numpy as np

import kvkeep
from tests.fakes.client_process import Wire
from tests.fakes.generated_blocks import (
    KEY_NBYTES,
    blocks_of,
    chain_keys,
    place_of,
    spec,
    store_chain,
)

BLOCK_NBYTES = 32 * 1024
BLOCKS = 32
CHAINS = 24
LIVES_KEPT = 4
SPEC = spec(BLOCK_NBYTES)


class Worker:
    """One thread's work with the cache; whatever the daemon does, only `KVKeepError`s come."""

    def __init__(self, namespace: kvkeep.Namespace, seed: int) -> None:
        self._namespace = namespace
        self._source = random.Random(seed)
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        chain = self._source.randrange(CHAINS)
        keys = chain_keys(chain, BLOCKS)
        way = self._source.choice((self._look_up, self._read, self._lease, self._store))
        try:
            way(keys)
        except (kvkeep.UnavailableError, kvkeep.DeadlineError) as error:
            self.counts[type(error).__name__] += 1
            time.sleep(0.002)

    def _verify(self, keys: bytes, blocks) -> None:
        expected = blocks_of(place_of(""), keys[: len(blocks) * KEY_NBYTES], BLOCK_NBYTES)
        assert all(block == expected[i].data for i, block in enumerate(blocks)), "wrong bytes"
        self.counts["verified"] += len(blocks)

    def _look_up(self, keys: bytes) -> None:
        found = self._namespace.lookup(keys)
        assert found.complete or not found.blocks
        self.counts["nothing known" if not found.complete else "looked up"] += 1

    def _read(self, keys: bytes) -> None:
        buffer = bytearray(BLOCKS * BLOCK_NBYTES)
        exact = self._namespace.read_into(keys, buffer)
        whole = memoryview(buffer)
        starts = range(0, exact * BLOCK_NBYTES, BLOCK_NBYTES)
        self._verify(keys, [whole[at : at + BLOCK_NBYTES] for at in starts])

    def _lease(self, keys: bytes) -> None:
        with self._namespace.acquire(keys) as acquired:
            self._verify(keys, acquired.views())

    def _store(self, keys: bytes) -> None:
        self.counts["stored"] += store_chain(self._namespace, keys).stored


class OldViews:
    """Arrays on the pools of daemons that are dead: memory still, with the bytes of then."""

    def __init__(self, namespace: kvkeep.Namespace, name: str) -> None:
        self._namespace = namespace
        self._keys = chain_keys(("kept", name), 4)
        self._expected = blocks_of(place_of(""), self._keys, BLOCK_NBYTES)
        self._kept: deque[list[np.ndarray]] = deque(maxlen=LIVES_KEPT)
        self._leases: deque[kvkeep.Acquired] = deque(maxlen=LIVES_KEPT)

    def keep(self) -> None:
        """Errors: UnavailableError, DeadlineError."""
        acquired = None
        while acquired is None or acquired.leased < len(self._expected):
            # Others may have pushed it out in between.
            store_chain(self._namespace, self._keys)
            acquired = self._namespace.acquire(self._keys)
        self._leases.append(acquired)
        self._kept.append([acquired.array(i) for i in range(acquired.leased)])

    def verify(self) -> int:
        for arrays in self._kept:
            for array, expected in zip(arrays, self._expected, strict=True):
                assert np.array_equal(array, expected), "an old view changed"
        return len(self._kept)


def work(wire: Wire, runtime_dir: str, seed: int, threads: int) -> None:
    """Tells (epoch, when it was there) after each attach, and in the end its counts."""
    with kvkeep.connect(runtime_dir) as client:
        namespace = client.open_namespace(SPEC)
        workers = [Worker(namespace, 100 * seed + number) for number in range(threads)]
        over = threading.Event()
        failures: list[BaseException] = []

        def run(worker: Worker) -> None:
            try:
                while not over.is_set():
                    worker.step()
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        running = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in running:
            thread.start()
        try:
            lives = _watch(wire, client, OldViews(namespace, str(seed)), failures)
        finally:
            over.set()
            for thread in running:
                thread.join()
    if failures:
        raise failures[0]
    wire.tell((lives, sum((worker.counts for worker in workers), Counter())))


def _watch(wire: Wire, client: kvkeep.Client, views: OldViews, failures: list) -> int:
    """Most daemons' lives of which it could still read a view."""
    epoch = lives = 0
    while not (wire.asked() or failures):
        lives = max(lives, views.verify())
        try:
            if client.attached and client.server_epoch != epoch:
                now_s, found = time.monotonic(), client.server_epoch
                views.keep()
                epoch = found
                wire.tell((epoch, now_s))
        except (kvkeep.UnavailableError, kvkeep.DeadlineError):
            pass
        time.sleep(0.002)
    return lives

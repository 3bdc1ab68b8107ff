"""A client program whose calls are interrupted by a signal whose handler raises, at any line."""

import random
import select
import signal
import time
from collections.abc import Callable

import kvkeep
from tests.fakes.client_process import Wire
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec

BLOCK_NBYTES = 512 * 1024
BLOCKS = 4
DEADLINE_S = 5.0
SPEC = spec(BLOCK_NBYTES)


class _AlarmError(Exception):
    pass


def _ring(*_: object) -> None:
    raise _AlarmError


def _under_alarm(work: Callable[[], None], delay_s: float) -> type[Exception] | None:
    """What ended it."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (_AlarmError, kvkeep.UnavailableError) as error:
        return _AlarmError if isinstance(error, _AlarmError) else kvkeep.UnavailableError
    return None


def interrupted(wire: Wire, runtime_dir: str, seed: int, count: int) -> None:
    """Stores and leases under alarms; what is stored later must never be found under what was
    interrupted. Tells (alarms, wrong blocks, blocks read, longest call in seconds).
    """
    source = random.Random(seed)
    signal.signal(signal.SIGALRM, _ring)
    # Threads that begin below inherit it: one that takes the signal for this one, and runs only
    # when the timer has long been stopped, would have it raised outside of what is interrupted.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    alarms = wrong = read = 0
    longest_s = typical_s = 0.005
    with kvkeep.connect(
        runtime_dir, staging_nbytes=4 * BLOCKS * BLOCK_NBYTES, timeout_s=DEADLINE_S
    ) as client:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        namespace = client.open_namespace(SPEC)
        turn = 0
        while alarms < count:
            turn += 1
            first, second = (chain_keys((seed, turn, which), BLOCKS) for which in "ab")
            content = [blocks_of(place_of(""), keys, BLOCK_NBYTES) for keys in (first, second)]
            began_s = time.monotonic()

            def work(keys: bytes = first, blocks: object = content[0]) -> None:
                namespace.store_blocks(keys, blocks)
                with namespace.acquire(keys):
                    pass
                _submit(client, namespace, keys)

            ended = _under_alarm(work, source.uniform(1e-5, 1.2 * typical_s))
            longest_s = max(longest_s, time.monotonic() - began_s)
            if ended is None:
                typical_s = time.monotonic() - began_s
            elif ended is _AlarmError:
                alarms += 1
            else:
                time.sleep(0.01)  # an interrupt cost the session: it attaches again
            for keys, expected in ((second, content[1]), (first, content[0])):
                began_s = time.monotonic()
                found, bad = _store_and_read(namespace, keys, expected, store=keys is second)
                longest_s = max(longest_s, time.monotonic() - began_s)
                read, wrong = read + found, wrong + bad
    wire.tell((alarms, wrong, read, longest_s))


def _submit(client, namespace, keys) -> None:
    ticket = namespace.submit_acquire(keys)
    store = namespace.store(keys)
    tickets = [ticket, store.submit_commit()]
    while not all(each.done for each in tickets):
        select.select([client.fileno()], [], [], DEADLINE_S)
        client.poll()
    if ticket.acquired is not None:
        ticket.acquired.release()


def _store_and_read(namespace, keys, expected, *, store: bool) -> tuple[int, int]:
    """(blocks read, of them wrong); none while there is no session."""
    try:
        if store:
            namespace.store_blocks(keys, expected)
        with namespace.acquire(keys) as acquired:
            right = [
                bytes(view) == row.tobytes()
                for view, row in zip(acquired.views(), expected, strict=False)
            ]
            return len(right), right.count(False)
    except kvkeep.UnavailableError:
        time.sleep(0.01)
        return 0, 0

"""P09: what a client held comes back when it is killed (at once) or stopped (after the timeout).

Nothing in the API shows a slot that is lost or a pin that stays. But one client can store and lease
blocks until nothing may leave any more, and how many that are must not change.
"""

import contextlib
import random
import time

import pytest

import kvkeep
from tests.crash.dying_clients import (
    BEGUN,
    BLOCK_NBYTES,
    OVER,
    PHASES,
    SPEC,
    STAGING_NBYTES,
    live,
    mix,
    say_hello,
    verify,
)
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys, store_chain
from tests.fakes.waiting import wait_until

CLIENTS = 10
TIMEOUT_S = 1.5
AFTER_KILL_S = 1.0
AFTER_STOP_S = TIMEOUT_S + 1.0
CONFIG = f"""
[ram]
size = "64MiB"
chunk = "64MiB"
slab = "1MiB"
[sessions]
timeout = "{TIMEOUT_S * 1000:.0f}ms"
staging_max = {CLIENTS * STAGING_NBYTES}
staging_total_max = {(CLIENTS + 1) * STAGING_NBYTES}
"""


class Observer:
    """A client that sees what others hold."""

    def __init__(self, runtime_dir: str) -> None:
        self.runtime_dir = runtime_dir
        self.client = kvkeep.connect(runtime_dir, staging_nbytes=STAGING_NBYTES, timeout_s=5.0)
        self.namespace = self.client.open_namespace(SPEC)
        self._probes = 0

    def capacity(self) -> int:
        """Blocks that one client can store and lease at a time."""
        self._probes += 1
        blocks = 0
        with contextlib.ExitStack() as held:
            while True:
                keys = chain_keys(("probe", self._probes, blocks), 16)
                stored = store_chain(self.namespace, keys).stored
                acquired = held.enter_context(self.namespace.acquire(keys))
                assert acquired.leased == stored
                blocks += stored
                if stored < 16:
                    break
        wait_until(lambda: self.client.stats().leases == 0, 5.0, "the probe's leases are back")
        return blocks

    def alone(self) -> bool:
        """No other session, no lease."""
        stats = self.client.stats()
        return (stats.sessions, stats.leases, stats.pool.leased_nbytes) == (1, 0, 0)

    def all_staging_is_back(self) -> bool:
        """One client may have as much as all the others had."""
        try:
            kvkeep.connect(self.runtime_dir, staging_nbytes=CLIENTS * STAGING_NBYTES).close()
        except kvkeep.UnavailableError as error:
            if "staging" not in str(error):
                raise
            return False
        return True

    def everything_back_s(self, wait_s: float, since: float) -> float:
        """Seconds since `since` until nothing of the others is held."""
        left_s = wait_s - (time.monotonic() - since)
        wait_until(self.alone, left_s, f"sessions and leases back: {self.client.stats()}")
        left_s = wait_s - (time.monotonic() - since)
        wait_until(self.all_staging_is_back, left_s, "staging back")
        return time.monotonic() - since


@pytest.fixture
def observer(tmp_path):
    with running_daemon(tmp_path, CONFIG) as daemon:
        observed = Observer(str(daemon.runtime_dir))
        yield observed
        observed.client.close()
        daemon.check_log()
        assert daemon.end() == 0


def enter(start, observer, phase, turn):
    """Ten clients that are in this phase."""
    names = [f"{turn}-{number}" for number in range(CLIENTS)]
    clients = [start(live, observer.runtime_dir, phase, name) for name in names]
    for client in clients:
        assert client.hear() == (BEGUN if phase == "in commit" else "there")
    assert observer.client.stats().sessions == CLIENTS + 1
    return clients


def strike(clients, blow, phase) -> float:
    """Kills or stops them all; when the last one was hit."""
    source = random.Random(phase)
    for client in clients:
        if phase == "in commit":
            while client.hear() != BEGUN or client.asked():
                pass
            # Some milliseconds are what its commit takes.
            time.sleep(source.random() * 0.003)
        blow(client)
    return time.monotonic()


def last_heard(client) -> str | None:
    """Of what a client told that now is dead or stopped, the last."""
    last = None
    with contextlib.suppress(AssertionError):
        while client.asked():
            last = client.hear()
    return last


@pytest.mark.promise("P09", gate=CLIENTS, nightly=10 * CLIENTS, unit="clients killed")
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_client_gives_back_all_at_once(observer, phase, promise_count):
    capacity = observer.capacity()
    for turn in range(promise_count // CLIENTS):
        with client_processes() as start:
            clients = enter(start, observer, phase, turn)
            struck_s = strike(clients, lambda client: client.kill(), phase)
            observer.everything_back_s(AFTER_KILL_S, struck_s)
            if phase == "in commit":
                assert [last_heard(client) for client in clients].count(OVER) <= CLIENTS // 2
    assert observer.capacity() == capacity


@pytest.mark.promise("P09", gate=CLIENTS, nightly=10 * CLIENTS, unit="clients stopped")
@pytest.mark.parametrize("phase", PHASES)
def test_a_stopped_client_gives_back_all_after_the_timeout(observer, phase, promise_count):
    capacity = observer.capacity()
    for turn in range(promise_count // CLIENTS):
        with client_processes() as start:
            clients = enter(start, observer, phase, turn)
            struck_s = strike(clients, lambda client: client.stop(), phase)
            assert observer.everything_back_s(AFTER_STOP_S, struck_s) > TIMEOUT_S / 2
            come_back_to_life(clients, observer, phase, turn)
        wait_until(observer.alone, AFTER_KILL_S, "the sessions that came back have ended")
    assert observer.capacity() == capacity


def come_back_to_life(clients, observer, phase, turn) -> None:
    """All that they held is somebody else's now: they must find out, and touch none of it."""
    taken = chain_keys(("taken", turn), 512)
    for at in range(0, len(taken), len(taken) // 16):
        store_chain(observer.namespace, taken[: at + len(taken) // 16])
    with observer.namespace.acquire(taken, ttl_s=30.0) as acquired:
        assert acquired.leased == 512
        for client in clients:
            client.resume()
        for client in clients:
            # The commit that was stopped fails or is answered, and others follow.
            for _ in range(6 if phase == "in commit" else 0):
                client.hear()
            client.tell("go on")
        for client in clients:
            assert last_word(client) == "back"
        verify(taken, acquired.views())
    for client in clients:
        client.end()


def last_word(client) -> str:
    while (word := client.hear()) in {BEGUN, OVER}:
        pass
    return word


def test_a_client_that_dies_before_its_first_use_holds_nothing(observer):
    """B071. It has a session and memory, but no Attach yet."""
    capacity = observer.capacity()
    with client_processes() as start:
        clients = [start(say_hello, observer.runtime_dir) for _ in range(CLIENTS)]
        for client in clients:
            assert client.hear() >= 3
        assert observer.client.stats().sessions == CLIENTS + 1
        assert not observer.all_staging_is_back()
        struck_s = strike(clients, lambda client: client.kill(), "said hello")
        observer.everything_back_s(AFTER_KILL_S, struck_s)
    assert observer.capacity() == capacity


@pytest.mark.promise("P09", gate=40, nightly=2000, unit="clients killed in a mix")
def test_free_bytes_are_the_same_after_many_deaths(observer, promise_count):
    """B029: stores, leases and reads of four clients, of which 2 % end in the client's death."""
    capacity = observer.capacity()
    with client_processes() as start:
        deaths = seed = 0
        running = []
        while deaths < promise_count:
            dead = [client for client in running if not client.alive]
            for client in dead:
                # It told "there", and nothing else: a failed check would be heard here.
                assert client.hear() == "there"
                with pytest.raises(AssertionError, match="code -9"):
                    client.hear()
            deaths += len(dead)
            running = [client for client in running if client not in dead]
            while len(running) < 4:
                seed += 1
                running.append(start(mix, observer.runtime_dir, seed, 0.02))
            time.sleep(0.005)
        for client in running:
            client.kill()
    wait_until(observer.alone, AFTER_KILL_S, "sessions and leases back")
    wait_until(observer.all_staging_is_back, AFTER_KILL_S, "staging back")
    assert observer.client.stats().blocks_stored_total > 10 * promise_count
    assert observer.client.stats().pool.payload_nbytes % BLOCK_NBYTES == 0
    assert observer.capacity() == capacity

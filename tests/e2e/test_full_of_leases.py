"""P28, by the real thing: with everything leased a store is refused at once, and nothing spins."""

import contextlib
import statistics
import time

import pytest

from kvkeep import CommitStatus
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec, store_chain
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, connect, place

CONFIG = LISTEN + '[ram]\nsize = "8MiB"\nslab = "256KiB"\n[leases]\nttl = "60s"\n'
BLOCK_NBYTES = 16 * 1024
BLOCKS = 16
ANSWER_S = 0.05
IDLE_S = 1.0
IDLE_SHARE = 0.05


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as started:
        yield started
        started.check_log()


@pytest.fixture
def client(daemon, way):
    with connect(place(daemon, way), timeout_s=10.0) as attached:
        yield attached


def fill_with_leases(namespace, held) -> list[bytes]:
    """Stores and leases chains until nothing may leave any more; the chains."""
    chains = []
    while True:
        chains.append(chain_keys(("leased", len(chains)), BLOCKS))
        stored = store_chain(namespace, chains[-1]).stored
        acquired = held.enter_context(namespace.acquire(chains[-1]))
        assert acquired.leased == stored
        if stored < BLOCKS:
            return chains


@pytest.mark.promise("P28", gate=50, nightly=5_000, unit="stores into a pool of leases")
def test_a_store_is_refused_at_once_and_look_ups_go_on(daemon, client, way, promise_count):
    namespace = client.open_namespace(spec(BLOCK_NBYTES, model=way))
    others = client.open_namespace(spec(3 * BLOCK_NBYTES, model=way))
    with contextlib.ExitStack() as held:
        chains = fill_with_leases(namespace, held)
        used = client.stats().pool.slot_nbytes_used
        assert used > 7 << 20
        took_s, cpu_s = [], daemon.cpu_s()
        for turn in range(promise_count):
            into = others if turn % 3 == 2 else namespace
            store = into.store(chain_keys(("refused", turn), BLOCKS))
            start_s = time.monotonic()
            result = store.commit()
            took_s.append(time.monotonic() - start_s)
            assert (result.stored, result.refused) == (0, BLOCKS)
            assert result.status[0] is CommitStatus.REFUSED_NO_ROOM
            assert namespace.lookup(chains[turn % len(chains)]).blocks > 0
        cpu_s = daemon.cpu_s() - cpu_s
        # The machine may be busy with other things; the daemon may not.
        assert statistics.median(took_s) <= ANSWER_S
        assert cpu_s <= ANSWER_S * promise_count
        check_idle(daemon)
        check_reads(namespace, chains)
    # With the leases gone there is room again.
    deadline = time.monotonic() + 5
    while store_chain(namespace, chain_keys("after", BLOCKS)).refused:
        assert time.monotonic() < deadline
    wait_until(lambda: client.stats().leases == 0, 2.0, "all leases are back")


def check_idle(daemon) -> None:
    """No thread of the daemon is after something that cannot be had."""
    before_s, start_s = daemon.cpu_s(), time.monotonic()
    time.sleep(IDLE_S)
    assert (daemon.cpu_s() - before_s) / (time.monotonic() - start_s) < IDLE_SHARE


def check_reads(namespace, chains) -> None:
    buffer = bytearray(BLOCKS * BLOCK_NBYTES)
    for keys in chains:
        blocks = namespace.read_into(keys, buffer)
        assert blocks == namespace.lookup(keys).blocks
        expected = blocks_of(place_of(""), keys, BLOCK_NBYTES)[:blocks]
        assert buffer[: blocks * BLOCK_NBYTES] == expected.tobytes()
        with namespace.acquire(keys) as acquired:
            assert acquired.leased == blocks

"""Retention pins, by real clients of a real daemon."""

import statistics
import time

import pytest

import kvkeep
from kvkeep import CommitStatus
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, connect, place

BLOCK_NBYTES = 16 * 1024
BLOCKS = 16
CONFIG = LISTEN + '[ram]\nsize = "8MiB"\nslab = "256KiB"\n[pins]\n'


def test_a_pin_outlives_a_flood_and_its_client(tmp_path, way):
    with running_daemon(tmp_path, CONFIG + 'max = "1MiB"\n') as daemon:
        with connect(place(daemon, way), timeout_s=10) as client:
            namespace = client.open_namespace(spec(BLOCK_NBYTES))
            keys = chain_keys("kept", BLOCKS)
            store_chain(namespace, keys)
            given = namespace.pin(keys, keep_for_s=600)
            assert (given.blocks, given.keep_for_s) == (BLOCKS, 600)
            assert given.budget_left_nbytes == (1 << 20) - BLOCKS * BLOCK_NBYTES
        with connect(place(daemon, way), timeout_s=10) as client:
            namespace = client.open_namespace(spec(BLOCK_NBYTES))
            for number in range(100):
                assert store_chain(namespace, chain_keys(number, BLOCKS)).refused == 0
            assert namespace.lookup(keys).blocks == BLOCKS
            stats = client.stats()
            assert (stats.pins, stats.pinned_nbytes) == (1, BLOCKS * BLOCK_NBYTES)
            more = b"".join(chain_keys(number, BLOCKS) for number in range(96, 100))
            store_chain(namespace, more)
            with pytest.raises(kvkeep.ResourceExhaustedError, match=r"pins\.max") as refused:
                namespace.pin(more)
            assert refused.value.retry_after_s > 0
            assert namespace.unpin(given) == 1
            assert namespace.unpin(given) == 0
            assert client.stats().pinned_nbytes == 0
        daemon.check_log()


@pytest.mark.promise("P28", gate=50, nightly=5_000, unit="stores into a pool of pins")
def test_a_pool_of_pins_refuses_a_store_at_once(tmp_path, promise_count):
    with (
        running_daemon(tmp_path, CONFIG + 'max = "1GiB"\n') as daemon,
        kvkeep.connect(daemon.runtime_dir, timeout_s=10) as client,
    ):
        namespace = client.open_namespace(spec(BLOCK_NBYTES))
        pins = []
        for number in range(1000):
            keys = chain_keys(number, BLOCKS)
            refused = store_chain(namespace, keys).refused
            pins.append(namespace.pin(keys))
            if refused:
                break
        took_s, cpu_s = [], daemon.cpu_s()
        for turn in range(promise_count):
            store = namespace.store(chain_keys(("refused", turn), BLOCKS))
            began_s = time.monotonic()
            result = store.commit()
            took_s.append(time.monotonic() - began_s)
            assert result.status[0] is CommitStatus.REFUSED_NO_ROOM
        assert statistics.median(took_s) <= 0.05
        assert daemon.cpu_s() - cpu_s <= 0.05 * promise_count
        namespace.unpin(*pins)
        wait_until(lambda: not store_chain(namespace, chain_keys("l", 2)).refused, 5, "room")
        daemon.check_log()

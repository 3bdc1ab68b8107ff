"""P10: a block under a lease stays; a reader that outlived its lease always learns what it lost."""

import random
import time

import pytest

import kvkeep
from tests.crash.outliving_clients import BLOCKS, SPEC, keep, outlive
from tests.e2e import reuse_clients
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys, store_chain
from tests.fakes.waiting import wait_until

READERS = 8
TTL_S = 0.15
# Holds all chains of the readers at once, and little more.
CONFIG = """
[ram]
size = "12MiB"
slab = "256KiB"
[leases]
ttl = "5s"
[sessions]
timeout = "60s"
"""


@pytest.fixture
def observed(tmp_path):
    """The daemon's directory, and a client of the test's own."""
    with running_daemon(tmp_path, CONFIG) as daemon:
        with kvkeep.connect(daemon.runtime_dir, timeout_s=10.0) as client:
            yield str(daemon.runtime_dir), client
        daemon.check_log()


def refill(client, turn, pools):
    """Stores this many times what the pool holds."""
    namespace = client.open_namespace(SPEC)
    for chain in range(round(pools * 12)):
        store_chain(namespace, chain_keys(("refill", turn, chain), BLOCKS))


def evict_part_of_a_chain(client):
    """Stores in small pieces until what left is no whole number of the readers' chains."""
    namespace = client.open_namespace(SPEC)
    for piece in range(12 * BLOCKS // 24):
        store_chain(namespace, chain_keys(("piece", piece), 24))
        evicted = client.stats().blocks_evicted_total
        if evicted % BLOCKS:
            assert evicted < READERS * BLOCKS
            return
    raise AssertionError("nothing left, or whole chains only")


def outlive_leases(readers, client):
    """Stops all readers until none has a lease any more."""
    for reader in readers:
        assert reader.hear() == BLOCKS
    for reader in readers:
        reader.stop()
    wait_until(lambda: client.stats().leases == 0, 5.0, "the leases of stopped readers expire")


def answers(readers, what_then):
    for reader in readers:
        reader.tell(what_then)
        reader.resume()
    return [reader.hear() for reader in readers]


@pytest.mark.promise("P10", gate=5_120, nightly=1_000_000, unit="stale blocks under a lost lease")
def test_a_reader_learns_that_its_blocks_were_replaced(observed, promise_count):
    runtime_dir, client = observed
    with client_processes() as start:
        readers = [start(outlive, runtime_dir, str(i), TTL_S) for i in range(READERS)]
        stale = undetected = 0
        for turn in range(100 * promise_count):
            outlive_leases(readers, client)
            refill(client, turn, 1.5)
            then = "renew" if turn % 2 else "read"
            for differing, exact, renewed, told in answers(readers, then):
                assert not renewed
                undetected += (differing > 0 or exact < BLOCKS) and not told
                assert differing <= BLOCKS - exact
                stale += differing
            if stale >= promise_count:
                break
        for reader in readers:
            assert reader.hear() == BLOCKS
            reader.tell("end")
            reader.end()
    assert undetected == 0
    assert stale >= promise_count


def test_expired_but_still_resident_is_renewed(observed):
    runtime_dir, client = observed
    with client_processes() as start:
        readers = [start(outlive, runtime_dir, str(i), TTL_S) for i in range(READERS)]
        for what_then, renewed in (("renew", True), ("read", None)):
            outlive_leases(readers, client)
            assert answers(readers, what_then) == [(0, BLOCKS, renewed, False)] * READERS
    assert client.stats().blocks_evicted_total == 0


def test_some_blocks_replaced_is_some_blocks_lost(observed):
    """Leaves leave first, so what is left is a prefix, and it is exact."""
    runtime_dir, client = observed
    with client_processes() as start:
        readers = [start(outlive, runtime_dir, str(i), TTL_S) for i in range(READERS)]
        outlive_leases(readers, client)
        evict_part_of_a_chain(client)
        found = answers(readers, "read")
    for differing, exact, _, told in found:
        assert told == (exact < BLOCKS)
        assert differing <= BLOCKS - exact
    assert any(0 < exact < BLOCKS for _, exact, _, _ in found)


@pytest.mark.promise("P10", gate=10, nightly=200, unit="pools stored against leases")
def test_leased_blocks_stay_whatever_is_stored(observed, promise_count):
    runtime_dir, client = observed
    with client_processes() as start:
        readers = [start(keep, runtime_dir, str(i), 2.0) for i in range(READERS)]
        assert [reader.hear() for reader in readers] == [BLOCKS] * READERS
        for turn in range(promise_count):
            refill(client, turn, 1.0)
        assert client.stats().leases == READERS
        for reader in readers:
            reader.tell("end")
        for reader in readers:
            passes, wrong = reader.hear()
            assert (passes > 10, wrong) == (True, 0)
            reader.end()
        wait_until(lambda: client.stats().leases == 0, 5.0, "leases given back")
        assert client.stats().blocks_evicted_total > 100 * promise_count
        # Now they may leave as everything else may.
        refill(client, "after", 2.0)
        namespace = client.open_namespace(SPEC)
        left = [namespace.lookup(chain_keys(("keep", str(i)), BLOCKS)) for i in range(READERS)]
        assert sum(found.blocks for found in left) == 0


@pytest.mark.promise("P10", gate=100, nightly=20_000, unit="stops within a read without a lease")
def test_a_read_that_was_stopped_on_the_way_is_exact_or_a_miss(tmp_path, promise_count):
    tiny = '[ram]\nsize = "4MiB"\nslab = "64KiB"\n[sessions]\nstaging = "4MiB"\n'
    source = random.Random(7)
    with running_daemon(tmp_path, tiny) as daemon, client_processes() as start:
        runtime_dir = str(daemon.runtime_dir)
        writer = start(reuse_clients.refill, runtime_dir)
        readers = [
            start(reuse_clients.read, runtime_dir, seed, "one buffer", None) for seed in range(4)
        ]
        for client in (writer, *readers):
            assert client.hear() == "ready"
        for reader in readers:
            reader.tell("go")
        for _ in range(promise_count // len(readers)):
            time.sleep(source.random() * 0.005)
            for reader in readers:
                reader.stop()
            # In which every slot changes hands.
            time.sleep(0.02)
            for reader in readers:
                reader.resume()
        for client in (*readers, writer):
            client.tell("end")
        told = [reader.hear() for reader in readers]
        writer.hear()
    done, wrong, detected, spoiled = map(sum, zip(*told, strict=True))
    assert (wrong, done > 1000, detected > 0, spoiled > 0) == (0, True, True, True)

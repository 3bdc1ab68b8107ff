"""P01, smoke: clients that read in every way from a pool that is smaller than what they use.

Several namespaces have the same keys and unlike bytes; every byte that a read returns is compared
with what its (namespace, rank, group, key) says.
"""

import pytest

import kvkeep
from tests.e2e.verified_clients import read_and_verify
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import running_daemon

CONFIG = '[ram]\nsize = "16MiB"\nchunk = "4MiB"\nslab = "128KiB"\n[index]\nrows_initial = 512\n'
PROCESSES, THREADS = 3, 2


@pytest.mark.promise("P01", gate=100_000, nightly=1_000_000, unit="reads")
def test_every_read_returns_the_bytes_of_its_key(tmp_path, promise_count):
    share = -(-promise_count // PROCESSES)
    with running_daemon(tmp_path, CONFIG) as daemon, client_processes() as start:
        runtime_dir = str(daemon.runtime_dir)
        clients = [
            start(read_and_verify, runtime_dir, seed, THREADS, share) for seed in range(PROCESSES)
        ]
        limit_s = max(200.0, promise_count / 500)
        tallies = [tally for client in clients for tally in client.hear(limit_s)]
        with kvkeep.connect(runtime_dir) as client:
            stats = client.stats()
        for one in clients:
            one.end()
    assert [wrong for tally in tallies for wrong in tally.wrong] == []
    assert sum(tally.verified for tally in tallies) >= promise_count
    # Each way was used, and what it read was evicted from under it all the time.
    for way in ("one buffer", "buffers", "views", "looked up"):
        assert sum(tally.by_way[way] for tally in tallies) > promise_count // 50, way
    assert stats.blocks_evicted_total > promise_count // 10
    assert sum(tally.short for tally in tallies) > promise_count // 1000
    assert stats.blocks_asked_total == stats.blocks_hit_total + stats.blocks_missed_total
    assert stats.index.rebuilds > 0
    assert sum(tally.incomplete for tally in tallies) <= promise_count // 500
    assert stats.touch_records_invalid_total == 0

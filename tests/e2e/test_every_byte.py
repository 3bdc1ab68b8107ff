"""P01: clients that read in every way from a pool that is smaller than what they use, without nvme
and with one that is smaller, too.

Several namespaces have the same keys and unlike bytes; every byte that a read returns is compared
with what its (namespace, rank, group, key) says.
"""

import pytest

from tests.e2e.verified_clients import read_and_verify
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.ways import LISTEN, connect, place

SETTINGS = (
    LISTEN + '[ram]\nsize = "{}"\nchunk = "4MiB"\nslab = "128KiB"\n[index]\nrows_initial = 512\n'
)
RAM = SETTINGS.format("24MiB")
PROCESSES, THREADS = 3, 2


def both(directory):
    """A pool and an nvme that is full soon."""
    return (
        SETTINGS.format("8MiB")
        + f'[nvme]\ndirectories = ["{directory}/nvme"]\nmax = "24MiB"\nsegment = "2MiB"\n'
        'free_min = "1MiB"\n'
    )


def read(directory, config, count, way="local"):
    """The tallies of all threads that read `count` blocks, and the daemon's stats after it."""
    share = -(-count // PROCESSES)
    with running_daemon(directory, config) as daemon, client_processes() as start:
        where = place(daemon, way)
        clients = [start(read_and_verify, where, seed, THREADS, share) for seed in range(PROCESSES)]
        limit_s = max(200.0, count / 300)
        tallies = [tally for client in clients for tally in client.hear(limit_s)]
        with connect(where, timeout_s=20.0) as client:
            stats = client.stats()
        for one in clients:
            one.end()
        daemon.check_log()
    assert [wrong for tally in tallies for wrong in tally.wrong] == []
    assert sum(tally.verified for tally in tallies) >= count
    # Each way was used.
    for used in ("one buffer", "buffers", "views", "looked up"):
        assert sum(tally.by_way[used] for tally in tallies) > count // 50, used
    assert stats.blocks_asked_total == stats.blocks_hit_total + stats.blocks_missed_total
    assert stats.touch_records_invalid_total == stats.blocks_corrupt_total == 0
    return tallies, stats


@pytest.mark.promise("P01", gate=100_000, nightly=1_000_000, unit="reads")
def test_every_read_returns_the_bytes_of_its_key(tmp_path, promise_count):
    tallies, stats = read(tmp_path, RAM, promise_count)
    # What was read was evicted from under the readers all the time.
    assert stats.blocks_evicted_total > promise_count // 10
    assert sum(tally.short for tally in tallies) > promise_count // 1000
    assert stats.index.rebuilds > 0
    assert sum(tally.incomplete for tally in tallies) <= promise_count // 500


@pytest.mark.promise("P01", gate=20_000, nightly=1_000_000, unit="reads from both tiers")
def test_every_read_from_both_tiers_returns_the_bytes_of_its_key(tmp_path, promise_count):
    tallies, stats = read(tmp_path, both(tmp_path), promise_count)
    # Blocks came back from nvme all the time, and left it for others: it is full.
    assert sum(tally.from_nvme for tally in tallies) > promise_count // 50
    assert stats.blocks_evicted_total > promise_count // 10
    assert stats.nvme.blocks > stats.pool.blocks
    assert stats.nvme.used_nbytes > 0.8 * stats.nvme.limit_nbytes


@pytest.mark.promise("P01", gate=3_000, nightly=200_000, unit="reads from another host")
def test_every_read_from_another_host_returns_the_bytes_of_its_key(tmp_path, promise_count):
    """From both tiers; fewer, for each is a call."""
    tallies, stats = read(tmp_path, both(tmp_path), promise_count, "remote")
    assert sum(tally.from_nvme for tally in tallies) > 0
    assert stats.blocks_evicted_total > promise_count // 50

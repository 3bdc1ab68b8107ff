"""B032: what is asked for and not there leaves nothing behind in the daemon."""

import os

import kvkeep
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import spec

KEYS_A_CALL = 1000
CALLS = 1000
GROWTH_NBYTES_MAX = 10 << 20


def test_a_million_misses_take_no_memory(tmp_path):
    with (
        running_daemon(tmp_path) as daemon,
        kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client,
    ):
        namespace = client.open_namespace(spec(4096))

        def ask(calls):
            for _ in range(calls):
                keys = os.urandom(32 * KEYS_A_CALL)
                assert namespace.lookup(keys).blocks == 0
                assert namespace.prefetch(keys) == 0
                with namespace.acquire(keys) as found:
                    assert found.leased == 0

        ask(50)
        before = daemon.resident_nbytes()
        ask(CALLS)
        assert daemon.resident_nbytes() - before < GROWTH_NBYTES_MAX
        stats = client.stats()
        assert stats.leases == 0
        assert stats.blocks_missed_total >= KEYS_A_CALL * CALLS
        daemon.check_log()

"""P01, P03: an exception out of a signal's handler, in the middle of any call, costs at most the
session: never a wrong byte, never a call that outlives its deadline."""

import pytest

from tests.crash.interrupted_clients import DEADLINE_S, interrupted
from tests.fakes.client_process import HEAR_S, client_processes
from tests.fakes.daemon_process import running_daemon

CLIENTS = 2


@pytest.mark.promise("P01", gate=300, nightly=30_000, unit="calls interrupted by a signal")
def test_an_interrupt_at_any_line_makes_no_wrong_byte(tmp_path, promise_count):
    with (
        running_daemon(tmp_path, '[ram]\nsize = "256MiB"\n') as daemon,
        client_processes() as start,
    ):
        clients = [
            start(interrupted, str(daemon.runtime_dir), seed, promise_count // CLIENTS)
            for seed in range(CLIENTS)
        ]
        for client in clients:
            alarms, wrong, read, longest_s = client.hear(HEAR_S + promise_count)
            assert (alarms, wrong) == (promise_count // CLIENTS, 0)
            assert read > alarms
            # Two calls of the library, and a store has several of the wire.
            assert longest_s < 4 * DEADLINE_S
            client.end()
        daemon.check_log()

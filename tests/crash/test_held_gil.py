"""P09: a client whose interpreter stands still for half the session's timeout (an engine captures
its graphs) keeps its session and its leases."""

import ctypes
import time

import pytest

import kvkeep
from tests.fakes.client_process import Wire, client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec, store_chain

BLOCK_NBYTES = 16 * 1024
BLOCKS = 16
SPEC = spec(BLOCK_NBYTES)
KEYS = chain_keys("kept", BLOCKS)


def stand_still(wire: Wire, runtime_dir: str, seconds: float) -> None:
    """Holds a lease, and the GIL, which no other thread of this process gets meanwhile."""
    expected = blocks_of(place_of(""), KEYS, BLOCK_NBYTES)
    with kvkeep.connect(runtime_dir) as client:
        namespace = client.open_namespace(SPEC)
        store_chain(namespace, KEYS)
        with namespace.acquire(KEYS) as acquired:
            for _ in range(2):
                began_s = time.monotonic()
                ctypes.PyDLL(None).usleep(int(seconds * 1e6))
                assert time.monotonic() - began_s >= seconds
                acquired.renew()
            views = acquired.views()
            wire.tell([view == row.data for view, row in zip(views, expected, strict=True)])
            wire.tell((client.attached, client.stats().sessions_ended_total))


@pytest.mark.parametrize(
    ("timeout_s", "seconds"), [(4, 2.0), pytest.param(30, 15.0, marks=pytest.mark.slow)]
)
def test_a_held_gil_costs_no_session(tmp_path, timeout_s, seconds):
    text = f'[sessions]\ntimeout = "{timeout_s}s"\n[leases]\nttl = "{timeout_s}s"\n'
    with running_daemon(tmp_path, text) as daemon, client_processes() as start:
        client = start(stand_still, str(daemon.runtime_dir), seconds)
        assert client.hear(10 * seconds) == [True] * BLOCKS
        assert client.hear() == (True, 0)
        client.end()

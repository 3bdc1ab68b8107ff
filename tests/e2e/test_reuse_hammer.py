"""Readers without leases against a pool that is refilled as fast as it goes: no reuse of a slot
goes unnoticed, and the check that notices is needed.

The pool holds a fraction of the chains, so that every slot changes hands all the time. A read that
counts as exact has exactly its key's bytes, every one compared.
"""

import pytest

from tests.e2e.reuse_clients import read, refill
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import running_daemon

TINY = '[ram]\nsize = "4MiB"\nslab = "64KiB"\n[sessions]\nstaging = "4MiB"\n'
READERS = 2


def reads(gate):
    return pytest.mark.promise("P10", gate=gate, nightly=10 * gate, unit="reads without a lease")


@pytest.mark.parametrize(
    "into",
    [
        pytest.param("one buffer", marks=reads(9_000_000)),
        pytest.param("a buffer a block", marks=reads(1_000_000)),
    ],
)
def test_no_reuse_of_a_slot_goes_unnoticed(tmp_path, promise_count, into):
    limit_s = max(200.0, promise_count / 20_000)
    with running_daemon(tmp_path, TINY) as daemon, client_processes() as start:
        runtime_dir = str(daemon.runtime_dir)
        writer = start(refill, runtime_dir)
        share = promise_count // READERS
        readers = [start(read, runtime_dir, seed, into, share) for seed in range(READERS)]
        for client in (writer, *readers):
            assert client.hear() == "ready"
        for reader in readers:
            reader.tell("go")
        told = [reader.hear(limit_s) for reader in readers]
        writer.tell("end")
        refilled = writer.hear()
        done, wrong, detected, spoiled = map(sum, zip(*told, strict=True))
    assert wrong == 0
    assert done >= promise_count
    # Else this test proves nothing: slots must have been reused under the readers' hands.
    assert detected >= 100
    assert spoiled >= 10
    assert refilled > 10_000

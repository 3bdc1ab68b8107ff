"""P13: a daemon that dies takes no client with it, and leaves nothing behind."""

import contextlib
import os
import random
import signal
import time

import pytest

import kvkeep
from tests.crash.restart_clients import BLOCKS, LIVES_KEPT, SPEC, work
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import DaemonProcess, running_daemon
from tests.fakes.generated_blocks import chain_keys, store_chain
from tests.fakes.waiting import wait_until

CLIENTS, THREADS = 3, 2
ATTACHED_S = 2.0
SIZES = ("16MiB", "48MiB", "9MiB", "32MiB")


def config(size: str) -> str:
    # Clients that lived with dead daemons are still there, and the next daemon starts all the same.
    return f'[ram]\nsize = "{size}"\nchunk = "8MiB"\nslab = "256KiB"\n[index]\nrows_initial = 64\n'


@pytest.mark.promise("P13", gate=10, nightly=100, unit="restarts under load")
def test_a_dead_daemon_takes_no_client_with_it(tmp_path, promise_count):
    source = random.Random(13)
    before = set(os.listdir("/dev/shm"))
    daemon = DaemonProcess(tmp_path, config(SIZES[0]))
    try:
        daemon.start()
        with client_processes() as start:
            clients = [
                start(work, str(daemon.runtime_dir), seed, THREADS) for seed in range(CLIENTS)
            ]
            epochs = {client.hear()[0] for client in clients}
            assert len(epochs) == 1
            for turn in range(promise_count):
                time.sleep(0.1 + source.random() * 0.3)
                # Mostly as it goes when it goes wrong; now and then as an upgrade does it.
                number = signal.SIGTERM if turn % 3 == 2 else signal.SIGKILL
                assert daemon.end(number) == (0 if number == signal.SIGTERM else -number)
                if turn % 4 == 3:
                    time.sleep(0.5)
                for client in clients:
                    client.check_alive()
                daemon.config = config(SIZES[(turn + 1) % len(SIZES)])
                daemon.start()
                serving_s = time.monotonic()
                attached = [client.hear() for client in clients]
                late_s = max(when_s for _, when_s in attached) - serving_s
                assert late_s <= ATTACHED_S
                (epoch,) = {epoch for epoch, _ in attached}
                assert epoch not in epochs
                epochs.add(epoch)
            for client in clients:
                client.tell("end")
            for client in clients:
                lives, counts = client.hear()
                client.end()
                assert lives == min(LIVES_KEPT, promise_count + 1)
                # It read all the time, and found out each time.
                assert counts["verified"] > 100 * promise_count
                assert counts["stored"] > 10 * promise_count
                assert counts["UnavailableError"] + counts["SessionLostError"] >= promise_count
                assert counts["nothing known"] > 0
        assert daemon.end() == 0
    finally:
        daemon.kill()
    daemon.check_log()
    assert set(os.listdir("/dev/shm")) <= before
    assert set(os.listdir(daemon.runtime_dir)) == {"kvkeep.lock"}


def test_a_daemon_that_was_stopped_ends_nobody(tmp_path):
    """While it could not hear, silence says nothing: sessions and leases of the living go on."""
    timeout_s, clients = 1.5, 4
    text = f'[sessions]\ntimeout = "{timeout_s * 1000:.0f}ms"\n[leases]\nttl = "60s"\n'
    keys = chain_keys("kept", BLOCKS)
    with running_daemon(tmp_path, text) as daemon, contextlib.ExitStack() as held:
        attached = [held.enter_context(kvkeep.connect(daemon.runtime_dir)) for _ in range(clients)]
        namespaces = [client.open_namespace(SPEC) for client in attached]
        store_chain(namespaces[0], keys)
        leases = [namespace.acquire(keys) for namespace in namespaces]
        daemon.send(signal.SIGSTOP)
        time.sleep(1.5 * timeout_s)
        assert namespaces[0].lookup(keys).blocks == BLOCKS
        daemon.send(signal.SIGCONT)
        time.sleep(timeout_s)
        for lease in leases:
            lease.renew()
        stats = attached[0].stats()
        assert (stats.sessions, stats.leases) == (clients, clients)
        assert stats.sessions_ended_total == 0
        # Those that really are gone are noticed all the same.
        attached[-1].close()
        wait_until(lambda: attached[0].stats().sessions == clients - 1, 1.0, "one has left")

"""P13: a daemon that dies takes no client with it, and leaves nothing behind."""

import os
import random
import signal
import time

import pytest

from tests.crash.restart_clients import LIVES_KEPT, work
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import DaemonProcess

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
                daemon.end(signal.SIGTERM if turn % 5 == 4 else signal.SIGKILL)
                if turn % 3 == 2:
                    time.sleep(0.5)
                assert all(client.alive for client in clients)
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
    assert "Traceback" not in daemon.log
    assert set(os.listdir("/dev/shm")) <= before
    assert set(os.listdir(daemon.runtime_dir)) == {"kvkeep.lock"}

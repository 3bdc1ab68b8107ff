"""P04, P16: a daemon with an nvme tier dies, by SIGKILL or SIGTERM, and the next one has what was
acknowledged."""

import random
import signal
import threading
import time

import pytest

from tests.crash.acked_stores import LENGTH, LIVES_KEPT, RAM_BLOCKS, config, stores, verify
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.waiting import wait_until

DRAIN_S = 5


@pytest.mark.promise("P04", gate=8, nightly=1000, unit="kill cycles of a daemon")
def test_what_was_acknowledged_on_nvme_outlives_the_daemon(tmp_path, promise_count):
    source = random.Random(4)
    daemon, acked = DaemonProcess(tmp_path, config(tmp_path)), {}
    try:
        for cycle in range(promise_count):
            daemon.start()
            # What is older may have left for what is newer.
            oldest = (cycle - LIVES_KEPT) * 10_000
            acked = {number: blocks for number, blocks in acked.items() if number >= oldest}
            writer = threading.Thread(
                target=stores,
                args=(daemon.runtime_dir, cycle * 10_000, acked),
                kwargs={"ack": "nvme"},
            )
            before = len(acked)
            writer.start()
            if acked:
                verify(daemon.runtime_dir, dict(acked), source, chains_max=10)
            wait_until(lambda: len(acked) > before, 20, "the writer stores")  # noqa: B023
            # All its chains take 0.6 s.
            time.sleep(source.random() * 0.4)
            daemon.kill()
            writer.join()
        daemon.start()
        verify(daemon.runtime_dir, acked, source)
        assert len(acked) * LENGTH > RAM_BLOCKS
        daemon.end()
        daemon.check_log()
    finally:
        daemon.kill()


@pytest.mark.promise("P16", gate=3, nightly=200, unit="drains under load")
def test_a_drain_brings_what_is_in_ram_to_nvme(tmp_path, promise_count):
    source = random.Random(16)
    drain = f'[server]\ndrain_timeout = "{DRAIN_S}s"\n'
    daemon, acked = DaemonProcess(tmp_path, config(tmp_path) + drain), {}
    try:
        for cycle in range(promise_count):
            daemon.start()
            # Fewer than ram holds: level RAM alone says that they are not evicted unwritten.
            writer = threading.Thread(
                target=stores,
                args=(daemon.runtime_dir, cycle * 10_000, acked),
                kwargs={"ack": "ram"},
            )
            before = len(acked)
            writer.start()
            wait_until(lambda: len(acked) > before, 20, "the writer stores")  # noqa: B023
            time.sleep(source.random() * 0.3)
            began_s = time.monotonic()
            assert daemon.end(signal.SIGTERM) == 0
            assert time.monotonic() - began_s < DRAIN_S + 1
            writer.join()
            daemon.start()
            verify(daemon.runtime_dir, dict([max(acked.items())]), source)
            assert daemon.end(signal.SIGTERM) == 0
        daemon.check_log()
    finally:
        daemon.kill()

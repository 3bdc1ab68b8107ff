"""P04, P15: a daemon dies at a named point of its work on nvme. What it acknowledged is there, what
it left is no damage, and no room is lost with it."""

import random
import sys
import threading

import pytest

import kvkeep
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.tiers.nvme.files import DiskFiles
from kvkeep_server.tiers.nvme.offline import OfflineCheck
from tests.crash.acked_stores import SEGMENT, config, stores, verify
from tests.crash.dying_daemon import POINTS
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.nvme_tier import directory_settings

MAX = 1 << 31
# Of the calls of a life, the one that is the last: early ones fall into recovery.
NUMBERS = {"pwritev": 24, "fdatasync": 24, "preadv": 12, "open": 6, "truncate": 6}


def look(path):
    settings = directory_settings(path, max_nbytes=MAX, segment_nbytes=SEGMENT)
    return OfflineCheck(
        directories=[settings], files=DiskFiles(), clock=SystemClock(), nbytes_per_s=0
    ).run()


def writes(runtime_dir, chain, acked, over):
    """As soon as there is a daemon; it may die before it serves."""
    while not over.is_set():
        try:
            stores(runtime_dir, chain, acked, ack="nvme")
        except kvkeep.KVKeepError:
            over.wait(0.02)


def life(daemon, point, number, chain, acked):
    """The exit code of one daemon that dies by itself."""
    daemon.program = (sys.executable, "-m", "tests.crash.dying_daemon", point, str(number))
    daemon.launch()
    over = threading.Event()
    writer = threading.Thread(target=writes, args=(daemon.runtime_dir, chain, acked, over))
    writer.start()
    try:
        return daemon.process.wait(20)
    finally:
        over.set()
        daemon.kill()
        writer.join()


@pytest.mark.promise("P04", gate=len(POINTS), nightly=20 * len(POINTS), unit="named points")
def test_what_was_acknowledged_outlives_a_death_at_a_named_point(tmp_path, promise_count):
    source = random.Random(404)
    daemon, acked, path = DaemonProcess(tmp_path, config(tmp_path)), {}, tmp_path / "nvme"
    try:
        for cycle in range(promise_count):
            point = POINTS[cycle % len(POINTS)]
            most = NUMBERS.get(point.partition(":")[0], 3)
            number = source.randint(1, most)
            assert life(daemon, point, number, cycle * 1000, acked) == -9, (point, number)
            assert look(path).findings == [], (point, number)
        daemon.program = (sys.executable, "-m", "kvkeep_server")
        daemon.start()
        verify(daemon.runtime_dir, acked, source)
        assert len(acked) > promise_count
        daemon.end()
        # Nothing is left but segments with blocks in them.
        report = look(path)
        assert (report.findings, report.notes) == ([], [])
        assert all(file.stat().st_size < SEGMENT for file in path.glob("*.kvks"))
        daemon.check_log()
    finally:
        daemon.kill()

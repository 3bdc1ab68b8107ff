"""P18 from outside: a daemon under libfaketime, whose wall clock jumps while it runs and between
two of its lives."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvkeep
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.generated_blocks import spec
from tests.fakes.waiting import wait_until

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
BLOCK = 4096
DAY_S = 86_400
# Every lease lives longer than the test, and far shorter than a jump.
LEASE_S = 60.0

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="needs libfaketime")


def keys_of(name, count):
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count)]


class FakedClock:
    """What a process of `program` takes for the wall clock; its monotonic one is left alone."""

    def __init__(self, directory):
        self._file = directory / "faketime"
        self.jump_to(0)
        self.program = (
            "env",
            f"LD_PRELOAD={LIBRARIES[0]}",
            f"FAKETIME_TIMESTAMP_FILE={self._file}",
            "FAKETIME_NO_CACHE=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            sys.executable,
        )

    def jump_to(self, days):
        self._file.write_text(f"{days * DAY_S:+d}\n")

    def ahead_s(self):
        """How far such a process is ahead of this one."""
        command = [*self.program, "-c", "import time; print(time.time())"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(told) - time.time()


def store(namespace, keys):
    status = namespace.store_blocks(keys, [key * (BLOCK // 32) for key in keys], ack="nvme").status
    assert set(status) == {kvkeep.CommitStatus.STORED}


def verify(namespace, keys):
    with namespace.acquire(keys, wait_s=10.0, timeout_s=20.0) as found:
        assert [bytes(view) for view in found.views()] == [key * (BLOCK // 32) for key in keys]


@pytest.mark.promise("P18", gate=4, nightly=40, unit="jumps of a daemon's wall clock by 4 days")
def test_jumps_expire_nothing_and_a_restart_in_the_past_loses_nothing(tmp_path, promise_count):
    clock = FakedClock(tmp_path)
    config = (
        '[ram]\nsize = "16MiB"\nslab = "1MiB"\nhuge_pages = false\n[sessions]\ntimeout = "2s"\n'
        f'[nvme]\ndirectories = ["{tmp_path}/nvme"]\nmax = "64MiB"\nsegment = "4MiB"\n'
        'free_min = "1MiB"\n'
    )
    daemon = DaemonProcess(tmp_path, config, (*clock.program, "-m", "kvkeep_server"))
    chains = [keys_of("first", 20)]
    try:
        daemon.start()
        with kvkeep.connect(daemon.runtime_dir, timeout_s=20.0) as client:
            namespace = client.open_namespace(spec(BLOCK))
            store(namespace, chains[0])
            with namespace.acquire(chains[0], ttl_s=LEASE_S) as held:
                for number in range(promise_count):
                    days = (4, 0, -4, 0)[number % 4]
                    clock.jump_to(days)
                    assert abs(clock.ahead_s() - days * DAY_S) < 60
                    time.sleep(0.3)
                    chains.append(keys_of(number, 5))
                    store(namespace, chains[-1])
                    assert [namespace.lookup(keys).blocks for keys in chains] == list(
                        map(len, chains)
                    )
                    now = client.stats()
                    assert (now.leases, now.leases_expired_total) == (1, 0)
                    assert now.sessions_ended_total == 0
                assert len(held.views()) == 20
        daemon.kill()
        clock.jump_to(-3)
        daemon.start()
        with kvkeep.connect(daemon.runtime_dir, timeout_s=20.0) as client:
            namespace = client.open_namespace(spec(BLOCK))
            # It serves while it recovers.
            wait_until(lambda: not client.stats().nvme.recovering, 30, "it has recovered")
            for keys in chains:
                verify(namespace, keys)
        assert daemon.end() == 0
        daemon.check_log()
    finally:
        daemon.kill()

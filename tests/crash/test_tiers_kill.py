"""P04, P16: a daemon with an nvme tier dies, by SIGKILL or SIGTERM, and the next one has what was
acknowledged; P17: it serves at once."""

import hashlib
import random
import signal
import threading
import time

import pytest

import kvkeep
from tests.fakes.daemon_process import DaemonProcess

BLOCK = 57_344
LENGTH = 24
RAM_BLOCKS = 16 * 2**20 // BLOCK
SPEC = kvkeep.NamespaceSpec(
    model="m",
    weights_fingerprint="w",
    engine="e",
    layout_version="1",
    kv_dtype="bf16",
    hash_algorithm="sha256",
    key_nbytes=32,
    groups=[kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=BLOCK)],
)


def config(directory):
    return (
        '[ram]\nsize = "16MiB"\nslab = "1MiB"\nhuge_pages = false\n'
        f'[nvme]\ndirectories = ["{directory}/nvme"]\nmax = "2GiB"\nsegment = "16MiB"\n'
        'free_min = "1MiB"\n'
    )


def chain(name):
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(LENGTH)]


def content(key):
    return key * (BLOCK // 32)


def stores(runtime_dir, first, acked, *, ack):
    """Stores chains until the daemon is gone; adds those that were acknowledged."""
    with kvkeep.connect(runtime_dir, timeout_s=5.0) as client:
        namespace = client.open_namespace(SPEC)
        for number in range(first, first + 10_000):
            keys = chain(number)
            try:
                result = namespace.store_blocks(keys, [content(key) for key in keys], ack=ack)
            except kvkeep.KVKeepError:
                return
            good = [status in (1, 2) for status in result.status]
            acked[number] = good.index(False) if False in good else LENGTH


def verify(runtime_dir, acked, source, chains_max=40):
    """Every acknowledged block is there, and its bytes are its own."""
    numbers = sorted(acked)
    if len(numbers) > chains_max:
        numbers = sorted(source.sample(numbers, chains_max))
    with kvkeep.connect(runtime_dir, timeout_s=20.0) as client:
        namespace = client.open_namespace(SPEC)
        deadline_s = time.monotonic() + 30
        for number in numbers:
            keys = chain(number)
            while True:
                with namespace.acquire(keys, wait_s=10.0) as found:
                    for key, view in zip(keys, found.views(), strict=False):
                        assert view == content(key)
                    if found.leased >= acked[number]:
                        break
                # It serves while it recovers.
                assert time.monotonic() < deadline_s, (number, acked[number], found.leased)
                time.sleep(0.05)


@pytest.mark.promise("P04", gate=8, nightly=1000, unit="kill cycles of a daemon")
def test_what_was_acknowledged_on_nvme_outlives_the_daemon(tmp_path, promise_count):
    source = random.Random(4)
    daemon, acked = DaemonProcess(tmp_path, config(tmp_path)), {}
    try:
        for cycle in range(promise_count):
            daemon.start()
            writer = threading.Thread(
                target=stores,
                args=(daemon.runtime_dir, cycle * 10_000, acked),
                kwargs={"ack": "nvme"},
            )
            writer.start()
            if acked:
                verify(daemon.runtime_dir, dict(acked), source, chains_max=10)
            time.sleep(source.random() * 0.7)
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
    daemon, acked = DaemonProcess(tmp_path, config(tmp_path)), {}
    try:
        for cycle in range(promise_count):
            daemon.start()
            # Fewer than ram holds: level RAM alone says that they are not evicted unwritten.
            writer = threading.Thread(
                target=stores,
                args=(daemon.runtime_dir, cycle * 10_000, acked),
                kwargs={"ack": "ram"},
            )
            writer.start()
            time.sleep(0.2 + source.random() * 0.3)
            began_s = time.monotonic()
            assert daemon.end(signal.SIGTERM) == 0
            assert time.monotonic() - began_s < 15
            writer.join()
            daemon.start()
            verify(daemon.runtime_dir, dict([max(acked.items())]), source)
            assert daemon.end(signal.SIGTERM) == 0
        daemon.check_log()
    finally:
        daemon.kill()

"""Chains that are stored until the daemon is gone, and held against what it acknowledged."""

import hashlib
import time

import kvkeep
from tests.fakes.generated_blocks import spec

BLOCK = 57_344
LENGTH = 24
SEGMENT = 4 << 20
# Of one writer; lives of `LIVES_KEPT` writers fit the directory, so nothing has to leave it.
CHAINS_MAX = 40
LIVES_KEPT = 30
RAM_BLOCKS = 16 * 2**20 // BLOCK
SPEC = spec(BLOCK)


def config(directory):
    return (
        '[ram]\nsize = "16MiB"\nslab = "1MiB"\nhuge_pages = false\n'
        f'[nvme]\ndirectories = ["{directory}/nvme"]\nmax = "2GiB"\nsegment = "{SEGMENT}B"\n'
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
        for number in range(first, first + CHAINS_MAX):
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
                        assert bytes(view) == content(key)
                    if found.leased >= acked[number]:
                        break
                # It serves while it recovers.
                assert time.monotonic() < deadline_s, (number, acked[number], found.leased)
                time.sleep(0.05)

"""A client process that uses the cache and ends in one of the ways in which processes end.

    python -m tests.e2e.ending_client WHERE COUNT

It forks COUNT children, each of which attaches, reads, and ends in its own way, exit handlers and
all; then it does so itself. None may have started a tracker of shared memory.
"""

import os
import signal
import sys
from pathlib import Path

import kvkeep
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec
from tests.fakes.ways import connect

BLOCK_NBYTES = 32 * 1024
BLOCKS = 32
KEYS = chain_keys("stays", BLOCKS)
SPEC = spec(BLOCK_NBYTES)


def use(where: str) -> kvkeep.Client:
    client = connect(where, timeout_s=10.0)
    namespace = client.open_namespace(SPEC)
    buffer = bytearray(BLOCKS * BLOCK_NBYTES)
    assert namespace.read_into(KEYS, buffer) == BLOCKS
    assert buffer == blocks_of(place_of(""), KEYS, BLOCK_NBYTES).tobytes()
    namespace.acquire(KEYS).views()  # and is not given back
    namespace.store(chain_keys(os.getpid(), 2))  # and is not committed
    assert "multiprocessing.resource_tracker" not in sys.modules
    assert "multiprocessing.shared_memory" not in sys.modules
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return client


def end(way: int) -> None:
    """Never returns."""
    if way % 5 == 0:
        os._exit(0)
    if way % 5 == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if way % 5 == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if way % 5 == 3:
        raise SystemExit(0)
    raise KeyboardInterrupt


def main(where: str, count: int) -> None:
    for way in range(count):
        pid = os.fork()
        if not pid:
            client = use(where)
            if way % 2:
                client.close()
            end(way)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) in {0, -9, -15, -2}
    use(where)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

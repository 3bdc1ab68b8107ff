"""A program that attaches, forks while calls are under way, and goes on in both processes.

    python -m tests.unit.client.forking_client DIRECTORY FORKS

It prints one line a process, which say what worked; a test reads them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import kvkeep.client  # before anything else may import grpc
from tests.unit.client.conftest import BLOCK_NBYTES, chain, contents, spec, store


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def child(namespace: kvkeep.Namespace, client: kvkeep.Client, number: int) -> None:
    signal.alarm(30)
    keys = chain(3)
    into = bytearray(3 * BLOCK_NBYTES)
    found = namespace.lookup(keys).blocks
    exact = namespace.read_into(keys, into) == 3 and into == b"".join(contents(keys))
    with namespace.acquire(keys) as acquired:
        leased = [bytes(view) for view in acquired.views()] == contents(keys)
    stored = store(namespace, chain(2, f"child {number}")).stored
    client.close()
    say(f"child found={found} exact={exact} leased={leased} stored={stored}")


def main(directory: str, forks: int) -> None:
    keys = chain(3)
    with kvkeep.connect(directory, timeout_s=10) as client:
        namespace = client.open_namespace(spec())
        store(namespace, keys)
        stop = threading.Event()

        def lease() -> None:
            while not stop.is_set():
                namespace.acquire(keys).release()

        caller = threading.Thread(target=lease)
        caller.start()
        for number in range(forks):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    child(namespace, client, number)
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            found, leased = namespace.lookup(keys).blocks, namespace.acquire(keys).leased
            code = os.waitstatus_to_exitcode(status)
            say(f"parent child={code} found={found} leased={leased}")
        stop.set()
        caller.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

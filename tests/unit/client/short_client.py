"""A client that runs out of descriptors: a process of its own, since the table is the process's.

`python -m tests.unit.client.short_client DIRECTORY HOW`; a line of output a step, a line of input
to go on.
"""

from __future__ import annotations

import logging
import os
import resource
import sys

import kvkeep
from tests.fakes.waiting import wait_until
from tests.unit.client.conftest import BLOCK_NBYTES, chain, spec

HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def fill(spare: int = 0) -> list[int]:
    """Take every descriptor but `spare`."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 16 + spare, HARD_LIMIT))
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        for fd in held[len(held) - spare :]:
            os.close(fd)
        return held[: len(held) - spare]


def step(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def log_steps() -> None:
    class Steps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            step(f"{record.levelname}: {record.getMessage()} {getattr(record, 'reason', '')}")

    logging.getLogger("kvkeep").addHandler(Steps(logging.WARNING))


def attach_short(directory: str) -> None:
    """With one more descriptor each time, until there are enough."""
    with kvkeep.connect(directory, timeout_s=10):
        pass  # gRPC has what it keeps
    for spare in range(64):
        held = fill(spare)
        try:
            with kvkeep.connect(directory, timeout_s=10) as client:
                attached = client.attached
        except Exception as error:  # noqa: BLE001 - which one it is, is what is looked at
            step(f"{spare} {type(error).__name__} {error}")
            attached = False
        for fd in held:
            os.close(fd)
        if attached:
            step(f"{spare} attached")
            return


def grow_short(directory: str) -> None:
    """A new chunk arrives while the table is full; then there is room again."""
    with kvkeep.connect(directory, timeout_s=10) as client:
        namespace = client.open_namespace(spec())
        namespace.lookup(chain(1))
        log_steps()
        held = fill()
        step("full")
        sys.stdin.readline()
        wait_until(lambda: not client.attached, 30, "the session is over")
        step("lost")
        sys.stdin.readline()
        for fd in held:
            os.close(fd)
        wait_until(lambda: client.attached, 30, "attached again")
        step(f"read {namespace.read_into(chain(1), bytearray(BLOCK_NBYTES))}")


if __name__ == "__main__":
    {"attach": attach_short, "grow": grow_short}[sys.argv[2]](sys.argv[1])

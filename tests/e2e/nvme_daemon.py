"""A daemon with an nvme directory in a test, and a client that stores and reads chains there."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kvkeep
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.generated_blocks import (
    KEY_NBYTES,
    blocks_of,
    chain_keys,
    place_of,
    spec,
    store_chain,
)
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, connect, place

MIB = 1 << 20
NBYTES = 60_000
LENGTH = 20


def config(path: Path, *, ram: str = "16MiB", size: str = "64MiB", segment: str = "2MiB") -> str:
    return (
        f'[ram]\nsize = "{ram}"\nslab = "1MiB"\nhuge_pages = false\n'
        f'[nvme]\ndirectories = ["{path}"]\nmax = "{size}"\nsegment = "{segment}"\n'
        'free_min = "1MiB"\n' + LISTEN
    )


@dataclass(slots=True)
class Chains:
    """Chains of `LENGTH` blocks in one namespace, by name."""

    client: kvkeep.Client
    namespace: kvkeep.Namespace

    def store(self, *names: object, ack: str = "nvme") -> int:
        """How many blocks are refused."""
        return sum(
            store_chain(self.namespace, chain_keys(name, LENGTH), ack=ack).refused for name in names
        )

    def read(self, name: object, wait_s: float = 10.0) -> int:
        """How many leading blocks there are; each is exact."""
        keys = chain_keys(name, LENGTH)
        with self.namespace.acquire(keys, wait_s=wait_s) as found:
            right = blocks_of(place_of(""), keys[: found.leased * KEY_NBYTES], NBYTES)
            for view, block in zip(found.views(), right, strict=True):
                assert bytes(view) == block.tobytes(), "wrong bytes"
            return found.leased

    def found(self, *names: object) -> int:
        """How many leading blocks of these there are in all."""
        return sum(map(self.read, names))

    def recovered(self) -> "Chains":
        """When all that an earlier daemon left is in the index."""
        wait_until(lambda: not self.client.stats().nvme.recovering, 30, "it has recovered")
        return self


@contextlib.contextmanager
def chains_of(daemon: DaemonProcess, *, way: str = "local", **facts: object) -> Iterator[Chains]:
    """A client of a daemon that runs."""
    with connect(place(daemon, way), timeout_s=20.0) as client:
        yield Chains(client, client.open_namespace(spec(NBYTES, **facts)))


def used_nbytes(path: Path) -> int:
    """What all files of the directory take, by their sizes; those that vanish meanwhile nothing."""
    total = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def most_used_nbytes(path: Path, for_s: float) -> int:
    """The most that it takes, looked at again and again for a while."""
    most, until_s = 0, time.monotonic() + for_s
    while time.monotonic() < until_s:
        most = max(most, used_nbytes(path))
        time.sleep(0.01)
    return most

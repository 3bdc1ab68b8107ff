"""SIGKILL at any moment: what was acknowledged as durable is there, what was removed stays away,
nothing that is read is wrong. The oracle is this process; the writer is another."""

import asyncio
import os
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep_server.tiers.base import ReadStatus
from tests.crash.nvme_writer import LIMITS, index_of, key_of, nbytes_of
from tests.fakes.nvme_blocks import content
from tests.fakes.nvme_tier import IndexOwner, get, nvme_tier, started
from tests.fakes.warm_programs import WarmProgram


class Oracle:
    """What the writers said."""

    def __init__(self):
        self.durable = set()
        self.removed = set()

    def hear(self, line):
        kind, *numbers = line.split()
        indices = set(map(int, numbers))
        if kind == "W":
            self.durable |= indices
        if kind in {"r", "F"}:
            self.durable -= indices
        if kind == "R":
            self.removed |= indices


def one_life(path, oracle, source, first):
    """Runs a writer, kills it after some of its lines, and hears all that it said."""
    said, saying = os.pipe()
    with os.fdopen(said) as said_by_writer:
        arguments = [str(path), str(first), str(first)]
        writer = WarmProgram("tests.crash.nvme_writer", arguments, saying)
        os.close(saying)
        try:
            for _ in range(source.randint(1, 60)):
                line = said_by_writer.readline()
                assert line.endswith("\n"), f"the writer ended by itself: {line}"
                oracle.hear(line)
        finally:
            writer.kill()
        for line in said_by_writer.read().splitlines(keepends=True):
            if line.endswith("\n"):
                oracle.hear(line)
        assert writer.wait(20) == -signal.SIGKILL


def verify(path, oracle, *, clean):
    """Recovers, reads everything, and compares; leaves the directory as a process would."""
    owner = IndexOwner()
    threads = ThreadPoolExecutor(2)
    tier = nvme_tier([path], threads, owner=owner, **LIMITS)

    async def run():
        await started(tier, owner)
        found = {index_of(key) for key in owner.places}
        by_size = {}
        for index in found:
            by_size.setdefault(nbytes_of(index), []).append(index)
        wrong = 0
        for nbytes, indices in by_size.items():
            got = await get(tier, owner, [key_of(index) for index in indices], nbytes)
            for index in indices:
                wrong += got[key_of(index)] != (ReadStatus.HIT, content([7, index], nbytes))
        tier.check()
        if clean:
            await tier.close()
        else:
            tier._logs[0].directory.table.close_all()
            tier._locks[0].release()
        return found, wrong

    found, wrong = asyncio.run(run())
    threads.shutdown()
    assert wrong == 0
    assert not oracle.durable - found, "acknowledged blocks are lost"
    assert not oracle.removed & found, "removed blocks came back"
    return found


@pytest.mark.promise("P04", gate=50, nightly=1000, unit="kill cycles")
def test_killed_at_any_moment(tmp_path, promise_count):
    source = random.Random(20261130)
    oracle, seen = Oracle(), Counter()
    for cycle in range(promise_count):
        one_life(tmp_path / "nvme", oracle, source, 1_000_000 * cycle)
        found = verify(tmp_path / "nvme", oracle, clean=cycle % 3 == 0)
        seen.update(found=len(found), durable=len(oracle.durable))
    assert seen["durable"] > 20 * promise_count, "the writers hardly wrote"
    assert oracle.removed

"""Clients that end and start again: the same keys in a new process, and what ending leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import ending_client
from tests.e2e.restarted_engine import BLOCKS
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import blocks_of, place_of, store_chain
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, connect, place

ROOT = Path(__file__).parents[2]
CONFIG = LISTEN + '[ram]\nsize = "64MiB"\n[sessions]\nstaging = "4MiB"\n'
OTHER_FACTS = [
    {"weights_fingerprint": "other weights"},  # B010: under the same served name
    {"layout_version": "2"},
    {"kv_dtype": "fp8_e4m3"},
    {"engine": "another"},
    {"layout_switches": ["KV_LAYOUT=HND"]},
    {"namespace_epoch": 1},
    {"block_nbytes": 12_000},
    {"tenant": "another"},
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as started:
        yield started
        started.check_log()


MISSED = {"found": 0, "exact": 0, "stored": BLOCKS}
HIT = {"found": BLOCKS, "exact": BLOCKS, "stored": 0}


def engine(where, seed, *namespaces) -> list[dict]:
    """A new process, whose `hash()` is another."""
    facts = json.dumps(namespaces)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.e2e.restarted_engine", where, facts],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_restarted_engine_finds_exactly_what_it_stored(daemon, way):
    """B004."""
    where, mine = place(daemon, way), {"model": way}
    assert engine(where, 1, mine) == [MISSED]
    for seed in (1, 2, 3):
        assert engine(where, seed, mine) == [HIT]


def test_an_engine_that_differs_in_anything_misses(daemon, way):
    """B004, B010. It finds nothing of the others, stores its own, and all are right afterwards."""
    where, mine = place(daemon, way), {"model": f"differs {way}"}
    others = [{**mine, **facts} for facts in OTHER_FACTS]
    engine(where, 0, mine)
    assert engine(where, 1, *others) == [MISSED] * len(others)
    assert engine(where, 2, mine, *others) == [HIT] * (1 + len(others))


def shared_memory() -> set[str]:
    """Names in /dev/shm, but for those that libfaketime makes for other tests on this machine."""
    return {name for name in os.listdir("/dev/shm") if "faketime_" not in name}


def test_the_pool_stays_when_clients_end(daemon, way):
    """B064: fifty of them, of which none owns what it maps."""
    shm = shared_memory()
    where = place(daemon, way)
    with connect(where) as client:
        namespace = client.open_namespace(ending_client.SPEC)
        assert store_chain(namespace, ending_client.KEYS).refused == 0
        with namespace.acquire(ending_client.KEYS) as acquired:
            command = [sys.executable, "-m", "tests.e2e.ending_client", where, "9"]
            running = [
                subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
                for _ in range(5)
            ]
            for one in running:
                _, errors = one.communicate(timeout=60)
                assert one.returncode == 0, errors
                assert "resource_tracker" not in errors
            expected = blocks_of(place_of(""), ending_client.KEYS, ending_client.BLOCK_NBYTES)
            assert acquired.leased == ending_client.BLOCKS
            assert all(
                view == row.data for view, row in zip(acquired.views(), expected, strict=True)
            )
        wait_until(lambda: client.stats().sessions == 1, 1.0, "their sessions are over")
        wait_until(lambda: client.stats().leases == 0, 1.0, "their leases are back")
        assert client.stats().sessions_ended_total >= 50
    assert shared_memory() <= shm
    # The daemon has no helper process that could take shared memory for its own.
    assert not Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text()

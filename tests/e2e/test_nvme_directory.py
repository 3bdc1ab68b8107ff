"""A daemon and what lies in its nvme directory: limits, restarts, damage, files of others."""

import os
import random
import signal
import threading
import time

import pytest

import kvkeep
from tests.e2e.nvme_daemon import (
    LENGTH,
    MIB,
    NBYTES,
    chains_of,
    config,
    used_nbytes,
)
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.generated_blocks import chain_keys
from tests.fakes.sealed_segments import write_segments
from tests.fakes.waiting import wait_until
from tests.fakes.ways import at_one_port

CHAIN = LENGTH * NBYTES


@pytest.fixture
def path(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def daemon(tmp_path, path):
    daemon = DaemonProcess(tmp_path, config(path))
    yield daemon
    daemon.kill()


# --- limits


@pytest.mark.promise("P15", gate=4, nightly=40, unit="restarts with another limit")
def test_it_stays_below_its_limit_and_shrinks_after_restarts(daemon, path, promise_count):
    """Old files and files of others count."""
    source = random.Random(15)
    path.mkdir()
    (path / "of somebody else").write_bytes(bytes(3 * MIB))
    names = iter(range(10**6))
    for cycle in range(promise_count):
        size = 32 >> cycle % 3
        daemon.config = config(path, size=f"{size}MiB")
        before = used_nbytes(path)
        daemon.start()
        with chains_of(daemon) as chains:
            limit = max(before, size * MIB)
            for _ in range(source.randint(5, 40)):
                last = next(names)
                chains.store(last, ack=source.choice(["ram", "nvme"]))
                assert used_nbytes(path) <= limit
            wait_until(
                lambda: used_nbytes(path) <= size * MIB,  # noqa: B023
                20,
                "it shrinks behind",
            )
            assert chains.found(last) == LENGTH
        if cycle % 2:
            daemon.kill()
        else:
            assert daemon.end() == 0
    daemon.check_log()


def test_three_times_the_limit_with_default_policies_evicts(daemon, path):
    """B047: a disk that is full goes on, and the newest is there. B055: at the end what is counted
    is what is there, also for blocks that left while others came."""
    daemon.config = config(path, size="16MiB")
    daemon.start()
    over = threading.Event()
    with chains_of(daemon) as chains:

        def churn():
            with chains_of(daemon) as others:
                number = 0
                while not over.is_set():
                    others.store(f"churn {number % 4}", ack="ram")
                    others.namespace.remove(chain_keys(f"churn {number % 4}", LENGTH))
                    number += 1

        removing = threading.Thread(target=churn)
        removing.start()
        try:
            for name in range(3 * 16 * MIB // CHAIN):
                chains.store(name)
                assert used_nbytes(path) <= 16 * MIB
        finally:
            over.set()
            removing.join()
        assert chains.found(name) == LENGTH
        assert chains.found(0) == 0

        def accounted():
            locks = (path / "kvkeep.lock").stat().st_size
            return chains.client.stats().nvme.used_nbytes == used_nbytes(path) - locks

        wait_until(accounted, 10, "what is counted is what is there")
    assert daemon.end() == 0
    daemon.check_log()


# --- restarts


def test_all_is_there_after_a_clean_restart(daemon, way):
    """B045, B059: 500 blocks, 200 of which were in ram only when SIGTERM came."""
    daemon.start()
    with chains_of(daemon, way=way) as chains:
        assert chains.store(*range(15)) == 0
        assert chains.store(*range(15, 25), ack="ram") == 0
    assert daemon.end(signal.SIGTERM) == 0
    daemon.start()
    with chains_of(daemon, way=way) as chains:
        assert chains.recovered().found(*range(25)) == 25 * LENGTH == 500
        assert chains.client.stats().nvme.blocks_hit_total >= 500


def test_other_sizes_after_a_restart(daemon, path):
    """B061: with another pool and other segments the old ones are readable, and age out."""
    daemon.start()
    with chains_of(daemon) as chains:
        chains.store(*range(10))
    daemon.kill()
    for ram, segment in (("8MiB", "1MiB"), ("32MiB", "8MiB")):
        daemon.config = config(path, ram=ram, segment=segment)
        daemon.start()
        with chains_of(daemon) as chains:
            assert chains.recovered().found(*range(10)) == 10 * LENGTH
        assert daemon.end() == 0
    daemon.start()
    with chains_of(daemon) as chains:
        chains.store(*range(100, 180))
        # Used more than once, so it was written again.
        assert chains.found(*range(160, 180)) == 20 * LENGTH
    daemon.kill()
    daemon.check_log()


def test_another_layout_on_an_old_directory_misses(daemon, path):
    """B013: the old data is not found, does no harm and leaves for the new. B004: the same engine
    finds its own again."""
    daemon.config = config(path, size="24MiB")
    daemon.start()
    with chains_of(daemon) as chains:
        chains.store(*range(7))
    daemon.kill()
    daemon.start()
    with chains_of(daemon, layout_version="2") as chains:
        assert chains.recovered().found(*range(7)) == 0
        assert chains.store(*range(7)) == 0
        with chains_of(daemon) as others:
            assert others.found(*range(7)) == 7 * LENGTH
        for name in range(100, 126):
            chains.store(name)
            assert chains.found(name) == LENGTH
        with chains_of(daemon) as others:
            assert others.found(*range(7)) < 7 * LENGTH
    assert daemon.end() == 0
    daemon.check_log()


def test_while_it_is_away_calls_fail_at_once_and_then_go_on(daemon, way):
    """B069."""
    daemon.config = at_one_port(daemon.config)
    daemon.start()
    with chains_of(daemon, way=way) as chains:
        chains.store("a")
        daemon.kill()
        wait_until(lambda: not chains.client.attached, 5, "the client notices")
        began_s, refused = time.monotonic(), 0
        for _ in range(100):
            with pytest.raises(kvkeep.UnavailableError):
                chains.read("a")
            found = chains.namespace.lookup(chain_keys("a", LENGTH))
            assert (found.blocks, found.complete) == (0, False)
            refused += 1
        assert time.monotonic() - began_s < 0.05 * refused
        daemon.start()
        assert wait_until(lambda: chains.client.attached, 2.0, "it attaches again") <= 2.0
        assert chains.recovered().found("a") == LENGTH
        assert chains.store("b") == 0


# --- damage


def damaged(path, source, share):
    """Flips a byte in this share of the pages of all segments but their first ones."""
    count = 0
    for file in path.glob("*.kvks"):
        pages = file.stat().st_size // 4096
        with file.open("r+b") as segment:
            for page in source.sample(range(1, pages), max(1, int(share * pages))):
                segment.seek(page * 4096 + source.randrange(4096))
                byte = segment.read(1)
                segment.seek(-1, os.SEEK_CUR)
                segment.write(bytes([byte[0] ^ 0x40]))
                count += 1
    return count


def test_corrupt_records_are_misses_and_then_plain_misses(daemon, path, way):
    """B022: no error to anybody, and what is bad is gone."""
    daemon.start()
    with chains_of(daemon, way=way) as chains:
        chains.store(*range(20))
    assert daemon.end() == 0
    # A block has 16 pages.
    assert damaged(path, random.Random(22), 0.05 / 16) >= 10
    daemon.start()
    with chains_of(daemon, way=way) as chains:
        first = [chains.recovered().read(name) for name in range(20)]
        assert LENGTH * 10 < sum(first) < LENGTH * 20

        def found_nothing_more():
            """The same is read again, and nothing that is bad is met. What follows what is bad is
            looked at behind an answer, which may take a moment."""
            before = chains.client.stats().blocks_corrupt_total
            time.sleep(0.1)
            read = [chains.read(name) for name in range(20)]
            return (read, chains.client.stats().blocks_corrupt_total) == (first, before)

        wait_until(found_nothing_more, 20, "no more is lost")
        assert chains.client.stats().blocks_corrupt_total > 0
        assert chains.store(*range(20)) == 0
        assert chains.found(*range(20)) == 20 * LENGTH
    assert daemon.end() == 0
    daemon.check_log()


def test_a_truncated_segment_lists_nothing_that_it_has_not(daemon, path, way):
    """B016: what a look-up says is there, is."""
    daemon.start()
    with chains_of(daemon, way=way) as chains:
        chains.store(*range(6))
    assert daemon.end() == 0
    files = sorted(path.glob("*.kvks"))
    os.truncate(files[0], 0)
    os.truncate(files[1], files[1].stat().st_size // 2)
    daemon.start()
    with chains_of(daemon, way=way) as chains:
        chains.recovered()
        for name in range(6):
            found = chains.namespace.lookup(chain_keys(name, LENGTH))
            assert chains.read(name) == found.blocks
        assert 0 < chains.found(*range(6)) < 6 * LENGTH
    assert daemon.end() == 0
    daemon.check_log()


# --- what is not ours


@pytest.mark.promise("P17", gate=100_000, unit="records, and files that are of no use")
def test_it_serves_at_once_and_names_what_it_does_not_use(daemon, path, promise_count):
    write_segments(path, promise_count)
    with (path / "00000001.kvks").open("rb") as file:
        good = file.read(50_000)
    newer = bytearray(good)
    newer[8] = 2
    strange = {
        "00000020.kvks": random.Random(17).randbytes(50_000),
        "00000021.kvks": bytes(newer),
        "00000022.kvks": good,
        "core.1234": b"x" * 1000,
        "00000001.KVKS": b"x",
    }
    for name, data in strange.items():
        (path / name).write_bytes(data)
    (path / "lost+found").mkdir()
    daemon.config = config(path, size="4GiB") + '[metrics]\nlisten = "127.0.0.1:0"\n'
    listening_s = []
    for _ in range(3):
        began_s = time.monotonic()
        daemon.start()
        listening_s.append(time.monotonic() - began_s)
        with chains_of(daemon) as chains:
            assert chains.store("while it recovers", ack="ram") == 0
            chains.recovered()
            assert chains.found("while it recovers") == LENGTH
        assert daemon.end() == 0
    assert min(listening_s) <= 2.0
    for name, data in strange.items():
        assert (path / name).read_bytes() == data
    log = daemon.log
    for name, reason in (
        ("00000020.kvks", "its header is damaged"),
        ("00000021.kvks", "format version 2 is newer than 1"),
        ("00000022.kvks", "is a copy of segment 1"),
    ):
        assert f'WARNING nvme: of no use path={path}/{name} reason="{reason}"' in log
    for name in ("core.1234", "00000001.KVKS", "lost+found"):
        assert f"INFO nvme: not ours path={path}/{name}\n" in log
    daemon.check_log()

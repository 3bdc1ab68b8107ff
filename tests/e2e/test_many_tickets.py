"""Many submitted calls at once: each ends, none is lost, all bytes are right, nothing stays."""

import gc
import os
import random
import select
import time
from collections import Counter

import pytest

import kvkeep
from kvkeep.tickets import TicketState
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import (
    KEY_NBYTES,
    blocks_of,
    chain_keys,
    place_of,
    spec,
    store_chain,
)
from tests.fakes.waiting import wait_until

BLOCK_NBYTES = 4096
BLOCKS = 16
CHAINS = 32
SPEC = spec(BLOCK_NBYTES)
LONG_S = 60.0
# Half a KiB of each look-up that misses, in the gate.
LEFT_NBYTES = 4 << 20
NVME = """
[ram]
size = "8MiB"
slab = "256KiB"
[nvme]
directories = ["{}/nvme"]
max = "256MiB"
segment = "4MiB"
free_min = "0B"
"""


def fill(store, keys):
    new = keys[store.new.start * KEY_NBYTES :]
    content = blocks_of(place_of(""), new, BLOCK_NBYTES) if new else ()
    for view, block in zip(store.views, content, strict=True):
        view[:] = block.data


def right(acquired, keys):
    """How many blocks were read; an AssertionError when one is wrong."""
    with acquired:
        views = acquired.views()
        expected = blocks_of(place_of(""), keys, BLOCK_NBYTES)
        assert all(view == row.data for view, row in zip(views, expected, strict=False)), "wrong"
        return len(views)


def collect(client, waiting, on_done, wait_s=LONG_S):
    """Until all of these are done."""
    until_s = time.monotonic() + wait_s
    while waiting:
        assert time.monotonic() < until_s, f"{len(waiting)} tickets are lost"
        select.select([client.fileno()], [], [], 1.0)
        for ticket in client.poll(64):
            if ticket.done:
                on_done(ticket, waiting.pop(ticket))


@pytest.mark.promise("P14", gate=5_000, nightly=8_000, unit="calls of one client under way")
def test_thousands_of_calls_under_way(tmp_path, promise_count):
    counts = Counter()
    with running_daemon(tmp_path) as daemon, kvkeep.connect(daemon.runtime_dir) as client:
        namespace = client.open_namespace(SPEC)
        chains = [chain_keys(number, BLOCKS) for number in range(CHAINS)]
        waiting = {}
        for number in range(promise_count):
            keys = chains[number % CHAINS]
            if number < CHAINS:
                store = namespace.store(keys)
                fill(store, keys)
                waiting[store.submit_commit(LONG_S)] = keys
            else:
                waiting[namespace.submit_acquire(keys, timeout_s=LONG_S)] = keys

        def done(ticket, keys):
            counts[ticket.state] += 1
            if isinstance(ticket, kvkeep.AcquireTicket) and ticket.state is TicketState.READY:
                counts["blocks"] += right(ticket.acquired, keys)

        collect(client, waiting, done)
        assert set(counts) <= {TicketState.READY, TicketState.NOTHING, "blocks"}
        assert counts[TicketState.READY] + counts[TicketState.NOTHING] == promise_count
        assert counts["blocks"] > promise_count * BLOCKS // 2
        wait_until(lambda: client.stats().leases == 0, 5.0, "all leases are given back")
        staging = client._keeper.require().staging
        assert staging.free_nbytes == staging.nbytes
        daemon.check_log()


def test_b095_read_on_another_connection_what_is_just_being_written(tmp_path):
    count, at_once = 512, 128
    ended = Counter()
    with (
        running_daemon(tmp_path) as daemon,
        kvkeep.connect(daemon.runtime_dir, staging_nbytes=32 << 20) as writer,
        kvkeep.connect(daemon.runtime_dir) as reader,
    ):
        stores, reads = writer.open_namespace(SPEC), reader.open_namespace(SPEC)
        for first in range(0, count, at_once):
            writing, reading = {}, {}
            for number in range(first, first + at_once):
                keys = chain_keys(("b095", number), 4)
                store = stores.store(keys)
                fill(store, keys)
                writing[store.submit_commit(LONG_S)] = keys
                reading[reads.submit_acquire(keys, timeout_s=LONG_S)] = keys

            def read(ticket, keys):
                ended[ticket.state] += 1
                if ticket.state is TicketState.READY:
                    assert right(ticket.acquired, keys) == 4

            def written(ticket, _):
                assert ticket.result.stored == 4

            collect(reader, reading, read)
            collect(writer, writing, written)
    assert ended[TicketState.READY] + ended[TicketState.NOTHING] == count


def test_what_lies_on_nvme_comes_while_the_loop_goes_on(tmp_path):
    with (
        running_daemon(tmp_path, NVME.format(tmp_path)) as daemon,
        kvkeep.connect(daemon.runtime_dir, timeout_s=LONG_S) as client,
    ):
        namespace = client.open_namespace(SPEC)
        chains = [chain_keys(("nvme", number), 4 * BLOCKS) for number in range(64)]
        for keys in chains:
            store_chain(namespace, keys, ack="nvme")
        waiting = {namespace.submit_acquire(keys, timeout_s=LONG_S): keys for keys in chains[:16]}
        from_nvme = []

        def done(ticket, keys):
            assert ticket.state is TicketState.READY, ticket.error
            from_nvme.append(ticket.acquired.from_nvme)
            assert ticket.acquired.pending == 0
            assert right(ticket.acquired, keys) == 4 * BLOCKS

        collect(client, waiting, done)
        assert sum(from_nvme) > 8 * BLOCKS
        wait_until(lambda: client.stats().leases == 0, 5.0, "all leases are given back")
        daemon.check_log()


def test_b036_more_loads_than_readers_wait_and_do_not_fail(tmp_path):
    """100 at once of one thread that reads."""
    with (
        running_daemon(tmp_path, NVME.format(tmp_path) + "read_threads = 1\n") as daemon,
        kvkeep.connect(daemon.runtime_dir, timeout_s=LONG_S) as client,
    ):
        namespace = client.open_namespace(SPEC)
        chains = [chain_keys(("b036", number), BLOCKS) for number in range(200)]
        for keys in chains:
            store_chain(namespace, keys, ack="nvme")
        waiting = {namespace.submit_acquire(keys, timeout_s=LONG_S): keys for keys in chains[:100]}
        from_nvme = []

        def done(ticket, keys):
            assert ticket.state is TicketState.READY, ticket.error
            from_nvme.append(ticket.acquired.from_nvme)
            assert right(ticket.acquired, keys) == BLOCKS

        collect(client, waiting, done)
        assert sum(map(bool, from_nvme)) > 50
        daemon.check_log()


def release_what_is_told(client):
    for ticket in client.poll():
        if ticket.done and ticket.acquired is not None:
            ticket.acquired.release()


def test_b031_cancelled_calls_keep_nothing(tmp_path):
    source = random.Random(31)
    with (
        running_daemon(tmp_path, NVME.format(tmp_path)) as daemon,
        kvkeep.connect(daemon.runtime_dir, timeout_s=LONG_S) as client,
    ):
        namespace = client.open_namespace(SPEC)
        chains = [chain_keys(("nvme", number), BLOCKS) for number in range(128)]
        for keys in chains:
            store_chain(namespace, keys, ack="nvme")
        waiting = []
        for _ in range(500):
            waiting.append(namespace.submit_acquire(source.choice(chains), timeout_s=LONG_S))
            if source.random() < 0.2:
                release_what_is_told(client)
            while len(waiting) > source.randrange(40):
                waiting.pop(source.randrange(len(waiting))).cancel()
        for ticket in waiting:
            ticket.cancel()

        def nothing_is_held():
            release_what_is_told(client)
            return client.stats().leases == 0

        wait_until(nothing_is_held, 10.0, "no lease is left")
        daemon.check_log()


def test_b062_a_daemon_that_goes_while_a_batch_is_stored(tmp_path):
    chains = [chain_keys(("b062", number), BLOCKS) for number in range(64)]
    ended = Counter()
    with running_daemon(tmp_path) as daemon, kvkeep.connect(daemon.runtime_dir) as client:
        namespace = client.open_namespace(SPEC)
        epoch = client.server_epoch

        def store_all():
            waiting = {}
            for keys in chains:
                store = namespace.store(keys)
                fill(store, keys)
                waiting[store.submit_commit(LONG_S)] = keys
                if len(waiting) == len(chains) // 2 and client.server_epoch == epoch:
                    daemon.kill()
                    break
            return waiting

        def done(ticket, _):
            ended[type(ticket.error)] += 1

        collect(client, store_all(), done)
        assert set(ended) <= {type(None), kvkeep.SessionLostError}
        assert ended[kvkeep.SessionLostError] > 0
        daemon.start()
        wait_until(
            lambda: client.attached and client.server_epoch != epoch, 5.0, "it attaches again"
        )
        ended.clear()
        collect(client, store_all(), done)
        assert ended == {type(None): len(chains)}
        assert all(namespace.lookup(keys).blocks == BLOCKS for keys in chains)


def resident_nbytes(pid):
    with open(f"/proc/{pid}/statm") as fields:
        return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.promise("P14", gate=8_000, nightly=1_000_000, unit="look-ups that miss")
def test_b032_misses_leave_nothing_behind(tmp_path, promise_count):
    with running_daemon(tmp_path) as daemon, kvkeep.connect(daemon.runtime_dir) as client:
        namespace = client.open_namespace(SPEC)

        def miss(first, count):
            waiting = {}
            for number in range(first, first + count):
                keys = number.to_bytes(KEY_NBYTES, "big")
                assert not namespace.lookup(keys).blocks
                waiting[namespace.submit_acquire(keys, timeout_s=LONG_S)] = keys
                if len(waiting) == 64:
                    collect(client, waiting, missed)
            collect(client, waiting, missed)

        def missed(ticket, _):
            assert ticket.state is TicketState.NOTHING, ticket.error

        miss(0, 2_000)
        gc.collect()  # what other tests left in this process
        before = [resident_nbytes(pid) for pid in (os.getpid(), daemon.pid)]
        miss(2_000, promise_count)
        after = [resident_nbytes(pid) for pid in (os.getpid(), daemon.pid)]
        for was, now in zip(before, after, strict=True):
            assert now - was < LEFT_NBYTES

"""Sessions of clients on other hosts: how they end, and begin again."""

import os
import signal
import socket
import time

import pytest

import kvkeep
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import SMALL, DaemonProcess, running_daemon
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec, store_chain
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, at_one_port, connect

NBYTES = 40_000
BLOCKS = 20
KEYS = chain_keys("a", BLOCKS)
CONFIG = LISTEN + '[ram]\nsize = "64MiB"\n[sessions]\nstaging = "4MiB"\ntimeout = "2s"\n'
SESSION_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as started:
        yield started
        started.check_log()


def hold(wire, where, model):
    """A client that leases, begins to store, and waits."""
    with connect(where, timeout_s=10.0) as client:
        namespace = client.open_namespace(spec(NBYTES, model=model))
        acquired = namespace.acquire(KEYS)
        store = namespace.store(chain_keys(os.getpid(), 3))
        wire.tell((acquired.leased, len(store.views)))
        wire.hear()


@pytest.mark.promise("P09", gate=4, unit="remote clients killed and stopped")
@pytest.mark.parametrize(("end", "bound_s"), [("kill", 1.0), ("stop", SESSION_TIMEOUT_S + 1.0)])
def test_what_a_client_held_comes_back(daemon, end, bound_s):
    with connect(daemon.address, timeout_s=10.0) as client, client_processes() as start:
        wait_until(lambda: client.stats().sessions == 1, 5.0, "those of other tests are over")
        namespace = client.open_namespace(spec(NBYTES, model=end))
        assert store_chain(namespace, KEYS).stored == BLOCKS
        clients = [start(hold, daemon.address, end) for _ in range(2)]
        assert [one.hear(30.0) for one in clients] == [(BLOCKS, 3)] * 2
        assert (client.stats().sessions, client.stats().leases) == (3, 2)
        for one in clients:
            getattr(one, end)()
        took_s = wait_until(lambda: client.stats().sessions == 1, bound_s + 2.0, "they are over")
        assert took_s <= bound_s
        assert client.stats().leases == 0
        assert namespace.lookup(KEYS).blocks == BLOCKS
        reason = "silent" if end == "stop" else '"its Attach stream ended"'
        assert daemon.log.count(f"remote=True reason={reason}") >= 2


@pytest.mark.promise("P13", gate=2, nightly=30, unit="restarts seen from another host")
def test_a_client_attaches_again(tmp_path, promise_count):
    daemon = DaemonProcess(tmp_path, at_one_port(CONFIG))
    daemon.start()
    try:
        with connect(daemon.address, timeout_s=5.0) as client:
            namespace = client.open_namespace(spec(NBYTES))
            expected = blocks_of(place_of(""), KEYS, NBYTES)
            for _ in range(promise_count):
                assert store_chain(namespace, KEYS).stored == BLOCKS
                acquired = namespace.acquire(KEYS)
                views = acquired.views()
                epoch = client.server_epoch
                daemon.kill()
                wait_until(lambda: not client.attached, 2.0, "it notices")
                # What was fetched stays.
                assert [bytes(view) for view in views] == [row.tobytes() for row in expected]
                with pytest.raises(kvkeep.LeaseLostError):
                    acquired.renew()
                acquired.release()
                began_s = time.monotonic()
                assert namespace.lookup(KEYS)[:3] == (0, 0, False)
                assert namespace.read_into(KEYS, bytearray(BLOCKS * NBYTES)) == 0
                with pytest.raises(kvkeep.UnavailableError):
                    namespace.acquire(KEYS)
                assert time.monotonic() - began_s < 0.5
                daemon.start()
                assert wait_until(lambda: client.attached, 2.0, "it attaches again") <= 2.0
                assert client.server_epoch != epoch
    finally:
        daemon.kill()
    daemon.check_log()


def test_a_lease_is_shared_on_the_daemons_host_only(daemon):
    """What was fetched is this process's: its places would be others' blocks there."""
    with connect(daemon.address, timeout_s=10.0) as client:
        namespace = client.open_namespace(spec(NBYTES, model="shared"))
        store_chain(namespace, KEYS)
        with namespace.acquire(KEYS) as acquired:
            assert acquired.leased == BLOCKS
            with pytest.raises(kvkeep.NotSupportedError, match="daemon's host"):
                acquired.share()
            with pytest.raises(kvkeep.NotSupportedError, match="daemon's host"):
                namespace.join(b"")


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "in use"), ("192.0.2.1", "assign")])
def test_a_port_that_is_not_to_be_had_is_one_line(tmp_path, host, why):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"{host}:{taken.getsockname()[1]}"
        remote = f'[remote]\nlisten = "{listen}"\ninsecure_beyond_loopback = true\n'
        daemon = DaemonProcess(tmp_path, SMALL + remote)
        daemon.launch()
        try:
            assert daemon.process.wait(20) == 1
        finally:
            daemon.kill()
    (line,) = daemon.log.splitlines()
    assert line.startswith(f"kvkeep: remote.listen is {listen}: ")
    assert why in line
    assert line.endswith("; name another address or port")
    assert not daemon.socket.exists()


def test_nobody_there_is_told_at_once():
    with pytest.raises(kvkeep.UnavailableError, match=r"127\.0\.0\.1:1: .*remote\.listen"):
        kvkeep.connect(address="127.0.0.1:1", timeout_s=5.0)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:99999999", "unix:/x", 7, "a b:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(kvkeep.InvalidArgumentError, match=r"remote\.listen"):
        kvkeep.connect(address=address)


def test_an_address_and_a_directory_are_one_too_many(tmp_path):
    with pytest.raises(kvkeep.InvalidArgumentError, match="runtime_dir"):
        kvkeep.connect(tmp_path, address="127.0.0.1:1")


def test_a_staging_above_the_limit_is_refused_in_words(daemon):
    with pytest.raises(kvkeep.InvalidArgumentError, match=r"sessions\.staging_max"):
        kvkeep.connect(address=daemon.address, staging_nbytes=1 << 40)


def test_blocks_larger_than_a_message_and_than_the_daemons_limit_of_one(tmp_path):
    """Chunks follow limits.message_max, and blocks are cut anywhere."""
    config = LISTEN + '[ram]\nsize = "64MiB"\n[limits]\nmessage_max = "64KiB"\nkeys_max = 500\n'
    with (
        running_daemon(tmp_path, config) as daemon,
        connect(daemon.address, timeout_s=20.0) as client,
    ):
        keys, nbytes = chain_keys("large", 6), 3_333_333
        namespace = client.open_namespace(spec(nbytes))
        assert store_chain(namespace, keys).stored == 6
        with namespace.acquire(keys, timeout_s=20.0) as acquired:
            expected = blocks_of(place_of(""), keys, nbytes)
            assert [bytes(view) for view in acquired.views()] == [one.tobytes() for one in expected]
        daemon.check_log()


def test_tickets_are_collected_from_another_host(tmp_path):
    """What lies on nvme comes piece by piece, and each piece is fetched."""
    nvme = f'[nvme]\ndirectories = ["{tmp_path}/nvme"]\nmax = "64MiB"\nsegment = "2MiB"\n'
    config = LISTEN + '[ram]\nsize = "16MiB"\nslab = "1MiB"\n' + nvme + 'free_min = "1MiB"\n'
    with (
        running_daemon(tmp_path, config) as daemon,
        connect(daemon.address, timeout_s=20.0) as client,
    ):
        namespace = client.open_namespace(spec(NBYTES))
        chains = [chain_keys(number, BLOCKS) for number in range(40)]
        for keys in chains:
            assert store_chain(namespace, keys, ack="nvme").refused == 0
        expected = {keys: blocks_of(place_of(""), keys, NBYTES) for keys in chains[:6]}
        tickets = {namespace.submit_acquire(keys, timeout_s=20.0): keys for keys in expected}
        done, until_s = {}, time.monotonic() + 30.0
        while len(done) < len(tickets):
            assert time.monotonic() < until_s
            for ticket in client.poll():
                if ticket.done:
                    done[ticket] = ticket.acquired
            time.sleep(0.005)
        for ticket, acquired in done.items():
            right = expected[tickets[ticket]]
            assert acquired is not None, (ticket.state, ticket.error)
            assert acquired.leased == BLOCKS
            assert [bytes(view) for view in acquired.views()] == [row.tobytes() for row in right]
            acquired.release()
        store = namespace.store(chain_keys("submitted", 3))
        for view in store.views:
            view[:] = bytes(len(view))
        ticket = store.submit_commit(timeout_s=10.0)
        while not ticket.done:
            client.poll()
            assert time.monotonic() < until_s + 15
            time.sleep(0.005)
        assert store.result is None or store.result.stored == 3
        assert namespace.lookup(chain_keys("submitted", 3)).blocks == 3
        wait_until(lambda: client.stats().leases == 0, 5.0, "leases are back")
        assert client.health is kvkeep.Health.ANSWERS
        daemon.check_log()


def test_who_only_reads_learns_of_silence_too(daemon):
    """P08: a few reads wait for a frozen daemon, the next ones come back at once."""
    with connect(daemon.address, timeout_s=0.3) as client:
        namespace = client.open_namespace(spec(NBYTES))
        into = bytearray(BLOCKS * NBYTES)
        daemon.send(signal.SIGSTOP)
        try:
            for _ in range(3):
                assert namespace.read_into(KEYS, into) == 0
            wait_until(lambda: namespace.read_into(KEYS, into) or silent(client), 2.0, "it knows")
            began_s = time.monotonic()
            for _ in range(100):
                assert namespace.read_into(KEYS, into) == 0
            assert time.monotonic() - began_s < 0.3
        finally:
            daemon.send(signal.SIGCONT)
        wait_until(lambda: client.health is kvkeep.Health.ANSWERS, 2.0, "it answers")


def silent(client):
    return client.health is kvkeep.Health.SILENT

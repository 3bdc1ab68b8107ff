"""New weights in place, with real daemons and clients: also through SIGKILL."""

import threading

import pytest

import kvkeep
from kvkeep.results import CommitStatus
from tests.e2e.nvme_daemon import LENGTH, chains_of, config
from tests.fakes.daemon_process import DaemonProcess, running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, connect, place

NBYTES = 5000
KEYS = chain_keys("a", 6)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("d"), LISTEN) as daemon:
        yield daemon
        daemon.check_log()


def test_all_processes_go_on_in_the_next_epoch(daemon, way):
    model = spec(NBYTES, model=f"several {way}")
    with connect(place(daemon, way)) as one, connect(str(daemon.runtime_dir)) as two:
        own, theirs = one.open_namespace(model), two.open_namespace(model)
        store_chain(own, KEYS)
        assert theirs.lookup(KEYS).blocks == 6
        with theirs.store(chain_keys("begun", 2)) as begun:
            for view in begun.views:
                view[:] = bytes(len(view))
            assert own.advance_epoch() == 1
            assert own.lookup(KEYS).blocks == 0
        assert set(begun.result.status) == {CommitStatus.REFUSED_EPOCH}
        # Its own thread opens the set again: look-ups make no calls.
        wait_until(lambda: theirs._opened.namespace_epoch == 1, 5, "it is open again")
        assert theirs.lookup(KEYS) == kvkeep.Lookup(0, 0, complete=True, groups=(0,))
        store_chain(own, KEYS)
        assert theirs.lookup(KEYS).blocks == 6
        assert theirs.advance_epoch(expected_epoch=0) == 1, "somebody has done it"
        assert theirs.lookup(KEYS).blocks == 6
        with pytest.raises(kvkeep.NotSupportedError, match="the present one 1"):
            own.advance_epoch(expected_epoch=5)


def test_workers_that_call_together_advance_once(daemon, way):
    model = spec(NBYTES, model=f"workers {way}")
    clients = [connect(place(daemon, way), timeout_s=20) for _ in range(4)]
    try:
        namespaces = [client.open_namespace(model) for client in clients]
        epochs = []
        threads = [
            threading.Thread(target=lambda n=one: epochs.append(n.advance_epoch(0)))
            for one in namespaces
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert epochs == [1] * 4
    finally:
        for client in clients:
            client.close()


def test_a_client_takes_its_epoch_to_a_daemon_that_has_forgotten_it(tmp_path):
    daemon = DaemonProcess(tmp_path)
    daemon.start()
    try:
        with kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client:
            namespace = client.open_namespace(spec(NBYTES))
            assert namespace.advance_epoch() == 1
            daemon.kill()
            daemon.start()
            wait_until(lambda: client.attached, 20, "it is attached again")
            assert namespace.namespace_epoch == 1
    finally:
        daemon.kill()


@pytest.mark.parametrize("ends", ["kill", "end"])
def test_after_a_crash_old_blocks_stay_unfindable(tmp_path, ends):
    daemon = DaemonProcess(tmp_path, config(tmp_path / "nvme"))
    daemon.start()
    try:
        with chains_of(daemon) as chains:
            assert chains.store("old", "older") == 0
            assert chains.namespace.advance_epoch() == 1
            assert chains.store("new") == 0
            getattr(daemon, ends)()
        daemon.start()
        # Another process, that never heard of epochs.
        with chains_of(daemon) as chains:
            chains.recovered()
            assert chains.namespace.namespace_epoch == 1
            assert chains.found("old", "older") == 0
            assert chains.read("new") == LENGTH
            assert chains.client.stats().nvme.blocks == LENGTH
    finally:
        daemon.kill()

"""P16: what a daemon does between the signal and its end."""

import itertools
import random
import signal
import statistics
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvkeep
from tests.crash.acked_stores import LENGTH, SPEC, chain, config, content, stores, verify
from tests.crash.test_named_points import look
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.waiting import wait_until

NOT_SERVING_S = 0.1


@pytest.fixture
def daemon(tmp_path):
    daemon = DaemonProcess(tmp_path, config(tmp_path))
    yield daemon
    daemon.kill()


def slow(daemon, sync_s):
    syncs_take(daemon, sync_s)
    file = str(daemon.directory / "sync_s")
    daemon.program = (sys.executable, "-m", "tests.crash.slow_daemon", file)
    daemon.start()


def syncs_take(daemon, sync_s):
    new = daemon.directory / "sync_s.new"
    new.write_text(str(sync_s))
    new.rename(daemon.directory / "sync_s")


def at_once(daemon):
    daemon.program = (sys.executable, "-m", "kvkeep_server")
    daemon.start()


class HealthWatch:
    """Notes when the daemon first says that it does not serve."""

    def __init__(self, socket):
        self.not_serving_s = None
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._serves.wait(10)

    def _run(self):
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=60):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    self._serves.set()
                elif self.not_serving_s is None:
                    self.not_serving_s = time.monotonic()
        except grpc.RpcError:
            pass

    def ended(self):
        self._thread.join(30)
        self._channel.close()
        return self.not_serving_s


@pytest.mark.promise("P16", gate=3, nightly=50, unit="signals under load")
def test_it_says_at_once_that_it_does_not_serve(daemon, tmp_path, promise_count):
    late_s, acked = [], {}
    for cycle in range(promise_count):
        at_once(daemon)
        watch = HealthWatch(daemon.socket)
        before = len(acked)
        writer = threading.Thread(
            target=stores, args=(daemon.runtime_dir, 1000 * cycle, acked), kwargs={"ack": "nvme"}
        )
        writer.start()
        wait_until(lambda: len(acked) > before, 20, "the writer stores")  # noqa: B023
        signalled_s = time.monotonic()
        daemon.send(signal.SIGTERM)
        assert daemon.process.wait(20) == 0
        late_s.append(watch.ended() - signalled_s)
        writer.join()
    assert statistics.median(late_s) <= NOT_SERVING_S
    at_once(daemon)
    verify(daemon.runtime_dir, acked, random.Random(16))
    daemon.check_log()


def test_a_commit_that_runs_gets_its_answer(daemon):
    """It waits for a sync of one second when the signal comes."""
    slow(daemon, 1.0)
    answers = []
    with kvkeep.connect(daemon.runtime_dir, timeout_s=20.0) as client:
        namespace = client.open_namespace(SPEC)
        keys = chain("in flight")

        def store():
            answers.append(namespace.store_blocks(keys, [content(k) for k in keys], ack="nvme"))

        storing = threading.Thread(target=store)
        storing.start()
        wait_until(lambda: client.stats().nvme.queued_blocks, 10, "it waits for the disk")
        daemon.send(signal.SIGTERM)
        # What comes now is refused, and quickly.
        late = itertools.count()
        wait_until(
            lambda: not _stores(namespace, chain(f"late {next(late)}")), 0.9, "it takes none"
        )
        assert not answers
        storing.join()
    syncs_take(daemon, 0.0)
    assert answers[0].stored == LENGTH
    assert daemon.process.wait(20) == 0
    at_once(daemon)
    verify(daemon.runtime_dir, {"in flight": LENGTH}, random.Random(1))
    daemon.check_log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_drain_too(daemon, number):
    """A terminal that is closed sends SIGHUP: what was in ram only is on disk all the same."""
    slow(daemon, 0.2)
    with kvkeep.connect(daemon.runtime_dir, timeout_s=20.0) as client:
        namespace, keys = client.open_namespace(SPEC), chain("hung up")
        assert namespace.store_blocks(keys, [content(key) for key in keys]).stored == LENGTH
        daemon.send(number)
        assert daemon.process.wait(20) == 0
    at_once(daemon)
    verify(daemon.runtime_dir, {"hung up": LENGTH}, random.Random(1))
    daemon.check_log()


def _stores(namespace, keys):
    try:
        with namespace.store(keys[:1], timeout_s=0.2) as store:
            store.views[0][:] = content(keys[0])
    except (kvkeep.UnavailableError, kvkeep.DeadlineError):
        return False
    return True


def test_a_second_signal_ends_it_fast_and_leaves_what_was_acknowledged(daemon, tmp_path):
    """Draining all that is in ram would take nine slow syncs."""
    sync_s, acked = 1.0, {}
    slow(daemon, 0.0)
    with kvkeep.connect(daemon.runtime_dir, timeout_s=20.0) as client:
        namespace = client.open_namespace(SPEC)
        for name in range(3):
            keys = chain(name)
            result = namespace.store_blocks(keys, [content(key) for key in keys], ack="nvme")
            acked[name] = result.stored
        assert acked == dict.fromkeys(range(3), LENGTH)
        for name in range(3, 12):
            keys = chain(name)
            assert namespace.store_blocks(keys, [content(key) for key in keys]).refused == 0
        syncs_take(daemon, sync_s)
        daemon.send(signal.SIGTERM)
        wait_until(lambda: not client.attached, 5, "it drains")
    time.sleep(0.1)
    hurried_s = time.monotonic()
    daemon.send(signal.SIGTERM)
    assert daemon.process.wait(20) == 0
    # What a thread writes is waited for, and segments are sealed.
    assert time.monotonic() - hurried_s < 1.0 + 5 * sync_s
    assert look(tmp_path / "nvme").findings == []
    at_once(daemon)
    verify(daemon.runtime_dir, acked, random.Random(2))
    daemon.check_log()

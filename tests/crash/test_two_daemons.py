"""P30: of the daemons that want one directory exactly one serves; the others say who does."""

import re
import shutil
import signal
import socket
import time

import pytest

import kvkeep
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.waiting import wait_until

SPEC = spec(8192)
KEYS = chain_keys("two", 8)
EXIT_FAILED = 1


@pytest.fixture
def daemons(tmp_path):
    """Two that share a runtime directory, not started."""
    runtime_dir = tmp_path / "run"
    two = [DaemonProcess(tmp_path / name, shared_runtime_dir=runtime_dir) for name in "ab"]
    yield two
    for daemon in two:
        daemon.kill()


def ended(daemon) -> bool:
    return daemon.process.poll() is not None


def last_line(daemon) -> str:
    return daemon.log.strip().splitlines()[-1]


def check_serves(daemon) -> None:
    with kvkeep.connect(daemon.runtime_dir, timeout_s=5.0) as client:
        namespace = client.open_namespace(SPEC)
        store_chain(namespace, KEYS)
        assert namespace.lookup(KEYS).blocks == 8


def leave_behind(runtime_dir, turn) -> None:
    """What a daemon of the past may have left."""
    if turn % 3 == 1:
        for name in runtime_dir.iterdir():
            name.unlink()
    elif turn % 3 == 2:
        # A socket that nobody listens on any more.
        (runtime_dir / "kvkeep.fd.sock").unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(runtime_dir / "kvkeep.fd.sock"))


@pytest.mark.promise("P30", gate=10, nightly=100, unit="races of two daemons")
def test_of_two_at_once_exactly_one_serves(daemons, promise_count):
    for turn in range(promise_count):
        for daemon in daemons if turn % 2 else reversed(daemons):
            daemon.launch()
        wait_until(lambda: any(map(ended, daemons)), 20.0, "one of them gives up")
        (loser,) = filter(ended, daemons)
        (winner,) = (daemon for daemon in daemons if daemon is not loser)
        wait_until(winner.serving, 20.0, "the other serves")
        assert loser.process.returncode == EXIT_FAILED
        assert re.search(rf"\bpid {winner.pid}\b", last_line(loser)), last_line(loser)
        assert "--runtime-dir" in last_line(loser)
        check_serves(winner)
        winner.end(signal.SIGTERM if turn % 4 == 3 else signal.SIGKILL)
        leave_behind(winner.runtime_dir, turn)
    for daemon in daemons:
        daemon.check_log()


@pytest.mark.parametrize("lock", ["locked", "removed"])
def test_a_live_socket_is_never_stolen(daemons, lock):
    owner, intruder = daemons
    owner.start()
    sockets = [owner.socket, owner.runtime_dir / "kvkeep.fd.sock"]
    before = [path.stat().st_ino for path in sockets]
    with kvkeep.connect(owner.runtime_dir, timeout_s=5.0) as client:
        namespace = client.open_namespace(SPEC)
        store_chain(namespace, KEYS)
        if lock == "removed":
            # By somebody who knew better: the sockets still are somebody's.
            (owner.runtime_dir / "kvkeep.lock").unlink()
        for _ in range(3):
            intruder.launch()
            assert intruder.process.wait(20) == EXIT_FAILED
            assert f"pid {owner.pid}" in last_line(intruder)
        assert [path.stat().st_ino for path in sockets] == before
        assert client.stats().sessions_ended_total == 0
        assert namespace.lookup(KEYS).blocks == 8
    check_serves(owner)
    owner.check_log()
    intruder.check_log()


def test_who_ends_leaves_the_sockets_of_who_came_into_its_place(daemons):
    """The directory was removed under it, by who cleans up, and made anew."""
    owner, successor = daemons
    owner.start()
    shutil.rmtree(owner.runtime_dir)
    successor.start()
    owner.end(signal.SIGTERM)
    check_serves(successor)
    successor.check_log()


def test_a_stopped_owner_is_still_the_owner(daemons):
    """It answers nobody for a while, but it is not dead."""
    owner, intruder = daemons
    owner.start()
    owner.send(signal.SIGSTOP)
    start_s = time.monotonic()
    intruder.launch()
    assert intruder.process.wait(20) == EXIT_FAILED
    assert time.monotonic() - start_s < 10
    assert f"pid {owner.pid}" in last_line(intruder)
    owner.send(signal.SIGCONT)
    check_serves(owner)


def test_what_is_no_socket_is_left_alone(daemons):
    daemon = daemons[0]
    daemon.runtime_dir.mkdir(mode=0o700)
    daemon.socket.write_text("somebody's notes")
    daemon.launch()
    assert daemon.process.wait(20) == EXIT_FAILED
    assert daemon.socket.read_text() == "somebody's notes"
    assert "is not a socket" in last_line(daemon)

"""P11: a client cannot change, shrink or corrupt sealed memory, be its uid the daemon's or another.

The attacks are in `shm_attacker.py`. Root is not an attacker: it may write into any process.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fakes.daemon_process import DaemonProcess

DAEMON_UID, OTHER_UID, GID = 65534, 65533, 65534
CONFIG = '[ram]\nsize = "8MiB"\nslab = "1MiB"\n[sessions]\nstaging = "1MiB"\n'
ATTACKER = Path(__file__).with_name("shm_attacker.py")
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another uid")

# The interpreter may lie where only root can read it, so the daemon changes its uid after its
# imports. That made it undumpable; prctl(4, 1) takes it back, as an exec would have, so that the
# daemon's own call is what counts.
AS_NOBODY = f"""
import ctypes, os, sys
import kvkeep_server.cli.main
from kvkeep_server.__main__ import main
os.setgroups([]); os.setgid({GID}); os.setuid({DAEMON_UID})
ctypes.CDLL(None).prctl(4, 1)
sys.exit(main())
"""

# What may refuse: the modes of descriptor and file, the seals; or the kernel cannot do it at all.
REFUSED = {"EPERM", "EACCES", "EBADF", "EBUSY", "EINVAL", "EOPNOTSUPP", "ENOTSUP"}
# The owner may write its staging, but not what the daemon relies on.
SIZE_AND_SEALS = {
    "ftruncate to 0",
    "ftruncate larger",
    "truncate by path",
    "collapse range",
    "fallocate larger",
    "pwrite behind the end",
    "add seal write",
    "add any seal",
}


@pytest.fixture(scope="module")
def daemon():
    directory = Path(tempfile.mkdtemp(prefix="kvkeep-attack-"))
    program = (sys.executable, "-m", "kvkeep_server")
    if os.geteuid() == 0:
        directory.chmod(0o755)
        (directory / "run").mkdir()
        (directory / "run").chmod(0o750)
        os.chown(directory / "run", DAEMON_UID, GID)
        program = (sys.executable, "-c", AS_NOBODY)
    daemon = DaemonProcess(directory, CONFIG, program)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()
        shutil.rmtree(directory)


def attack(daemon, uid):
    path = daemon.runtime_dir / "kvkeep.fd.sock"
    command = [sys.executable, str(ATTACKER), str(path), str(daemon.pid), str(uid), str(GID)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(DAEMON_UID, id="same uid"),
        pytest.param(OTHER_UID, id="other uid", marks=NEEDS_ROOT),
    ],
)
def report(request, daemon):
    return request.param, attack(daemon, request.param)


def not_refused(outcomes):
    return {name: outcome for name, outcome in outcomes.items() if outcome not in REFUSED}


@pytest.mark.promise("P11", gate=20, nightly=20, unit="attacks")
@pytest.mark.parametrize("region", ["chunk", "index"])
def test_sealed_memory_cannot_be_changed(report, region):
    uid, outcomes = report[0], dict(report[1][region])
    assert outcomes.pop("content") == "UNCHANGED"
    if uid == DAEMON_UID:
        # The owner may open it again for writing: the seals hold for every descriptor.
        assert outcomes.pop("reopen") == "DONE"
        assert len(outcomes) >= 35
    assert not_refused(outcomes) == {}
    assert len(outcomes) >= 20


@pytest.mark.parametrize("region", ["staging", "touch_ring"])
def test_size_and_seals_of_what_clients_write_cannot_be_changed(report, region):
    outcomes = report[1][region]
    assert not_refused({name: outcomes[name] for name in SIZE_AND_SEALS}) == {}
    assert outcomes["pwrite"] == "DONE"


def test_the_daemons_own_memory_is_closed(report):
    assert not_refused(report[1]["process"]) == {}
    assert len(report[1]["process"]) == 8


def test_a_lease_on_a_descriptor_does_not_stop_the_daemon(report):
    # Its owner may take one, unless the kernel counts other readers. That the attacker attached
    # beside it is the proof.
    uid, outcomes = report
    allowed = {"DONE", "EAGAIN"} if uid == DAEMON_UID else {"EACCES"}
    assert set(outcomes["leases"]) <= allowed


def test_the_daemon_survives(daemon, report):
    assert daemon.process.poll() is None
    assert daemon.serving()

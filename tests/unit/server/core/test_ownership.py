"""One owner per directory (P30), told by name to whom comes second."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.ownership import Ownership

# Takes the directory, says so, holds it until stdin ends.
HOLDER = """
import sys
from pathlib import Path
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.ownership import Ownership
owner = Ownership(Path(sys.argv[1]), server_epoch=int(sys.argv[2]))
sys.stdin.readline()
try:
    owner.acquire()
except FailedPreconditionError as error:
    print("refused:", error, flush=True)
else:
    print("owns", flush=True)
    sys.stdin.read()
"""


class Process:
    """A process that takes the directory when told."""

    def __init__(self, directory, epoch=7):
        self.child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(directory), str(epoch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self):
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def answer(self):
        return self.child.stdout.readline()

    def end(self, number=signal.SIGKILL):
        self.child.send_signal(number)
        self.child.communicate()


@pytest.fixture
def holder(tmp_path):
    process = Process(tmp_path)
    process.go()
    assert process.answer() == "owns\n"
    yield process
    process.end()


def acquire(directory):
    owner = Ownership(directory, server_epoch=1)
    owner.acquire()
    return owner


def test_a_missing_directory_is_made_for_its_owner_only(tmp_path):
    directory = tmp_path / "a" / "b"
    owner = acquire(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    owner.release()


def test_the_second_is_refused_and_told_who_is_first(tmp_path, holder):
    """P30."""
    with pytest.raises(FailedPreconditionError, match=rf"pid {holder.child.pid}\b.*stop it"):
        acquire(tmp_path)


def test_released_or_dead_holders_do_not_matter(tmp_path, holder):
    holder.end()
    owner = acquire(tmp_path)
    owner.release()
    acquire(tmp_path).release()


def look(directory):
    looker = Ownership(directory, server_epoch=0)
    looker.acquire_to_look()
    return looker


def test_who_looks_keeps_owners_out_and_writes_nothing(tmp_path, holder):
    with pytest.raises(FailedPreconditionError, match=rf"pid {holder.child.pid}\b.*stop it"):
        look(tmp_path)
    holder.end()
    before = (tmp_path / "kvkeep.lock").read_bytes()
    first, second = look(tmp_path), look(tmp_path)
    with pytest.raises(FailedPreconditionError, match=rf"{holder.child.pid}\b.* not to be seen"):
        acquire(tmp_path)
    assert (tmp_path / "kvkeep.lock").read_bytes() == before
    first.release()
    second.release()
    acquire(tmp_path).release()


def test_where_nobody_ever_was_there_is_nothing_to_lock(tmp_path):
    look(tmp_path).release()
    assert not list(tmp_path.iterdir())
    with pytest.raises(FailedPreconditionError, match="No such file"):
        look(tmp_path / "none")
    (tmp_path / "kvkeep.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedPreconditionError, match="levels of symbolic links"):
        look(tmp_path)


def test_release_is_idempotent_and_before_acquire_harmless(tmp_path):
    owner = Ownership(tmp_path, server_epoch=1)
    owner.release()
    owner.acquire()
    owner.release()
    owner.release()


@pytest.mark.promise("P30", gate=10, nightly=100, unit="starts of two at once")
def test_of_two_at_once_exactly_one_owns_and_the_other_names_it(tmp_path, promise_count):
    pair = [Process(tmp_path), Process(tmp_path)]
    for _ in range(promise_count):
        for process in pair:
            process.go()
        answers = [process.answer() for process in pair]
        assert sorted(answer.partition(" ")[0].strip() for answer in answers) == [
            "owns",
            "refused:",
        ]
        winner = pair[answers.index("owns\n")]
        (refusal,) = [answer for answer in answers if answer.startswith("refused:")]
        assert f"pid {winner.child.pid}," in refusal
        # The winner dies without a word, so its name stays in the file for the next two.
        for process in pair:
            process.end()
        pair = [Process(tmp_path), Process(tmp_path)]
    for process in pair:
        process.end()


def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(tmp_path):
    """The lock comes before the name: who comes in between must not be told a dead one's."""
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    first = acquire(tmp_path)
    lock = tmp_path / "kvkeep.lock"
    name = lock.read_text()
    lock.write_text(f"pid {dead.pid}, server epoch 3\n")
    writer = threading.Timer(0.1, lock.write_text, (name,))
    writer.start()
    with pytest.raises(FailedPreconditionError, match=rf"pid {os.getpid()},"):
        acquire(tmp_path)
    writer.join()
    first.release()


def test_a_holder_without_a_name_is_refused_in_bounded_time(tmp_path):
    first = acquire(tmp_path)
    (tmp_path / "kvkeep.lock").write_text("")
    with pytest.raises(FailedPreconditionError, match="pid unknown"):
        acquire(tmp_path)
    first.release()


def test_a_directory_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(FailedPreconditionError, match="--runtime-dir"):
        acquire(file)
    with pytest.raises(FailedPreconditionError, match="--runtime-dir"):
        acquire(file / "below")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "kvkeep.lock").symlink_to(target)
    with pytest.raises(FailedPreconditionError):
        acquire(directory)
    assert target.read_text() == "content"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another uid")
def test_somebody_elses_directory_is_refused(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(FailedPreconditionError, match="belongs to uid 65534"):
        acquire(tmp_path)


KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_daemons_socket_is_removed(tmp_path, kind):
    owner, path = acquire(tmp_path), tmp_path / "kvkeep.sock"
    with socket.socket(socket.AF_UNIX, kind) as dead:
        dead.bind(str(path))
        dead.listen()
    owner.clear_socket(path, kind)
    assert not path.exists()
    owner.clear_socket(path, kind)  # none is fine
    owner.release()


@pytest.mark.parametrize("served", KINDS)
@pytest.mark.parametrize("probed", KINDS)
def test_a_live_socket_is_never_stolen(tmp_path, served, probed):
    """P30, also when somebody of another kind listens there."""
    owner, path = acquire(tmp_path), tmp_path / "kvkeep.sock"
    with socket.socket(socket.AF_UNIX, served) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(FailedPreconditionError, match="--runtime-dir"):
            owner.clear_socket(path, probed)
        assert path.exists()
    owner.release()


def test_a_live_socket_whose_backlog_is_full_is_never_stolen(tmp_path):
    owner, path = acquire(tmp_path), tmp_path / "kvkeep.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(str(path))
        live.listen(0)
        waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
        for client in waiting:
            client.settimeout(0)
            client.connect_ex(str(path))
        with pytest.raises(FailedPreconditionError, match="served by another process"):
            owner.clear_socket(path, socket.SOCK_STREAM)
        assert path.exists()
        for client in waiting:
            client.close()
    owner.release()


@pytest.mark.parametrize("make", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(tmp_path, make):
    owner, path = acquire(tmp_path), tmp_path / "kvkeep.sock"
    if make == "file":
        path.write_text("mine")
    elif make == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedPreconditionError, match="not a socket"):
        owner.clear_socket(path, socket.SOCK_STREAM)
    assert path.is_symlink() or path.exists()
    owner.release()


def test_the_lock_is_not_inherited_by_programs_that_are_started(tmp_path):
    owner = acquire(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner.release()
    acquire(tmp_path).release()
    child.communicate(b"\n")


def test_a_full_disk_is_one_sentence_and_holds_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("kvkeep_server.core.ownership.os.pwrite", full)
        with pytest.raises(FailedPreconditionError, match="No space left on device; make room"):
            Ownership(tmp_path, server_epoch=1).acquire()
    acquire(tmp_path).release()


def test_a_directory_that_everybody_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(FailedPreconditionError, match="writable by everybody"):
        Ownership(tmp_path, server_epoch=1).acquire()


@pytest.mark.parametrize("look", [False, True])
def test_what_to_do_instead_is_a_whole_sentence(tmp_path, look):
    instead = "name another directory in nvme.directories"
    first = Ownership(tmp_path / "d", server_epoch=1)
    second = Ownership(tmp_path / "d", server_epoch=2, instead=instead)
    first.acquire()
    with pytest.raises(FailedPreconditionError) as refused:
        (second.acquire_to_look if look else second.acquire)()
    first.release()
    assert str(refused.value).endswith(f"); stop it, or {instead}")


def test_by_default_it_is_the_directory_of_the_sockets(tmp_path):
    (tmp_path / "d").touch()
    with pytest.raises(
        FailedPreconditionError, match=r"; name another directory with --runtime-dir$"
    ):
        Ownership(tmp_path / "d", server_epoch=1).acquire()


def test_whatever_the_umask_the_directory_is_the_owners(tmp_path):
    before = os.umask(0o777)
    try:
        owner = Ownership(tmp_path / "run", server_epoch=1)
        owner.acquire()
    finally:
        os.umask(before)
    owner.release()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run" / "kvkeep.lock").stat().st_mode & 0o777 == 0o600


def test_a_directory_that_is_there_keeps_its_mode(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o750)
    owner = Ownership(tmp_path / "run", server_epoch=1)
    owner.acquire()
    owner.release()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o750

"""The client's life: attaching, losing the daemon, attaching again, forking, closing."""

from __future__ import annotations

import gc
import math
import os
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import grpc
import numpy as np
import pytest

import kvkeep
from kvkeep.client import _default_runtime_dir
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2
from tests.fakes.in_process_daemon import FakeDaemon
from tests.fakes.waiting import wait_until
from tests.unit.client.conftest import BLOCK_NBYTES, chain, contents, mapped, spec, store

ROOT = Path(__file__).parents[3]


def open_fds() -> set[str]:
    """What the descriptors of this process are."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return found


def test_hello_says_who_and_which_layout(daemon):
    with kvkeep.connect(daemon.directory, client_name="engine 7", staging_nbytes=3 << 20):
        session = daemon.only_session()
        assert session.hello.client_name == "engine 7"
        assert list(session.hello.layout_versions) == [2]
        assert session.hello.staging_nbytes == 3 << 20
        assert session.hello.pid == os.getpid()


def test_without_a_daemon_the_error_says_what_to_do(directory):
    with pytest.raises(kvkeep.UnavailableError, match="kvkeep serve"):
        kvkeep.connect(directory)


def test_a_refusal_carries_the_daemons_sentence(daemon):
    daemon.refuse_hello = "staging_nbytes is 5: at most 4"
    with pytest.raises(kvkeep.UnavailableError, match="staging_nbytes is 5"):
        kvkeep.connect(daemon.directory)


@pytest.mark.parametrize(
    "missing",
    [session_pb2.FD_KIND_INDEX, session_pb2.FD_KIND_STAGING, session_pb2.FD_KIND_TOUCH_RING],
)
def test_an_incomplete_welcome_is_refused(daemon, missing):
    daemon.welcome_kinds -= {missing}
    with pytest.raises(kvkeep.KVKeepError, match="lacks"):
        kvkeep.connect(daemon.directory)


def test_a_daemon_that_does_not_answer_is_a_deadline(directory):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(directory / "kvkeep.fd.sock"))
        silent.listen()
        with pytest.raises(kvkeep.DeadlineError):
            kvkeep.connect(directory, timeout_s=0.05)


def test_a_daemon_without_grpc_is_unavailable(daemon):
    (daemon.directory / "kvkeep.sock").rename(daemon.directory / "elsewhere.sock")
    with pytest.raises(kvkeep.UnavailableError, match="Attach"):
        kvkeep.connect(daemon.directory)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"runtime_dir": "/" + "x" * 120}, "shorter"),
        ({"runtime_dir": 5}, "runtime_dir is 5"),
        ({"runtime_dir": "/tmp/\0"}, "NUL"),
        ({"runtime_dir": "/tmp/\ud800"}, "runtime_dir"),
        ({"client_name": "ä" * 129}, "client_name"),
        ({"client_name": "\ud800"}, "client_name"),
        ({"client_name": b"x"}, "client_name"),
        ({"staging_nbytes": -1}, "staging_nbytes is -1"),
        ({"staging_nbytes": 1.5}, "staging_nbytes is 1.5"),
        ({"staging_nbytes": 2**64}, "staging_nbytes"),
        ({"timeout_s": -1}, "timeout_s is -1; allowed is above 0"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": math.nan}, "timeout_s is nan"),
        ({"timeout_s": math.inf}, "timeout_s is inf"),
        ({"timeout_s": "2"}, "timeout_s is '2'"),
    ],
    ids=repr,
)
def test_arguments_are_checked(arguments, match):
    with pytest.raises(kvkeep.InvalidArgumentError, match=match):
        kvkeep.connect(**{"runtime_dir": "/nowhere"} | arguments)


@pytest.mark.parametrize(
    "ranks", [["a"], [0, 0], [1.5], [2], [-1], 3, "01", [None], [[0]]], ids=repr
)
def test_local_ranks_are_checked(client, ranks):
    with pytest.raises(kvkeep.InvalidArgumentError, match=r"local_ranks is .* 0 to 1"):
        client.open_namespace(spec(tp_size=2), ranks)


def test_a_specification_is_one(client):
    with pytest.raises(kvkeep.InvalidArgumentError, match="NamespaceSpec"):
        client.open_namespace({"model": "m"})


def test_the_default_directory_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path)[:60])
    with pytest.raises(kvkeep.UnavailableError, match=str(tmp_path)[:60]):
        kvkeep.connect()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(_default_runtime_dir()) == f"/tmp/kvkeep-{os.getuid()}"


@pytest.fixture
def fallback(monkeypatch, directory):
    """The directory that `connect` falls back to, not made yet."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("kvkeep.client._FALLBACK_PARENT", directory)
    return directory / f"kvkeep-{os.getuid()}"


def test_a_fallback_directory_of_ones_own_is_used(fallback):
    with pytest.raises(kvkeep.UnavailableError, match="no daemon listens"):
        kvkeep.connect()
    fallback.mkdir(mode=0o700)
    with FakeDaemon(fallback), kvkeep.connect() as client:
        assert client.attached


@pytest.mark.parametrize("kind", ["world-writable", "another user's", "a link", "a file"])
def test_a_fallback_directory_that_another_may_have_made_is_refused(fallback, monkeypatch, kind):
    elsewhere = fallback.parent / "elsewhere"
    elsewhere.mkdir()
    if kind == "a link":
        fallback.symlink_to(elsewhere)
    elif kind == "a file":
        fallback.touch()
    else:
        fallback.mkdir(mode=0o700)
    if kind == "world-writable":
        fallback.chmod(0o777)
    if kind == "another user's":
        monkeypatch.setattr("os.geteuid", lambda: fallback.stat().st_uid + 1)
    with pytest.raises(kvkeep.UnavailableError, match=r"not trusted.*runtime_dir"):
        kvkeep.connect()


def test_a_directory_that_the_caller_names_is_trusted(fallback):
    fallback.mkdir()
    fallback.chmod(0o777)
    with FakeDaemon(fallback), kvkeep.connect(fallback) as client:
        assert client.attached


def test_nothing_is_left_open(daemon):
    with kvkeep.connect(daemon.directory) as client:
        client.open_namespace(spec())
    gc.collect()
    before = open_fds()
    for _ in range(8):
        with kvkeep.connect(daemon.directory) as client:
            store(client.open_namespace(spec()), chain(2))
    gc.collect()
    wait_until(lambda: not daemon.sessions, 10, "the sessions are over")
    # gRPC opens one or the other of its own when it likes: one a client would be eight.
    wait_until(lambda: len(open_fds()) < len(before) + 8, 10, f"closing {open_fds() - before}")
    maps = sum("memfd:fake" in fd for fd in before)
    wait_until(lambda: sum("memfd:fake" in fd for fd in open_fds()) <= maps, 10, "letting go")
    names = {thread.name for thread in threading.enumerate()}
    assert "kvkeep-session" not in names


def test_a_closed_client_refuses_and_finds_nothing(daemon):
    client = kvkeep.connect(daemon.directory)
    namespace = client.open_namespace(spec())
    keys = chain(1)
    store(namespace, keys)
    client.close()
    client.close()
    assert not client.attached
    assert namespace.lookup(keys)[:3] == (0, 0, False)
    assert namespace.read_into(keys, bytearray(BLOCK_NBYTES)) == 0
    for call in (namespace.acquire, namespace.store):
        with pytest.raises(kvkeep.UnavailableError, match="closed"):
            call(keys)
    with pytest.raises(kvkeep.UnavailableError, match="closed"):
        client.stats()


def test_stats_are_the_daemons(daemon, client, namespace):
    assert client.stats().server_epoch == client.server_epoch == daemon.server_epoch


# --- events


def test_heartbeats_come_thrice_a_timeout(directory):
    with FakeDaemon(directory) as daemon:
        daemon.session_timeout_ms = 300
        with kvkeep.connect(directory):
            session = daemon.only_session()
            wait_until(lambda: session.heartbeats >= 4, 10, "heartbeats")


def test_a_lost_attach_stream_is_opened_again(daemon, client, namespace):
    session = daemon.only_session()
    session.over = True
    wait_until(lambda: daemon.calls.count("Attach") >= 3, 10, "further tries")
    session.over = False
    beats = session.heartbeats
    wait_until(lambda: session.heartbeats > beats, 10, "one that stays")
    assert client.attached
    assert namespace.lookup(chain(1)).complete


def test_a_chunk_that_is_added_is_mapped(daemon, client, namespace):
    daemon.add_chunk(1 << 20)
    session = namespace._opened.session
    wait_until(lambda: 1 in session.chunks, 10, "the chunk is mapped")
    keys = chain(2)
    namespace_id = daemon.opened[0].namespace_id(0)
    for chunk_id, key in enumerate(keys):
        daemon.put(namespace_id, 0, key, contents([key])[0], chunk_id=chunk_id)
    into = bytearray(2 * BLOCK_NBYTES)
    assert namespace.read_into(keys, into) == 2
    assert into == b"".join(contents(keys))


def test_a_region_that_does_not_fit_is_skipped(daemon, client, namespace, caplog):
    caplog.set_level("WARNING", logger="kvkeep")
    real_epoch, daemon.server_epoch = daemon.server_epoch, 99
    daemon.add_chunk(1 << 20)
    daemon.server_epoch = real_epoch
    wait_until(lambda: "region refused" in caplog.text, 10, "the chunk is refused")
    assert client.attached
    assert 1 not in namespace._opened.session.chunks


def test_the_index_moves(daemon, namespace):
    keys = chain(3)
    store(namespace, keys)
    assert namespace.lookup(keys).blocks == 3
    old = daemon.index
    places = [
        (key, int(old.place[row]))
        for key in keys
        for row in [old.row_of(daemon.opened[0].namespace_id(0), 0, key)]
    ]
    new = daemon.move_index(32)
    namespace_id = daemon.opened[0].namespace_id(0)
    for place in places:
        new.insert(namespace_id, 0, *place)
    wait_until(lambda: namespace.lookup(keys).blocks == 3, 10, "the new table answers")
    into = bytearray(3 * BLOCK_NBYTES)
    assert namespace.read_into(keys, into) == 3
    daemon.move_index(64)
    wait_until(lambda: namespace.lookup(keys)[:3] == (0, 0, True), 10, "an empty table answers")


def test_a_table_that_moved_answers_nothing_until_the_next_is_here(daemon, namespace):
    keys = chain(1)
    store(namespace, keys)
    daemon.index.state = 2
    assert namespace.lookup(keys)[:3] == (0, 0, False)
    assert namespace.read_into(keys, bytearray(BLOCK_NBYTES)) == 0
    daemon.index.state = 1
    assert namespace.lookup(keys).blocks == 1


def test_draining_is_noted(daemon, namespace):
    session = namespace._opened.session
    event = pb.AttachEvent(sequence=1, draining=pb.Draining(grace_ms=5000))
    daemon.tell(daemon.only_session(), event)
    wait_until(lambda: session.draining, 10, "the event came")


# --- the daemon goes away


def test_the_client_attaches_again_to_a_new_daemon(directory, caplog):
    keys = chain(3)
    with FakeDaemon(directory) as first, kvkeep.connect(directory, timeout_s=10) as client:
        namespace = client.open_namespace(spec())
        store(namespace, keys)
        acquired = namespace.acquire(keys)
        views = acquired.views()
        first.stop()
        wait_until(lambda: not client.attached, 10, "the loss is seen")
        assert namespace.lookup(keys)[:3] == (0, 0, False)
        assert namespace.read_into(keys, bytearray(3 * BLOCK_NBYTES)) == 0
        with pytest.raises(kvkeep.UnavailableError):
            namespace.store(keys)
        assert [bytes(view) for view in views] == contents(keys)
        acquired.release()
        with FakeDaemon(directory) as second:
            wait_until(lambda: client.attached, 10, "attached again")
            assert client.server_epoch == second.server_epoch != first.server_epoch
            assert namespace.lookup(keys)[:3] == (0, 0, True)
            store(namespace, keys)
            into = bytearray(3 * BLOCK_NBYTES)
            assert namespace.read_into(keys, into) == 3
            assert into == b"".join(contents(keys))


def test_a_dead_daemons_memory_is_let_go(daemon, client, namespace):
    """All but what views show: it counts against what the next daemon can have."""
    keys = chain(1)
    store(namespace, keys)
    namespace.lookup(keys)
    daemon.add_chunk(1 << 20)
    session = namespace._opened.session
    wait_until(lambda: 1 in session.chunks, 10, "the chunk is mapped")
    buffers = [
        *(session.chunks[0].buffer, session.chunks[1].buffer),
        *(session.staging.region, session.table()._region),
    ]
    addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
    del buffers
    acquired = namespace.acquire(keys)
    views = acquired.views()
    daemon.stop()
    wait_until(lambda: not any(map(mapped, addresses[1:])), 10, "they are unmapped")
    assert mapped(addresses[0])
    assert bytes(views[0]) == contents(keys)[0]
    del views
    acquired.release()
    wait_until(lambda: not mapped(addresses[0]), 10, "it is unmapped")


def test_a_session_that_the_daemon_ended_is_followed_by_another(daemon, client, namespace):
    old = daemon.only_session()
    daemon.end(old)
    wait_until(lambda: daemon.sessions and client.attached, 10, "another session")
    assert daemon.only_session().token != old.token
    wait_until(lambda: namespace.lookup(chain(1)).complete, 10, "the namespace is open again")


def test_an_unknown_token_ends_the_session(daemon, client, namespace):
    """The daemon forgot the session, and its fd socket is still open."""
    old = daemon.only_session()
    del daemon.sessions[old.token]
    old.over = True
    wait_until(lambda: daemon.sessions and client.attached, 10, "another session")
    assert namespace.acquire(chain(1)).blocks == 0


def test_a_store_of_the_session_before_is_lost(daemon, client, namespace):
    pending = namespace.store(chain(1))
    old = daemon.only_session()
    daemon.end(old)
    wait_until(lambda: daemon.sessions and client.attached, 10, "another session")
    with pytest.raises(kvkeep.SessionLostError):
        pending.commit()


def test_a_namespace_that_the_new_daemon_refuses_says_why(daemon, client, namespace):
    daemon.fail_next("OpenNamespace", grpc.StatusCode.INVALID_ARGUMENT, details="block too large")
    daemon.end(daemon.only_session())
    wait_until(lambda: daemon.sessions and client.attached, 10, "another session")
    with pytest.raises(kvkeep.InvalidArgumentError, match="block too large"):
        namespace.acquire(chain(1))
    assert namespace.lookup(chain(1))[:3] == (0, 0, False)


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN]
)
def test_a_refusal_that_may_pass_is_tried_again(daemon, client, namespace, code):
    daemon.fail_next("OpenNamespace", code, details="no room now")
    session = namespace._opened.session
    daemon.end(daemon.only_session())
    wait_until(lambda: client.attached and not session.alive, 10, "it attaches again")
    with pytest.raises(kvkeep.KVKeepError, match="no room now"):
        namespace.acquire(chain(1))
    # Look-ups alone bring it back.
    wait_until(lambda: namespace.lookup(chain(1)) and namespace._opened.session.alive, 5, "it is")
    assert namespace.acquire(chain(1)).blocks == 0


def test_a_new_daemon_that_is_not_ready_is_tried_again(daemon, client, namespace):
    daemon.fail_next("OpenNamespace", grpc.StatusCode.UNAVAILABLE)
    daemon.end(daemon.only_session())
    wait_until(lambda: daemon.calls.count("OpenNamespace") >= 3, 10, "two tries")
    wait_until(lambda: namespace.lookup(chain(1)).complete, 10, "open again")


# --- forks


def run_forking(daemon, forks: int, **environment: str) -> list[str]:
    """Lines of the forking program."""
    program = [sys.executable, "-m", "tests.unit.client.forking_client"]
    ran = subprocess.run(
        [*program, str(daemon.directory), str(forks)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_forked_child_attaches_anew_and_leaves_its_parent_alone(daemon):
    lines = run_forking(daemon, 5)
    assert lines == 5 * [
        "child found=3 exact=True leased=True stored=2",
        "parent child=0 found=3 leased=3",
    ]
    wait_until(lambda: not daemon.sessions, 10, "every session is over")


def test_a_child_that_may_not_use_grpc_refuses(daemon):
    """Sharing gRPC's epoll set, it would take its parent's answers."""
    (line,) = run_forking(daemon, 1, GRPC_POLL_STRATEGY="epoll1")
    assert line == "parent child=1 found=3 leased=3"


def test_the_choice_of_the_poller_does_not_leak_into_the_environment():
    program = (
        "import os, kvkeep.client, kvkeep.forking;"
        "assert kvkeep.forking.CHILD_MAY_USE_GRPC;"
        "assert 'GRPC_POLL_STRATEGY' not in os.environ"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_POLL_STRATEGY"}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=True)


# --- the package


@pytest.mark.parametrize("name", sorted(kvkeep.__all__))
def test_every_public_name_is_there(name):
    assert getattr(kvkeep, name) is not None


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvkeep.nothing


def test_importing_is_cheap():
    program = (
        "import sys, kvkeep; kvkeep.NamespaceSpec, kvkeep.KVKeepError;"
        "assert not {'numpy', 'grpc', 'google.protobuf'} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_only_what_is_exported_is_public():
    """Names that the package defines eagerly; the others come with __getattr__."""
    defined = {name for name in vars(kvkeep) if not name.startswith("_")}
    modules = {name for name in defined if isinstance(vars(kvkeep)[name], types.ModuleType)}
    assert defined - modules - set(kvkeep.__all__) == {"TYPE_CHECKING", "annotations"}

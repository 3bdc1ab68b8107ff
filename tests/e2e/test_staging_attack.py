"""P11: what a client does to its staging, or says of it, never reaches a sealed block."""

import mmap
import random
import threading

import grpc
import pytest

from kvkeep.v1.session_pb2 import FD_KIND_CHUNK
from kvkeep_server.core.results import CommitStatus
from tests.fakes.daemon_process import running_daemon
from tests.fakes.raw_session import KEY_NBYTES, RawSession

CONFIG = '[ram]\nsize = "32MiB"\nslab = "1MiB"\n[sessions]\nstaging = "4MiB"\n'
NBYTES = 57 * 1024
MADV_REMOVE = 9


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("staging"), CONFIG) as daemon:
        yield daemon


@pytest.fixture
def session(daemon):
    with RawSession(daemon.runtime_dir) as session:
        yield session


@pytest.fixture
def keys(request):
    """Keys that no other test has."""
    source = random.Random(request.node.name)
    return lambda count: source.randbytes(KEY_NBYTES * count)


def stage(session, blocks):
    for position, block in enumerate(blocks):
        session.staging[position * NBYTES : (position + 1) * NBYTES] = block
    return [position * NBYTES for position in range(len(blocks))]


def test_a_late_write_to_staging_changes_nothing(session, keys):
    handle = session.open_namespace(NBYTES).set_index
    blocks = [random.Random(seed).randbytes(NBYTES) for seed in range(8)]
    mine = keys(8)
    answer = session.commit(handle, mine, stage(session, blocks))
    assert list(answer.status) == [CommitStatus.STORED] * 8
    session.staging[:] = b"\xee" * len(session.staging)
    session.staging.madvise(MADV_REMOVE)
    _, addresses = session.acquire(handle, mine)
    assert [session.block(address, NBYTES) for address in addresses] == blocks


def test_a_write_during_the_copy_is_sealed_once(session, keys):
    """Bytes that change while they are copied: whatever was sealed stays as it is."""
    handle = session.open_namespace(NBYTES).set_index
    over = threading.Event()

    def scribble():
        number = 0
        while not over.is_set():
            number += 1
            session.staging[:] = bytes([number % 256]) * len(session.staging)

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        mine = keys(64)
        assert session.commit(handle, mine, [i * NBYTES for i in range(64)]).stored == 64
        _, addresses = session.acquire(handle, mine)
        first = [session.block(address, NBYTES) for address in addresses]
        for _ in range(20):
            assert [session.block(address, NBYTES) for address in addresses] == first
    finally:
        over.set()
        scribbler.join()


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param((4 << 20) - NBYTES + 64, id="over the end"),
        pytest.param(4 << 20, id="behind the end"),
        pytest.param((1 << 64) - 64, id="wraps around"),
        pytest.param((1 << 63), id="negative"),
    ],
)
def test_a_fake_place_is_refused(daemon, session, keys, offset):
    handle = session.open_namespace(NBYTES).set_index
    mine = keys(2)
    with pytest.raises(grpc.RpcError) as caught:
        session.commit(handle, mine, [0, offset])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "staging" in caught.value.details()
    assert session.acquire(handle, mine)[0].leased_blocks == 0
    assert daemon.serving()


@pytest.mark.parametrize("offsets", [[], [0], [0, NBYTES, 0]])
def test_a_fake_count_is_refused(session, keys, offsets):
    handle = session.open_namespace(NBYTES).set_index
    with pytest.raises(grpc.RpcError) as caught:
        session.commit(handle, keys(2), offsets)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_another_sessions_staging_cannot_be_named(daemon, session, keys):
    """Offsets count in the session's own staging: a foreign block is not there to be named."""
    with RawSession(daemon.runtime_dir) as victim:
        secret = random.Random(1).randbytes(NBYTES)
        stage(victim, [secret])
        handle = session.open_namespace(NBYTES).set_index
        mine = keys(1)
        session.commit(handle, mine, [0])
        _, addresses = session.acquire(handle, mine)
        assert session.block(addresses[0], NBYTES) != secret
        with pytest.raises(PermissionError):
            mmap.mmap(session.fds[FD_KIND_CHUNK][0], 0)


def test_what_is_sealed_outlives_the_session_that_staged_it(daemon, session, keys):
    mine = keys(4)
    with RawSession(daemon.runtime_dir) as other:
        handle = other.open_namespace(NBYTES).set_index
        blocks = [random.Random(seed).randbytes(NBYTES) for seed in range(4)]
        assert other.commit(handle, mine, stage(other, blocks)).stored == 4
    handle = session.open_namespace(NBYTES).set_index
    _, addresses = session.acquire(handle, mine)
    assert [session.block(address, NBYTES) for address in addresses] == blocks

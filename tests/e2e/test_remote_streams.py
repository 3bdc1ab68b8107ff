"""What clients on other hosts can send and refuse to take: nothing of it stores, hangs or leaks."""

import contextlib
import os
import struct
import threading
import time
import zlib

import grpc
import pytest

from kvkeep.v1 import admin_pb2, admin_pb2_grpc, block_cache_pb2, block_cache_pb2_grpc
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys
from tests.fakes.raw_remote import (
    CHUNK_NBYTES,
    DEADLINE_S,
    RawRemote,
    chunk,
    chunks,
    first,
    sealed,
)
from tests.fakes.waiting import wait_until

MIB = 1 << 20
NBYTES = 300_000
STRIDE = 4096 * 74
COUNT = 8
STALL_S = 1.0
CONFIG = (
    '[ram]\nsize = "64MiB"\n[sessions]\nstaging = "4MiB"\nstaging_total_max = "64MiB"\n'
    '[remote]\nlisten = "127.0.0.1:0"\nsessions_max = 4\nstreams_max = 4\n'
    f'session_streams_max = 2\nstall_timeout = "{STALL_S}s"\nstaging_total_max = "16MiB"\n'
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as started:
        yield started
        started.check_log()


@pytest.fixture
def remote(daemon):
    with RawRemote(daemon.address) as session:
        yield session


@pytest.fixture
def opened(remote, request):
    return remote.open_namespace(NBYTES, model=request.node.name).set_index


def refused(code, what):
    """That the call fails with this code; its sentence."""

    def run():
        answer = what()
        if not isinstance(answer, block_cache_pb2.WriteResponse):
            list(answer)

    with pytest.raises(grpc.RpcError) as failed:
        run()
    assert failed.value.code() == code, failed.value.details()
    return failed.value.details()


def test_what_is_written_is_read(remote, opened):
    keys, payload = chain_keys("a", COUNT), os.urandom(COUNT * NBYTES)
    assert remote.lookup(opened, keys) == 0
    assert remote.write(remote.header(opened, keys, STRIDE), payload).stored == COUNT
    assert remote.lookup(opened, keys) == COUNT
    leased = remote.acquire(opened, keys)
    assert leased.leased_blocks == COUNT
    responses = remote.read(leased.lease_id)
    assert b"".join(one.data for one in responses) == payload
    assert max(len(one.data) for one in responses) <= CHUNK_NBYTES
    middle = remote.read(leased.lease_id, first_block=2, blocks=1, range_offset=7, range_nbytes=9)
    start = 2 * NBYTES + 7
    assert [one.data for one in middle] == [payload[start : start + 9]]
    remote.call("Release", block_cache_pb2.ReleaseRequest(lease_ids=[leased.lease_id]))
    request = block_cache_pb2.ReadRequest(lease_id=leased.lease_id)
    sentence = refused(grpc.StatusCode.NOT_FOUND, lambda: remote.call("Read", request))
    assert "acquire again" in sentence


BAD_STREAMS = {
    "nothing": lambda _header, _payload: [],
    "no header": lambda header, payload: chunks(payload, first(header)),
    "two headers": lambda header, payload: [
        first(header),
        first(header),
        *chunks(payload, first(header)),
    ],
    "half": lambda header, payload: [first(header), *chunks(payload, first(header))[:1]],
    "header only": lambda header, _payload: [first(header)],
    "too much": lambda header, payload: [first(header), *chunks(payload + b"x", first(header))],
    "a chunk twice": lambda header, payload: [
        first(header),
        *chunks(payload, first(header))[:1] * 2,
    ],
    "out of order": lambda header, payload: [
        first(header),
        *reversed(chunks(payload, first(header))),
    ],
    "too large a chunk": lambda header, payload: [
        first(header),
        chunk(0, payload[: MIB + 1], first(header)),
    ],
    "empty chunks": lambda header, _payload: [first(header), chunk(0, b"", first(header))],
}


def test_bytes_that_were_damaged_on_the_way_are_not_the_callers_fault(remote, opened):
    keys, payload = chain_keys("a", COUNT), os.urandom(COUNT * NBYTES)
    damaged = block_cache_pb2.WriteRequest(data=payload[:MIB], crc32=1)
    begin = first(remote.header(opened, keys, STRIDE))
    messages = [begin, damaged, *chunks(payload, begin)[1:]]
    sentence = refused(grpc.StatusCode.UNAVAILABLE, lambda: remote.call("Write", iter(messages)))
    assert "store again" in sentence
    assert remote.lookup(opened, keys) == 0


def flipped(message, step):
    """Its bytes, each time with another bit flipped, of every so many."""
    payload = message.SerializeToString()
    for bit in range(0, 8 * len(payload), step):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


DAMAGED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT}


def test_no_flipped_bit_stores_under_another_key(remote, opened):
    """Of a header: keys, places, the handle; of a chunk: where it belongs."""
    keys, payload = chain_keys("a", COUNT), os.urandom(COUNT * NBYTES)
    begin = first(remote.header(opened, keys, STRIDE))
    rest = [one.SerializeToString() for one in chunks(payload, begin)]
    write = remote.channel.stream_unary("/kvkeep.v1.BlockCache/Write")
    for damaged in flipped(begin, 37):
        with pytest.raises(grpc.RpcError) as failed:
            write(iter([damaged, *rest]), metadata=remote.metadata, timeout=DEADLINE_S)
        assert failed.value.code() in DAMAGED, failed.value.details()
    # The bytes of another Write.
    other = first(remote.header(opened, chain_keys("b", COUNT), STRIDE))
    messages = iter([other, *chunks(payload, begin)])
    refused(grpc.StatusCode.UNAVAILABLE, lambda: remote.call("Write", messages))
    assert remote.lookup(opened, keys) == 0
    assert remote.lookup(opened, chain_keys("b", COUNT)) == 0
    assert remote.write(remote.header(opened, keys, STRIDE), payload).stored == COUNT


@pytest.mark.parametrize("name", ["OpenNamespace", "Lookup", "Acquire", "Read", "Remove"])
def test_no_flipped_bit_asks_for_another_block(remote, opened, name):
    keys = chain_keys("a", 2)
    remote.write(remote.header(opened, keys, STRIDE), os.urandom(2 * NBYTES))
    leased = remote.acquire(opened, keys)
    requests = {
        "OpenNamespace": block_cache_pb2.OpenNamespaceRequest(layout_version=2),
        "Lookup": block_cache_pb2.LookupRequest(set_index=opened, keys=keys),
        "Acquire": block_cache_pb2.AcquireRequest(set_index=opened, keys=keys),
        "Read": block_cache_pb2.ReadRequest(lease_id=leased.lease_id, blocks=1),
        "Remove": block_cache_pb2.RemoveRequest(set_index=opened, keys=keys),
    }
    kind = "unary_stream" if name == "Read" else "unary_unary"
    call = getattr(remote.channel, kind)(f"/kvkeep.v1.BlockCache/{name}")
    for damaged in flipped(sealed(name, requests[name]), 1 if name == "Read" else 7):
        with pytest.raises(grpc.RpcError) as failed:
            list(call(damaged, metadata=remote.metadata, timeout=DEADLINE_S))
        assert failed.value.code() in DAMAGED, failed.value.details()
    # Nor can it be another call's.
    other = sealed("Prefetch", requests[name]).SerializeToString()
    with pytest.raises(grpc.RpcError):
        list(call(other, metadata=remote.metadata, timeout=DEADLINE_S))
    assert remote.lookup(opened, keys) == 2


def test_an_answer_is_that_of_its_request(remote, opened):
    answers = {}
    for model in ("one", "two"):
        request = sealed(
            "Lookup", block_cache_pb2.LookupRequest(set_index=opened, keys=chain_keys(model, 3))
        )
        answer = remote.call("Lookup", request)
        crc32 = answer.message_crc32
        answer.ClearField("message_crc32")
        assert crc32 == zlib.crc32(answer.SerializeToString(), request.message_crc32)
        answers[crc32] = answer
    assert len(answers) == 2


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_stream_that_is_not_its_blocks_stores_nothing(remote, opened, name):
    keys, payload = chain_keys("a", COUNT), os.urandom(COUNT * NBYTES)
    messages = BAD_STREAMS[name](remote.header(opened, keys, STRIDE), payload)
    sentence = refused(
        grpc.StatusCode.INVALID_ARGUMENT, lambda: remote.call("Write", iter(messages))
    )
    assert "allowed: " in sentence
    assert remote.lookup(opened, keys) == 0
    # The session is none the worse for it.
    assert remote.write(remote.header(opened, keys, STRIDE), payload).stored == COUNT


def test_a_place_outside_of_staging_is_refused_before_bytes_come(remote, opened):
    header = remote.header(opened, chain_keys("a", COUNT), 4 * MIB)
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: remote.call("Write", iter([first(header)])))


@pytest.mark.parametrize("timeout_s", [None, 3600.0])
def test_a_stream_needs_a_deadline(remote, opened, timeout_s):
    request = block_cache_pb2.ReadRequest(lease_id=1)
    sentence = refused(
        grpc.StatusCode.INVALID_ARGUMENT, lambda: remote.call("Read", request, timeout_s)
    )
    assert "deadline" in sentence


def test_a_client_that_vanishes_in_the_middle_leaves_nothing(daemon, opened, remote):
    keys, payload = chain_keys("a", COUNT), os.urandom(COUNT * NBYTES)
    with RawRemote(daemon.address) as other:
        other.open_namespace(NBYTES, model="vanishes")
        gone = threading.Event()

        def half():
            begin = first(other.header(opened, keys, STRIDE))
            yield begin
            yield chunks(payload, begin)[0]
            gone.wait(10)

        call = other.stub.Write.future(half(), metadata=other.metadata, timeout=20)
        time.sleep(0.3)
        call.cancel()
        gone.set()
    wait_until(lambda: remote.stats().sessions == 1, 2.0, "its session is over")
    assert remote.lookup(opened, keys) == 0


def test_who_takes_nothing_is_ended_and_the_rest_go_on(daemon, remote, opened):
    """A reader that does not read: its session ends, its leases come back."""
    # More than any window holds.
    keys, payload = chain_keys("a", 64), os.urandom(COUNT * NBYTES)
    for start in range(0, 64, COUNT):
        header = remote.header(opened, keys[start * 32 : (start + COUNT) * 32], STRIDE)
        header.parent_key = keys[max(0, start - 1) * 32 : start * 32]
        assert remote.write(header, payload).stored == COUNT
    with RawRemote(daemon.address) as idle:
        model = test_who_takes_nothing_is_ended_and_the_rest_go_on.__name__
        index = idle.open_namespace(NBYTES, model=model).set_index
        leased = idle.acquire(index, keys)
        assert leased.leased_blocks == 64
        request = block_cache_pb2.ReadRequest(lease_id=leased.lease_id)
        calls = [idle.call("Read", request, 8.0) for _ in range(2)]
        assert remote.stats().leases == 1
        began = time.monotonic()
        wait_until(lambda: remote.stats().sessions == 1, 6.0, "it was ended")
        assert time.monotonic() - began >= STALL_S / 2
        assert remote.stats().leases == 0
        assert remote.lookup(opened, keys) == 64
        for call in calls:
            call.cancel()


def test_who_takes_nothing_is_in_nobodys_way(daemon, remote, opened):
    """P14, of hosts that are as bad as their number allows: each opens all the streams it gets, and
    takes nothing until its deadlines."""
    keys, payload = chain_keys("a", 64), os.urandom(COUNT * NBYTES)
    model = test_who_takes_nothing_is_in_nobodys_way.__name__

    def store(number):
        own = keys[number * 32 * COUNT :][: 32 * COUNT]
        header = remote.header(opened, own, STRIDE)
        header.parent_key = keys[max(0, number * COUNT - 1) * 32 : number * COUNT * 32]
        return remote.write(header, payload).stored

    assert sum(store(number) for number in range(8)) == 64
    with contextlib.ExitStack() as held:
        for _ in range(2):
            idle = held.enter_context(RawRemote(daemon.address))
            leased = idle.acquire(idle.open_namespace(NBYTES, model=model).set_index, keys)
            request = block_cache_pb2.ReadRequest(lease_id=leased.lease_id)
            for _ in range(3):
                call = idle.call("Read", request, DEADLINE_S)
                held.callback(call.cancel)
        # One place is left all the time, and when the others were ended theirs are free.
        lease_id = remote.acquire(opened, keys).lease_id
        assert b"".join(one.data for one in remote.read(lease_id, blocks=COUNT)) == payload
        wait_until(lambda: remote.stats().sessions == 1, 6.0, "they are ended")
        ends = [error.code().name for error in begun_writes(remote, opened, 2)]
        assert ends == ["INVALID_ARGUMENT"] * 2


def begun_writes(remote, opened, count):
    """How Write streams end that are open at the same time, and send no bytes."""
    over = threading.Event()

    def waiting(number):
        header = remote.header(opened, chain_keys(f"begun {number}", 1), STRIDE)
        header.groups[0].staging_offsets = struct.pack("<Q", number * STRIDE)
        yield first(header)
        over.wait(STALL_S / 2)

    calls = [
        remote.stub.Write.future(waiting(number), metadata=remote.metadata, timeout=20)
        for number in range(count)
    ]
    errors = [call.exception() for call in calls]
    over.set()
    return errors


def test_who_sends_nothing_is_ended(daemon, remote, opened):
    header = remote.header(opened, chain_keys("a", COUNT), STRIDE)
    over = threading.Event()

    def endless():
        yield first(header)
        over.wait(20)

    sentence = refused(grpc.StatusCode.UNAVAILABLE, lambda: remote.call("Write", endless()))
    over.set()
    assert "stall_timeout" in sentence
    with pytest.raises(grpc.RpcError) as ended:
        remote.lookup(opened, chain_keys("a", 1))
    assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_streams_and_sessions_have_limits(daemon, remote, opened):
    errors = begun_writes(remote, opened, 3)
    codes = sorted(error.code().name for error in errors)
    assert codes == ["INVALID_ARGUMENT"] * 2 + ["RESOURCE_EXHAUSTED"]
    (full,) = [e for e in errors if e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert "remote.session_streams_max" in full.details()
    assert any(datum.key == "kvkeep-retry-after-ms" for datum in full.trailing_metadata())
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(RawRemote(daemon.address))
        with pytest.raises(grpc.RpcError) as too_many:
            RawRemote(daemon.address).__enter__()
    assert too_many.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "remote.sessions_max = 4" in too_many.value.details()
    with pytest.raises(grpc.RpcError) as too_large:
        RawRemote(daemon.address, staging_nbytes=32 * MIB).__enter__()
    assert "remote.staging_total_max" in too_large.value.details()


@pytest.mark.parametrize("name", ["Lookup", "Acquire", "Read", "Write", "Attach", "Stats"])
def test_without_a_session_there_is_nothing(daemon, name):
    calls = {
        "Lookup": lambda blocks, _: blocks.Lookup(
            sealed("Lookup", block_cache_pb2.LookupRequest()), timeout=5
        ),
        "Acquire": lambda blocks, _: blocks.Acquire(
            sealed("Acquire", block_cache_pb2.AcquireRequest()), timeout=5
        ),
        "Read": lambda blocks, _: list(
            blocks.Read(sealed("Read", block_cache_pb2.ReadRequest()), timeout=5)
        ),
        "Write": lambda blocks, _: blocks.Write(iter([]), timeout=5),
        "Attach": lambda blocks, _: list(
            blocks.Attach(iter([block_cache_pb2.AttachRequest()]), timeout=5)
        ),
        "Stats": lambda _, admin: admin.Stats(admin_pb2.StatsRequest(), timeout=5),
    }
    with grpc.insecure_channel(daemon.address) as channel:
        stubs = block_cache_pb2_grpc.BlockCacheStub(channel), admin_pb2_grpc.AdminStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            calls[name](*stubs)
    assert failed.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_operators_have_the_unix_socket_only(daemon, remote):
    """Also when one has called there before."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        admin_pb2_grpc.AdminStub(channel).ListNamespaces(
            admin_pb2.ListNamespacesRequest(), timeout=DEADLINE_S
        )
    for name in ("ListNamespaces", "Check"):
        call, request = getattr(remote.admin, name), getattr(admin_pb2, f"{name}Request")()
        with pytest.raises(grpc.RpcError) as failed:
            call(request, metadata=remote.metadata, timeout=5)
        assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "unix socket" in failed.value.details()


def test_a_header_of_a_million_groups_is_not_parsed(remote, opened):
    header = block_cache_pb2.CommitRequest(
        set_index=opened, groups=[block_cache_pb2.StagedGroup()] * 500_000
    )
    sentence = refused(
        grpc.StatusCode.INVALID_ARGUMENT, lambda: remote.call("Write", iter([first(header)]))
    )
    assert "fields" in sentence

"""The bridge of a session on another host: what a client's frames become, and what comes back."""

from __future__ import annotations

import socket
import threading
import time
import zlib

import numpy as np
import pytest

from kvkeep import bridge as module
from kvkeep.bridge import Bridge
from kvkeep.call_socket import CallSocket, PendingCall, Reply
from kvkeep.checksums import seal
from kvkeep.errors import UnavailableError
from kvkeep.results import BlockStatus
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1.session_pb2 import CallMethod
from tests.fakes.waiting import wait_until

NBYTES, BLOCKS, SET = 5000, 3, 7
READY = BlockStatus.READY
FULL, INTERNAL, UNAVAILABLE = 8, 13, 14  # gRPC's numbers
LONG_S = 20.0
OPEN = CallMethod.CALL_METHOD_OPEN_NAMESPACE
ACQUIRE, AWAIT = CallMethod.CALL_METHOD_ACQUIRE, CallMethod.CALL_METHOD_AWAIT
COMMIT, RELEASE = CallMethod.CALL_METHOD_COMMIT, CallMethod.CALL_METHOD_RELEASE
RENEW, REMOVE = CallMethod.CALL_METHOD_RENEW, CallMethod.CALL_METHOD_REMOVE


def content(lease, number):
    return bytes([(lease * 16 + number) % 251]) * NBYTES


def columns(blocks=BLOCKS):
    return [pb.LeasedColumn(addresses=bytes(8 * blocks), generations=bytes(8 * blocks))]


class FakeChannel:
    """A daemon on another host, in the test's hands.

    Attributes:
        answers: By name of the call: its response, or a Reply.
        begun: (name, payload, deadline) of each unary call.
        writes: The messages of each Write.
        write_ends: How each Write ends; the last goes on.
        arrived: What an Await brings.
    """

    def __init__(self):
        self.answers = {}
        self.begun = []
        self.writes = []
        self.write_ends = [Reply(0, 0.0, pb.CommitResponse(status=b"\x01").SerializeToString())]
        self.arrived = []
        self.paused_s = 0.0
        self.closed = False
        self.gone = False

    def begin(self, name, payload, timeout_s, on_reply):
        self.begun.append((name, payload, timeout_s))
        answer = self.answers.get(name, pb.ReleaseResponse())
        if not isinstance(answer, Reply):
            answer = Reply(0, 0.0, answer.SerializeToString())
        on_reply(answer)

    def read(self, request, timeout_s):
        if self.gone:
            raise UnavailableError("gone")
        for number in range(request.first_block, request.first_block + request.blocks):
            data = content(request.lease_id, number)
            crc32 = zlib.crc32(data, request.message_crc32)
            yield pb.ReadResponse(block=number, data=data, status=READY, crc32=crc32)

    def arrivals(self, request, timeout_s, on_arrival):
        for answer in self.arrived:
            if not on_arrival(answer):
                break
        return Reply(0, 0.0, b"")

    def write(self, requests, timeout_s, crc32):
        self.writes.append(list(requests))
        return self.write_ends.pop(0) if len(self.write_ends) > 1 else self.write_ends[0]

    def pause(self, seconds):
        self.paused_s += seconds

    def close(self):
        self.closed = True


class Bridged:
    """A bridge, its channel, and a client's end of the call socket."""

    def __init__(self, timeout_s=2.0):
        ours, theirs = socket.socketpair()
        self.calls = CallSocket(ours.detach())
        self.channel = FakeChannel()
        self.staging = memoryview(bytearray(1 << 16))
        self.shown = {}
        self.bridge = Bridge(
            end=theirs,
            channel=self.channel,
            staging=self.staging,
            show=self.show,
            timeout_s=timeout_s,
        )
        self.bridge.start()

    def show(self, chunks):
        self.shown = chunks

    def begin(self, method, request, on_reply=None, timeout_s=LONG_S):
        until_s = time.monotonic() + timeout_s
        pending = PendingCall(method, CallMethod.Name(method), until_s, on_reply=on_reply)
        return self.calls.begin(pending, request.SerializeToString())

    def call(self, method, request, timeout_s=LONG_S):
        return self.calls.wait(self.begin(method, request, timeout_s=timeout_s))

    def open(self):
        group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL, block_nbytes=NBYTES)
        limits = pb.Limits(message_nbytes_max=1 << 20)
        self.channel.answers["OpenNamespace"] = pb.OpenNamespaceResponse(
            set_index=SET, limits=limits
        )
        request = pb.OpenNamespaceRequest(spec=pb.NamespaceSpec(groups=[group]))
        assert self.call(OPEN, request).status == 0

    def acquire(self, lease=1, ttl_s=30.0, blocks=BLOCKS):
        self.channel.answers["Acquire"] = pb.AcquireResponse(
            lease_id=lease,
            leased_blocks=blocks,
            prefix_blocks=blocks,
            status=bytes([READY] * blocks),
            lease_ttl_ms=round(ttl_s * 1000),
            columns=columns(blocks) if blocks else [],
        )
        reply = self.call(ACQUIRE, pb.AcquireRequest(set_index=SET))
        assert reply.status == 0, reply
        return pb.AcquireResponse.FromString(reply.payload)

    def blocks(self, column):
        """What the addresses of a column show."""
        found = []
        for address in np.frombuffer(column.addresses, np.uint64).tolist():
            start = (address & 0xFFFFFFFF) * 4096
            found.append(bytes(self.shown[address >> 32].buffer[start : start + NBYTES]))
        return found

    def close(self):
        self.bridge.close()
        self.bridge.close()
        self.calls.close()


@pytest.fixture
def bridged():
    before = set(threading.enumerate())
    bridged = Bridged()
    bridged.open()
    yield bridged
    bridged.close()
    assert bridged.channel.closed
    wait_until(lambda: set(threading.enumerate()) <= before, 5.0, "its threads have ended")


def test_calls_go_on_by_their_names_and_refusals_come_back(bridged):
    refusal = Reply(FULL, 0.25, b"limits.x = 1; try again")
    bridged.channel.answers["Renew"] = refusal
    assert bridged.call(RENEW, pb.RenewRequest(lease_ids=[3])) == refusal
    name, payload, _ = bridged.channel.begun[-1]
    assert (name, pb.RenewRequest.FromString(payload).lease_ids) == ("Renew", [3])
    bridged.channel.answers["Acquire"] = refusal
    assert bridged.call(ACQUIRE, pb.AcquireRequest(set_index=SET)) == refusal
    assert bridged.shown == {}


def test_an_acquire_is_answered_when_its_blocks_are_here(bridged):
    (column,) = bridged.acquire(4).columns
    assert bridged.blocks(column) == [content(4, number) for number in range(BLOCKS)]
    bridged.call(RELEASE, pb.ReleaseRequest(lease_ids=[4]))
    assert bridged.shown == {}
    # Nothing leased, nothing to fetch.
    assert bridged.acquire(0, blocks=0).lease_id == 0
    assert bridged.acquire(5, blocks=0).lease_id == 5


def test_blocks_that_do_not_come_shorten_the_answer(bridged):
    bridged.channel.gone = True
    answer = bridged.acquire(4)
    assert (answer.leased_blocks, answer.prefix_blocks) == (0, 0)
    assert answer.ended == pb.MISS_REASON_TIER_DOWN


def awaited(bridged, lease, count):
    """The replies to an Await."""
    replies = []
    bridged.begin(AWAIT, pb.AwaitRequest(lease_id=lease), on_reply=replies.append)

    def all_here():
        bridged.calls.take()
        return len(replies) == count

    wait_until(all_here, LONG_S, "it ended")
    return replies


def test_what_arrives_is_shown_piece_by_piece(bridged):
    bridged.acquire(4, blocks=1)
    arrival = pb.AwaitResponse(first_block=1, status=bytes([READY] * 2), columns=columns(2))
    bridged.channel.arrived = [arrival, pb.AwaitResponse(first_block=3, status=b"\x03")]
    replies = awaited(bridged, 4, 3)
    assert [reply.more for reply in replies] == [True, True, False]
    (column,) = pb.AwaitResponse.FromString(replies[0].payload).columns
    assert bridged.blocks(column) == [content(4, 1), content(4, 2)]
    assert len(bridged.shown) == 2


def commit(bridged, blocks=2):
    offsets = np.arange(blocks, dtype="<u8") * 8192
    for number, at in enumerate(offsets.tolist()):
        bridged.staging[at : at + NBYTES] = content(9, number)
    group = pb.StagedGroup(staging_offsets=offsets.tobytes())
    return pb.CommitRequest(set_index=SET, keys=bytes(32 * blocks), groups=[group])


def test_a_commit_sends_what_lies_in_the_staging(bridged):
    request = commit(bridged)
    assert bridged.call(COMMIT, request).payload == bridged.channel.write_ends[0].payload
    (first, *rest) = bridged.channel.writes[0]
    assert first.header == request
    assert b"".join(one.data for one in rest) == content(9, 0) + content(9, 1)
    assert all(zlib.crc32(one.data, first.message_crc32) == one.crc32 for one in rest)
    assert first == seal("Write", pb.WriteRequest(header=request))
    assert rest[0].offset == 0


def test_a_stream_without_a_turn_is_tried_again_while_there_is_time(bridged):
    full, late = Reply(FULL, 0.01, b"full"), Reply(FULL, 5.0, b"full for long")
    bridged.channel.write_ends[:0] = [full, full]
    assert bridged.call(COMMIT, commit(bridged)).status == 0
    assert (len(bridged.channel.writes), bridged.channel.paused_s) == (3, pytest.approx(0.02))
    bridged.channel.write_ends = [late]
    assert bridged.call(COMMIT, commit(bridged)) == late


def test_leases_that_ran_out_are_forgotten_without_a_word(bridged, monkeypatch):
    """Who lets them run out, and never gives one back, keeps no memory of what they showed."""
    monkeypatch.setattr(module, "_KEPT_S", 0.0)
    for lease in range(1, 20):
        bridged.acquire(lease, ttl_s=0.001)
        time.sleep(0.002)
    assert len(bridged.shown) <= 2
    assert len(bridged.bridge._leases) <= 2


def test_a_renewed_lease_is_not_forgotten(bridged, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_S", 0.0)
    bridged.acquire(1, ttl_s=0.2)
    bridged.acquire(2, ttl_s=0.2)
    status = bytes([pb.RENEW_STATUS_RENEWED, pb.RENEW_STATUS_LOST])
    bridged.channel.answers["Renew"] = pb.RenewResponse(status=status, lease_ttl_ms=30_000)
    assert bridged.call(RENEW, pb.RenewRequest(lease_ids=[1, 2])).status == 0
    time.sleep(0.25)
    bridged.call(RELEASE, pb.ReleaseRequest(lease_ids=[99]))
    assert list(bridged.bridge._leases) == [1]
    assert len(bridged.shown) == 1


def test_calls_that_may_take_long_may(bridged):
    bridged.call(REMOVE, pb.RemoveRequest(set_index=SET))
    assert bridged.channel.begun[-1][2] > 30.0


@pytest.mark.parametrize("error", [OSError(12, "no memory"), MemoryError()])
def test_no_memory_for_what_comes_is_an_answer_and_no_end(bridged, monkeypatch, error):
    """As often as there are threads, and once more."""

    def make(*_):
        raise error

    bridged.acquire(50)
    with monkeypatch.context() as patched:
        patched.setattr(module, "FetchedChunk", make)
        for lease in range(1, 7):
            with pytest.raises(AssertionError, match="memory"):
                bridged.acquire(lease)
            name, payload, _ = bridged.channel.begun[-1]
            assert (name, pb.ReleaseRequest.FromString(payload).lease_ids) == ("Release", [lease])
        arrival = pb.AwaitResponse(first_block=1, status=bytes([READY]), columns=columns(1))
        bridged.channel.arrived = [arrival]
        # One that is there, and one that was given back meanwhile: nothing of either is shown.
        for lease in (50, 1):
            replies = awaited(bridged, lease, 2)
            came = pb.AwaitResponse.FromString(replies[0].payload)
            assert (list(came.columns), came.status) == ([], bytes([BlockStatus.TIER_DOWN]))
    assert list(bridged.bridge._leases) == [50]
    assert bridged.acquire(7).leased_blocks == BLOCKS


@pytest.mark.parametrize("method", [OPEN, ACQUIRE, RELEASE, RENEW, REMOVE, AWAIT, COMMIT])
@pytest.mark.parametrize("planted", [AttributeError("planted"), RuntimeError("can't start thread")])
def test_whatever_goes_wrong_is_the_end_of_that_call_only(bridged, monkeypatch, method, planted):
    """As often as there are threads, and once more."""

    def fail(*_):
        raise planted

    with monkeypatch.context() as patched:
        for name in ("begin", "read", "arrivals", "write"):
            patched.setattr(bridged.channel, name, fail)
        for _ in range(6):
            reply = bridged.call(method, pb.AwaitRequest())
            assert (reply.status, str(planted) in reply.payload.decode()) == (INTERNAL, True)
    assert bridged.acquire(7).leased_blocks == BLOCKS
    assert bridged.call(COMMIT, commit(bridged)).status == 0


@pytest.mark.parametrize("method", [OPEN, ACQUIRE, RENEW])
def test_an_answer_that_is_no_message_is_that_calls_failure(bridged, method):
    name = module._NAMES[method]
    good, bridged.channel.answers[name] = (
        bridged.channel.answers.get(name),
        Reply(0, 0.0, b"\xff" * 9),
    )
    reply = bridged.call(method, pb.AwaitRequest())
    assert (reply.status, reply.payload) == (
        UNAVAILABLE,
        b"the daemon's answer came damaged; try again",
    )
    bridged.channel.answers[name] = good
    assert bridged.acquire(7).leased_blocks == BLOCKS


def test_blocks_that_cannot_be_fetched_for_any_reason_are_given_back(bridged, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(module, "FetchedChunk", fail)
        for lease in range(1, 7):
            with pytest.raises(AssertionError, match="planted"):
                bridged.acquire(lease)
            name, payload, _ = bridged.channel.begun[-1]
            assert (name, pb.ReleaseRequest.FromString(payload).lease_ids) == ("Release", [lease])
    assert bridged.bridge._leases == {}
    assert bridged.acquire(7).leased_blocks == BLOCKS


def threads():
    return sum(one.name == "kvkeep-remote" for one in threading.enumerate())


def test_half_a_frame_at_the_end_is_no_call(bridged):
    begun, running = len(bridged.channel.begun), threads()
    bridged.calls._socket.send(module._HEADER.pack(100, RELEASE, 0, 0, 1) + b"half")
    bridged.calls._socket.shutdown(socket.SHUT_WR)
    wait_until(lambda: threads() < running, 5.0, "it has read all")
    assert len(bridged.channel.begun) == begun

"""Calls without gRPC: replies in any order and any pieces, deadlines, ends, many threads."""

import gc
import os
import random
import socket
import struct
import threading
import time

import pytest

from kvkeep.breaker import SILENCE_S
from kvkeep.call_socket import CallSocket, PendingCall
from kvkeep.errors import DeadlineError, SessionLostError, UnavailableError
from kvkeep.spec import SECONDS_MAX
from kvkeep.v1.block_cache_pb2 import ReleaseRequest, RenewRequest
from tests.fakes.frames import received

HEADER = struct.Struct("<IHHII")
METHOD = 4
REQUEST = ReleaseRequest(lease_ids=[7])
LONG_S = 20.0


class Peer:
    """The daemon's end."""

    def __init__(self):
        self.sock, self._theirs = socket.socketpair()
        self.calls = CallSocket(self._theirs.detach())

    def take(self):
        """(method, call id, payload) of the next call."""
        nbytes, method, zero, also_zero, call_id = HEADER.unpack(received(self.sock, HEADER.size))
        assert (zero, also_zero) == (0, 0)
        return method, call_id, received(self.sock, nbytes)

    @staticmethod
    def frame(call_id, payload=b"", status=0, retry_after_ms=0):
        return HEADER.pack(len(payload), status, 0, retry_after_ms, call_id) + payload

    def answer(self, *frame, **more):
        self.sock.sendall(self.frame(*frame, **more))

    def begin(self, method=METHOD, request=REQUEST, timeout_s=LONG_S, what="Release", **more):
        pending = PendingCall(method, what, time.monotonic() + timeout_s, **more)
        return self.calls.begin(pending, request.SerializeToString())

    def call(self, timeout_s=LONG_S, **more):
        return self.calls.wait(self.begin(timeout_s=timeout_s, **more))


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.sock.close()
    peer.calls.close()


def in_thread(work):
    """Runs it; what it returned or raised comes by `join`."""

    class Worker(threading.Thread):
        outcome = None

        def run(self):
            try:
                self.outcome = work()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.outcome = error

        def result(self):
            self.join(LONG_S)
            assert not self.is_alive()
            return self.outcome

    worker = Worker(daemon=True)
    worker.start()
    return worker


@pytest.mark.parametrize("quick", [True, False])
def test_a_call_and_its_reply(peer, quick):
    worker = in_thread(lambda: peer.call(quick=quick))
    method, call_id, payload = peer.take()
    assert (method, ReleaseRequest.FromString(payload)) == (METHOD, REQUEST)
    peer.answer(call_id, b"sentence", status=8, retry_after_ms=1500)
    assert worker.result() == (8, 1.5, b"sentence", False)


@pytest.mark.parametrize("asleep", [True, False])
def test_a_reply_that_came_before_the_end_counts(peer, asleep):
    """A daemon that stops answers and hangs up. Whoever learns of the end first must not throw the
    answer away: what was committed was committed."""
    pending = peer.begin(METHOD, REQUEST, LONG_S, "Commit", quick=not asleep)
    other = peer.begin(METHOD, REQUEST, LONG_S, "Release")
    _, call_id, _ = peer.take()
    peer.answer(call_id, b"stored")
    peer.calls.close()
    peer.sock.close()
    assert peer.calls.wait(pending).payload == b"stored"
    with pytest.raises(SessionLostError, match="the session was closed"):
        peer.calls.wait(other)
    with pytest.raises(SessionLostError, match="the session was closed"):
        peer.call()


def test_replies_in_any_order_and_in_any_pieces(peer):
    pending = [peer.begin(METHOD, REQUEST, LONG_S, "Release") for _ in range(40)]
    ids = [peer.take()[1] for _ in pending]
    assert len(set(ids)) == len(ids)
    source = random.Random(3)
    payloads = {call_id: source.randbytes(source.choice([0, 1, 17, 5000])) for call_id in ids}
    order = source.sample(ids, len(ids))
    stream = b"".join(peer.frame(call_id, payloads[call_id]) for call_id in order)

    def trickle():
        at = 0
        while at < len(stream):
            step = source.choice([1, 15, 16, 17, 4096])
            peer.sock.sendall(stream[at : at + step])
            at += step

    sender = in_thread(trickle)
    for each, call_id in zip(pending, ids, strict=True):
        assert peer.calls.wait(each).payload == payloads[call_id]
    assert sender.result() is None


def test_a_reply_larger_than_any_buffer(peer):
    payload = random.Random(1).randbytes(5 << 20)
    worker = in_thread(peer.call)
    _, call_id, _ = peer.take()
    peer.answer(call_id, payload)
    assert worker.result().payload == payload


def test_a_request_larger_than_any_buffer_while_replies_wait(peer):
    """The daemon stops reading while its replies are not read: sending must read."""
    big = RenewRequest(lease_ids=range(1 << 20))
    first = peer.begin(METHOD, REQUEST, LONG_S, "Release")
    _, call_id, _ = peer.take()
    reply = random.Random(2).randbytes(4 << 20)

    def daemon():
        peer.answer(call_id, reply)  # blocks until it is read, and reads nothing before
        _, second_id, payload = peer.take()
        peer.answer(second_id, b"done")
        return payload

    worker = in_thread(daemon)
    second = peer.begin(5, big, LONG_S, "Renew")
    assert peer.calls.wait(second).payload == b"done"
    assert peer.calls.wait(first).payload == reply
    assert RenewRequest.FromString(worker.result()) == big


def test_no_answer_in_time_and_a_late_one_is_nobodys(peer):
    with pytest.raises(DeadlineError, match="Release: no answer in time"):
        peer.call(timeout_s=0.05)
    _, late, _ = peer.take()
    peer.answer(late, b"late")
    peer.answer(peer.take()[1])  # a probe
    worker = in_thread(peer.call)
    _, call_id, _ = peer.take()
    peer.answer(call_id, b"right")
    assert worker.result().payload == b"right"
    assert peer.calls._waiting == {}


def test_a_client_that_stood_still_does_not_call_the_daemon_silent(peer):
    with pytest.raises(DeadlineError):
        peer.call(timeout_s=0.001)
    for _ in ("the call", "the probe"):
        peer.answer(peer.take()[1])
    time.sleep(1.5 * SILENCE_S)
    pending = peer.begin()
    peer.answer(peer.take()[1])
    assert peer.calls.wait(pending).status == 0
    with pytest.raises(DeadlineError):
        peer.call(timeout_s=0.001)
    time.sleep(1.5 * SILENCE_S)
    with pytest.raises(UnavailableError, match="does not answer"):
        peer.begin()


def test_a_daemon_that_takes_no_calls(peer):
    big = RenewRequest(lease_ids=range(1 << 20))
    began = time.monotonic()
    pending = peer.begin(5, big, 0.1, "Renew")
    with pytest.raises(DeadlineError, match="takes no calls"):
        peer.calls.wait(pending)
    assert time.monotonic() - began < LONG_S / 2
    # Half a frame is out, so the rest follows when the daemon takes it, and other calls after it.
    worker = in_thread(peer.call)
    assert RenewRequest.FromString(peer.take()[2]) == big
    while (taken := peer.take())[2] != REQUEST.SerializeToString():
        assert taken[2] == b""  # a probe
    peer.answer(taken[1], b"right")
    assert worker.result().payload == b"right"


def test_the_daemon_hangs_up(peer):
    workers = [in_thread(peer.call) for _ in range(4)]
    for _ in workers:
        peer.take()
    peer.sock.close()
    for worker in workers:
        error = worker.result()
        assert str(error) == "Release: the daemon hung up: the session is over"
        assert type(error) is SessionLostError
    with pytest.raises(SessionLostError):
        peer.call()


def test_close_wakes_all_who_wait(peer):
    workers = [in_thread(lambda quick=quick: peer.call(quick=quick)) for quick in (True, False) * 4]
    for _ in workers:
        peer.take()
    peer.calls.close()
    for worker in workers:
        assert type(worker.result()) is SessionLostError
    with pytest.raises(SessionLostError):
        peer.call()


def test_the_descriptor_goes_with_the_last_reference(peer):
    own, theirs = socket.socketpair()
    fd = theirs.detach()
    calls = CallSocket(fd)
    calls.close()
    os.fstat(fd)  # a thread may still be using it
    del calls
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    own.close()


def test_who_reads_hands_over_before_it_leaves(peer):
    """One waits for long, the reader gets its own reply first: the other must go on reading."""
    slow = in_thread(peer.call)
    _, slow_id, _ = peer.take()
    for _ in range(20):
        quick = in_thread(peer.call)
        _, call_id, _ = peer.take()
        peer.answer(call_id, b"quick")
        assert quick.result().payload == b"quick"
    peer.answer(slow_id, b"slow")
    assert slow.result().payload == b"slow"


def test_a_readers_deadline_ends_no_other_call(peer):
    hasty = in_thread(lambda: peer.call(timeout_s=0.1))
    peer.take()
    patient = in_thread(peer.call)
    _, call_id, _ = peer.take()
    assert type(hasty.result()) is DeadlineError
    peer.answer(call_id, b"patience")
    assert patient.result().payload == b"patience"


def test_many_threads_get_each_its_own(peer):
    lock, source = threading.Lock(), random.Random(5)

    def answer(call_id, payload):
        with lock:
            peer.answer(call_id, payload)

    def daemon():
        for _ in range(16 * 100):
            _, call_id, payload = peer.take()
            later_s = source.random() * 0.003  # so that replies overtake each other
            threading.Timer(later_s, answer, (call_id, payload)).start()

    def engine(number):
        def work():
            for turn in range(100):
                request = ReleaseRequest(lease_ids=[number, turn])
                pending = peer.begin(METHOD, request, LONG_S, "Release", quick=turn % 2 == 0)
                answer = peer.calls.wait(pending).payload
                assert ReleaseRequest.FromString(answer) == request
            return "all mine"

        return in_thread(work)

    server = in_thread(daemon)
    workers = [engine(number) for number in range(16)]
    assert [worker.result() for worker in workers] == ["all mine"] * 16
    assert server.result() is None
    assert peer.calls._waiting == {}


@pytest.mark.parametrize("quick", [True, False])
def test_the_longest_deadline_there_is(peer, quick):
    worker = in_thread(lambda: peer.call(timeout_s=SECONDS_MAX, quick=quick))
    _, call_id, _ = peer.take()
    time.sleep(0.01)  # so that it sleeps
    peer.answer(call_id, b"right")
    assert worker.result().payload == b"right"


def test_sending_with_the_longest_deadline_there_is(peer):
    big = RenewRequest(lease_ids=range(1 << 20))
    worker = in_thread(lambda: peer.calls.wait(peer.begin(5, big, SECONDS_MAX, "Renew")))
    time.sleep(0.05)  # so that it waits for room
    _, call_id, payload = peer.take()
    assert RenewRequest.FromString(payload) == big
    peer.answer(call_id, b"right")
    assert worker.result().payload == b"right"

"""Calls to another host: what gRPC makes of odd answers."""

import zlib
from types import SimpleNamespace

import grpc
import pytest

from kvkeep.checksums import crc32_of, ended
from kvkeep.remote_channel import RemoteChannel
from kvkeep.v1 import block_cache_pb2 as pb

DAMAGED = b"the daemon's answer came damaged: its CRC-32 is another; look at the network"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


class Answered:
    """A call that ended well, with these bytes; None: without a message, which damaged frames can
    do."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, *_args, **_options):
        return self.answer

    def future(self, *_args, **_options):
        return self

    def add_done_callback(self, done):
        done(self)

    def result(self):
        return self.answer


def replies_to(monkeypatch, answer, crc32):
    """What each kind of call comes to that this is the answer to."""
    channel = RemoteChannel("127.0.0.1:1", bytes(32))
    call = Answered(answer)
    fake = SimpleNamespace(
        unary_unary=lambda _: call,
        stream_unary=lambda _, **__: call,
    )
    channel.close()
    monkeypatch.setattr(channel, "_channel", fake)
    replies = [channel.call("Lookup", b"x", 1.0), channel.write(iter([]), 1.0, crc32)]
    channel.begin("Lookup", b"x", 1.0, replies.append)
    return replies


@pytest.mark.parametrize("answer", [None, b"", b"\x08\x01", b"\x08\x01" + bytes(5)])
def test_an_answer_without_its_crc_is_a_failure(monkeypatch, answer):
    replies = replies_to(monkeypatch, answer, 7)
    assert [reply.status for reply in replies] == [UNAVAILABLE] * 3
    assert {reply.payload for reply in replies} == {DAMAGED}


@pytest.mark.parametrize("bit", [None, *range(8 * 7)])
def test_no_flipped_bit_of_an_answer_is_believed(monkeypatch, bit):
    crc32 = crc32_of("Lookup", b"x")
    message = pb.WriteResponse(commit=pb.CommitResponse(stored=9)).SerializeToString()
    answer = bytearray(ended(message, zlib.crc32(message, crc32)))
    if bit is not None:
        answer[bit // 8] ^= 1 << bit % 8
    replies = replies_to(monkeypatch, bytes(answer), crc32)
    wanted = UNAVAILABLE if bit is not None else 0
    assert [reply.status for reply in replies] == [wanted] * 3
    # Nor is it the answer to another request.
    others = replies_to(monkeypatch, bytes(answer), crc32_of("Lookup", b"y"))
    assert others[1].status == UNAVAILABLE

"""Calls to another host: what gRPC makes of odd answers."""

from types import SimpleNamespace

import grpc
import pytest

from kvkeep.remote_channel import RemoteChannel

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


class NoMessage:
    """A call that ended well, without a message: damaged frames can make it so."""

    def __call__(self, *_args, **_options):
        return None

    def future(self, *_args, **_options):
        return self

    def add_done_callback(self, done):
        done(self)

    def result(self):
        return None


@pytest.fixture
def channel(monkeypatch):
    channel = RemoteChannel("127.0.0.1:1", bytes(32))
    monkeypatch.setattr(channel, "_unary", lambda _: NoMessage())
    monkeypatch.setattr(channel, "_stub", SimpleNamespace(Write=NoMessage()))
    yield channel
    channel.close()


def test_an_answer_without_a_message_is_a_failure(channel):
    replies = [channel.call("Lookup", b"", 1.0), channel.write(iter([]), 1.0)]
    channel.begin("Lookup", b"", 1.0, replies.append)
    assert [reply.status for reply in replies] == [UNAVAILABLE] * 3
    assert {reply.payload for reply in replies} == {b"the daemon's answer came without a message"}

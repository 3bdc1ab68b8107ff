"""Call sockets: the same answers as on gRPC, in whatever pieces calls come, whoever sends them."""

import asyncio
import os
import random
import re

import pytest

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2
from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.rpc import call_sockets
from tests.fakes.call_socket_clients import MESSAGE_MAX, OPEN, commit_of, frame, run
from tests.fakes.core_harness import hello, keys_of
from tests.fakes.frames import HEADER

OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 3, 5, 8, 12


def snake(name):
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).upper()


def test_every_call_does_what_it_does_on_grpc():
    async def test(sockets, client):
        status, payload = await client.call(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN)
        opened = pb.OpenNamespaceResponse.FromString(payload)
        assert (status, opened.limits.message_nbytes_max) == (OK, MESSAGE_MAX)
        keys = keys_of("chain", 5)
        status, payload = await client.call(
            session_pb2.CALL_METHOD_COMMIT, commit_of(client.session, keys)
        )
        assert (status, pb.CommitResponse.FromString(payload).stored) == (OK, 5)
        packed = b"".join(keys)
        status, payload = await client.call(
            session_pb2.CALL_METHOD_LOOKUP, pb.LookupRequest(set_index=0, keys=packed)
        )
        assert pb.LookupResponse.FromString(payload).prefix_blocks == 5
        status, payload = await client.call(
            session_pb2.CALL_METHOD_ACQUIRE, pb.AcquireRequest(set_index=0, keys=packed)
        )
        lease = pb.AcquireResponse.FromString(payload)
        assert (status, lease.leased_blocks) == (OK, 5)
        ids = [lease.lease_id]
        # All of it was in ram, so the stream ends at once.
        assert await client.call(
            session_pb2.CALL_METHOD_AWAIT, pb.AwaitRequest(lease_id=ids[0])
        ) == (OK, b"")
        status, payload = await client.call(
            session_pb2.CALL_METHOD_RENEW, pb.RenewRequest(lease_ids=ids, lease_ttl_ms=1000)
        )
        assert list(pb.RenewResponse.FromString(payload).status) == [pb.RENEW_STATUS_RENEWED]
        status, payload = await client.call(
            session_pb2.CALL_METHOD_RELEASE, pb.ReleaseRequest(lease_ids=ids)
        )
        assert pb.ReleaseResponse.FromString(payload).released == 1
        status, payload = await client.call(
            session_pb2.CALL_METHOD_REMOVE,
            pb.RemoveRequest(set_index=0, keys=packed, with_descendants=True),
        )
        assert pb.RemoveResponse.FromString(payload).removed == 5
        assert not sockets.running
        ended = sockets.meter.ended
        assert {
            name: ended[f"BlockCache/{name}", "OK"] for name, _ in call_sockets.METHODS.values()
        } == {name: 1 for name, _ in call_sockets.METHODS.values()}

    run(test)


def test_every_number_of_the_wire_is_served():
    async def test(sockets, client):
        numbers = call_sockets.METHODS
        assert set(numbers) == set(session_pb2.CallMethod.values()) - {
            session_pb2.CALL_METHOD_UNSPECIFIED
        }
        assert {name for name, _ in numbers.values()} == {
            *sockets.begun,
            *sockets.served,
            *sockets.streamed,
        }
        for number, (name, request) in numbers.items():
            method = pb.DESCRIPTOR.services_by_name["BlockCache"].methods_by_name[name]
            assert method.input_type.full_name == request.DESCRIPTOR.full_name
            assert session_pb2.CallMethod.Name(number).endswith(f"_{snake(name)}")

    run(test)


def test_errors_have_the_numbers_and_sentences_of_grpc(monkeypatch):
    async def test(sockets, client):
        asked = pb.AcquireRequest(set_index=9, keys=b"k" * 32)
        status, sentence = await client.call(session_pb2.CALL_METHOD_ACQUIRE, asked)
        assert status == NOT_FOUND
        assert b"call OpenNamespace" in sentence
        status, sentence = await client.call(session_pb2.CALL_METHOD_ACQUIRE, b"\xff\xff\xff")
        assert status == INVALID_ARGUMENT
        for method in (0, 77, 65535):
            status, sentence = await client.call(method, b"")
            assert status == UNIMPLEMENTED
            assert str(method).encode() in sentence

        def refuse(*_):
            raise ResourceExhaustedError("enough", retry_after_s=0.25)

        monkeypatch.setattr(sockets.calls.service, "begin_commit", refuse)
        await client.send(frame(session_pb2.CALL_METHOD_COMMIT, pb.CommitRequest(), 6))
        assert await client.reply() == (6, RESOURCE_EXHAUSTED, 250, b"enough")
        assert sockets.meter.ended["BlockCache/Acquire", "NOT_FOUND"] == 1
        assert sockets.meter.ended["BlockCache/Acquire", "INVALID_ARGUMENT"] == 1
        assert sockets.meter.ended["BlockCache/Commit", "RESOURCE_EXHAUSTED"] == 1
        # None of it ended the session.
        assert (await client.call(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN))[0] == OK

    run(test)


def test_calls_come_in_any_pieces_and_many_at_once():
    async def test(sockets, client):
        calls = [
            frame(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN, number) for number in range(60)
        ]
        stream, source = b"".join(calls), random.Random(4)
        replies = asyncio.create_task(_replies(client, len(calls)))
        while stream:
            step = source.choice([1, 3, 15, 16, 17, 200, 5000])
            await client.send(stream[:step])
            stream = stream[step:]
            await asyncio.sleep(0)
        assert sorted(await replies) == list(range(60))

    run(test)


async def _replies(client, count):
    return [(await client.reply())[0] for _ in range(count)]


def test_commits_overlap_and_answer_when_they_are_done():
    async def test(sockets, client):
        await client.call(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN)
        keys = keys_of("chain", 3)
        # The second waits for the first, which stores the same keys; the look-up overtakes both.
        commit = frame(session_pb2.CALL_METHOD_COMMIT, commit_of(client.session, keys), 11)
        again = frame(session_pb2.CALL_METHOD_COMMIT, commit_of(client.session, keys), 12)
        look = frame(
            session_pb2.CALL_METHOD_LOOKUP, pb.LookupRequest(set_index=0, keys=keys[0]), 13
        )
        await client.send(commit + again + look)
        replies = {(await client.reply())[0]: None for _ in range(3)}
        assert set(replies) == {11, 12, 13}

    run(test)


def test_one_clients_flood_does_not_hold_up_another(monkeypatch):
    """A turn of the loop serves one client for a bounded time."""
    monkeypatch.setattr(call_sockets, "_TURN_S", 0.0)

    async def test(sockets, flooding, other):
        flood = frame(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN) * 500
        sending = asyncio.create_task(flooding.send(flood))
        replies = asyncio.create_task(_replies(flooding, 500))
        await flooding.received(0)
        await other.call(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN)
        assert not replies.done()
        await sending
        await replies

    run(test, clients=2)


def test_who_does_not_read_is_not_read_from(monkeypatch):
    monkeypatch.setattr(call_sockets, "_UNSENT_NBYTES_MAX", 4096)

    async def test(sockets, client):
        flood = frame(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN) * 20_000
        sending = asyncio.create_task(client.send(flood))
        done, _ = await asyncio.wait([sending], timeout=0.5)
        assert not done
        (connection,) = sockets._connections.values()
        assert connection.transport.get_write_buffer_size() < 64 * 1024
        assert len(connection._unread) <= 512 * 1024
        # When it reads, it gets all its answers.
        assert len(await _replies(client, 20_000)) == 20_000
        await sending

    run(test)


@pytest.mark.parametrize("nbytes", [MESSAGE_MAX + 1, 2**32 - 1])
def test_a_call_above_the_limit_ends_the_session(nbytes):
    async def test(sockets, client):
        await client.send(HEADER.pack(nbytes, session_pb2.CALL_METHOD_LOOKUP, 0, 0, 1))
        await client.ended()
        assert client.session.over
        assert sockets.sender.hung_up == [client.session.session_id]

    run(test)


def test_closing_the_call_socket_ends_the_session():
    async def test(sockets, client):
        client.sock.close()
        async with asyncio.timeout(10):
            while not client.session.over:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)

    run(test)


def test_the_end_of_the_session_closes_the_call_socket():
    async def test(sockets, by_fd_socket, by_silence):
        sockets.end(by_fd_socket.session.session_id, "EOF on the fd socket")
        await by_fd_socket.ended()
        sockets.sessions.end(by_silence.session.session_id, "silent")
        await by_silence.ended()
        assert by_silence.session.session_id in sockets.sender.hung_up

    run(test, clients=2)


def test_a_call_is_a_sign_of_life():
    async def test(sockets, client):
        client.session.seen_s = 0.0
        await client.call(session_pb2.CALL_METHOD_OPEN_NAMESPACE, OPEN)
        assert client.session.seen_s > 0.0

    run(test)


def test_without_a_descriptor_there_is_no_session(monkeypatch):
    def none(*_):
        raise OSError(24, "Too many open files")

    async def test(sockets):
        before = set(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(call_sockets.socket, "socketpair", none)
        with pytest.raises(OSError, match="Too many"):
            await sockets.open(hello())
        monkeypatch.undo()
        assert len(sockets.sessions) == 0
        assert set(os.listdir("/proc/self/fd")) == before

    run(test, clients=0)


def test_what_happens_after_the_welcome_was_made_comes_as_an_event(monkeypatch):
    """No turn of the loop between the snapshot of chunks in a welcome and its way to the fd socket:
    who is told of a chunk in between is not known there yet."""
    order = []

    async def test(sockets):
        real = sockets.sessions.open

        async def opened(facts):
            welcome = await real(facts)
            asyncio.get_running_loop().call_soon(order.append, "a chunk is added")
            return welcome

        monkeypatch.setattr(sockets.sessions, "open", opened)
        welcome = await sockets.open(hello())
        order.append("the fd socket has it")
        for offer in welcome.fds:
            os.close(offer.fd)
        await asyncio.sleep(0)
        sockets.end(welcome.session_id, "test is over")

    run(test, clients=0)
    assert order == ["the fd socket has it", "a chunk is added"]


def test_a_session_that_is_refused_leaves_no_call_socket(monkeypatch):
    async def test(sockets):
        before = set(os.listdir("/proc/self/fd"))

        async def refused(_):
            raise ResourceExhaustedError("full", retry_after_s=1.0)

        monkeypatch.setattr(sockets.sessions, "open", refused)
        with pytest.raises(ResourceExhaustedError):
            await sockets.open(hello())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert set(os.listdir("/proc/self/fd")) == before
        assert not sockets._connections

    run(test, clients=0)


def test_streams_have_several_replies_and_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(call_sockets, "_STREAMS_MAX", 3)
    monkeypatch.setattr(call_sockets, "_RUNNING_MAX", 2)

    async def test(sockets, client):
        landed = asyncio.Event()

        async def arrivals(session, request):
            yield pb.AwaitResponse(first_block=request.lease_id)
            await landed.wait()
            yield pb.AwaitResponse(first_block=7)

        sockets.streamed["Await"] = arrivals
        awaited = session_pb2.CALL_METHOD_AWAIT
        for call_id in (1, 2, 3):
            await client.send(frame(awaited, pb.AwaitRequest(lease_id=call_id), call_id))
            assert await stream_reply(client) == (call_id, OK, 1, call_id)
        status, sentence = await client.call(awaited, pb.AwaitRequest(lease_id=4), 4)
        assert status == RESOURCE_EXHAUSTED
        assert b"3 calls of Await" in sentence
        # They wait, and others do not.
        assert (await client.call(session_pb2.CALL_METHOD_RENEW, pb.RenewRequest()))[0] == OK
        landed.set()
        replies = sorted([await stream_reply(client) for _ in range(6)])
        ends = [(call_id, OK, 0, 0) for call_id in (1, 2, 3)]
        assert replies == sorted([*ends, *((call_id, OK, 1, 7) for call_id in (1, 2, 3))])
        await client.send(frame(awaited, pb.AwaitRequest(lease_id=6), 6))
        assert await stream_reply(client) == (6, OK, 1, 6)

    run(test)


async def stream_reply(client):
    """(call id, status, flags, first block)."""
    nbytes, status, flags, _, call_id = HEADER.unpack(await client.received(16))
    answer = pb.AwaitResponse.FromString(await client.received(nbytes))
    return call_id, status, flags, answer.first_block

"""What one client can make a daemon hold or do on its call socket."""

import asyncio

import pytest

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2
from kvkeep_server.rpc import call_sockets, frame_room
from tests.fakes.call_socket_clients import MESSAGE_MAX, OPEN, commit_of, frame, run
from tests.fakes.core_harness import Gate, keys_of
from tests.fakes.frames import HEADER

OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 3, 5, 8, 12
LOOKUP = session_pb2.CALL_METHOD_LOOKUP
COMMIT = session_pb2.CALL_METHOD_COMMIT
RENEW = session_pb2.CALL_METHOD_RENEW
OPENING = session_pb2.CALL_METHOD_OPEN_NAMESPACE
# Of a commit; three of them fill the room for a message of MESSAGE_MAX.
LARGE = 300_000


def unread(sockets):
    return [len(connection._unread) for connection in sockets._connections.values()]


async def until(true):
    while not true():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


def large_commit():
    """A commit of LARGE bytes that is refused at last."""
    staged = pb.StagedGroup(group=0, staging_offsets=b"o" * (LARGE - 100))
    payload = pb.CommitRequest(keys=b"k" * 32, groups=[staged]).SerializeToString()
    return frame(COMMIT, payload, 7)


@pytest.mark.parametrize(
    ("method", "status"),
    [(RENEW, INVALID_ARGUMENT), (LOOKUP, INVALID_ARGUMENT), (77, UNIMPLEMENTED)],
)
def test_what_is_too_large_for_its_call_is_refused_by_its_header(method, status):
    async def test(sockets, client):
        nbytes = MESSAGE_MAX - 1
        await client.send(HEADER.pack(nbytes, method, 0, 0, 5))
        call_id, got, _, sentence = await client.reply()
        assert (call_id, got) == (5, status)
        assert len(sentence) < 300
        # Its payload is passed over, in whatever pieces it comes.
        for _ in range(nbytes // 1000):
            await client.send(bytes(1000))
        assert max(unread(sockets)) == 0
        await client.send(bytes(nbytes % 1000) + frame(OPENING, OPEN, 6))
        assert (await client.reply())[:2] == (6, OK)

    run(test)


def test_half_requests_are_bounded_together_and_wait_their_turn(monkeypatch):
    monkeypatch.setattr(call_sockets, "_ROOM_NBYTES", 0)

    async def test(sockets, *clients):
        whole = large_commit()
        sending = [asyncio.create_task(client.send(whole[:-1])) for client in clients]
        await until(lambda: sum(task.done() for task in sending) >= 3)
        await asyncio.sleep(0.05)
        assert sockets.room.held_nbytes <= sockets.room.nbytes_max
        assert max(unread(sockets)) < len(whole)
        assert sum(unread(sockets)) < sockets.room.nbytes_max + 8 * call_sockets._FREE_NBYTES
        # Small calls of others go on; who finishes makes room.
        replies = [asyncio.create_task(client.reply()) for client in clients]
        for client, task in zip(clients, sending, strict=True):
            task.add_done_callback(
                lambda _, client=client: asyncio.ensure_future(client.send(whole[-1:]))
            )
        assert {reply[0] for reply in await asyncio.gather(*replies)} == {7}
        assert sockets.room.held_nbytes == 0

    run(test, clients=8)


def test_who_leaves_a_request_half_while_others_wait_is_refused_and_goes_on(monkeypatch):
    monkeypatch.setattr(call_sockets, "_ROOM_NBYTES", 0)
    monkeypatch.setattr(frame_room, "_LOOK_S", 0.02)

    async def test(sockets, *clients):
        *hostile, sane = clients
        whole = large_commit()
        for client in hostile:
            await client.send(whole[:-1])
        await asyncio.sleep(0.2)
        assert sum(unread(sockets)), "they are in nobody's way"
        await sane.send(whole)
        assert (await sane.reply())[0] == 7
        assert not any(client.session.over for client in clients)
        first, *others = hostile
        call_id, status, retry_after_ms, sentence = await first.reply()
        assert (call_id, status, retry_after_ms) == (7, RESOURCE_EXHAUSTED, 100)
        assert sentence.startswith(b"Commit: ")
        # The rest is passed over, and the call may be made again.
        await first.send(whole[-1:] + whole)
        for client in others:
            await client.send(whole[-1:])
        for client in hostile:
            assert (await client.reply())[:2] == (7, NOT_FOUND)
        assert sockets.room.held_nbytes == 0

    run(test, clients=4)


def test_a_client_that_leaves_gives_its_room_back(monkeypatch):
    monkeypatch.setattr(call_sockets, "_ROOM_NBYTES", 0)

    async def test(sockets, first, second):
        await first.send(large_commit()[:-1])
        await until(lambda: sockets.room.held_nbytes)
        sockets.end(first.session.session_id, "EOF on the fd socket")
        assert sockets.room.held_nbytes == 0
        assert not sockets.room._waiting
        await second.call(OPENING, OPEN)

    run(test, clients=2)


def test_calls_under_way_are_bounded(monkeypatch):
    monkeypatch.setattr(call_sockets, "_RUNNING_MAX", 2)

    async def go(harness, sockets, client):
        await client.call(OPENING, OPEN)
        gate = Gate(harness.core)
        for number in range(6):
            commit = commit_of(client.session, keys_of(f"chain {number}", 1))
            await client.send(frame(COMMIT, commit, number))
        await gate.reached()
        await gate.reached()
        await asyncio.sleep(0.02)
        assert (gate.waiting, len(sockets.running)) == (2, 2)
        gate.open()
        assert {(await client.reply())[0] for _ in range(6)} == set(range(6))
        gate.remove()

    run(go, with_harness=True)


def test_a_turn_begins_one_call_that_goes_on_by_itself():
    """What they do when they begin is not seen by the clock of the turn."""

    async def test(sockets, client):
        await client.call(OPENING, OPEN)
        begun, turns = [], [0]

        real, render = sockets.begun["Remove"]

        async def noted(session, request):
            begun.append(turns[0])
            return await real(session, request)

        sockets.begun["Remove"] = noted, render
        loop = asyncio.get_running_loop()

        def count():
            turns[0] += 1
            if len(begun) < 20:
                loop.call_soon(count)

        request = pb.RemoveRequest(set_index=0, keys=keys_of("a", 1)[0])
        await client.send(frame(session_pb2.CALL_METHOD_REMOVE, request) * 20)
        count()
        for _ in range(20):
            await client.reply()
        assert len(set(begun)) == 20, "one in each turn of the loop"

    run(test)

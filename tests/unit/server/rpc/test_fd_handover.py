"""The fd socket: what a client gets, and what a bad client cannot do."""

import asyncio
import errno
import os
import socket
import stat

import pytest

from kvkeep.v1 import session_pb2
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.rpc import fd_handover
from kvkeep_server.rpc.fd_handover import FdHandover, HandoverLimits
from kvkeep_server.service.session_memory import FdKind, FdOffer
from kvkeep_server.service.sessions import Welcome

TOKEN = bytes(range(32))
DEADLINE_S = 10.0


class Opener:
    """Sessions that offer `chunks` descriptors of /dev/null."""

    def __init__(self, chunks=2):
        self.chunks = chunks
        self.facts = []
        self.ended = []
        self.refusal = None

    async def open(self, facts):
        if self.refusal is not None:
            raise self.refusal
        self.facts.append(facts)
        return Welcome(len(self.facts), TOKEN, 77, offers(self.chunks))

    def end(self, session_id, reason):
        self.ended.append((session_id, reason))


def offers(count):
    return [
        FdOffer(FdKind.CHUNK, number, 4096 * number, os.open(os.devnull, os.O_RDONLY))
        for number in range(count)
    ]


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def connect(path):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(DEADLINE_S)
    try:
        client.connect(str(path))
    except OSError:
        client.close()
        raise
    return client


def hello(**fields):
    fields = {"client_name": "test", "layout_versions": [2], **fields}
    return session_pb2.SideHello(**fields).SerializeToString()


def receive(client):
    """One packet and its descriptors; (None, []) at EOF."""
    payload, fds, flags, _ = socket.recv_fds(client, 65536, 128)
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    return (session_pb2.SidePacket.FromString(payload) if payload else None), fds


def close_all(fds):
    for fd in fds:
        os.close(fd)


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the thing under test has no event to wait for
            await asyncio.sleep(0.001)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kvkeep.fd.sock"


def serve(path, opener, scenario, limits=None):
    """Runs `scenario(handover)` beside a listening FdHandover; no descriptor may be left."""

    async def run():
        handover = FdHandover(
            path=path, mode=0o660, opener=opener, limits=limits or HandoverLimits()
        )
        handover.start()
        try:
            await scenario(handover)
        finally:
            handover.close()

    before = open_descriptors()
    asyncio.run(run())
    assert open_descriptors() == before


async def attach(path, **fields):
    """A client that said hello and read its welcome; (socket, packet)."""
    client = await asyncio.to_thread(connect, path)
    client.send(hello(**fields))
    packet, fds = await asyncio.to_thread(receive, client)
    close_all(fds)
    return client, packet


def test_welcome_carries_token_epoch_and_described_descriptors(path):
    opener = Opener(chunks=3)

    async def scenario(_):
        client = await asyncio.to_thread(connect, path)
        with client:
            client.send(hello(staging_nbytes=4096, credential="secret", pid=1))
            packet, fds = await asyncio.to_thread(receive, client)
        assert (packet.sequence, packet.more, packet.error) == (0, False, "")
        assert (packet.session_token, packet.server_epoch) == (TOKEN, 77)
        assert packet.layout_version == 2
        described = [(fd.kind, fd.id, fd.nbytes) for fd in packet.fds]
        assert described == [(session_pb2.FD_KIND_CHUNK, i, 4096 * i) for i in range(3)]
        assert len(fds) == 3
        close_all(fds)

    serve(path, opener, scenario)
    facts = opener.facts[0]
    assert (facts.client_name, facts.layout_versions) == ("test", (2,))
    assert (facts.staging_nbytes, facts.credential) == (4096, "secret")
    # the kernel's word, not the hello's
    assert (facts.uid, facts.gid, facts.pid) == (os.getuid(), os.getgid(), os.getpid())


@pytest.mark.parametrize(("count", "packets"), [(0, 1), (1, 1), (64, 1), (65, 2), (200, 4)])
def test_many_descriptors_come_in_packets_of_64(path, count, packets):
    async def scenario(_):
        client = await asyncio.to_thread(connect, path)
        with client:
            client.send(hello())
            seen = []
            for number in range(packets):
                packet, fds = await asyncio.to_thread(receive, client)
                close_all(fds)
                assert len(fds) == len(packet.fds) <= 64
                assert packet.more == (number < packets - 1)
                assert packet.sequence == 0
                seen += [fd.id for fd in packet.fds]
        assert seen == list(range(count))

    serve(path, Opener(chunks=count), scenario)


def test_only_owner_and_group_may_connect(path):
    async def scenario(_):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660

    serve(path, Opener(), scenario)


def test_events_bring_descriptors_with_their_sequence(path):
    async def scenario(handover):
        client, _ = await attach(path)
        with client:
            handover.send(1, 5, offers(66))
            first, fds = await asyncio.to_thread(receive, client)
            close_all(fds)
            second, fds = await asyncio.to_thread(receive, client)
            close_all(fds)
            assert (first.sequence, first.more, len(first.fds)) == (5, True, 64)
            assert (second.sequence, second.more, len(second.fds)) == (5, False, 2)
            assert first.session_token == b""

    serve(path, Opener(), scenario)


def test_descriptors_for_a_session_that_is_gone_are_closed(path):
    async def scenario(handover):
        handover.send(99, 1, offers(3))

    serve(path, Opener(), scenario)


def test_eof_ends_the_session(path):
    opener = Opener()

    async def scenario(handover):
        client, _ = await attach(path)
        client.close()
        await until(lambda: opener.ended)
        handover.send(1, 1, offers(1))

    serve(path, opener, scenario)
    assert opener.ended == [(1, "client closed")]


def test_a_client_that_goes_on_talking_is_ended(path):
    opener = Opener()

    async def scenario(_):
        client, _ = await attach(path)
        with client:
            client.send(b"more")
            assert (await asyncio.to_thread(receive, client))[0] is None

    serve(path, opener, scenario)
    assert opener.ended == [(1, "sent more than a hello")]


def test_hang_up_is_eof_for_the_client(path):
    opener = Opener()

    async def scenario(handover):
        client, _ = await attach(path)
        with client:
            handover.hang_up(1)
            handover.hang_up(1)
            assert (await asyncio.to_thread(receive, client))[0] is None

    serve(path, opener, scenario)
    assert opener.ended == [], "who hangs up knows"


def test_stopping_ends_sessions_and_takes_no_more(path):
    opener = Opener()

    async def scenario(handover):
        client, _ = await attach(path)
        handover.stop_listening()
        with pytest.raises(ConnectionRefusedError):
            connect(path)
        handover.send(1, 1, offers(1))
        _, fds = await asyncio.to_thread(receive, client)
        close_all(fds)
        handover.close()
        assert (await asyncio.to_thread(receive, client))[0] is None
        client.close()

    serve(path, opener, scenario)
    assert opener.ended == [(1, "daemon stops")]


MALFORMED = {
    "not protobuf": b"\xff\xff\xff\xff",
    "wrong types": b"\x08\x01",
    "cut short": b"\x0a\x7fabc",
    "bad utf-8": b"\x0a\x02\xff\xfe",
}


@pytest.mark.parametrize("packet", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_hello_gets_a_sentence_and_eof(path, packet):
    opener = Opener()

    async def scenario(handover):
        client = await asyncio.to_thread(connect, path)
        with client:
            client.send(packet)
            answer, fds = await asyncio.to_thread(receive, client)
            if packet != MALFORMED["wrong types"]:
                assert "not a SideHello" in answer.error
                assert (answer.session_token, fds) == (b"", [])
                assert (await asyncio.to_thread(receive, client))[0] is None
                assert handover.refused_total == 1
            else:  # an unknown field is legal protobuf: the opener judges what is missing
                close_all(fds)
                assert opener.facts[0].layout_versions == ()

    serve(path, opener, scenario)


def test_a_hello_that_is_too_long_gets_a_sentence(path):
    async def scenario(_):
        client, answer = await attach(path, client_name="n" * 5000)
        client.close()
        assert answer.error == "a SideHello has at most 4096 bytes"

    serve(path, Opener(), scenario)


def test_a_hello_may_be_as_long_as_allowed(path):
    async def scenario(_):
        rest = 4096 - len(hello(client_name="n" * 3000))
        client, answer = await attach(path, client_name="n" * (3000 + rest))
        client.close()
        assert answer.error == ""

    serve(path, Opener(), scenario)


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        (FailedPreconditionError("no common layout version"), "no common layout version"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
    ],
)
def test_a_refused_session_is_answered_with_the_reason(path, refusal, sentence):
    opener = Opener()

    async def scenario(_):
        opener.refusal = refusal
        client, answer = await attach(path)
        with client:
            assert sentence in answer.error
            assert (await asyncio.to_thread(receive, client))[0] is None
        opener.refusal = None
        client, answer = await attach(path)
        client.close()
        assert answer.session_token == TOKEN

    serve(path, opener, scenario)


def test_descriptors_sent_by_a_client_are_not_kept(path):
    async def scenario(_):
        before = open_descriptors()
        client = await asyncio.to_thread(connect, path)
        with client:
            socket.send_fds(client, [hello()], [client.fileno()] * 10)
            packet, fds = await asyncio.to_thread(receive, client)
            close_all(fds)
            assert packet.session_token == TOKEN
            assert open_descriptors() == before + 2  # both ends of the connection

    serve(path, Opener(), scenario)


def test_silence_is_dropped_at_the_deadline(path):
    opener = Opener()

    async def scenario(handover):
        client = await asyncio.to_thread(connect, path)
        with client:
            assert (await asyncio.to_thread(receive, client))[0] is None
        assert handover.dropped_total == 1

    serve(path, opener, scenario, HandoverLimits(hello_timeout_s=0.05))
    assert opener.facts == []


def test_silent_connections_do_not_keep_others_out(path):
    async def scenario(handover):
        silent = [await asyncio.to_thread(connect, path) for _ in range(20)]
        await until(lambda: handover.dropped_total == 16)
        client, packet = await attach(path)
        assert packet.session_token == TOKEN
        for connection in [client, *silent]:
            connection.close()

    serve(path, Opener(), scenario, HandoverLimits(pending_max=4, hello_timeout_s=60.0))


def test_a_storm_of_connections_leaves_the_listener_alive(path):
    # B081, on this listener; the gRPC one is not ours.
    connections = 10_000

    def storm():
        for _ in range(connections):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client.connect(str(path))
            client.close()

    async def scenario(handover):
        await asyncio.to_thread(storm)
        client, packet = await attach(path)
        client.close()
        assert packet.session_token == TOKEN
        await until(lambda: handover.dropped_total == connections)

    serve(path, Opener(), scenario)


def test_out_of_descriptors_pauses_and_goes_on(path, monkeypatch):
    """accept fails with EMFILE while the listener stays readable: neither a spin nor the end."""
    real = socket.socket.accept
    refusals = []

    def accept(self):
        if len(refusals) < 2:
            refusals.append(asyncio.get_running_loop().time())
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self)

    async def scenario(_):
        monkeypatch.setattr(socket.socket, "accept", accept)
        client, packet = await attach(path)
        client.close()
        assert packet.session_token == TOKEN

    serve(path, Opener(), scenario)
    assert refusals[1] - refusals[0] >= fd_handover._ACCEPT_PAUSE_S * 0.9


def test_an_aborted_connection_does_not_end_accepting(path, monkeypatch):
    real = socket.socket.accept
    aborted = []

    def accept(self):
        if not aborted:
            aborted.append(1)
            raise ConnectionAbortedError(errno.ECONNABORTED, "gone")
        return real(self)

    async def scenario(_):
        monkeypatch.setattr(socket.socket, "accept", accept)
        client, packet = await attach(path)
        client.close()
        assert packet.session_token == TOKEN

    serve(path, Opener(), scenario)


def test_a_client_that_does_not_read_is_closed_and_others_go_on(path):
    opener = Opener(chunks=1)

    async def scenario(handover):
        lazy, _ = await attach(path)
        busy, _ = await attach(path)
        sequence = 0
        async with asyncio.timeout(DEADLINE_S):
            while not opener.ended:
                sequence += 1
                handover.send(1, sequence, offers(1))
                handover.send(2, sequence, offers(1))
                packet, fds = await asyncio.to_thread(receive, busy)
                close_all(fds)
                assert packet.sequence == sequence
        lazy.close()
        busy.close()

    serve(path, opener, scenario, HandoverLimits(unsent_packets_max=3))
    assert opener.ended[0] == (1, "does not read its descriptors")


def test_a_client_that_stops_reading_is_closed_at_the_deadline(path, monkeypatch):
    opener = Opener()

    async def scenario(handover):
        client, _ = await attach(path)
        with client:
            monkeypatch.setattr(socket, "send_fds", _always(errno.ETOOMANYREFS))
            handover.send(1, 1, offers(1))
            assert opener.ended == []
            await until(lambda: opener.ended)

    serve(path, opener, scenario, HandoverLimits(unsent_timeout_s=0.1))
    assert opener.ended == [(1, "does not read its descriptors")]


def test_what_could_not_be_sent_at_once_follows(path, monkeypatch):
    real = socket.send_fds
    failures = [errno.EAGAIN, errno.ENOBUFS]

    def send_fds(*args):
        if failures:
            raise OSError(failures.pop(), "later")
        return real(*args)

    async def scenario(handover):
        client, _ = await attach(path)
        with client:
            monkeypatch.setattr(socket, "send_fds", send_fds)
            handover.send(1, 1, offers(1))
            handover.send(1, 2, offers(1))
            for sequence in (1, 2):
                packet, fds = await asyncio.to_thread(receive, client)
                close_all(fds)
                assert packet.sequence == sequence

    serve(path, Opener(), scenario)


def _always(number):
    def fail(*_):
        raise OSError(number, "never")

    return fail

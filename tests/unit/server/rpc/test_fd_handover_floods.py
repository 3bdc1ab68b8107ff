"""Hellos in numbers: few sessions are opened at a time, and none for who is gone."""

import asyncio
import errno

from kvkeep_server.rpc import fd_handover
from kvkeep_server.rpc.fd_handover import HandoverLimits
from tests.unit.server.rpc import test_fd_handover as one_by_one
from tests.unit.server.rpc.test_fd_handover import (
    TOKEN,
    Opener,
    attach,
    connect,
    hello,
    serve,
    until,
)

path = one_by_one.path
FEW = HandoverLimits(opening_max=2, hello_timeout_s=0.2)


class SlowOpener(Opener):
    """Opens when it is told."""

    def __init__(self):
        super().__init__(chunks=1)
        self.go = asyncio.Event()
        self.opening = 0
        self.most = 0

    async def open(self, facts):
        self.opening += 1
        self.most = max(self.most, self.opening)
        try:
            await self.go.wait()
            return await super().open(facts)
        finally:
            self.opening -= 1


def test_few_sessions_are_opened_at_a_time_and_the_others_have_their_turn(path):
    opener = SlowOpener()

    async def scenario(handover):
        clients = [asyncio.create_task(attach(path)) for _ in range(30)]
        await until(lambda: opener.opening == 2)
        # Longer than who says nothing may take: they said it.
        await asyncio.sleep(0.3)
        assert opener.opening == 2
        assert len(handover._said) <= FEW.pending_max
        opener.go.set()
        for client, packet in await asyncio.gather(*clients):
            assert packet.session_token == TOKEN
            client.close()
        assert handover.dropped_total == 0

    serve(path, opener, scenario, FEW)
    assert (opener.most, len(opener.facts)) == (2, 30)


def test_nobody_is_accepted_while_others_wait_and_it_goes_on_behind_them(path):
    opener = SlowOpener()

    async def scenario(handover):
        first = [asyncio.create_task(attach(path)) for _ in range(4)]
        # The fourth is accepted only if it came before the third had said hello.
        await until(lambda: handover._said)
        silent = [await asyncio.to_thread(connect, path) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert not handover._pending
        opener.go.set()
        for client, _ in await asyncio.gather(*first):
            client.close()
        await until(lambda: handover.dropped_total == 20)
        for client in silent:
            client.close()

    serve(path, opener, scenario, FEW)


def test_who_is_gone_by_its_turn_gets_no_session(path):
    opener = SlowOpener()

    async def scenario(handover):
        first = [asyncio.create_task(attach(path)) for _ in range(2)]
        await until(lambda: opener.opening == 2)
        for _ in range(10):
            with await asyncio.to_thread(connect, path) as gone:
                gone.send(hello())
        last = asyncio.create_task(attach(path))
        opener.go.set()
        for client, _ in await asyncio.gather(*first, last):
            client.close()
        assert handover.dropped_total == 10

    serve(path, opener, scenario, FEW)
    assert len(opener.facts) == 3


def test_stopping_closes_those_who_wait(path):
    opener = SlowOpener()

    async def scenario(handover):
        clients = [await asyncio.to_thread(connect, path) for _ in range(6)]
        for client in clients:
            client.send(hello())
        await until(lambda: len(handover._said) > 0)
        handover.close()
        for client in clients:
            assert await asyncio.to_thread(client.recv, 10) == b""
            client.close()

    serve(path, opener, scenario, FEW)
    assert opener.facts == []


def test_a_shortage_of_descriptors_is_told_once_a_minute(path, caplog, monkeypatch):
    monkeypatch.setattr(fd_handover, "_ACCEPT_PAUSE_S", 0.001)

    async def scenario(handover):
        listener = handover._listener
        tries = []

        class Full:
            def accept(self):
                tries.append(1)
                raise OSError(errno.EMFILE, "Too many open files")

            def fileno(self):
                return listener.fileno()

        asyncio.get_running_loop().remove_reader(listener)
        handover._listener = Full()
        handover._listen_again()
        client = connect(path)
        await until(lambda: len(tries) > 5)
        client.close()
        asyncio.get_running_loop().remove_reader(listener)
        handover._listener = listener
        assert [record.message for record in caplog.records] == ["accept paused"]

    serve(path, Opener(), scenario)

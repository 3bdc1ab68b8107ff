"""Call sockets of a core without a daemon, and clients at their other end, all on one loop."""

import asyncio
import os
import socket
import struct
from contextlib import asynccontextmanager

import pytest

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.rpc.block_calls import BlockCalls, ClientLimits
from kvkeep_server.rpc.call_sockets import CallSockets
from kvkeep_server.rpc.interceptors import CallMeter
from kvkeep_server.rpc.request_limits import RequestLimits
from kvkeep_server.rpc.server import METHODS
from kvkeep_server.service.session_memory import FdKind
from tests.fakes.core_harness import Harness, block_of, hello
from tests.fakes.frames import HEADER, wire_spec

MESSAGE_MAX = 1 << 20
KEYS_MAX = 1024
BLOCK = 4096


class Sender:
    """The fd socket's sending side."""

    def __init__(self):
        self.hung_up = []

    def send(self, session_id, sequence, fds):
        for offer in fds:
            os.close(offer.fd)

    def hang_up(self, session_id):
        self.hung_up.append(session_id)


class Client:
    """The other end, on the same loop."""

    def __init__(self, sock, session):
        self.sock = sock
        self.session = session
        self._loop = asyncio.get_running_loop()

    async def send(self, data):
        await self._loop.sock_sendall(self.sock, data)

    async def received(self, nbytes):
        data = b""
        while len(data) < nbytes:
            part = await self._loop.sock_recv(self.sock, nbytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    async def reply(self):
        """(call id, status, retry after in ms, payload)."""
        nbytes, status, zero, retry_after_ms, call_id = HEADER.unpack(await self.received(16))
        assert zero == 0
        return call_id, status, retry_after_ms, await self.received(nbytes)

    async def call(self, method, request, call_id=1):
        await self.send(frame(method, request, call_id))
        got, status, _, payload = await self.reply()
        assert got == call_id
        return status, payload

    async def ended(self):
        with pytest.raises((EOFError, ConnectionResetError)):
            await self.received(1 << 30)


def frame(method, request, call_id=1):
    payload = request if isinstance(request, bytes) else request.SerializeToString()
    return HEADER.pack(len(payload), method, 0, 0, call_id) + payload


SPEC = wire_spec(BLOCK)
OPEN = pb.OpenNamespaceRequest(spec=SPEC, layout_version=2)


@asynccontextmanager
async def attached(harness, clients=1):
    """The call sockets of a core, and clients; nothing of them is left behind."""
    core = harness.core
    limits = ClientLimits(KEYS_MAX, BLOCK, 1 << 20, 30.0, 30.0, MESSAGE_MAX)
    calls = BlockCalls(service=core.service, limits=limits, server_epoch=1)
    sockets = CallSockets(
        calls=calls,
        sessions=core.sessions,
        meter=CallMeter(methods=METHODS, clock=SystemClock()),
        limits=RequestLimits(keys_max=KEYS_MAX, message_nbytes_max=MESSAGE_MAX),
    )
    sockets.sender = Sender()
    core.sessions.sender = sockets
    opened = []
    for _ in range(clients):
        welcome = await sockets.open(hello())
        for offer in welcome.fds:
            if offer.kind is FdKind.CALLS:
                sock = socket.socket(fileno=offer.fd)
                sock.setblocking(False)  # noqa: FBT003 - the name says it
            else:
                os.close(offer.fd)
        opened.append(Client(sock, core.sessions.get(welcome.token)))
    yield (sockets, *opened)
    for client in opened:
        client.sock.close()
    async with asyncio.timeout(10):
        while len(core.sessions) or sockets._connections:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)


def commit_of(session, keys, set_index=0):
    """A Commit of one block a key, laid into staging."""
    offsets = [at * BLOCK for at in range(len(keys))]
    for offset, key in zip(offsets, keys, strict=True):
        session.staging.buffer[offset : offset + BLOCK] = block_of(key)
    packed = struct.pack(f"<{len(keys)}Q", *offsets)
    group = pb.StagedGroup(group=0, staging_offsets=packed)
    return pb.CommitRequest(set_index=set_index, keys=b"".join(keys), groups=[group])


def run(test, clients=1, *, with_harness=False, **settings):
    async def go(harness):
        first = (harness,) if with_harness else ()
        async with asyncio.timeout(30), attached(harness, clients) as everything:
            await test(*first, *everything)

    with Harness(**settings) as harness:
        harness.run(go(harness))

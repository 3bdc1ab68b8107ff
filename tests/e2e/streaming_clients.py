"""The client program of the test of overload by streams: very many calls at a time."""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from pathlib import Path

import grpc

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import block_cache_pb2_grpc, session_pb2
from tests.fakes.client_process import Wire
from tests.fakes.frames import HEADER
from tests.fakes.raw_session import PAGE, RawSession

CHANNELS = 20
# Longer than who says no hello is waited for: who has not ended when nobody ends is held.
QUIET_S = 3.0
FIRST_S = 60.0
# For so long at least it has what was announced.
HELD_S = 1.0
ANNOUNCED_NBYTES = 1 << 30
HELLO = pb.AttachRequest(hello=pb.RemoteHello(layout_versions=[2], client_name="many"))


def spin(wire: Wire) -> None:
    """As busy as the others, with nothing that concerns the daemon."""
    wire.tell("ready")
    while not wire.asked():
        sum(range(10_000))


def stream(wire: Wire, runtime_dir: str, what: str, count: int) -> None:
    """Begins `count` calls and tells how many ended how; those that did not are "open". They go
    with this process."""
    with RawSession(Path(runtime_dir)) as session:
        opened = session.open_namespace(PAGE)
        wire.tell("ready")
        if what == "1 GiB on a call socket":
            wire.tell(announce_on_call_sockets(runtime_dir, count))
        elif what == "1 GiB on gRPC":
            wire.tell(announce_on_grpc(runtime_dir, count))
        else:
            asyncio.run(begin_all(wire, session, opened.set_index, what, count))


async def begin_all(wire: Wire, session: RawSession, set_index: int, what: str, count: int) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    name, _, with_what = what.partition(" ")
    metadata = session.metadata if with_what == "with a token" else ()
    request = {
        "Await": pb.AwaitRequest(lease_id=1),
        "Watch": pb.WatchRequest(set_indexes=[set_index]),
        "Lookup": pb.LookupRequest(set_index=set_index, keys=bytes(32)),
    }.get(name)
    async with contextlib.AsyncExitStack() as held:
        channels = [
            await held.enter_async_context(
                grpc.aio.insecure_channel(session.target, options=options)
            )
            for _ in range(CHANNELS)
        ]
        stubs = [block_cache_pb2_grpc.BlockCacheStub(channel) for channel in channels]
        calls = []
        for number in range(count):
            begin = getattr(stubs[number % CHANNELS], name)
            call = (
                begin(metadata=metadata) if request is None else begin(request, metadata=metadata)
            )
            if with_what == "with a hello":
                await call.write(HELLO)
            calls.append(call)
        tasks = [asyncio.ensure_future(how_it_ended(call)) for call in calls]
        done: set[asyncio.Task[str]] = set()
        more = open_ones = set(tasks)
        while more and open_ones:
            wait_s = QUIET_S if done else FIRST_S
            more, open_ones = await asyncio.wait(open_ones, timeout=wait_s)
            done |= more
        ended = Counter(task.result() for task in done)
        ended["open"] = len(open_ones)
        wire.tell(dict(ended))


async def how_it_ended(call) -> str:
    """What it is answered has to be taken, or its end does not come."""
    if hasattr(call, "__aiter__"):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
    code = await call.code()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        trailing = dict(await call.trailing_metadata())
        return "refused" if "kvkeep-retry-after-ms" in trailing else "refused without a time"
    return code.name


def announce_on_call_sockets(runtime_dir: str, count: int) -> dict[str, int]:
    """Each session of its own is ended for it."""
    for _ in range(count):
        with RawSession(Path(runtime_dir)) as session:
            method = session_pb2.CALL_METHOD_LOOKUP
            session.calls.sendall(HEADER.pack(ANNOUNCED_NBYTES, method, 0, 0, 1) + bytes(PAGE))
            with contextlib.suppress(ConnectionError):
                assert session.calls.recv(1) == b""
    return {"hung up on": count}


def announce_on_grpc(runtime_dir: str, count: int) -> dict[str, int]:
    """Streams that announce a message of 1 GiB and send the beginning; HTTP/2 by hand."""
    connections = [socket.socket(socket.AF_UNIX) for _ in range(CHANNELS)]
    for connection in connections:
        connection.connect(f"{runtime_dir}/kvkeep.sock")
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    for number in range(count):
        stream_id = 1 + 2 * (number // CHANNELS)
        data = b"\0" + ANNOUNCED_NBYTES.to_bytes(4, "big") + bytes(100)
        begin = frame(1, 4, stream_id, HEADERS) + frame(0, 0, stream_id, data)
        connections[number % CHANNELS].sendall(begin)
    answered, until_s = 0, time.monotonic() + FIRST_S
    while answered <= count:
        assert time.monotonic() < until_s, "it answers each of them"
        time.sleep(HELD_S)
        answered += sum(received_now(connection) for connection in connections)
    for connection in connections:
        connection.close()
    return {"announced": count}


def received_now(connection: socket.socket) -> int:
    """Bytes that have come and were not taken."""
    nbytes = 0
    with contextlib.suppress(BlockingIOError):
        while got := connection.recv(1 << 20, socket.MSG_DONTWAIT):
            nbytes += len(got)
    return nbytes


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big")
    return head + payload


def literal(name: str, value: str) -> bytes:
    """A header field that nobody is to remember."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


HEADERS = b"".join(
    literal(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/kvkeep.v1.BlockCache/Lookup"),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
)

"""Calls at a time are bounded, of all clients and of each; who is refused is told when to come."""

import asyncio
import contextlib

import grpc
import pytest

from kvkeep_server.rpc.call_limit import CallLimit, CallLimits

WAIT_S = 60.0
LIMITS = CallLimits(calls_running_max=5, session_calls_running_max=3, attached_max=7)


class Methods:
    """They hang until the gate opens."""

    def __init__(self):
        self.gate = asyncio.Event()

    async def unary(self, request, context):
        await self.gate.wait()
        return request

    async def answers(self, request, context):
        await self.gate.wait()
        yield request

    async def both(self, requests, context):
        async for request in requests:
            await self.gate.wait()
            yield request

    async def requests(self, requests, context):
        async for _ in requests:
            await self.gate.wait()
        return b"done"

    async def bug(self, request, context):
        raise ZeroDivisionError


@contextlib.asynccontextmanager
async def served(directory):
    methods = Methods()
    names = ("unary", "answers", "both", "requests", "bug", "Attach")
    limit = CallLimit(methods=[f"/test.Service/{name}" for name in names], limits=LIMITS)
    handlers = {
        "unary": grpc.unary_unary_rpc_method_handler(methods.unary),
        "answers": grpc.unary_stream_rpc_method_handler(methods.answers),
        "both": grpc.stream_stream_rpc_method_handler(methods.both),
        "requests": grpc.stream_unary_rpc_method_handler(methods.requests),
        "bug": grpc.unary_unary_rpc_method_handler(methods.bug),
        "Attach": grpc.stream_stream_rpc_method_handler(methods.both),
        "unlimited": grpc.unary_unary_rpc_method_handler(methods.unary),
    }
    server = grpc.aio.server(interceptors=[limit])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", handlers),)
    )
    server.add_insecure_port(f"unix:{directory}/s")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{directory}/s") as channel:
            yield methods, limit, channel
    finally:
        await server.stop(0)


def begin(channel, name, token=b""):
    metadata = (("kvkeep-session-bin", token),) if token else ()
    path = f"/test.Service/{name}"
    if name == "answers":
        return channel.unary_stream(path)(b"x", metadata=metadata)
    if name in {"both", "Attach"}:
        return channel.stream_stream(path)(iter([b"x"]), metadata=metadata)
    if name == "requests":
        return channel.stream_unary(path)(iter([b"x"]), metadata=metadata)
    return channel.unary_unary(path)(b"x", metadata=metadata)


def run(tmp_path, test):
    async def go():
        async with asyncio.timeout(WAIT_S), served(tmp_path) as (methods, limit, channel):
            await test(methods, limit, channel)

    asyncio.run(go())


async def ended(call):
    """Its code, when all that it answers was taken."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
    return await call.code()


async def until_running(limit, calls):
    while limit._total != calls:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


async def refusal(call):
    assert await ended(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(await call.trailing_metadata())["kvkeep-retry-after-ms"]) > 0
    return await call.details()


@pytest.mark.parametrize("name", ["unary", "answers", "both", "requests"])
def test_one_client_and_all_of_them_have_their_limits(tmp_path, name):
    async def test(methods, limit, channel):
        first = [begin(channel, name, b"first") for _ in range(3)]
        await until_running(limit, 3)
        assert "session_calls_running_max = 3" in await refusal(begin(channel, name, b"first"))
        second = [begin(channel, name, b"second") for _ in range(2)]
        await until_running(limit, 5)
        assert "limits.calls_running_max = 5" in await refusal(begin(channel, name, b"second"))
        assert "limits.calls_running_max = 5" in await refusal(begin(channel, name))
        methods.gate.set()
        for call in (*first, *second):
            assert await ended(call) is grpc.StatusCode.OK
        assert await ended(begin(channel, name, b"first")) is grpc.StatusCode.OK
        assert not limit._total
        assert not limit._running

    run(tmp_path, test)


def test_cancelled_calls_and_bugs_make_room(tmp_path):
    async def test(methods, limit, channel):
        calls = [begin(channel, "unary"), begin(channel, "answers"), begin(channel, "both")]
        await until_running(limit, 3)
        for call in calls:
            call.cancel()
        await until_running(limit, 0)
        for _ in range(4):
            assert await ended(begin(channel, "bug")) is grpc.StatusCode.UNKNOWN
        assert not limit._running

    run(tmp_path, test)


def test_what_is_not_ours_does_not_count(tmp_path):
    async def test(methods, limit, channel):
        calls = [begin(channel, "unlimited") for _ in range(9)]
        await asyncio.sleep(0.05)
        methods.gate.set()
        for call in calls:
            assert await ended(call) is grpc.StatusCode.OK

    run(tmp_path, test)


def test_streams_of_sessions_count_by_themselves(tmp_path):
    async def test(methods, limit, channel):
        streams = [begin(channel, "Attach", token) for token in (b"", b"a") for _ in range(9)]
        await asyncio.sleep(0.05)
        calls = [begin(channel, "unary", b"a") for _ in range(3)]
        await asyncio.sleep(0.05)
        methods.gate.set()
        codes = [await ended(stream) for stream in streams]
        assert [codes[at : at + 9].count(grpc.StatusCode.OK) for at in (0, 9)] == [7, 7]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 4
        for call in calls:
            assert await ended(call) is grpc.StatusCode.OK

    run(tmp_path, test)

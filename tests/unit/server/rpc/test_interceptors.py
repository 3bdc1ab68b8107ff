"""The meter: each way that a call can end is counted once, under the code that the client gets."""

import asyncio
import contextlib

import grpc
import pytest

from kvkeep_server.core.clock import SystemClock
from kvkeep_server.rpc.interceptors import CallMeter

WAIT_S = 120.0


class Methods:
    """One service with a method for each way to end."""

    def __init__(self):
        self.entered = asyncio.Event()

    async def ok(self, request, context):
        return request

    async def refused(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "no")

    async def bug(self, request, context):
        raise ZeroDivisionError

    async def hang(self, request, context):
        self.entered.set()
        await asyncio.Event().wait()

    async def stream(self, request, context):
        for _ in range(3):
            yield request

    async def refused_stream(self, request, context):
        yield request
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")

    async def endless_stream(self, request, context):
        yield request
        await asyncio.Event().wait()

    async def unserved_stream(self, request, context):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")


STREAMS = {"stream", "refused_stream", "endless_stream", "unserved_stream"}
UNARY = {"ok", "refused", "bug", "hang"}


@contextlib.asynccontextmanager
async def served(directory):
    methods = Methods()
    meter = CallMeter(
        methods=[f"/test.Service/{name}" for name in UNARY | STREAMS], clock=SystemClock()
    )
    handlers = {
        **{n: grpc.unary_unary_rpc_method_handler(getattr(methods, n)) for n in UNARY},
        **{n: grpc.unary_stream_rpc_method_handler(getattr(methods, n)) for n in STREAMS},
        "uncounted": grpc.unary_unary_rpc_method_handler(methods.ok),
    }
    server = grpc.aio.server(interceptors=[meter])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", handlers),)
    )
    server.add_insecure_port(f"unix:{directory}/s")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{directory}/s") as channel:
            yield meter, channel, methods
    finally:
        await server.stop(0)


async def ends(meter, name, code):
    """Waits until such an end was counted: a client may hear of it first."""
    async with asyncio.timeout(WAIT_S):
        while not meter.ended.get((f"Service/{name}", code)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


def run(directory, work):
    async def inside():
        async with served(directory) as parts:
            await work(*parts)
            return parts[0]

    return asyncio.run(inside())


@pytest.mark.parametrize(
    ("name", "code"), [("ok", "OK"), ("refused", "NOT_FOUND"), ("bug", "UNKNOWN")]
)
def test_unary_calls(tmp_path, name, code):
    async def work(meter, channel, _):
        for _ in range(3):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/test.Service/{name}")(b"x", timeout=WAIT_S)
        await ends(meter, name, code)

    meter = run(tmp_path, work)
    assert meter.ended[f"Service/{name}", code] == 3
    assert sum(meter.ended.values()) == 3
    assert set(meter.durations) == {(f"Service/{name}", code == "OK")}
    assert sum(meter.durations[f"Service/{name}", code == "OK"].value().counts) == 3


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("stream", "OK"),
        ("refused_stream", "RESOURCE_EXHAUSTED"),
        ("unserved_stream", "UNIMPLEMENTED"),
    ],
)
def test_streams_are_counted_and_not_timed(tmp_path, name, code):
    async def work(meter, channel, _):
        received = 0
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _part in channel.unary_stream(f"/test.Service/{name}")(b"x", timeout=WAIT_S):
                received += 1
        assert received == {"stream": 3, "refused_stream": 1}.get(name, 0)
        await ends(meter, name, code)

    meter = run(tmp_path, work)
    assert sum(meter.ended.values()) == meter.ended[f"Service/{name}", code] == 1
    assert not meter.durations


def test_a_call_that_its_client_cancels(tmp_path):
    async def work(meter, channel, methods):
        call = channel.unary_unary("/test.Service/hang")(b"x")
        await methods.entered.wait()
        call.cancel()
        await ends(meter, "hang", "CANCELLED")
        stream = channel.unary_stream("/test.Service/endless_stream")(b"x")
        await stream.read()
        stream.cancel()
        await ends(meter, "endless_stream", "CANCELLED")

    run(tmp_path, work)


def test_a_call_that_is_too_late(tmp_path):
    async def work(meter, channel, _):
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await channel.unary_unary("/test.Service/hang")(b"x", timeout=0.3)
        await ends(meter, "hang", "DEADLINE_EXCEEDED")

    run(tmp_path, work)


def test_names_that_nobody_listed_are_not_counted(tmp_path):
    async def work(meter, channel, _):
        await channel.unary_unary("/test.Service/uncounted")(b"x", timeout=WAIT_S)
        for name in ("made_up", "made/up", "\u00e9".encode().decode("latin1")):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/test.Service/{name}")(b"x", timeout=WAIT_S)

    meter = run(tmp_path, work)
    assert sum(meter.ended.values()) == 0
    assert {method for method, _ in meter.ended} == {f"Service/{n}" for n in UNARY | STREAMS}

"""Counts every call of our services, with its status code, and how long the unary ones took."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.histogram import DURATION_BOUNDS_S, Histogram
from kvkeep_server.rpc.calls import Context

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
OK = grpc.StatusCode.OK.name


class CallMeter(grpc.aio.ServerInterceptor):
    """Event loop only; of several servers, which have methods of the same names.

    Args:
        methods: Full names, "/kvkeep.v1.BlockCache/Acquire". Others are not counted: a name that
            somebody makes up must not become a label.
        clock: Of durations.

    Attributes:
        ended: Calls by method ("BlockCache/Acquire") and name of the status code.
        durations: Of unary calls by method and whether they ended with OK. Streams live as long
            as their client.
    """

    def __init__(self, *, methods: Iterable[str], clock: Clock) -> None:
        """See the class."""
        self.ended: dict[tuple[str, str], int] = {}
        self.durations: dict[tuple[str, bool], Histogram] = {}
        self._names = {method: method.rpartition(".")[2] for method in methods}
        self._clock = clock
        # By handler: a name is another method on another server.
        self._metered: dict[Any, Any] = {}
        for name in self._names.values():
            self.ended[name, OK] = 0

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:  # noqa: ANN401 - grpc gives no type
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        name = self._names.get(handler_call_details.method)
        if handler is None or name is None:
            return handler
        metered = self._metered.get(handler)
        if metered is None:
            metered = self._metered[handler] = self._meter(name, handler)
        return metered

    def _meter(self, name: str, handler: Any) -> Any:  # noqa: ANN401 - see above
        """The handler with its method metered; whichever of the four kinds it is."""
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            method = getattr(handler, kind)
            if method is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                metered = (
                    self._stream(name, method)
                    if inspect.isasyncgenfunction(method)
                    else self._single(name, method, timed=kind == "unary_unary")
                )
                return make(metered, handler.request_deserializer, handler.response_serializer)
        raise AssertionError("a handler without a method")

    def _single(
        self, name: str, method: Callable[[Any, Context], Awaitable[Any]], *, timed: bool
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: object, context: Context) -> object:
            began_s = self._clock.monotonic_s()
            code = OK
            try:
                return await method(request, context)
            except BaseException as error:
                code = _code(error, context)
                raise
            finally:
                if timed:
                    self.note(name, code, self._clock.monotonic_s() - began_s)
                else:
                    self._count(name, code)

        return call

    def _stream(
        self, name: str, method: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def call(request: object, context: Context) -> AsyncIterator[object]:
            code = OK
            try:
                async for response in method(request, context):
                    yield response
            except BaseException as error:
                code = _code(error, context)
                raise
            finally:
                self._count(name, code)

        return call

    def note(self, name: str, code: str, seconds: float) -> None:
        """Counts one unary call, however it came.

        Args:
            name: Of the method, one of those given, as "BlockCache/Acquire".
            code: Name of its status code.
            seconds: It took.
        """
        assert (name, OK) in self.ended, "a name that somebody made up must not become a label"
        self._count(name, code)
        self._time(name, seconds, ok=code == OK)

    def _count(self, name: str, code: str) -> None:
        self.ended[name, code] = self.ended.get((name, code), 0) + 1

    def _time(self, name: str, seconds: float, *, ok: bool) -> None:
        histogram = self.durations.get((name, ok))
        if histogram is None:
            histogram = self.durations[name, ok] = Histogram(DURATION_BOUNDS_S)
        histogram.add_one(seconds)


def _code(error: BaseException, context: Context) -> str:
    """The status that the client gets for a call that ended with this."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        late = context.time_remaining() == 0
        ended = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        return ended.name
    if isinstance(error, grpc.aio.AbortError):
        code = context.code()
        return code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN.name
    return grpc.StatusCode.UNKNOWN.name

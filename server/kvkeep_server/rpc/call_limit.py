"""How many calls of ours run on gRPC at a time, of all clients and of each: more are refused with
RESOURCE_EXHAUSTED and the time after which another try makes sense."""

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.rpc.calls import SESSION_KEY, Context, refuse

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

_RETRY_AFTER_S = 0.05
# A session's own stream. It is no call that is over soon, so it has a count of its own.
_ATTACH = "Attach"


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Names as in the configuration's `[limits]`; and how many Attach streams there may be with a
    token, and how many without."""

    calls_running_max: int
    session_calls_running_max: int
    attached_max: int


class CallLimit(grpc.aio.ServerInterceptor):
    """Event loop only; one server. Attach counts by itself, and apart if it has no token: who only
    promises to say hello keeps no session out.

    Args:
        methods: Full names, "/kvkeep.v1.BlockCache/Acquire"; others are not ours.
        limits: See there.
    """

    def __init__(self, *, methods: Iterable[str], limits: CallLimits) -> None:
        """See the class."""
        self._names = {method: method.rpartition("/")[2] for method in methods}
        self._limits = limits
        self._limited: dict[str, Any] = {}
        self._running: Counter[bytes] = Counter()
        self._total = 0
        self._attached: Counter[bool] = Counter()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:  # noqa: ANN401 - grpc gives no type
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method not in self._names:
            return handler
        limited = self._limited.get(method)
        if limited is None:
            limited = self._limited[method] = self._limit(self._names[method], handler)
        return limited

    def _limit(self, name: str, handler: Any) -> Any:  # noqa: ANN401 - see above
        requests = "stream" if handler.request_streaming else "unary"
        answers = "stream" if handler.response_streaming else "unary"
        method = getattr(handler, f"{requests}_{answers}")
        make = getattr(grpc, f"{requests}_{answers}_rpc_method_handler")
        yields = inspect.isasyncgenfunction(method)
        limit = self._attach if name == _ATTACH else self._stream if yields else self._single
        limited = limit(method)
        return make(limited, handler.request_deserializer, handler.response_serializer)

    def _single(
        self, method: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: object, context: Context) -> object:
            client = _client_of(context)
            if refused := self._refusal(client):
                await refuse(context, refused)
            with self._one_more(client):
                return await method(request, context)

        return call

    def _stream(
        self, method: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def call(request: object, context: Context) -> AsyncIterator[object]:
            client = _client_of(context)
            if refused := self._refusal(client):
                await refuse(context, refused)
            with self._one_more(client):
                async for answer in method(request, context):
                    yield answer

        return call

    def _attach(
        self, method: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def call(request: object, context: Context) -> AsyncIterator[object]:
            known, most = bool(_client_of(context)), self._limits.attached_max
            if self._attached[known] >= most:
                what = f"{most} Attach streams run, two for each of sessions.sessions_max"
                error = ResourceExhaustedError(f"{what}; try again, or raise it", _RETRY_AFTER_S)
                await refuse(context, error)
            self._attached[known] += 1
            try:
                async for answer in method(request, context):
                    yield answer
            finally:
                self._attached[known] -= 1

        return call

    def _refusal(self, client: bytes) -> ResourceExhaustedError | None:
        limits = self._limits
        if self._total >= limits.calls_running_max:
            what = f"limits.calls_running_max = {limits.calls_running_max} calls run"
        elif self._running.get(client, 0) >= limits.session_calls_running_max:
            what = (
                f"limits.session_calls_running_max = {limits.session_calls_running_max} calls of "
                "this client run"
            )
        else:
            return None
        return ResourceExhaustedError(f"{what}; try again, or raise it", _RETRY_AFTER_S)

    @contextmanager
    def _one_more(self, client: bytes) -> Iterator[None]:
        self._total += 1
        self._running[client] += 1
        try:
            yield
        finally:
            self._total -= 1
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]


def _client_of(context: Context) -> bytes:
    """Its session's token; all without one are one client."""
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_KEY and isinstance(value, bytes):
            return value
    return b""

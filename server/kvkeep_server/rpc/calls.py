"""What every RPC has in common: the session of the token, and errors as status codes."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from kvkeep_server.core.errors import KVKeepError, SessionUnknownError, UnsupportedError
from kvkeep_server.rpc import convert
from kvkeep_server.service.sessions import Session, Sessions

SESSION_KEY = "kvkeep-session-bin"

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


def session_of(sessions: Sessions, context: Context) -> Session:
    """The session whose token came with the call.

    Raises:
        SessionUnknownError: None came, or no session has it.
    """
    token = token_of(context)
    if token is None:
        msg = (
            f"the call carries no {SESSION_KEY}; attach through the fd socket first, or from "
            "another host with a hello on Attach"
        )
        raise SessionUnknownError(msg)
    return sessions.get(token)


def token_of(context: Context) -> bytes | None:
    """What came with the call as a session token, if anything did."""
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_KEY and isinstance(value, bytes):
            return value
    return None


async def refuse(context: Context, error: KVKeepError) -> NoReturn:
    """Ends a call with the status of an error."""
    await context.abort(convert.status_code(error), str(error), convert.trailing(error))
    raise AssertionError  # abort raises


def accept(request: object) -> None:
    """Raises what `RequestGuard` put in the place of a request that it refused."""
    if isinstance(request, KVKeepError):
        raise request


def unary(
    method: Callable[[Any, Request, Context], Awaitable[Response]],
) -> Callable[[Any, Request, Context], Awaitable[Response]]:
    """Turns our errors into status codes; anything else is a bug, logged and answered with
    INTERNAL."""

    @functools.wraps(method)
    async def call(self: object, request: Request, context: Context) -> Response:
        try:
            accept(request)
            return await method(self, request, context)
        except KVKeepError as error:
            await refuse(context, error)

    return call


def streamed(
    method: Callable[[Any, Request, Context], AsyncIterator[Response]],
) -> Callable[[Any, Request, Context], AsyncIterator[Response]]:
    """`unary` for calls that stream their answers."""

    @functools.wraps(method)
    async def call(self: object, request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            accept(request)
            async for response in method(self, request, context):
                yield response
        except KVKeepError as error:
            await refuse(context, error)

    return call


def not_served(what: str) -> Any:  # noqa: ANN401 - stands for a method of any shape
    """A method that answers UNIMPLEMENTED with a sentence.

    Args:
        what: The call and what it would do.
    """

    async def call(_self: object, _request: object, context: Context) -> None:
        await refuse(context, UnsupportedError(f"{what}: not served in this release"))

    return call

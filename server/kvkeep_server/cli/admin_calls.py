"""The daemon's Admin service, as commands call it: over its unix socket, without a session."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc

from kvkeep.v1 import admin_pb2 as pb
from kvkeep.v1.admin_pb2_grpc import AdminStub
from kvkeep.v1.namespace_pb2 import NamespaceMode
from kvkeep_server.cli.runtime_dir import runtime_dir_or_default
from kvkeep_server.core.errors import KVKeepError

SOCKET_NAME = "kvkeep.sock"
# EX_UNAVAILABLE of sysexits.h.
EXIT_NO_DAEMON = 69
CALL_S = 10.0
# A check reads every byte at the rate that was asked for; whoever waits no longer, interrupts it.
CHECK_S = 24 * 3600.0
_NAMESPACES_A_PAGE = 1000

Response = TypeVar("Response")


class NoDaemonError(KVKeepError):
    """Nobody serves in the runtime directory."""

    def __init__(self, runtime_dir: str, why: str) -> None:
        """See the class."""
        super().__init__(
            f"no daemon serves in {runtime_dir} ({why}); start one with `kvkeep serve`, or name"
            " its directory with --runtime-dir"
        )


class AdminCalls:
    """One daemon's Admin service; a context manager.

    Errors of every call: NoDaemonError; KVKeepError with the daemon's own sentence.

    Args:
        runtime_dir: From the command line, "" = this user's default.
    """

    def __init__(self, runtime_dir: str) -> None:
        """Connects with the first call."""
        self.runtime_dir = runtime_dir_or_default(runtime_dir)
        socket = Path(self.runtime_dir) / SOCKET_NAME
        self._channel = grpc.insecure_channel(
            f"unix:{socket}", options=(("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0))
        )
        self._stub: AdminStub = AdminStub(self._channel)

    def stats(self) -> pb.StatsResponse:
        """Admin.Stats."""
        return self._answer(self._stub.Stats, pb.StatsRequest(), CALL_S)

    def namespaces(self) -> list[pb.NamespaceInfo]:
        """Every namespace set that the daemon knows: all pages of Admin.ListNamespaces."""
        found: list[pb.NamespaceInfo] = []
        token = ""
        while True:
            request = pb.ListNamespacesRequest(page_size=_NAMESPACES_A_PAGE, page_token=token)
            page = self._answer(self._stub.ListNamespaces, request, CALL_S)
            found += page.namespaces
            token = page.next_page_token
            if not token:
                return found

    def set_namespace_mode(
        self, set_id: bytes, mode: NamespaceMode.ValueType
    ) -> NamespaceMode.ValueType:
        """Admin.SetNamespaceMode; the mode until now."""
        request = pb.SetNamespaceModeRequest(set_id=set_id, mode=mode)
        return self._answer(self._stub.SetNamespaceMode, request, CALL_S).previous

    def check(self, request: pb.CheckRequest) -> pb.CheckResponse:
        """Admin.Check; takes as long as it takes."""
        return self._answer(self._stub.Check, request, CHECK_S)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the channel."""
        self._channel.close()

    def _answer(self, call: Callable[..., Response], request: object, timeout_s: float) -> Response:
        try:
            return call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise NoDaemonError(self.runtime_dir, "nobody answers") from error
            raise KVKeepError(f"{error.code().name}: {error.details()}") from error

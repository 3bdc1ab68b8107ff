"""The client: attaches to a daemon and opens namespaces. Synchronous."""

from __future__ import annotations

import os
import platform
import re
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvkeep.descriptors import telling_shortage
from kvkeep.errors import UnavailableError
from kvkeep.forking import CHILD_MAY_USE_GRPC, REFUSAL
from kvkeep.keeper import SessionKeeper
from kvkeep.namespace import Namespace
from kvkeep.remote import RemoteSession
from kvkeep.results import Health
from kvkeep.session import FD_SOCKET_NAME, Session, SessionSettings
from kvkeep.spec import (
    U64_MAX,
    NamespaceSpec,
    check_number,
    check_seconds,
    check_text,
    deadline_of,
    invalid,
    whole,
)
from kvkeep.tickets import Tickets
from kvkeep.v1.block_cache_pb2 import WatchRequest
from kvkeep.watching import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from kvkeep.tickets import Ticket
    from kvkeep.v1.admin_pb2 import StatsResponse

# Reads without a lease rest on the order of stores; elsewhere `read_into` takes a lease.
_ORDERED_MACHINES: Final = frozenset({"x86_64", "AMD64"})
_SOCKET_PATH_NBYTES_MAX: Final = 107
_CLIENT_NAME_NBYTES_MAX: Final = 256
_PORT_MAX: Final = 65535
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}")
_FALLBACK_PARENT: Final = Path("/tmp")  # noqa: S108 - another user's directory is refused


class Client:
    """One attached process. Any thread may call; a context manager.

    When the daemon restarts, it attaches again by itself. A forked child attaches anew with its
    first call.
    """

    def __init__(self, settings: SessionSettings, *, machine: str) -> None:
        """Attaches nothing: see `connect`. `machine` is the architecture."""
        self._settings = settings
        self._optimistic_reads = machine in _ORDERED_MACHINES
        self._namespaces: weakref.WeakSet[Namespace] = weakref.WeakSet()
        self._namespaces_lock = threading.Lock()
        self._tickets = Tickets()
        self._keeper = SessionKeeper(
            open_session=self._open_session,
            on_session=self._open_namespaces,
            on_memory=self._tickets.on_memory,
        )

    def attach(self) -> None:
        """Errors: those of `connect`, but for arguments."""
        self._keeper.start()
        _clients.add(self)

    def _open_session(self) -> Session:
        kind = RemoteSession if self._settings.address else Session
        with telling_shortage():
            session = kind(
                self._settings, on_over=lambda: self._keeper.later(self._open_present_epochs)
            )
            session.open()
        return session

    def _open_present_epochs(self) -> None:
        with self._namespaces_lock:
            namespaces = list(self._namespaces)
        for namespace in namespaces:
            namespace.open_present_epoch()

    def _open_namespaces(self, session: Session) -> None:
        with self._namespaces_lock:
            namespaces = list(self._namespaces)
        for namespace in namespaces:
            namespace.reopen_in(session)

    def open_namespace(
        self, spec: NamespaceSpec, local_ranks: Sequence[int] | None = None
    ) -> Namespace:
        """Open a namespace set for this client.

        `local_ranks` are the flat ranks whose shards lie on this host, None = all of them:
        tp + tp_size * (pp + pp_size * (cp + cp_size * dp)). A look-up counts a block only if each
        of them is there.

        Errors: InvalidArgumentError (names field, value, what is allowed, fix), UnavailableError,
        DeadlineError, NotSupportedError, ResourceExhaustedError.
        """
        if not isinstance(spec, NamespaceSpec):
            raise invalid("spec", spec, "a kvkeep.NamespaceSpec", "make one")
        spec.validate()
        ranks = _checked_ranks(local_ranks, spec.ranks)
        namespace = Namespace(
            self._keeper,
            self._tickets,
            spec,
            ranks,
            timeout_s=self._settings.timeout_s,
            optimistic_reads=self._optimistic_reads,
        )
        session = self._keeper.require()
        # Known before it is opened: a session that begins in between opens it too.
        with self._namespaces_lock:
            self._namespaces.add(namespace)
        namespace.open_in(session)
        return namespace

    @property
    def attached(self) -> bool:
        """Whether there is a session with the daemon now."""
        return self._keeper.current() is not None

    @property
    def health(self) -> Health:
        """Whether the daemon answers; without asking it."""
        session = self._keeper.current()
        if session is None or session.answers:
            return Health.AWAY if session is None else Health.ANSWERS
        return Health.SILENT if session.silent else Health.AWAY

    def poll(self, limit: int | None = None) -> list[Ticket]:
        """Tickets of `submit_acquire` and `submit_commit` that have news, without waiting.

        Each is handed out once when it is done, and before that with each piece that it got. A call
        of a few microseconds when there is none; each one that is handed out costs its caller what
        an `acquire` does beside its waiting, so `limit` bounds how many it may be.

        Errors: InvalidArgumentError.
        """
        if limit is not None:
            limit = check_number("limit", limit, 0, U64_MAX)
        return self._tickets.poll(limit)

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do.

        For select, poll, epoll and event loops; do not read it. It stays the same until `close`; a
        forked child has another. Errors: OSError (no descriptors).
        """
        return self._tickets.fileno()

    @property
    def server_epoch(self) -> int:
        """Names the daemon's life; another one after its restart. Errors: UnavailableError."""
        return self._keeper.require().server_epoch

    def watch(self, *namespaces: Namespace, from_sequence: int = 0) -> Watch:
        """Hear what is stored and removed, in each tier of this host: for routers.

        Of these namespaces, as they are open now, none = all that this client has open. It begins
        with all that is there; with the `sequence` of the last change of a watch that broke it
        goes on from there instead, if the daemon still can.

        Errors: InvalidArgumentError, UnavailableError; while iterating also InvalidArgumentError
        (`from_sequence` cannot be had any more) and ResourceExhaustedError (too many watch).
        """
        with self._namespaces_lock:
            own = tuple(self._namespaces)
        for one in namespaces:
            if not isinstance(one, Namespace) or one not in own:
                fix = "give what its open_namespace returned, or none for all"
                raise invalid("namespaces", one, "namespaces of this client", fix)
        namespaces = namespaces or own
        opened = [namespace.opened() for namespace in namespaces]
        request = WatchRequest(
            from_sequence=check_number("from_sequence", from_sequence, 0, U64_MAX),
            set_indexes=[one.set_index for one in opened],
        )
        sizes = zip(opened, namespaces, strict=True)
        stream = self._keeper.require().transport.watch(request)
        return Watch(stream, {one.set_id: of.spec.key_nbytes for one, of in sizes})

    def stats(self, timeout_s: float | None = None) -> StatsResponse:
        """The daemon's counters and gauges; fields in admin.proto.

        Errors: UnavailableError, DeadlineError.
        """
        deadline_s = deadline_of(timeout_s, self._settings.timeout_s)
        return self._keeper.require().transport.stats(deadline_s)

    def close(self) -> None:
        """End the session: leases and staging go back. Views stay readable. Idempotent."""
        self._keeper.close()
        self._tickets.close()
        _clients.discard(self)

    def after_fork_in_child(self) -> None:
        """Called by the interpreter."""
        self._namespaces_lock = threading.Lock()
        for namespace in list(self._namespaces):
            namespace.after_fork_in_child()
        self._tickets.after_fork_in_child()
        self._keeper.after_fork_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(
    runtime_dir: str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    client_name: str = "",
    staging_nbytes: int = 0,
    timeout_s: float = 2.0,
) -> Client:
    """Attach to the daemon of this host, or to one on another.

    `runtime_dir` is where its sockets are: None = $XDG_RUNTIME_DIR/kvkeep, or /tmp/kvkeep-<uid>
    without that variable, as `kvkeep serve` has it; the latter only if it is this user's and no
    one else may write to it. `address` is that of a daemon on another host instead, "host:port",
    where it has `remote.listen`: the same calls, at the speed of the network; look-ups and reads
    then are calls, too. `client_name` is shown to operators, at most
    256 bytes. `staging_nbytes` is the room for blocks on their way in, 0 = the daemon's default.
    `timeout_s` is the deadline of attaching, and of every call that names none.

    A child that is forked afterwards attaches anew with its first call, if `kvkeep.client` was
    imported (or this called) before anything imported grpc; `import kvkeep` alone does not count.
    Otherwise its calls raise UnavailableError. See kvkeep.forking.

    Errors: InvalidArgumentError, UnavailableError (no daemon, it refused, the directory is not to
    be trusted, or this process has no descriptor left), DeadlineError; a bare KVKeepError where
    what the daemon shares cannot be mapped (RLIMIT_AS, or another release's layout).
    """
    if _forked_in_vain:
        raise UnavailableError(REFUSAL)
    check_text("client_name", client_name, required=False, nbytes_max=_CLIENT_NAME_NBYTES_MAX)
    if address is not None:
        _check_address(address, runtime_dir)
    settings = SessionSettings(
        runtime_dir=_checked_dir(_default_runtime_dir() if runtime_dir is None else runtime_dir),
        address=address or "",
        client_name=client_name,
        staging_nbytes=check_number("staging_nbytes", staging_nbytes, 0, U64_MAX),
        timeout_s=check_seconds("timeout_s", timeout_s, zero=False),
        private_dir=address is None and runtime_dir is None and not _session_dir(),
    )
    with telling_shortage():
        client = Client(settings, machine=platform.machine())
    client.attach()
    return client


def _check_address(address: str, runtime_dir: str | os.PathLike[str] | None) -> None:
    known = isinstance(address, str) and _ADDRESS.fullmatch(address) is not None
    if not known or not 0 < int(address.rpartition(":")[2]) <= _PORT_MAX:
        allowed = f'"host:port", ports 1 to {_PORT_MAX}, an IPv6 address in brackets'
        raise invalid("address", address, allowed, "give that of the daemon's remote.listen")
    if runtime_dir is not None:
        fix = "give one of them"
        raise invalid("runtime_dir", str(runtime_dir), "None with an address", fix)


def _session_dir() -> str:
    """$XDG_RUNTIME_DIR, which the system made for this user; "" without one."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")  # noqa: TID251 - where the default comes from
    return session if session.startswith("/") else ""


def _default_runtime_dir() -> Path:
    session = _session_dir()
    return Path(session) / "kvkeep" if session else _FALLBACK_PARENT / f"kvkeep-{os.getuid()}"


def _checked_dir(runtime_dir: str | os.PathLike[str]) -> Path:
    try:
        directory = Path(runtime_dir)
        path = os.fsencode(directory / FD_SOCKET_NAME)
    except (TypeError, UnicodeEncodeError):
        fix = "give a str or a Path"
        raise invalid("runtime_dir", runtime_dir, "a path of the file system", fix) from None
    if len(path) > _SOCKET_PATH_NBYTES_MAX or b"\0" in path:
        fix = f"a socket's path has at most {_SOCKET_PATH_NBYTES_MAX} bytes: use a shorter one"
        raise invalid("runtime_dir", str(directory), "a shorter path without NUL", fix)
    return directory


def _checked_ranks(local_ranks: Sequence[int] | None, count: int) -> tuple[int, ...]:
    given: tuple[object, ...] = (None,)
    with suppress(TypeError):
        given = () if local_ranks is None else tuple(local_ranks)
    ranks = tuple(rank for rank in map(whole, given) if rank is not None and 0 <= rank < count)
    if len(set(ranks)) < len(given):
        fix = "give each rank whose shard lies on this host once"
        raise invalid("local_ranks", local_ranks, f"different ranks from 0 to {count - 1}", fix)
    return ranks


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_forked_in_vain = False


def _after_fork_in_child() -> None:
    global _forked_in_vain  # noqa: PLW0603 - a fact about the process
    clients = list(_clients)
    _forked_in_vain = _forked_in_vain or (bool(clients) and not CHILD_MAY_USE_GRPC)
    for client in clients:
        client.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)

"""The composition root: the one place that builds, wires, starts and drains."""

import asyncio
import gc
import logging
import os
import random
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep_server.config import Settings
from kvkeep_server.config.parts import (
    call_limits,
    lease_limits,
    metric_facts,
    namespace_limits,
    nvme_facts,
    pin_limits,
    pool_settings,
    session_limits,
    stream_limits,
    watch_limits,
)
from kvkeep_server.core.clock import Clock, Deadline
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.histogram import DURATION_BOUNDS_S, Histogram
from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.core.memory_limit import MemoryLimit, read_memory_limit
from kvkeep_server.core.ownership import Ownership
from kvkeep_server.core.process import (
    SWITCH_INTERVAL_S,
    forbid_inspection,
    import_ahead,
    raise_descriptor_limit,
)
from kvkeep_server.core.stopping import Stopping
from kvkeep_server.index.table import IndexTable
from kvkeep_server.metrics.endpoint import scraped_at
from kvkeep_server.metrics.readings import Doors, Readings
from kvkeep_server.policies.registry import admission_policy, eviction_policy
from kvkeep_server.rpc.admin import AdminServicer, RemoteAdminServicer
from kvkeep_server.rpc.block_cache import BlockCacheServicer
from kvkeep_server.rpc.block_calls import BlockCalls, ClientLimits
from kvkeep_server.rpc.call_sockets import CallSockets
from kvkeep_server.rpc.fd_handover import FdHandover
from kvkeep_server.rpc.interceptors import CallMeter
from kvkeep_server.rpc.remote_calls import RemoteCalls
from kvkeep_server.rpc.request_limits import RequestLimits
from kvkeep_server.rpc.server import METHODS, Front, Servers
from kvkeep_server.service.block_service import BlockService, ServiceLimits
from kvkeep_server.service.keyspace_numbers import KeyspaceNumbers
from kvkeep_server.service.namespaces import Namespaces
from kvkeep_server.service.remote import RemoteService
from kvkeep_server.service.session_memory import FdKind, FdOffer, SessionMemory
from kvkeep_server.service.sessions import Session, Sessions
from kvkeep_server.service.streams import Streams
from kvkeep_server.service.upkeep import keep_up
from kvkeep_server.tiering.commits import Commits
from kvkeep_server.tiering.epochs import Epochs
from kvkeep_server.tiering.leases import Leases
from kvkeep_server.tiering.manager import TierManager, Wishes
from kvkeep_server.tiering.nvme_side import LocalTiers, NvmeMeans, NvmeSide, nvme_at_work
from kvkeep_server.tiering.rebuild import TableSettings
from kvkeep_server.tiering.removal import Removal
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.retention_pins import RetentionPins
from kvkeep_server.tiering.room import RoomMaker
from kvkeep_server.tiering.sending import Sending
from kvkeep_server.tiering.transfers import Transfers
from kvkeep_server.tiering.watching import ChangeLog
from kvkeep_server.tiers.nvme.files import DiskFiles, Files
from kvkeep_server.tiers.ram.pool import Chunk, Pool
from kvkeep_server.tiers.ram.tier import RamTier

SOCKET_NAME = "kvkeep.sock"
FD_SOCKET_NAME = "kvkeep.fd.sock"
_HEALTH_PERIOD_S = 0.5
_GRACE_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Core:
    """Everything below `rpc/`, wired. Also what a test builds on a virtual clock."""

    ram: RamTier
    residency: Residency
    leases: Leases
    sessions: Sessions
    room: RoomMaker
    service: BlockService
    executor: ThreadPoolExecutor
    transfers: Transfers
    huge_pages: HugePages
    nvme: NvmeSide | None

    def close(self) -> None:
        """Ends threads; gives the memory back."""
        for session in self.sessions:
            self.sessions.end(session.session_id, "daemon stops")
        self.residency.stop()
        self.huge_pages.close()
        self.transfers.close()
        self.executor.shutdown()


def build_core(
    settings: Settings,
    *,
    clock: Clock,
    source: random.Random,
    server_epoch: int,
    memory_limit: Callable[[], MemoryLimit] = read_memory_limit,
    files: Callable[[], Files] = DiskFiles,
) -> Core:
    """Builds and wires; starts nothing but idle threads.

    Raises:
        InvalidArgumentError: Settings that this machine cannot carry.
    """
    executor = ThreadPoolExecutor(settings.limits.copy_threads, thread_name_prefix="kvkeep-pool")
    transfers, wiring = Transfers(threads=settings.limits.copy_threads), _Wiring()
    pool = _pool(settings, server_epoch, memory_limit, wiring)
    huge_pages = HugePages(executor, wanted=settings.ram.huge_pages)
    ram = RamTier(
        pool=pool,
        slab_nbytes=settings.ram.slab_nbytes,
        executor=executor,
        clock=clock,
        huge_pages=huge_pages,
    )
    residency = Residency(
        ram=ram,
        policy=eviction_policy(settings.ram.policy)(),
        clock=clock,
        source=source,
        settings=TableSettings(server_epoch, settings.index.rows_initial, settings.index.load_max),
    )
    leases = Leases(residency=residency, clock=clock, source=source, limits=lease_limits(settings))
    memory = SessionMemory(
        touch_records=settings.sessions.touch_records,
        offers=partial(_offers, residency, pool),
        huge_pages=huge_pages,
        executor=executor,
    )
    sessions = Sessions(
        limits=session_limits(settings),
        clock=clock,
        source=source,
        server_epoch=server_epoch,
        memory=memory,
        on_end=lambda session: wiring.on_session_end(leases, session),
    )
    epochs = Epochs()
    numbers = KeyspaceNumbers(residency.add_keyspace, epochs.is_over)
    room = RoomMaker(ram=ram, residency=residency, publish_table=wiring.on_table)
    facts = nvme_facts(settings, server_epoch, NvmeMeans(files(), clock, source))
    nvme = NvmeSide(facts, residency, ram, room, numbers, epochs) if facts else None
    wishes = _wishes(settings, residency, clock, source, nvme)
    service = BlockService(
        limits=ServiceLimits(settings.limits.keys_max, settings.limits.commits_running_max),
        namespaces=Namespaces(
            limits=namespace_limits(settings, ram.block_nbytes_max), numbers=numbers, epochs=epochs
        ),
        sessions=sessions,
        manager=_manager(residency, leases, room, wishes, nvme),
        commits=_commits(settings, residency, room, transfers, nvme),
        clock=clock,
    )
    wiring.sessions, wiring.service = sessions, service
    threads = executor, transfers, huge_pages
    return Core(ram, residency, leases, sessions, room, service, *threads, nvme)


class _Wiring:
    """Typed events that flow up: from the pool and the index to the sessions."""

    sessions: Sessions | None = None
    service: BlockService | None = None

    def on_chunk(self, chunk: Chunk) -> None:
        if self.sessions is not None:
            values = {"chunk_id": chunk.chunk_id, "nbytes": chunk.nbytes}
            self.sessions.tell_all("chunk_added", values, lambda: [_chunk_offer(chunk)])

    def on_table(self, table: IndexTable) -> None:
        if self.sessions is not None:
            self.sessions.tell_all(
                "index_moved", {"table_id": table.table_id}, lambda: [_table_offer(table)]
            )

    def on_session_end(self, leases: Leases, session: Session) -> None:
        leases.end_session(session.session_id)
        if self.service is not None:
            self.service.part(session)


def _pool(
    settings: Settings, epoch: int, memory_limit: Callable[[], MemoryLimit], wiring: _Wiring
) -> Pool:
    pool = Pool(
        settings=pool_settings(settings, epoch),
        memory_limit=memory_limit,
        on_chunk=wiring.on_chunk,
    )
    pool.check_fits()
    return pool


def _offers(residency: Residency, pool: Pool) -> list[FdOffer]:
    """All that a new client maps; all or none, when descriptors run out."""
    offers: list[FdOffer] = []
    try:
        offers.append(_table_offer(residency.table))
        for chunk in pool.chunks.values():
            offers.append(_chunk_offer(chunk))  # noqa: PERF401 - what was made must be closed
    except OSError:
        for offer in offers:
            os.close(offer.fd)
        raise
    return offers


def _table_offer(table: IndexTable) -> FdOffer:
    return FdOffer(FdKind.INDEX, table.table_id, table.memfd.nbytes, table.memfd.client_fd())


def _chunk_offer(chunk: Chunk) -> FdOffer:
    return FdOffer(FdKind.CHUNK, chunk.chunk_id, chunk.nbytes, chunk.memfd.client_fd())


class Daemon:
    """One daemon. `run` serves until SIGTERM, SIGINT or cancellation.

    Args:
        settings: With `server.runtime_dir` filled in.
        clock: Of everything.
        random: Seeds tables, draws tokens and lease ids; unguessable in production.
    """

    def __init__(self, *, settings: Settings, clock: Clock, random: random.Random) -> None:
        """See the class."""
        self._settings = settings
        self._clock = clock
        self._random = random
        self._server_epoch = random.getrandbits(63) | 1
        self._draining = Deadline(clock)

    async def run(self) -> int:
        """Starts, serves, drains; returns the process's exit code.

        Raises:
            KVKeepError: It cannot start; one sentence.
        """
        directory = Path(self._settings.server.runtime_dir)
        ownership = Ownership(directory, server_epoch=self._server_epoch)
        ownership.acquire()
        stopping = Stopping()
        try:
            forbid_inspection()
            raise_descriptor_limit()
            import_ahead()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            ownership.clear_socket(directory / SOCKET_NAME, socket.SOCK_STREAM)
            ownership.clear_socket(directory / FD_SOCKET_NAME, socket.SOCK_SEQPACKET)
            core = build_core(
                self._settings,
                clock=self._clock,
                source=self._random,
                server_epoch=self._server_epoch,
            )
            try:
                await core.ram.grow()
                async with nvme_at_work(core.nvme, stopping, self._draining.left_s):
                    with _held(directory) as held:
                        await self._serve(core, held, stopping)
            finally:
                core.close()
        finally:
            ownership.release()
        return 0

    async def _serve(self, core: Core, directory: Path, stopping: Stopping) -> None:
        stopping.listen()
        # One pool for all that blocks; asyncio's own would be as large as the host.
        asyncio.get_running_loop().set_default_executor(core.executor)
        server, handover, readings = self._front(core, directory)
        scraped = scraped_at(self._settings.metrics.listen, readings, self._clock)
        try:
            await server.start(directory / SOCKET_NAME, self._settings.server.socket_mode)
            handover.start()
        except (OSError, RuntimeError, FailedPreconditionError) as error:
            scraped.close()
            await server.stop(0)
            (directory / SOCKET_NAME).unlink(missing_ok=True)
            named = Path(self._settings.server.runtime_dir)
            raise _cannot_listen(named, error) from error
        await server.say_serving()
        readings.serving = True
        # What was built to start lives as long as the daemon: no collection needs to look at it.
        gc.freeze()
        runtime_dir, epoch = self._settings.server.runtime_dir, self._server_epoch
        _log.info("serving", extra={"runtime_dir": runtime_dir, "server_epoch": epoch})
        upkeep = asyncio.create_task(
            _all(
                keep_up(core.service, core.room, self._clock, readings.loop_lag),
                _tell_health(server, core.nvme),
            )
        )
        stopped = asyncio.create_task(stopping.wanted.wait())
        try:
            # Upkeep ends by a broken invariant only: then it is better not to serve at all.
            await asyncio.wait((stopped, upkeep), return_when=asyncio.FIRST_COMPLETED)
            if upkeep.done():
                upkeep.result()
        finally:
            stopped.cancel()
            readings.serving = False
            await server.say_draining()
            _log.info("draining")
            self._draining.begin(timeout_s := self._settings.server.drain_timeout_s)
            core.sessions.tell_all("draining", {"grace_ms": round(timeout_s * 1000)})
            handover.stop_listening()
            await stopping.last(core.service.finish(), self._draining.left_s())
            upkeep.cancel()
            for session in core.sessions:
                core.sessions.end(session.session_id, "daemon stops")
            # For what is still answered.
            await server.stop(0 if stopping.hurried.is_set() else _GRACE_S)
            handover.close()
            scraped.close()
            _unlink_sockets(directory)

    def _front(self, core: Core, directory: Path) -> tuple[Servers, FdHandover, Readings]:
        """What clients and scrapers meet; nothing of it is started."""
        meter = CallMeter(methods=METHODS, clock=self._clock)
        limits = self._client_limits(core)
        calls = BlockCalls(service=core.service, limits=limits, server_epoch=self._server_epoch)
        requests = RequestLimits(
            keys_max=limits.keys_max, message_nbytes_max=limits.message_nbytes_max
        )
        tiers = LocalTiers(core.ram, core.nvme)
        streams = Streams(limits=stream_limits(self._settings), clock=self._clock)
        blocks = BlockCacheServicer(calls, RemoteCalls(_remote_service(core, streams)))
        admin = AdminServicer(service=core.service, tiers=tiers, server_epoch=self._server_epoch)
        server = Servers(
            Front(blocks, admin, meter, requests, call_limits(self._settings)),
            remote_admin=RemoteAdminServicer(admin, core.sessions),
            remote_listen=self._settings.remote.listen,
            beyond_loopback=self._settings.remote.insecure_beyond_loopback,
        )
        sockets = CallSockets(calls=calls, sessions=core.sessions, meter=meter, limits=requests)
        mode = self._settings.server.socket_mode
        handover = FdHandover(path=directory / FD_SOCKET_NAME, mode=mode, opener=sockets)
        sockets.sender = handover
        core.sessions.sender = sockets
        readings = Readings(
            service=core.service,
            tiers=tiers,
            doors=Doors(meter, handover, streams),
            loop_lag=Histogram(DURATION_BOUNDS_S),
            facts=metric_facts(self._settings),
        )
        return server, handover, readings

    def _client_limits(self, core: Core) -> ClientLimits:
        settings = self._settings
        return ClientLimits(
            keys_max=settings.limits.keys_max,
            block_nbytes_max=min(settings.limits.block_nbytes_max, core.ram.block_nbytes_max),
            staging_nbytes_max=settings.sessions.staging_nbytes_max,
            lease_ttl_s=settings.leases.ttl_s,
            session_timeout_s=settings.sessions.timeout_s,
            message_nbytes_max=settings.limits.message_nbytes_max,
        )


def _commits(
    settings: Settings,
    residency: Residency,
    room: RoomMaker,
    transfers: Transfers,
    nvme: NvmeSide | None,
) -> Commits:
    return Commits(
        residency=residency,
        room=room,
        transfers=transfers,
        admission=admission_policy(settings.ram.admission)(),
        demotion=nvme.demotion if nvme else None,
    )


def _wishes(
    settings: Settings,
    residency: Residency,
    clock: Clock,
    source: random.Random,
    nvme: NvmeSide | None,
) -> Wishes:
    limits = pin_limits(settings)
    pins = RetentionPins(residency=residency, clock=clock, source=source, limits=limits)
    residency.retainer = pins
    changes = ChangeLog(
        residency=residency,
        clock=clock,
        # Those of two daemons must not meet.
        first=(source.getrandbits(31) | 1) << 32,
        limits=watch_limits(settings),
    )
    return Wishes(pins, changes, nvme.prefetching if nvme else None)


def _manager(
    residency: Residency,
    leases: Leases,
    room: RoomMaker,
    wishes: Wishes,
    nvme: NvmeSide | None,
) -> TierManager:
    return TierManager(
        residency=residency,
        leases=leases,
        removal=nvme.removal if nvme else Removal(residency=residency, room=room),
        wishes=wishes,
        promotion=nvme.promotion if nvme else None,
    )


def _remote_service(core: Core, streams: Streams) -> RemoteService:
    removal = core.service.manager.removal
    sending = Sending(residency=core.residency, ram=core.ram, removal=removal)
    return RemoteService(service=core.service, sending=sending, streams=streams, ram=core.ram)


async def _all(*works: Coroutine[Any, Any, None]) -> None:
    """Runs them until one fails."""
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


async def _tell_health(server: Servers, nvme: NvmeSide | None) -> None:
    """Tells whether nvme is well, whenever that changes."""
    told = None
    while nvme is not None:
        well = any(not directory.sick for directory in nvme.tier.stats().directories)
        if well != told:
            told = well
            await server.say_nvme(well=well)
        await asyncio.sleep(_HEALTH_PERIOD_S)


def _cannot_listen(directory: Path, error: Exception) -> FailedPreconditionError:
    if isinstance(error, FailedPreconditionError):
        return FailedPreconditionError(str(error))
    msg = f"cannot listen in {directory}: {error}; name another --runtime-dir"
    return FailedPreconditionError(msg)


@contextmanager
def _held(directory: Path) -> Iterator[Path]:
    """A name of a directory that stays its own when another takes its place: who ends must not
    unlink, nor let gRPC unlink, the sockets of a daemon that serves there by then."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _unlink_sockets(directory: Path) -> None:
    for name in (SOCKET_NAME, FD_SOCKET_NAME):
        (directory / name).unlink(missing_ok=True)

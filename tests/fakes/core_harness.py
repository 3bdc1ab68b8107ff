"""The daemon without its network: everything below `rpc/` on a clock that a test moves by hand."""

import asyncio
import hashlib
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.config import parse
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.core.results import AckLevel, CommitStatus, GroupKind, RenewStatus
from kvkeep_server.daemon import Core, build_core
from kvkeep_server.service.commit_orders import CommitOrder
from kvkeep_server.service.namespaces import OpenedNamespace
from kvkeep_server.service.sessions import HelloFacts, Session, Welcome
from kvkeep_server.service.spec import GroupSpec, NamespaceSpec
from kvkeep_server.tiering.manager import Grant, Prefix, ReadOrder
from kvkeep_server.tiering.removal import Removed
from kvkeep_server.tiering.transfers import CopyIn
from kvkeep_server.tiers.nvme.files import DiskFiles, Files

MIB = 1 << 20
MEMORY = MemoryLimit(8 << 30, 8 << 30, "test")
RUN_S = 60.0
T = TypeVar("T")


@dataclass(slots=True)
class FakeClock:
    """A clock that stands until it is told."""

    now_s: float = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1.7e9 + self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def keys_of(name: object, count: int, nbytes: int = 32) -> list[bytes]:
    """Keys of a chain with that name; equal names give equal chains, of any length."""
    return [hashlib.sha512(f"{name}/{i}".encode()).digest()[:nbytes] for i in range(count)]


def block_of(key: bytes, nbytes: int = 4096, salt: bytes = b"") -> bytes:
    """Bytes that only this key and salt have."""
    seed = int.from_bytes(hashlib.sha256(key + salt).digest()[:8], "little")
    return np.random.Generator(np.random.PCG64(seed)).bytes(nbytes)


def hello(staging_nbytes: int = MIB, **changes: Any) -> HelloFacts:
    """What a sane client says."""
    values: dict[str, Any] = {
        "client_name": "test",
        "layout_versions": (2,),
        "staging_nbytes": staging_nbytes,
        "credential": "",
        "uid": 0,
        "gid": 0,
        "pid": 0,
    }
    return HelloFacts(**(values | changes))


def close_offers(welcome: Welcome) -> Welcome:
    """Does what the fd socket does when it has sent the descriptors."""
    for offer in welcome.fds:
        os.close(offer.fd)
    return welcome


def full(name: str = "kv", block_nbytes: int = 4096, tokens: int = 16) -> GroupSpec:
    return GroupSpec(name, GroupKind.FULL, tokens, block_nbytes)


def spec(**changes: Any) -> NamespaceSpec:
    """A sane specification."""
    block_nbytes = changes.pop("block_nbytes", 4096)
    values: dict[str, Any] = {
        "tenant": "t",
        "model": "mistralai/Mistral-7B-Instruct-v0.2",
        "weights_fingerprint": "sha256:1",
        "engine": "test",
        "layout_version": "1",
        "kv_dtype": "bfloat16",
        "hash_algorithm": "sha256",
        "hash_root": b"",
        "key_nbytes": 32,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "cp_size": 1,
        "replicated": False,
        "groups": (full(block_nbytes=block_nbytes),),
        "layout_switches": (),
        "namespace_epoch": 0,
    }
    return NamespaceSpec(**(values | changes))


@dataclass(slots=True, repr=False)
class Harness:
    """One core, one loop. `run` drives coroutines to their end; leaving checks and closes."""

    ram: str = "8MiB"
    slab: str = "1MiB"
    extra: str = ""
    seed: int = 7
    clock: FakeClock = field(default_factory=FakeClock)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    files: Callable[[], Files] = DiskFiles
    ack: AckLevel = AckLevel.RAM
    wait_s: float = 30.0
    core: Core = field(init=False)
    work: asyncio.Task[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        ram = f'size = "{self.ram}"\nslab = "{self.slab}"\nhuge_pages = false'
        settings = parse(f"[ram]\n{ram}\n{self.extra}", "test", MEMORY).settings
        self.core = build_core(
            settings,
            clock=self.clock,
            source=random.Random(self.seed),
            server_epoch=1,
            memory_limit=lambda: MEMORY,
            files=self.files,
        )
        self.run(self.core.ram.grow())
        if self.core.nvme is not None:
            self.run(self._start_nvme())

    async def _start_nvme(self) -> None:
        await self.core.nvme.start()
        self.work = asyncio.create_task(self.core.nvme.run())

    async def _stop_nvme(self) -> None:
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)
        await self.core.nvme.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, RUN_S))

    def close(self) -> None:
        """Gives back all memory and descriptors, so that thousands of these fit one process."""
        self.run(self.core.service.control.finish())
        if self.work is not None:
            self.run(self._stop_nvme())
        self.core.close()
        self.core.residency.table.close()
        self.core.ram.pool.close()
        self.loop.close()

    def check(self) -> None:
        """Every audit that there is."""
        assert self.work is None or not self.work.done(), "what goes on behind the work has ended"
        self.core.service.check()
        self.core.ram.check()
        if self.core.nvme is not None:
            columns = self.core.residency.columns
            lying = columns.nvme[columns.in_use()]
            numbers = np.unique(lying[lying != 0] >> np.uint64(32)).tolist()
            known = [n for log in self.core.nvme.tier._logs for n in log.directory.table.segments]
            assert set(numbers) <= set(known), "a record in a segment that is gone"

    def check_at_rest(self) -> None:
        """Also what holds while no commit runs: no slot is held by anything but a block."""
        self.check()
        columns = self.core.residency.columns
        ids = np.concatenate((columns.in_use(), columns.withdrawn()))
        addresses = columns.address_of(ids)
        slots = int(self.core.ram.slabs.slot_nbytes(addresses[addresses != 0]).sum())
        assert self.core.ram.slabs.used_nbytes == slots, "slots that no block has"
        assert self.core.service.commits.in_flight == 0, "commits in flight"
        assert self.core.service.commits_running == 0, "commits that run"
        self.check_checksums()

    def check_checksums(self) -> None:
        """The bytes of every block are those that its checksum was taken of."""
        columns, residency = self.core.residency.columns, self.core.residency
        ids = columns.in_use()
        for block, address in zip(ids.tolist(), columns.address_of(ids).tolist(), strict=True):
            if not address:
                continue
            space = residency.keyspaces[int(columns.keyspace[block])]
            key = columns.key_words[block].tobytes()[: space.key_nbytes]
            payload = self.core.ram.view(address, space.block_nbytes)
            assert space.checksum(key, payload) == int(columns.checksum[block])

    # --- sessions and namespaces

    async def attach(self, staging_nbytes: int = MIB) -> Session:
        welcome = close_offers(await self.core.sessions.open(hello(staging_nbytes)))
        return self.core.sessions.get(welcome.token)

    def session(self, staging_nbytes: int = MIB) -> Session:
        return self.run(self.attach(staging_nbytes))

    def open(
        self, session: Session, wanted: NamespaceSpec | None = None, ranks: Sequence[int] = ()
    ) -> OpenedNamespace:
        return self.core.service.open_namespace(session, wanted or spec(), ranks)

    # --- writing

    def lay(
        self, session: Session, opened: OpenedNamespace, blocks: Sequence[Sequence[bytes]]
    ) -> list[tuple[int, bytes, bytes]]:
        """Lays the blocks of each group into staging, one behind the other; the groups of a
        `CommitOrder`."""
        groups, at = [], 0
        for number, of_group in enumerate(blocks):
            if blocks and max(map(len, blocks)) and not len(of_group):
                continue  # without a block a group is not named
            nbytes = opened.namespace_set.spec.groups[number].block_nbytes
            stride = -(-nbytes // 64) * 64
            offsets = at + np.arange(len(of_group), dtype="<u8") * stride
            for offset, block in zip(offsets.tolist(), of_group, strict=True):
                assert len(block) == nbytes
                session.staging.buffer[offset : offset + nbytes] = block
            groups.append((number, b"", offsets.astype("<u8").tobytes()))
            at += len(of_group) * stride
        return groups

    async def seal(self, session: Session, order: CommitOrder) -> NDArray[np.uint8]:
        """A commit whose caller may be cancelled, as one on gRPC may."""
        return await asyncio.shield(self.core.service.begin_commit(session, order))

    async def commit(
        self,
        session: Session,
        opened: OpenedNamespace,
        keys: Sequence[bytes],
        groups: Sequence[tuple[int, bytes, bytes]],
        *,
        parent: bytes = b"",
        rank: int = 0,
    ) -> list[CommitStatus]:
        """One commit of blocks that lie in staging."""
        packed = b"".join(keys)
        order = CommitOrder(
            opened.spaces.index, rank, parent, packed, groups, self.ack, Hints(), 30.0
        )
        status = await self.seal(session, order)
        return [CommitStatus(s) for s in status.tolist()]

    async def store(
        self,
        session: Session,
        opened: OpenedNamespace,
        keys: Sequence[bytes],
        blocks: Sequence[bytes],
        *,
        parent: bytes = b"",
        rank: int = 0,
    ) -> list[CommitStatus]:
        """One commit of one FULL group."""
        groups = self.lay(session, opened, [blocks])
        return await self.commit(session, opened, keys, groups, parent=parent, rank=rank)

    def put(
        self,
        session: Session,
        opened: OpenedNamespace,
        keys: Sequence[bytes],
        *,
        parent: bytes = b"",
        rank: int = 0,
    ) -> list[CommitStatus]:
        """Stores `block_of` each key and rank, in all groups."""
        everywhere = [range(len(keys)) for _ in opened.namespace_set.spec.groups]
        return self.put_at(session, opened, keys, everywhere, parent=parent, rank=rank)

    def put_at(
        self,
        session: Session,
        opened: OpenedNamespace,
        keys: Sequence[bytes],
        positions: Sequence[Sequence[int]],
        *,
        parent: bytes = b"",
        rank: int = 0,
    ) -> list[CommitStatus]:
        """Stores `block_of` the keys at these positions of each group."""
        blocks = [
            [block_of(keys[at], group.block_nbytes, salt_of(rank, number)) for at in at_all]
            for (number, group), at_all in zip(
                enumerate(opened.namespace_set.spec.groups), positions, strict=True
            )
        ]
        groups = [
            (number, np.array(positions[number], "<u4").tobytes(), offsets)
            for number, _, offsets in self.lay(session, opened, blocks)
        ]
        work = self.commit(session, opened, keys, groups, parent=parent, rank=rank)
        return self.run(work)

    # --- reading

    def lookup(self, session: Session, opened: OpenedNamespace, keys: Iterable[bytes]) -> Prefix:
        packed = b"".join(keys)
        return self.core.service.lookup(session, opened.spaces.index, packed, Hints())[1]

    def acquire(
        self, session: Session, opened: OpenedNamespace, keys: Sequence[bytes], **order: Any
    ) -> Grant:
        return self.run(self.ask(session, opened, keys, **order))

    async def ask(  # noqa: PLR0913 - options of one call, all by name
        self,
        session: Session,
        opened: OpenedNamespace,
        keys: Sequence[bytes],
        *,
        ttl_s: float = 10.0,
        byte_budget: int = 0,
        skip: int = 0,
        groups: Sequence[int] = (),
    ) -> Grant:
        """An acquire by somebody who runs on the loop."""
        order = ReadOrder(session.session_id, ttl_s, byte_budget, skip, Hints(), self.wait_s)
        coming, _ = self.core.service.acquire(
            session, opened.spaces.index, b"".join(keys), groups, order
        )
        return coming if isinstance(coming, Grant) else await coming

    def release(self, session: Session, grant: Grant) -> int:
        assert grant.lease is not None
        return self.core.service.release(session, [grant.lease.lease_id])

    def renew(self, session: Session, grant: Grant, ttl_s: float = 10.0) -> RenewStatus:
        assert grant.lease is not None
        status, _ = self.core.service.renew(session, [grant.lease.lease_id], ttl_s)
        return status[0]

    def remove(
        self,
        session: Session,
        opened: OpenedNamespace,
        keys: Iterable[bytes],
        *,
        with_descendants: bool = True,
    ) -> Removed:
        work = self.core.service.remove(
            session,
            opened.spaces.index,
            b"".join(keys),
            with_descendants=with_descendants,
        )
        return self.run(work)

    def bytes_of(self, grant: Grant, column: int = 0) -> list[bytes]:
        """What a client would read under the lease."""
        needed = grant.columns[column]
        nbytes = needed.keyspace.block_nbytes
        addresses = self.core.residency.columns.address_of(needed.ids).tolist()
        return [bytes(self.core.ram.view(address, nbytes)) for address in addresses]

    def verify(self, grant: Grant, keys: Sequence[bytes]) -> None:
        """Everything that was leased is what `put` stored."""
        leased = keys[grant.first : grant.first + grant.leased]
        for column, needed in enumerate(grant.columns):
            space, of_column = needed.keyspace, leased
            if needed.positions is not None:
                of_column = [keys[at] for at in needed.positions.tolist()]
            salt = salt_of(space.rank, space.group)
            wanted = [block_of(key, space.block_nbytes, salt) for key in of_column]
            assert self.bytes_of(grant, column) == wanted


class Gate:
    """Holds copies from staging until it is opened."""

    def __init__(self, core: Core) -> None:
        self.waiting = 0
        self._open = asyncio.Event()
        self._arrived = asyncio.Semaphore(0)
        self._transfers = core.transfers
        self._copy_in = core.transfers.copy_in
        core.transfers.copy_in = self._wait_and_copy  # type: ignore[method-assign]

    async def _wait_and_copy(self, job: CopyIn) -> NDArray[np.uint64]:
        self.waiting += 1
        self._arrived.release()
        await self._open.wait()
        self.waiting -= 1
        return await self._copy_in(job)

    def open(self) -> None:
        self._open.set()

    def remove(self) -> None:
        """Copies do not pass it any more."""
        del self._transfers.copy_in  # type: ignore[method-assign]

    async def reached(self) -> None:
        """Until another copy has come."""
        await self._arrived.acquire()


def salt_of(rank: int, group: int) -> bytes:
    return b"%d/%d" % (rank, group)

"""The daemon without its network: everything below `rpc/` on a clock that a test moves by hand."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvkeep_server.config import parse
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.core.results import AckLevel, CommitStatus, GroupKind
from kvkeep_server.daemon import Core, build_core
from kvkeep_server.service.block_service import CommitOrder
from kvkeep_server.service.namespaces import GroupSpec, NamespaceSpec, OpenedNamespace
from kvkeep_server.service.sessions import HelloFacts, Session
from kvkeep_server.tiering.manager import Grant, ReadOrder

MIB = 1 << 20
MEMORY = MemoryLimit(8 << 30, 8 << 30, "test")
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
        "groups": (GroupSpec("kv", GroupKind.FULL, 16, block_nbytes),),
        "layout_switches": (),
        "namespace_epoch": 0,
    }
    return NamespaceSpec(**(values | changes))


@dataclass(slots=True)
class Harness:
    """One core, one loop. `run` drives coroutines to their end."""

    ram: str = "8MiB"
    extra: str = ""
    clock: FakeClock = field(default_factory=FakeClock)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    core: Core = field(init=False)

    def __post_init__(self) -> None:
        text = f'[ram]\nsize = "{self.ram}"\nslab = "1MiB"\nhuge_pages = false\n{self.extra}'
        settings = parse(text, "test", MEMORY).settings
        self.core = build_core(
            settings,
            clock=self.clock,
            source=random.Random(7),
            server_epoch=1,
            memory_limit=lambda: MEMORY,
        )
        self.run(self.core.ram.grow())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def close(self) -> None:
        self.core.close()
        self.loop.close()

    def session(self, staging_nbytes: int = MIB) -> Session:
        welcome = self.core.sessions.open(
            HelloFacts("test", (1,), staging_nbytes, "", 0, 0, 0)
        )
        for offer in welcome.fds:
            import os

            os.close(offer.fd)
        return self.core.sessions.get(welcome.token)

    def open(
        self, session: Session, wanted: NamespaceSpec | None = None, ranks: Sequence[int] = ()
    ) -> OpenedNamespace:
        return self.core.service.open_namespace(session, wanted or spec(), ranks)

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
        """One commit of one FULL group; the blocks are laid into staging one behind the other."""
        group = opened.namespace_set.spec.groups[0]
        stride = -(-group.block_nbytes // 64) * 64
        for i, block in enumerate(blocks):
            session.staging.buffer[i * stride : i * stride + len(block)] = block
        offsets = np.arange(len(keys), dtype="<u8") * stride
        order = CommitOrder(
            opened.spaces.index,
            rank,
            parent,
            b"".join(keys),
            [(0, b"", offsets.tobytes())],
            AckLevel.RAM,
            Hints(),
        )
        status = await self.core.service.commit(session, order)
        return [CommitStatus(s) for s in status.tolist()]

    def acquire(
        self,
        session: Session,
        opened: OpenedNamespace,
        keys: Sequence[bytes],
        *,
        ttl_s: float = 10.0,
        byte_budget: int = 0,
        skip: int = 0,
    ) -> Grant:
        order = ReadOrder(session.session_id, ttl_s, byte_budget, skip, Hints())
        grant, _ = self.core.service.acquire(
            session, opened.spaces.index, b"".join(keys), (), order
        )
        return grant

    def bytes_of(self, grant: Grant, column: int = 0) -> list[bytes]:
        """What a client would read under the lease."""
        space, ids = grant.columns[column]
        addresses = self.core.residency.columns.address[ids].tolist()
        return [bytes(self.core.ram.view(address, space.block_nbytes)) for address in addresses]

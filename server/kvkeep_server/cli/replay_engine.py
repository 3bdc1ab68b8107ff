"""Replays a trace as an engine would, and checks every byte.

A trace has no tokens and no KV. Both are derived: tokens from the ids of its blocks, bytes from
(namespace, rank, key), so that everything that is read back can be checked against what it must be.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

import kvkeep
from kvkeep_server.cli.replay_totals import Totals
from kvkeep_server.core.clock import Clock
from kvkeep_server.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest

# One commit's blocks, all ranks; the client's staging memory holds two of these.
PIECE_NBYTES = 28 << 20
# For what lies on nvme, which comes at a gigabyte a second or so: to compute it would take longer.
WAIT_S = 10.0
_KEYS_A_COMMIT_MAX = 4096
_CHAINS_REMEMBERED = 65536
_ROTATIONS = 65536

Words = npt.NDArray[np.uint64]
Answer = TypeVar("Answer")


class BlockBytes:
    """The bytes that the block of a key must have.

    A long random string, entered at a place and masked with a word that both come from a digest of
    the place and the whole key: 80 bits, so no two blocks agree, and a block in the wrong place is
    seen.

    Args:
        nbytes: Of a block.
        place: Namespace and rank.
    """

    def __init__(self, nbytes: int, place: bytes = b"") -> None:
        """See the class."""
        self.nbytes = nbytes
        self._place = place
        self._count = -(-nbytes // 8)
        self._words: Words = np.random.default_rng(2026).integers(
            0, 1 << 64, size=self._count + _ROTATIONS, dtype=np.uint64
        )
        self._scratch = np.empty(self._count, np.uint64)

    def fill(self, key: bytes, block: memoryview) -> None:
        """Writes the key's bytes into a block of `nbytes`."""
        np.copyto(np.frombuffer(block, np.uint8), self._expected(key))

    def is_exact(self, key: bytes, block: memoryview) -> bool:
        """True when every byte of the block is the key's."""
        if block.nbytes != self.nbytes:
            return False
        return np.array_equal(np.frombuffer(block, np.uint8), self._expected(key))

    def _expected(self, key: bytes) -> npt.NDArray[np.uint8]:
        """The bytes, valid until the next call."""
        digest = hashlib.blake2b(key, digest_size=16, key=self._place).digest()
        first = int.from_bytes(digest[:8], "little") % _ROTATIONS
        mask = np.uint64(int.from_bytes(digest[8:], "little"))
        np.bitwise_xor(self._words[first : first + self._count], mask, out=self._scratch)
        return self._scratch.view(np.uint8)[: self.nbytes]


class TraceKeys:
    """Chain hashes for the blocks of a trace: 512 / (tokens a block) for each of its own.

    The chains that were used last are remembered, so that equal prefixes are hashed once and memory
    stays bounded.

    Args:
        hasher: Names the blocks; its `block_tokens` divide 512.
    """

    def __init__(self, hasher: "kvkeep.chain_hash.Hasher") -> None:
        """See the class."""
        self._hasher = hasher
        self._known: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def of(self, request: TraceRequest) -> bytes:
        """The packed keys of a request's full blocks."""
        size, parent, parts = self._hasher.key_nbytes, b"", []
        for block in request.blocks:
            keys = self._keys(parent, block)
            parts.append(keys)
            parent = keys[-size:]
        return b"".join(parts)[: request.input_tokens // self._hasher.block_tokens * size]

    def _keys(self, parent: bytes, block: int) -> bytes:
        keys = self._known.get((parent, block))
        if keys is not None:
            self._known.move_to_end((parent, block))
            return keys
        # Tokens that no other block has behind this parent.
        tokens = np.zeros(TRACE_BLOCK_TOKENS, np.int64)
        tokens[:2] = block & 0xFFFFFFFF, block >> 32
        keys = self._known[parent, block] = self._hasher.keys(tokens, parent=parent)
        if len(self._known) > _CHAINS_REMEMBERED:
            self._known.popitem(last=False)
        return keys


class Replay:
    """Sends requests through the public client, one at a time, and keeps the totals.

    Args:
        namespace: Open, with one FULL group in front; of STATE groups a block is stored at the end
            of each prompt.
        ranks: Whose shards are stored and read.
        hasher: Names the blocks.
        clock: For the durations.
        check_one_in: Of so many hit blocks of a request the bytes of one are checked.
        ack: How far a block must have come before its store is over: "ram" or "nvme".
    """

    def __init__(
        self,
        *,
        namespace: kvkeep.Namespace,
        ranks: int,
        hasher: "kvkeep.chain_hash.Hasher",
        clock: Clock,
        check_one_in: int,
        ack: Literal["ram", "nvme"] = "ram",
    ) -> None:
        """See the class."""
        self.block_nbytes = namespace.spec.groups[0].block_nbytes
        self.totals = Totals(
            boundary_nbytes=self.block_nbytes * ranks, tokens_per_block=hasher.block_tokens
        )
        self._check_one_in = check_one_in
        self._ack = ack
        self._namespace = namespace
        self._size = hasher.key_nbytes
        self._keys = TraceKeys(hasher)
        set_id = namespace.set_id
        self._contents = [
            [
                BlockBytes(
                    group.block_nbytes, set_id + rank.to_bytes(4, "little") + bytes([number])
                )
                for number, group in enumerate(namespace.spec.groups)
            ]
            for rank in range(ranks)
        ]
        self._states = range(1, len(namespace.spec.groups))
        self._clock = clock

    def run(self, request: TraceRequest) -> None:
        """One request: use what is stored, compute and store the rest.

        Raises:
            kvkeep.KVKeepError: The daemon went away.
        """
        keys = self._keys.of(request)
        self.totals.requests += 1
        self.totals.blocks_asked += len(keys) // self._size
        try:
            self._serve(keys)
        except kvkeep.LeaseLostError:
            self.totals.leases_lost += 1
        except kvkeep.ResourceExhaustedError:
            self.totals.calls_refused += 1
        except kvkeep.DeadlineError:
            self.totals.deadlines_missed += 1

    def _serve(self, keys: bytes) -> None:
        looked_up = self._timed("lookup", lambda: self._namespace.lookup(keys))
        found, hit, wrong, from_nvme = looked_up.blocks, 0, 0, 0
        states, wrong_states = 0, 0
        with ExitStack() as held:
            if found:
                # Held until the rest is stored, so that the new blocks' parents stay.
                asked = keys[: found * self._size]
                lease = self._timed(
                    "acquire", lambda: self._namespace.acquire(asked, wait_s=WAIT_S)
                )
                held.enter_context(lease)
                hit, from_nvme = lease.leased, lease.from_nvme
                wrong = self._timed("read", lambda: self._wrong(keys, lease))
                states, wrong_states = self._check_states(keys, lease)
            self._store(keys, hit)
        # Here the lease has been seen to last: what was read counts.
        checked = -(-hit // self._check_one_in)
        self.totals.blocks_verified += checked - wrong
        self.totals.blocks_wrong += wrong
        self.totals.blocks_unchecked += hit - checked
        self.totals.blocks_from_nvme += from_nvme
        self.totals.states_verified += states - wrong_states
        self.totals.states_wrong += wrong_states
        if hit:
            self.totals.tokens_replayed += looked_up.replay_tokens

    def _wrong(self, keys: bytes, lease: "kvkeep.Acquired") -> int:
        """How many of the blocks that are checked are not exact in every rank's shard."""
        wrong = set()
        for rank, contents in enumerate(self._contents):
            views = lease.views(rank)
            for at in range(0, len(views), self._check_one_in):
                if not contents[0].is_exact(self._key(keys, at), views[at]):
                    wrong.add(at)
        return len(wrong)

    def _check_states(self, keys: bytes, lease: "kvkeep.Acquired") -> tuple[int, int]:
        """Blocks of STATE groups that are leased, all ranks, and how many are not exact."""
        found = wrong = 0
        for rank, contents in enumerate(self._contents):
            for group in self._states:
                at = lease.positions(rank, group)
                for position, view in zip(at, lease.views(rank, group), strict=True):
                    found += 1
                    wrong += not contents[group].is_exact(self._key(keys, position), view)
        return found, wrong

    def _key(self, keys: bytes, at: int) -> bytes:
        return keys[at * self._size : (at + 1) * self._size]

    def _store(self, keys: bytes, hit_blocks: int) -> None:
        step = min(_KEYS_A_COMMIT_MAX, max(1, PIECE_NBYTES // self.block_nbytes)) * self._size
        start = hit_blocks * self._size
        if keys and start == len(keys) and self._states:
            start -= self._size  # a state may be gone
        for at in range(start, len(keys), step):
            piece = keys[at : at + step]
            parent = keys[at - self._size : at] if at else None
            end = at + len(piece) == len(keys)
            results = [
                self._timed("store", self._storing(piece, parent, rank, at_end=end))
                for rank in range(len(self._contents))
            ]
            # A block is of use with all of its shards.
            self.totals.blocks_stored += min(stored for stored, _ in results)
            refused = max(refused for _, refused in results)
            self.totals.blocks_refused += refused
            if refused:
                # What follows has lost its parent.
                self.totals.blocks_refused += (len(keys) - at - len(piece)) // self._size
                return

    def _storing(
        self, piece: bytes, parent: bytes | None, rank: int, *, at_end: bool
    ) -> Callable[[], tuple[int, int]]:
        """Stores one piece; gives the numbers of FULL blocks that are new and that were refused."""
        contents, last = self._contents[rank], len(piece) // self._size - 1
        states = {group: [last] for group in self._states} if at_end else {}

        def store() -> tuple[int, int]:
            with self._namespace.store(
                piece, parent_key=parent, rank=rank, positions=states, ack=self._ack
            ) as storing:
                for group in storing.groups:
                    at, views = storing.new_of(group), storing.group_views(group)
                    for position, view in zip(at, views, strict=True):
                        contents[group].fill(self._key(piece, position), view)
                status = storing.commit().status
                new = [status[at] for at in storing.new]
                stored = new.count(kvkeep.CommitStatus.STORED)
                there = new.count(kvkeep.CommitStatus.ALREADY_STORED)
                return stored, len(new) - stored - there

        return store

    def _timed(self, what: str, call: Callable[[], Answer]) -> Answer:
        begin_s = self._clock.monotonic_s()
        answer = call()
        self.totals.latencies[what].add(self._clock.monotonic_s() - begin_s)
        return answer


def replay_spec(
    *,
    hasher: "kvkeep.chain_hash.Hasher",
    block_nbytes: int,
    ranks: int,
    names: Sequence[str],
    states: Sequence[kvkeep.Group] = (),
) -> kvkeep.NamespaceSpec:
    """The namespace of a replay.

    Args:
        hasher: Names the blocks.
        block_nbytes: Of one block of one rank.
        ranks: Of tensor parallelism.
        names: Tenant and model.
        states: STATE groups beside the FULL one.
    """
    tenant, model = names
    return kvkeep.NamespaceSpec(
        tenant=tenant,
        model=model,
        weights_fingerprint="generated bytes",
        engine="kvkeep replay",
        layout_version="1",
        kv_dtype="uint8",
        tp_size=ranks,
        hash_algorithm=hasher.algorithm,
        hash_root=hasher.root,
        key_nbytes=hasher.key_nbytes,
        groups=[
            kvkeep.Group.full(
                "kv", tokens_per_block=hasher.block_tokens, block_nbytes=block_nbytes
            ),
            *states,
        ],
    )

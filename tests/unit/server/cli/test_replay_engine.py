"""The replay against a namespace in a dict: what it stores, checks and counts."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import kvkeep
from kvkeep import chain_hash
from kvkeep_server.cli import replay_engine
from kvkeep_server.cli.replay_engine import BlockBytes, Replay, TraceKeys, replay_spec
from kvkeep_server.cli.replay_totals import Latencies, summed
from kvkeep_server.sim.trace import Trace, TraceRequest

TOKENS, NBYTES = 128, 1003
HASHER = chain_hash.KvkeepBlake2b(TOKENS)


class CountingClock:
    """Each reading is one second later."""

    def __init__(self):
        self._now_s = 0.0

    def monotonic_s(self):
        self._now_s += 1.0
        return self._now_s

    def wall_s(self):
        raise AssertionError("a replay needs no wall clock")


class FakeLease:
    """A context manager that fails at its end if the namespace says so."""

    def __init__(self, namespace, keys):
        self.leased = len(keys)
        self.from_nvme = min(namespace.on_nvme, len(keys))
        self._namespace = namespace
        self._keys = keys

    def views(self, rank):
        shard = self._namespace.shards[rank]
        return [memoryview(shard[key]).toreadonly() for key in self._keys]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None and self._namespace.failure is not None:
            raise self._namespace.failure


class DictNamespace:
    """Keeps at most `limit` blocks a rank, never evicts, and forgets on request."""

    def __init__(self, ranks=1, limit=10_000):
        self.spec = replay_spec(
            hasher=HASHER, block_nbytes=NBYTES, ranks=ranks, names=("replay", "test")
        )
        self.set_id = b"s" * 16
        self.shards = [{} for _ in range(ranks)]
        self.limit = limit
        self.on_nvme = 0
        self.acks = set()
        self.parents = []
        self.failure = None

    def _leading(self, keys):
        split = [keys[at : at + 32] for at in range(0, len(keys), 32)]
        there = [all(key in shard for shard in self.shards) for key in split]
        return split, there.index(False) if False in there else len(split)

    def lookup(self, keys):
        return SimpleNamespace(blocks=self._leading(keys)[1], replay_tokens=0)

    def acquire(self, keys, *, wait_s):
        assert wait_s > 0
        split, count = self._leading(keys)
        return FakeLease(self, split[:count])

    @contextmanager
    def store(self, keys, *, parent_key=None, rank=0, positions=None, ack="ram"):
        assert not positions
        self.parents.append(parent_key)
        self.acks.add(ack)
        blocks = self.shards[rank]
        split, _ = self._leading(keys)
        new = [i for i, key in enumerate(split) if key not in blocks]
        buffers = [bytearray(NBYTES) for _ in new]

        def commit():
            room = self.limit - len(blocks)
            for i, buffer in list(zip(new, buffers, strict=True))[:room]:
                blocks[split[i]] = buffer
            status = [kvkeep.CommitStatus.ALREADY_STORED] * len(split)
            for nth, i in enumerate(new):
                refused = kvkeep.CommitStatus.REFUSED_NO_ROOM
                status[i] = kvkeep.CommitStatus.STORED if nth < room else refused
            return SimpleNamespace(status=status)

        views = [memoryview(b) for b in buffers]
        yield SimpleNamespace(
            new=new,
            groups=(0,),
            new_of=lambda _: new,
            group_views=lambda _: views,
            commit=commit,
        )


def small_trace():
    # 0-1-2, then 0-1-3 (two of three seen), then 0-1-2 again, then 4 alone.
    leaves = np.array([2, 3, 2, 4])
    zeros = np.zeros(4, dtype=np.int64)
    parents = np.array([-1, 0, 1, 1, -1])
    return Trace(parents, leaves, np.arange(4.0), zeros, zeros, zeros)


def request_of(blocks, input_tokens=None):
    tokens = 512 * len(blocks) if input_tokens is None else input_tokens
    return TraceRequest(0.0, blocks, 0, 0, -1, tokens)


def replay_of(namespace, **more):
    options = {"check_one_in": 1, **more}
    ranks = len(namespace.shards)
    return Replay(namespace=namespace, ranks=ranks, hasher=HASHER, clock=CountingClock(), **options)


@pytest.fixture
def namespace():
    return DictNamespace()


@pytest.fixture
def replay(namespace):
    return replay_of(namespace)


def run_all(replay):
    for request in small_trace().requests():
        replay.run(request)
    return replay.totals


def test_totals_of_a_trace_that_fits(replay, namespace):
    totals = run_all(replay)
    assert totals.requests == 4
    assert totals.blocks_asked == 4 * (3 + 3 + 3 + 1)
    assert totals.blocks_verified == 4 * (0 + 2 + 3 + 0) == totals.blocks_hit
    assert totals.blocks_missed == 4 * 5 == totals.blocks_stored == len(namespace.shards[0])
    assert (totals.blocks_wrong, totals.blocks_refused, totals.blocks_unchecked) == (0, 0, 0)
    assert totals.hit_ratio == 0.5
    assert totals.tokens_saved == 20 * TOKENS
    assert (totals.nbytes_read, totals.nbytes_stored) == (20 * NBYTES, 20 * NBYTES)
    counts = {step: latencies.count for step, latencies in totals.latencies.items()}
    assert counts == {"lookup": 4, "acquire": 2, "read": 2, "store": 3}
    assert totals.latencies["lookup"].total_s == 4.0


def test_every_rank_has_bytes_of_its_own_and_all_are_checked():
    namespace = DictNamespace(ranks=3)
    replay = replay_of(namespace)
    totals = run_all(replay)
    assert totals.blocks_verified == totals.blocks_stored == 20
    assert totals.nbytes_read == 3 * 20 * NBYTES
    first, _, third = namespace.shards
    key = next(iter(first))
    assert len({bytes(shard[key]) for shard in namespace.shards}) == 3
    # One rank's shard is wrong: so is the block.
    third[key][0] ^= 1
    replay.run(next(small_trace().requests()))
    assert (totals.blocks_wrong, totals.blocks_verified) == (1, 20 + 11)


def test_what_came_from_nvme_and_how_far_a_store_goes(namespace):
    replay = replay_of(namespace, ack="nvme")
    namespace.on_nvme = 5
    totals = run_all(replay)
    assert (totals.blocks_hit, totals.blocks_from_nvme) == (20, 10)
    assert namespace.acks == {"nvme"}


def test_a_pool_that_is_full_costs_hits_not_correctness(replay, namespace):
    namespace.limit = 6
    totals = run_all(replay)
    assert totals.blocks_stored == 6
    assert totals.blocks_refused == 6 + 6 + 6 + 4
    assert totals.blocks_verified == 6 + 6


@pytest.mark.parametrize("at", [0, 1, 500, NBYTES - 1])
def test_a_wrong_byte_is_counted(replay, namespace, at):
    requests = list(small_trace().requests())
    replay.run(requests[0])
    key = list(namespace.shards[0])[2]
    namespace.shards[0][key][at] ^= 0x10
    replay.run(requests[2])
    assert replay.totals.blocks_wrong == 1
    assert replay.totals.blocks_verified == 11
    assert replay.totals.blocks_hit == 12


def test_swapped_blocks_are_both_wrong(replay, namespace):
    requests = list(small_trace().requests())
    replay.run(requests[0])
    blocks = namespace.shards[0]
    first, second = list(blocks)[:2]
    blocks[first], blocks[second] = blocks[second], blocks[first]
    replay.run(requests[2])
    assert replay.totals.blocks_wrong == 2


def test_of_so_many_blocks_one_is_checked(namespace):
    replay = replay_of(namespace, check_one_in=5)
    requests = list(small_trace().requests())
    replay.run(requests[0])
    for block in namespace.shards[0].values():
        block[0] ^= 1
    replay.run(requests[2])
    totals = replay.totals
    assert (totals.blocks_wrong, totals.blocks_verified, totals.blocks_unchecked) == (3, 0, 9)


@pytest.mark.parametrize(
    ("failure", "counted"),
    [
        (kvkeep.LeaseLostError("late"), "leases_lost"),
        (kvkeep.ResourceExhaustedError("full"), "calls_refused"),
        (kvkeep.DeadlineError("slow"), "deadlines_missed"),
    ],
)
def test_what_fails_is_counted_and_its_bytes_are_not(replay, namespace, failure, counted):
    requests = list(small_trace().requests())
    replay.run(requests[0])
    for block in namespace.shards[0].values():
        block[0] ^= 1
    namespace.failure = failure
    replay.run(requests[2])
    assert getattr(replay.totals, counted) == 1
    assert (replay.totals.blocks_wrong, replay.totals.blocks_hit) == (0, 0)


def test_a_daemon_that_is_gone_ends_it(replay, namespace):
    replay.run(request_of([1]))
    namespace.failure = kvkeep.UnavailableError("gone")
    with pytest.raises(kvkeep.UnavailableError):
        replay.run(request_of([1]))


def test_long_requests_are_stored_in_pieces_with_their_parents(replay, namespace, monkeypatch):
    monkeypatch.setattr(replay_engine, "PIECE_NBYTES", 5 * NBYTES)
    replay.run(next(small_trace().requests()))
    keys = list(namespace.shards[0])
    assert len(keys) == 12
    assert namespace.parents == [None, keys[4], keys[9]]


def test_only_full_blocks_have_a_key(replay):
    replay.run(request_of([1, 2], 512 + 300))
    replay.run(request_of([7], 127))
    replay.run(request_of([], 0))
    assert replay.totals.blocks_asked == 6


def test_block_bytes_depend_on_the_whole_key_and_the_place():
    content, other_place = BlockBytes(NBYTES, b"a"), BlockBytes(NBYTES, b"b")
    block = memoryview(bytearray(NBYTES))
    key = bytes(range(32))
    content.fill(key, block)
    assert content.is_exact(key, block)
    assert not other_place.is_exact(key, block)
    for at in range(32):
        changed = key[:at] + bytes((key[at] ^ 1,)) + key[at + 1 :]
        assert not content.is_exact(changed, block)
    assert not content.is_exact(key, block[:-1])
    words = np.frombuffer(block[: NBYTES // 8 * 8], dtype=np.uint64)
    assert len(np.unique(words)) == len(words), "a shifted block would not be seen"


def test_equal_prefixes_have_equal_keys_and_others_do_not():
    keys = TraceKeys(HASHER)
    first, second = keys.of(request_of([0, 1, 2])), keys.of(request_of([0, 1, 3]))
    assert first[: 8 * 32] == second[: 8 * 32]
    assert first[8 * 32 : 9 * 32] != second[8 * 32 : 9 * 32]
    # One id behind another prefix is another block, whatever the file claims.
    assert keys.of(request_of([5, 2]))[4 * 32 :] != first[8 * 32 :]
    assert keys.of(request_of([2**64 - 1])) != keys.of(request_of([2**32 - 1]))
    assert TraceKeys(HASHER).of(request_of([0, 1, 2])) == first


def test_chains_that_were_forgotten_come_back_the_same(monkeypatch):
    monkeypatch.setattr(replay_engine, "_CHAINS_REMEMBERED", 2)
    keys = TraceKeys(HASHER)
    first = keys.of(request_of([0, 1, 2, 3]))
    keys.of(request_of([9, 8, 7]))
    assert len(keys._known) == 2
    assert keys.of(request_of([0, 1, 2, 3])) == first


def test_percentiles_are_within_five_percent():
    latencies = Latencies()
    assert latencies.percentile_s(0.5) == 0.0
    for milliseconds in range(1, 1001):
        latencies.add(milliseconds / 1000)
    assert latencies.percentile_s(0.5) == pytest.approx(0.5, rel=0.05)
    assert latencies.percentile_s(0.99) == pytest.approx(0.99, rel=0.05)
    assert latencies.percentile_s(1.0) == pytest.approx(1.0, rel=0.05)
    latencies.add(1e9)
    latencies.add(0.0)
    assert latencies.count == 1002


def test_totals_of_clients_add_up():
    parts = [run_all(replay_of(DictNamespace())) for _ in range(3)]
    total = summed(parts)
    for name in ("requests", "blocks_asked", "blocks_verified", "blocks_stored", "nbytes_read"):
        assert getattr(total, name) == 3 * getattr(parts[0], name)
    assert total.latencies["store"].count == 9
    assert parts[0].latencies["store"].count == 3

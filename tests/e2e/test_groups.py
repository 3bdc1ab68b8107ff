"""WINDOW and STATE groups through a real daemon and the client library, over both tiers."""

from __future__ import annotations

import hashlib
import random

import pytest

import kvkeep
from tests.fakes import prefix_oracle
from tests.fakes.daemon_process import running_daemon
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, connect, place

# 16 tokens a key: global KV, a window of 40 tokens, states that must be exact or can be replayed.
GROUPS = (
    kvkeep.Group.full("global", tokens_per_block=16, block_nbytes=5000),
    kvkeep.Group.window("swa", tokens_per_block=16, block_nbytes=3000, window_tokens=40),
    kvkeep.Group.state("state", tokens_per_block=32, block_nbytes=7000),
    kvkeep.Group.state(
        "mamba",
        tokens_per_block=64,
        block_nbytes=2000,
        state_mode=kvkeep.StateMode.EXACT,
    ),
)
RULES = ((0, 1, True), (3, 1, True), (1, 2, False), (1, 4, True))
LENGTH = 12


def spec(model, groups=GROUPS):
    return kvkeep.NamespaceSpec(
        model=model,
        weights_fingerprint="sha256:1",
        engine="test",
        layout_version="1",
        kv_dtype="uint8",
        hash_algorithm="sha256",
        groups=groups,
        tp_size=2,
    )


def keys_of(name):
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(LENGTH)]


def block(key, rank, group, nbytes):
    seed = hashlib.sha256(key + bytes([rank, group])).digest()
    return (seed * (nbytes // 32 + 1))[:nbytes]


def attached(daemon, way):
    return connect(place(daemon, way))


def store(namespace, keys, rank, positions, ack="ram"):
    """Stores what is new of the FULL group, and of the others at these positions."""
    with namespace.store(keys, rank=rank, positions=positions, ack=ack) as pending:
        for group in pending.groups:
            nbytes = namespace.spec.groups[group].block_nbytes
            views = pending.group_views(group)
            for at, view in zip(pending.new_of(group), views, strict=True):
                view[:] = block(keys[at], rank, group, nbytes)
    return pending.result


def verify(namespace, keys):
    """Reads all that is leased, of every group and rank, and the same without a lease."""
    blocks = 0
    with namespace.acquire(keys, wait_s=10.0, timeout_s=20.0) as acquired:
        assert acquired.leased == acquired.blocks
        for rank in range(2):
            for group, of in enumerate(namespace.spec.groups):
                at = acquired.positions(rank, group)
                views = acquired.views(rank, group)
                assert [bytes(view) for view in views] == [
                    block(keys[position], rank, group, of.block_nbytes) for position in at
                ]
                blocks += len(views)
                into = bytearray(len(at) * of.block_nbytes)
                wanted = [keys[position] for position in at]
                assert namespace.read_into(wanted, into, rank=rank, group=group) == len(at)
                assert into == b"".join(map(bytes, views))
    return acquired.blocks, blocks


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    directory = tmp_path_factory.mktemp("daemon")
    config = (
        '[ram]\nsize = "64MiB"\n[sessions]\nstaging = "8MiB"\n'
        + LISTEN
        + f'[nvme]\ndirectories = ["{directory}/nvme"]\nmax = "128MiB"\nsegment = "8MiB"\n'
    )
    with running_daemon(directory, config) as started:
        yield started


def test_look_ups_acquires_and_bytes_agree_with_the_rule(daemon, way):
    """Random stores of two ranks; the client and the daemon find what the rule says."""
    with attached(daemon, way) as client:
        namespace = client.open_namespace(spec(f"rules {way}"))
        for seed in range(40):
            source, keys = random.Random(seed), keys_of(seed)
            present = [[[False] * LENGTH for _ in range(2)] for _ in GROUPS]
            for _ in range(source.randrange(6)):
                rank, whole = source.randrange(2), source.randrange(LENGTH + 1)
                at = {n: sorted(source.sample(range(LENGTH), 4)) for n in (1, 2, 3)}
                at = {n: [p for p in own if p < whole] for n, own in at.items()}
                store(namespace, keys[:whole], rank, at)
                for number, positions in {0: range(whole), **at}.items():
                    for position in positions:
                        present[number][rank][position] = True
            case = tuple(
                prefix_oracle.Group(*rule, tuple(map(tuple, ranks)))
                for rule, ranks in zip(RULES, present, strict=True)
            )
            for length in range(1, LENGTH + 1):
                found = namespace.lookup(keys[:length])
                assert found.blocks == prefix_oracle.usable(case, length)
                replayed = found.blocks - prefix_oracle.without_replay(case, found.blocks)
                assert (found.tokens, found.replay_tokens) == (16 * found.blocks, 16 * replayed)
            assert verify(namespace, keys)[0] == found.blocks
    daemon.check_log()


def test_states_come_back_from_nvme_after_a_kill(daemon, way):
    """What is EXACT or WINDOW is acknowledged on nvme; what is replayable lives in ram only."""
    keys = keys_of("kill")
    at = {1: list(range(LENGTH)), 2: [1, 3, 11], 3: [7, 11]}
    with attached(daemon, way) as client:
        namespace = client.open_namespace(spec(f"kill {way}"))
        for rank in range(2):
            assert store(namespace, keys, rank, at, ack="nvme").stored == LENGTH
        found = namespace.lookup(keys)
        assert (found.blocks, found.replay_tokens) == (LENGTH, 0)
        assert verify(namespace, keys) == (LENGTH, 2 * (LENGTH + 3 + 1 + 1))
    daemon.kill()
    daemon.start()
    with attached(daemon, way) as client:
        namespace = client.open_namespace(spec(f"kill {way}"))
        wait_until(lambda: not client.stats().nvme.recovering, 30, "it has recovered")
        assert verify(namespace, keys) == (LENGTH, 2 * (LENGTH + 3 + 1))
        found = namespace.lookup(keys)
        assert (found.blocks, found.replay_tokens) == (LENGTH, 16 * LENGTH)
        assert namespace.lookup(keys[:9]).blocks == 8
        assert store(namespace, keys, 0, at, ack="nvme").already_stored == LENGTH - 3
    daemon.check_log()


def test_a_namespace_of_states_only(daemon, way):
    keys = keys_of("states")
    with attached(daemon, way) as client:
        namespace = client.open_namespace(spec(f"states {way}", GROUPS[3:]))
        for rank in range(2):
            assert (
                store(namespace, keys, rank, {0: [3, 7]}).status.count(kvkeep.CommitStatus.STORED)
                == 2
            )
        assert namespace.lookup(keys)[:3] == (8, 8 * 64, True)
        assert namespace.lookup(keys[:7]).blocks == 4
        assert verify(namespace, keys) == (8, 2)
        assert namespace.remove(keys).removed == 2
        assert namespace.lookup(keys).blocks == 0
    daemon.check_log()


@pytest.mark.parametrize(
    "positions", [{0: [0]}, {9: [0]}, {"1": [0]}, {1: [2, 1]}, {1: [0, 0]}, {1: [-1]}, {1: [12]}]
)
def test_positions_that_make_no_sense_are_refused(daemon, positions):
    with kvkeep.connect(daemon.runtime_dir) as client:
        namespace = client.open_namespace(spec("wrong"))
        with pytest.raises(kvkeep.InvalidArgumentError, match="positions"):
            namespace.store(keys_of("a"), rank=0, positions=positions)

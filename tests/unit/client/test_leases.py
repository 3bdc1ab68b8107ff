"""Leases: views, their end, and the reader that outlived its lease."""

from __future__ import annotations

import math
from unittest.mock import Mock

import grpc
import numpy as np
import pytest

import kvkeep
from kvkeep.leases import _Column, _of_nvme
from kvkeep.v1 import block_cache_pb2 as pb
from tests.fakes.waiting import wait_until
from tests.unit.client.conftest import BLOCK_NBYTES, chain, contents, spec, store


@pytest.fixture
def keys(namespace):
    keys = chain(4)
    store(namespace, keys)
    return keys


def page_of(daemon, key: bytes) -> int:
    row = daemon.index.row_of(daemon.opened[0].namespace_id(0), 0, key)
    return int(daemon.index.place[row])


def test_views_show_the_blocks_and_the_lease_goes_back(daemon, namespace, keys):
    with namespace.acquire([*keys, b"x" * 32]) as acquired:
        assert (acquired.blocks, acquired.leased, acquired.skipped) == (4, 4, 0)
        assert acquired.status == (kvkeep.BlockStatus.READY,) * 4 + (kvkeep.BlockStatus.MISS,)
        assert acquired.ended is kvkeep.MissReason.NEVER_SEEN
        assert acquired.ttl_s == 30
        assert daemon.leases == {acquired.lease_id}
        views = acquired.views()
        assert [bytes(view) for view in views] == contents(keys)
        assert all(view.readonly for view in views)
        array = acquired.array(2)
        assert (array.shape, array.dtype, array.flags.writeable) == ((BLOCK_NBYTES,), "u1", False)
        assert array.tobytes() == contents(keys)[2]
        assert acquired.addresses().tolist() == [page_of(daemon, key) for key in keys]
        assert acquired.exact() == 4
    wait_until(lambda: not daemon.leases, 10, "the lease comes back")
    with pytest.raises(ValueError, match="released"):
        bytes(views[0])
    with pytest.raises(kvkeep.LeaseLostError):
        acquired.views()
    acquired.release()


def test_nothing_to_lease(daemon, namespace):
    with namespace.acquire(chain(2, "unknown")) as acquired:
        assert (acquired.blocks, acquired.leased, acquired.lease_id) == (0, 0, 0)
        assert acquired.views() == []
        acquired.renew()
    assert "Release" not in daemon.calls


def test_leading_blocks_can_be_skipped(namespace, keys):
    with namespace.acquire(keys, skip_blocks=3) as acquired:
        assert (acquired.blocks, acquired.skipped, acquired.leased) == (4, 3, 1)
        assert [bytes(view) for view in acquired.views()] == contents(keys[3:])
    with namespace.acquire(keys, skip_blocks=4) as acquired:
        assert (acquired.blocks, acquired.skipped, acquired.leased) == (4, 4, 0)
        assert acquired.views() == []
    with pytest.raises(kvkeep.InvalidArgumentError, match="skip_blocks"):
        namespace.acquire(keys, skip_blocks=5)


@pytest.mark.parametrize(
    ("first", "stop", "from_nvme"),
    [(0, 10, 5), (0, 3, 0), (0, 4, 1), (4, 10, 4), (3, 5, 2), (5, 8, 1), (0, 0, 0), (9, 10, 1)],
)
def test_what_was_leased_from_nvme(first, stop, from_nvme):
    # Keys 3 to 5 and 8 to 9 lie on nvme.
    runs = [(pb.TIER_ID_RAM, 3), (pb.TIER_ID_NVME, 3), (pb.TIER_ID_RAM, 2), (pb.TIER_ID_NVME, 2)]
    runs = [pb.TierRun(tier=tier, blocks=blocks) for tier, blocks in runs]
    assert _of_nvme(runs, first, stop) == from_nvme


def test_a_budget_defers_the_rest(namespace, keys):
    with namespace.acquire(keys, byte_budget=3 * BLOCK_NBYTES) as acquired:
        assert (acquired.blocks, acquired.leased) == (4, 3)
        assert acquired.status[3] is kvkeep.BlockStatus.DEFERRED


def test_an_expired_lease_with_unchanged_slots_is_no_error(daemon, namespace, keys):
    with namespace.acquire(keys) as acquired:
        daemon.leases.clear()
        assert bytes(acquired.views()[0]) == contents(keys)[0]


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("sealed", [False, True], ids=["being written", "sealed again"])
def test_a_slot_reused_under_its_views_is_learned_on_leaving(
    daemon, namespace, keys, block, sealed
):
    chunk, page = daemon.chunks[0], page_of(daemon, keys[block])
    acquired = namespace.acquire(keys)
    daemon.leases.clear()
    chunk.reuse(page)
    if sealed:
        chunk.seal(page)
    assert acquired.exact() == block
    with pytest.raises(kvkeep.LeaseLostError, match="reused"), acquired:
        acquired.views()
    acquired.release()


def test_a_reuse_does_not_hide_the_bodys_own_error(daemon, namespace, keys):
    acquired = namespace.acquire(keys)
    daemon.chunks[0].reuse(page_of(daemon, keys[0]))
    with pytest.raises(RuntimeError, match="gpu") as failure, acquired:
        raise RuntimeError("gpu")
    assert any("reused" in note for note in failure.value.__notes__)


def test_renewing(daemon, namespace, keys):
    with namespace.acquire(keys, ttl_s=5) as acquired:
        assert acquired.ttl_s == 5
        acquired.renew(ttl_s=7)
        assert acquired.ttl_s == 7
        daemon.leases.clear()
        with pytest.raises(kvkeep.LeaseLostError):
            acquired.renew()


def test_a_short_renewal_is_a_millisecond_as_in_acquire(namespace, keys):
    with namespace.acquire(keys, ttl_s=0.0001) as acquired:
        assert acquired.ttl_s == 0.001
        acquired.renew(ttl_s=0.0001)
        assert acquired.ttl_s == 0.001


@pytest.mark.parametrize("ttl_s", [-1, math.nan, math.inf, 1e12, "1"])
def test_lives_of_leases_are_checked(daemon, namespace, keys, ttl_s):
    with pytest.raises(kvkeep.InvalidArgumentError, match=r"ttl_s is .*; allowed is 0 to 4294967"):
        namespace.acquire(keys, ttl_s=ttl_s)
    acquired = namespace.acquire(keys)
    with pytest.raises(kvkeep.InvalidArgumentError, match="ttl_s is"):
        acquired.renew(ttl_s)
    assert "Renew" not in daemon.calls


@pytest.mark.parametrize(
    "arguments",
    [
        *({"byte_budget": value} for value in (-1, 1.5, 2**64, "1")),
        *({"skip_blocks": value} for value in (-1, 1.5, None)),
    ],
    ids=repr,
)
def test_numbers_of_an_acquire_are_checked(namespace, keys, arguments):
    (field,) = arguments
    with pytest.raises(kvkeep.InvalidArgumentError, match=f"{field} is .*; allowed is 0 to "):
        namespace.acquire(keys, **arguments)


@pytest.mark.parametrize("group", [99, -1, "a", 0.0, None, []])
def test_groups_of_views_are_checked(namespace, keys, group):
    for asked in (keys, chain(1, "unknown")):
        with namespace.acquire(asked) as acquired:
            with pytest.raises(
                kvkeep.InvalidArgumentError, match=r"group is .*; allowed is (0 to 0|one of)"
            ):
                acquired.views(group=group)
            with pytest.raises(kvkeep.InvalidArgumentError, match="group is"):
                acquired.addresses(group=group)


def test_more_keys_than_a_call_may_have_are_refused_here(daemon, namespace):
    namespace._opened.limits.keys_max = 4
    assert namespace.acquire(chain(4)).blocks == 0
    calls = list(daemon.calls)
    words = "keys is '5 keys'; allowed is at most 4 keys a call.*split the call"
    with pytest.raises(kvkeep.InvalidArgumentError, match=words):
        namespace.acquire(chain(5))
    assert daemon.calls == calls


def test_renewing_what_was_released_says_so(namespace, keys):
    acquired = namespace.acquire(keys)
    acquired.release()
    with pytest.raises(kvkeep.LeaseLostError, match="given back"):
        acquired.renew()


def test_a_lease_ends_with_its_session_but_its_views_stay(daemon, namespace, keys):
    with namespace.acquire(keys) as acquired:
        views = acquired.views()
        daemon.end(daemon.only_session())
        wait_until(lambda: not acquired._opened.session.alive, 10, "the session is over")
        assert [bytes(view) for view in views] == contents(keys)
        with pytest.raises(kvkeep.LeaseLostError):
            acquired.renew()


def test_a_daemon_that_goes_away_during_the_call_has_lost_the_lease(namespace, keys, monkeypatch):
    with namespace.acquire(keys) as acquired:
        transport = acquired._opened.session.transport
        with monkeypatch.context() as patch:
            ended = kvkeep.SessionLostError("Renew: the daemon hung up: the session is over")
            patch.setattr(transport, "renew", Mock(side_effect=ended))
            with pytest.raises(kvkeep.LeaseLostError, match="acquire again"):
                acquired.renew()


def test_views_outlive_the_client(daemon):
    keys = chain(2)
    with kvkeep.connect(daemon.directory) as client:
        namespace = client.open_namespace(spec())
        store(namespace, keys)
        acquired = namespace.acquire(keys)
        array = acquired.array(1)
    assert array.tobytes() == contents(keys)[1]
    acquired.release()


def test_releases_go_together(daemon, namespace, keys):
    acquired = [namespace.acquire(keys) for _ in range(50)]
    assert len(daemon.leases) == 50
    for one in acquired:
        one.release()
        one.release()
    wait_until(lambda: not daemon.leases, 10, "the leases come back")


def test_a_lost_release_is_no_error(daemon, namespace, keys):
    daemon.fail_next("Release", grpc.StatusCode.UNAVAILABLE)
    namespace.acquire(keys).release()
    wait_until(lambda: "Release" in daemon.calls, 10, "a try")
    namespace.acquire(keys).release()
    wait_until(lambda: daemon.calls.count("Release") == 2, 10, "another try")


def test_a_chunk_that_is_not_mapped_yet_is_waited_for(daemon, namespace, monkeypatch):
    keys = chain(2)
    namespace_id = daemon.opened[0].namespace_id(0)
    chunk = daemon.add_chunk(1 << 20)
    page = daemon.put(namespace_id, 0, keys[0], contents(keys)[0], chunk_id=1)
    with namespace.acquire(keys) as acquired:
        assert bytes(acquired.views()[0]) == contents(keys)[0]
        assert acquired.addresses().tolist() == [chunk.address(page)]


def test_a_chunk_that_never_comes_gives_the_lease_back(daemon, namespace):
    keys = chain(1)
    daemon.index.insert(daemon.opened[0].namespace_id(0), 0, keys[0], 9 << 32 | 300)
    with pytest.raises(kvkeep.UnavailableError, match=r"chunks \[9\]"):
        namespace.acquire(keys, timeout_s=0.05)
    wait_until(lambda: not daemon.leases, 10, "the lease comes back")
    assert namespace.read_into(keys, bytearray(BLOCK_NBYTES)) == 0


def test_an_address_outside_of_its_chunk_is_refused(daemon, namespace):
    keys = chain(1)
    daemon.index.insert(daemon.opened[0].namespace_id(0), 0, keys[0], 2**32 - 1)
    with pytest.raises(kvkeep.KVKeepError), namespace.acquire(keys) as acquired:
        acquired.views()


def test_arrays_of_views_do_not_stop_the_release(daemon, namespace, keys):
    with namespace.acquire(keys) as acquired:
        array = np.frombuffer(acquired.views()[0], np.uint8)
    wait_until(lambda: not daemon.leases, 10, "the lease comes back")
    assert array.tobytes() == contents(keys)[0]


@pytest.mark.parametrize("ids", [[], [0], [7], [0, 1, 255], [256], [1, 256, 65_535]])
def test_the_chunks_of_addresses(ids):
    addresses = np.array([chunk << 32 | 9 for chunk in ids * 3], dtype=np.uint64)
    column = _Column(addresses.tobytes(), addresses.tobytes())
    assert column.chunk_ids() == set(ids)

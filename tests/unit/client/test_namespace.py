"""Looking up, reading and storing, against a daemon in this process."""

from __future__ import annotations

import math
import struct
import threading

import grpc
import numpy as np
import pytest

import kvkeep
from kvkeep.client import Client
from kvkeep.session import SessionSettings
from tests.fakes.in_process_daemon import FakeDaemon
from tests.fakes.waiting import wait_until
from tests.unit.client.conftest import BLOCK_NBYTES, chain, contents, spec, store


def records(daemon) -> list[tuple[int, ...]]:
    """The touch records so far, without the two sequence numbers."""
    ring = daemon.only_session().ring
    return [struct.unpack("<QIIIIIIQIBBBBQQ", ring.record(i))[1:-1] for i in range(ring.head)]


def test_what_is_stored_is_found_and_read(daemon, namespace):
    keys = chain(5)
    result = store(namespace, keys)
    assert (result.stored, result.already_stored, result.refused) == (5, 0, 0)
    assert result.status == (kvkeep.CommitStatus.STORED,) * 5
    assert namespace.lookup([*keys, b"x" * 32])[:3] == (5, 80, True)
    into = bytearray(6 * BLOCK_NBYTES)
    assert namespace.read_into([*keys, b"x" * 32], into) == 5
    assert into[: 5 * BLOCK_NBYTES] == b"".join(contents(keys))
    assert daemon.calls.count("Commit") == 1
    assert not {"Lookup", "Acquire"} & set(daemon.calls)


def test_nothing_is_stored_yet(namespace):
    assert namespace.lookup(chain(3))[:3] == (0, 0, True)
    assert namespace.lookup([])[:3] == namespace.lookup(b"")[:3] == (0, 0, True)
    assert namespace.read_into(chain(3), bytearray(3 * BLOCK_NBYTES)) == 0


def test_what_is_no_hints_is_refused(namespace):
    for call in (namespace.lookup, namespace.acquire, namespace.store):
        with pytest.raises(kvkeep.InvalidArgumentError, match="hints is 'x'"):
            call(chain(1), hints="x")


def test_lookups_and_reads_leave_touch_records(daemon, namespace):
    keys = chain(4)
    store(namespace, keys)
    namespace.lookup([*keys, b"x" * 32])
    hints = kvkeep.Hints(
        stop_reason=kvkeep.StopReason.END_TURN,
        output_tokens=9,
        sub_agent=True,
        session_id=b"abcdefghij",
        engine_hit_tokens=7,
    )
    namespace.lookup(chain(2, "other"), hints=hints)
    namespace.read_into(keys[:2], bytearray(2 * BLOCK_NBYTES))
    namespace_id = daemon.opened[0].namespace_id(0)
    rows = [daemon.index.row_of(namespace_id, 0, key) for key in keys]
    assert records(daemon) == [
        (0, 0, 5, 4, rows[3], 2, 0, 0, 0, 0, 0, 0, 0),
        (0, 0, 2, 0, 0xFFFFFFFF, 0, 7, 9, 2, 1, 0, 0, int.from_bytes(b"abcdefgh", "little")),
        (0, 0, 2, 2, rows[1], 2, 0, 0, 0, 0, 1, 0, 0),
    ]


def test_only_what_is_new_is_staged_and_sent(daemon, namespace):
    keys = chain(6)
    store(namespace, keys[:4])
    with namespace.store(keys) as second:
        assert second.new == range(4, 6)
        for key, view in zip(keys[4:], second.views, strict=True):
            view[:] = contents([key])[0]
    assert (second.result.stored, second.result.already_stored) == (2, 4)
    assert second.result.status == (2, 2, 2, 2, 1, 1)
    assert namespace.lookup(keys).blocks == 6


def test_storing_what_is_there_makes_no_call(daemon, namespace):
    keys = chain(3)
    store(namespace, keys)
    calls = len(daemon.calls)
    result = store(namespace, keys)
    assert (result.stored, result.already_stored) == (0, 3)
    assert len(daemon.calls) == calls


@pytest.mark.parametrize(("stored", "parent"), [(0, b"p" * 32), (3, None)])
def test_the_parent_of_what_is_new_is_named(directory, stored, parent):
    seen = []

    class Recording(FakeDaemon):
        def Commit(self, request, context):  # noqa: N802
            seen.append(request)
            return super().Commit(request, context)

    keys = chain(5)
    with Recording(directory), kvkeep.connect(directory) as client:
        namespace = client.open_namespace(spec())
        if stored:
            store(namespace, keys[:stored])
        store(namespace, keys, parent_key=b"p" * 32)
    assert seen[-1].parent_key == (parent or keys[stored - 1])
    assert seen[-1].keys == b"".join(keys[stored:])


def test_leaving_a_store_by_an_exception_stores_nothing(daemon, namespace):
    keys = chain(3)
    free = daemon.staging_nbytes
    with pytest.raises(RuntimeError, match="gpu"), namespace.store(keys):
        raise RuntimeError("gpu")
    assert "Commit" not in daemon.calls
    assert namespace._opened.session.staging.free_nbytes == free


def test_views_of_a_store_end_with_it(namespace):
    keys = chain(2)
    with namespace.store(keys) as pending:
        views = pending.views
        views[0][:4] = b"abcd"
    with pytest.raises(ValueError, match="released"):
        views[0][:4] = b"late"
    with pytest.raises(kvkeep.InvalidArgumentError, match="over"):
        _ = pending.views
    assert pending.commit() is pending.result


def test_late_writes_to_staging_do_not_reach_the_pool(namespace):
    keys = chain(1)
    with namespace.store(keys) as pending:
        array = np.frombuffer(pending.views[0], np.uint8)
        array[:] = 7
    array[:] = 9
    into = bytearray(BLOCK_NBYTES)
    assert namespace.read_into(keys, into) == 1
    assert set(into) == {7}


def test_a_store_larger_than_staging_names_the_way_out(daemon, namespace):
    with pytest.raises(kvkeep.InvalidArgumentError, match="store_blocks"):
        namespace.store(chain(200))
    assert namespace._opened.session.staging.free_nbytes == daemon.staging_nbytes


@pytest.mark.parametrize("count", [1, 42, 200])
def test_any_number_of_blocks_is_stored_in_pieces(namespace, count):
    keys = chain(count)
    result = namespace.store_blocks(keys, contents(keys))
    assert (result.stored, result.refused, len(result.status)) == (count, 0, count)
    into = bytearray(count * BLOCK_NBYTES)
    assert namespace.read_into(keys, into) == count
    assert into == b"".join(contents(keys))
    again = namespace.store_blocks(keys, b"".join(contents(keys)))
    assert (again.stored, again.already_stored) == (0, count)


@pytest.mark.parametrize("answered", [True, False])
def test_pieces_that_fail_leave_no_staging_behind(daemon, client, answered):
    """The first piece's commit fails while the second is filled: DeadlineError, or definitely."""
    namespace = client.open_namespace(spec())
    namespace._timeout_s = 0.2
    staging = namespace._opened.session.staging
    keys = chain(200)
    if not answered:
        gate = daemon.gates["Commit"] = threading.Event()
        with pytest.raises(kvkeep.DeadlineError):
            namespace.store_blocks(keys, contents(keys))
        # What was not begun is back, what was begun waits for the daemon's word.
        assert staging.free_nbytes >= daemon.staging_nbytes // 2
        gate.set()
    else:
        daemon.fail_next("Commit", grpc.StatusCode.RESOURCE_EXHAUSTED)
        with pytest.raises(kvkeep.ResourceExhaustedError):
            namespace.store_blocks(keys, contents(keys))
    wait_until(lambda: staging.free_nbytes == daemon.staging_nbytes, 10, "all comes back")
    namespace._timeout_s = 10
    assert namespace.store_blocks(keys, contents(keys)).refused == 0
    assert namespace.lookup(keys).blocks == 200
    assert staging.free_nbytes == daemon.staging_nbytes


def test_a_piece_under_way_is_settled_when_the_next_finds_no_room(daemon, namespace):
    namespace._timeout_s = 0.2
    staging = namespace._opened.session.staging
    keys = chain(100)
    # Room for the first piece of 42 blocks, and not for the second while that is under way.
    others = namespace.store(chain(43, "other"))
    gate = daemon.gates["Commit"] = threading.Event()
    with pytest.raises(kvkeep.ResourceExhaustedError):
        namespace.store_blocks(keys, contents(keys))
    gate.set()
    others.abort()
    wait_until(lambda: staging.free_nbytes == daemon.staging_nbytes, 10, "all comes back")
    namespace._timeout_s = 10
    assert namespace.store_blocks(keys, contents(keys)).refused == 0


def test_blocks_to_store_must_fit_the_keys(namespace):
    with pytest.raises(kvkeep.InvalidArgumentError, match="2 blocks of 10000 bytes"):
        namespace.store_blocks(chain(2), bytes(10_001))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, kvkeep.InvalidArgumentError),
        (grpc.StatusCode.UNAVAILABLE, kvkeep.UnavailableError),
        (grpc.StatusCode.NOT_FOUND, kvkeep.SessionLostError),
        (grpc.StatusCode.FAILED_PRECONDITION, kvkeep.NotSupportedError),
        (grpc.StatusCode.UNIMPLEMENTED, kvkeep.NotSupportedError),
        (grpc.StatusCode.INTERNAL, kvkeep.KVKeepError),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_status_codes_become_exceptions_with_the_daemons_sentence(daemon, namespace, code, error):
    daemon.fail_next("Acquire", code, details="the sentence")
    with pytest.raises(error, match="Acquire: the sentence"):
        namespace.acquire(chain(1))


def test_a_limit_says_when_to_try_again(daemon, namespace):
    daemon.fail_next(
        "Acquire",
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        trailing=(("kvkeep-retry-after-ms", "250"),),
    )
    with pytest.raises(kvkeep.ResourceExhaustedError) as failure:
        namespace.acquire(chain(1))
    assert failure.value.retry_after_s == 0.25


def test_the_deadline_is_kept(daemon, namespace):
    daemon.gates["Acquire"] = threading.Event()
    with pytest.raises(kvkeep.DeadlineError):
        namespace.acquire(chain(1), timeout_s=0.05)
    daemon.gates["Acquire"].set()


def test_a_staging_range_is_not_reused_before_the_daemon_is_done_with_it(daemon, namespace):
    """The first Commit misses its deadline; the same one again says when its range is free."""
    keys = chain(3)
    gate = daemon.gates["Commit"] = threading.Event()
    staging = namespace._opened.session.staging
    pending = namespace.store(keys, timeout_s=0.05)
    for key, view in zip(keys, pending.views, strict=True):
        view[:] = contents([key])[0]
    with pytest.raises(kvkeep.DeadlineError):
        pending.commit()
    taken = daemon.staging_nbytes - staging.free_nbytes
    assert taken == 3 * 12_288
    gate.set()
    wait_until(lambda: staging.free_nbytes == daemon.staging_nbytes, 10, "the range comes back")
    into = bytearray(3 * BLOCK_NBYTES)
    assert namespace.read_into(keys, into) == 3
    assert into == b"".join(contents(keys))


def test_a_definite_refusal_gives_the_range_back_at_once(daemon, namespace):
    daemon.fail_next("Commit", grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(kvkeep.InvalidArgumentError), namespace.store(chain(3)):
        pass
    assert namespace._opened.session.staging.free_nbytes == daemon.staging_nbytes


def test_ranks_and_groups_count_only_together(client):
    groups = [
        kvkeep.Group.full("a", tokens_per_block=16, block_nbytes=4096),
        kvkeep.Group.full("b", tokens_per_block=16, block_nbytes=100),
    ]
    namespace = client.open_namespace(spec(groups=groups, tp_size=2))
    keys = chain(4)

    def put(rank: int, count: int) -> None:
        with namespace.store(keys[:count], rank=rank) as pending:
            for at in pending.new:
                first = at - pending.new.start
                pending.group_views(0)[first][:] = contents([keys[at]], 4096)[0]
                pending.group_views(1)[first][:] = contents([keys[at]], 100)[0]

    put(0, 4)
    assert namespace.lookup(keys).blocks == 0
    put(1, 3)
    assert namespace.lookup(keys).blocks == 3
    into = bytearray(400)
    assert namespace.read_into(keys, into, rank=0, group=1) == 4
    assert into == b"".join(contents(keys, 100))
    assert namespace.read_into(keys, bytearray(4 * 4096), rank=1) == 3
    with pytest.raises(kvkeep.InvalidArgumentError, match="rank"):
        namespace.read_into(keys, bytearray(4 * 4096))
    with pytest.raises(kvkeep.InvalidArgumentError, match="group"):
        namespace.read_into(keys, bytearray(400), rank=0, group=2)


def test_only_local_ranks_are_needed(client):
    whole = client.open_namespace(spec(tp_size=2))
    half = client.open_namespace(spec(tp_size=2), local_ranks=[1])
    keys = chain(2)
    store(half, keys)
    assert half.lookup(keys).blocks == 2
    assert whole.lookup(keys).blocks == 0
    with pytest.raises(kvkeep.InvalidArgumentError, match="0 to 1"):
        client.open_namespace(spec(tp_size=2), local_ranks=[2])


def test_other_specifications_miss_and_are_named(client, namespace):
    keys = chain(2)
    store(namespace, keys)
    other = client.open_namespace(spec(kv_dtype="fp8_e4m3"))
    assert other.lookup(keys).blocks == 0
    assert other.near_misses == [(namespace.set_id, ("kv_dtype",))]
    assert len(namespace.set_id) == 16


def test_an_unknown_ack_level_is_refused(namespace):
    with pytest.raises(kvkeep.InvalidArgumentError, match="ram, nvme or remote"):
        namespace.store(chain(1), ack="disk")


@pytest.mark.parametrize("parent", [b"", b"x" * 31])
def test_a_parent_is_a_whole_key(namespace, parent):
    with pytest.raises(kvkeep.InvalidArgumentError, match="parent_key"):
        namespace.store(chain(1), parent_key=parent)


def test_a_machine_that_reorders_loads_reads_under_a_lease(daemon):
    settings = SessionSettings(
        runtime_dir=daemon.directory, client_name="", staging_nbytes=0, timeout_s=10
    )
    with Client(settings, machine="aarch64") as client:
        client.attach()
        namespace = client.open_namespace(spec())
        keys = chain(4)
        store(namespace, keys)
        into = bytearray(5 * BLOCK_NBYTES)
        assert namespace.read_into([*keys, b"x" * 32], into) == 4
        assert into[: 4 * BLOCK_NBYTES] == b"".join(contents(keys))
        each = [bytearray(BLOCK_NBYTES) for _ in keys]
        assert namespace.read_into(keys, each) == 4
        assert each == contents(keys)
        assert daemon.calls.count("Acquire") == 2
        wait_until(lambda: not daemon.leases, 10, "the leases come back")
        daemon.fail_next("Acquire", grpc.StatusCode.UNAVAILABLE)
        assert namespace.read_into(keys, into[: 4 * BLOCK_NBYTES]) == 0


def test_what_is_removed_is_not_found(daemon, namespace):
    keys = chain(4)
    store(namespace, keys)
    result = namespace.remove([keys[2], keys[3], b"x" * 32])
    assert result.status == (
        kvkeep.RemovalStatus.REMOVED,
        kvkeep.RemovalStatus.REMOVED,
        kvkeep.RemovalStatus.ABSENT,
    )
    assert result.removed == 2
    assert namespace.lookup(keys).blocks == 2
    assert store(namespace, keys).stored == 2


def test_a_removal_that_fails_says_so(daemon, namespace):
    daemon.fail_next("Remove", grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(kvkeep.UnavailableError, match="Remove"):
        namespace.remove(chain(1))
    with pytest.raises(kvkeep.InvalidArgumentError, match="32769 keys"):
        namespace.remove(b"k" * 32 * 32769)
    assert daemon.calls.count("Remove") == 1


@pytest.mark.parametrize("timeout_s", [-1, math.nan, math.inf, "2", 2**40])
def test_a_deadline_that_is_none_is_refused(namespace, timeout_s):
    keys = [b"k" * 32]
    with pytest.raises(kvkeep.InvalidArgumentError, match="timeout_s"):
        namespace.acquire(keys, timeout_s=timeout_s)
    with pytest.raises(kvkeep.InvalidArgumentError, match="timeout_s"):
        namespace.store(keys, timeout_s=timeout_s)
    with pytest.raises(kvkeep.InvalidArgumentError, match="timeout_s"):
        namespace.remove(keys, timeout_s=timeout_s)
    with namespace.store(keys) as store:
        with pytest.raises(kvkeep.InvalidArgumentError, match="timeout_s"):
            store.commit(timeout_s)
        store.views[0][:] = bytes(len(store.views[0]))
    assert store.result.stored == 1

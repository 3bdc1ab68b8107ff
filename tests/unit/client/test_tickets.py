"""Submitted calls: each ticket ends, in time, right or without a hit; nothing waits."""

import select
import threading
import time

import grpc
import numpy as np
import pytest

import kvkeep
from kvkeep import tickets
from kvkeep.leases import Acquired
from kvkeep.session import Session
from kvkeep.tickets import AcquireTicket, TicketState
from tests.fakes.waiting import wait_until
from tests.unit.client.conftest import chain, contents, spec, store

READY, NOTHING, FAILED = TicketState.READY, TicketState.NOTHING, TicketState.FAILED


@pytest.fixture
def keys(namespace):
    keys = chain(8)
    store(namespace, keys)
    return keys


def collected(client, *wanted, wait_s=10.0):
    """All that `poll` hands out until these are done, as a loop on the descriptor has it."""
    told, until_s = [], time.monotonic() + wait_s
    while not all(ticket.done and ticket in told for ticket in wanted):
        assert time.monotonic() < until_s, [ticket.state for ticket in wanted]
        select.select([client.fileno()], [], [], 1.0)
        told += client.poll()
    return told


def test_an_acquire_is_collected_later(client, daemon, namespace, keys):
    ticket = namespace.submit_acquire(keys)
    assert collected(client, ticket) == [ticket]
    assert (ticket.state, ticket.error) == (READY, None)
    with ticket.acquired as acquired:
        assert [bytes(view) for view in acquired.views()] == contents(keys)
    wait_until(lambda: not daemon.leases, 5.0, "the lease is given back")
    assert client.poll() == []


def test_nothing_is_there(client, namespace):
    ticket = namespace.submit_acquire(chain(3, "unknown"))
    collected(client, ticket)
    assert ticket.state is NOTHING
    assert ticket.acquired.ended is kvkeep.MissReason.NEVER_SEEN
    empty = namespace.submit_acquire([])
    collected(client, empty)
    assert empty.state is NOTHING


def test_a_commit_is_collected_later(client, namespace):
    keys = chain(5)
    with namespace.store(keys) as pending:
        for view, block in zip(pending.views, contents(keys), strict=True):
            view[:] = block
        ticket = pending.submit_commit()
        with pytest.raises(kvkeep.InvalidArgumentError, match="over"):
            pending.submit_commit()
        with pytest.raises(kvkeep.InvalidArgumentError, match="over"):
            pending.views  # noqa: B018 - it raises
    assert collected(client, ticket) == [ticket]
    assert (ticket.state, ticket.result.stored) == (READY, 5)
    assert namespace.lookup(keys).blocks == 5
    staging = client._keeper.require().staging
    assert staging.free_nbytes == staging.nbytes
    again = namespace.store(keys).submit_commit()
    assert client.poll() == [again]
    assert (again.state, again.result.already_stored) == (READY, 5)


def test_a_commits_room_comes_back_also_without_a_poll(client, daemon, namespace):
    keys = chain(5)
    daemon.gates["Commit"] = threading.Event()
    pending = namespace.store(keys)
    staging = client._keeper.require().staging
    ticket = pending.submit_commit(timeout_s=0.05)
    collected(client, ticket)
    assert type(ticket.error) is kvkeep.DeadlineError
    assert staging.free_nbytes < staging.nbytes
    daemon.gates["Commit"].set()
    wait_until(lambda: staging.free_nbytes == staging.nbytes, 5.0, "the late answer frees it")


def test_pieces_are_told_as_they_come(client, daemon, namespace, keys):
    daemon.late.ready_at_once = 2
    gate = daemon.gates["Await"] = threading.Event()
    ticket = namespace.submit_acquire(keys)
    seen = []
    while not ticket.done:
        if ticket in client.poll():
            acquired = ticket.acquired
            seen.append(acquired.leased)
            views = acquired.views()
            assert [bytes(view) for view in views] == contents(keys)[: acquired.leased]
        gate.set()
    assert seen[0] == 2
    assert seen[-1] == 8
    assert seen == sorted(set(seen[:-1])) + seen[-1:]
    assert (acquired.pending, acquired.from_nvme, acquired.blocks) == (0, 6, 8)
    assert np.array_equal(acquired.array(7), np.frombuffer(contents(keys)[7], np.uint8))
    acquired.release()


def test_what_does_not_come_shortens_the_prefix(client, daemon, namespace, keys):
    daemon.late.ready_at_once, daemon.late.never_come = 2, 3
    ticket = namespace.submit_acquire(keys)
    collected(client, ticket)
    acquired = ticket.acquired
    assert (ticket.state, acquired.leased, acquired.blocks) == (READY, 5, 5)
    assert acquired.ended is kvkeep.MissReason.CORRUPT
    assert acquired.status[4:] == tuple(map(kvkeep.BlockStatus, (1, 5, 3, 3)))


def test_what_did_not_come_in_time_is_done_without(client, daemon, namespace, keys):
    daemon.late.ready_at_once = 2
    daemon.gates["Await"] = threading.Event()
    ticket = namespace.submit_acquire(keys, timeout_s=0.2)
    told = collected(client, ticket)
    assert told[-1] is ticket
    assert ticket.state is READY
    assert 2 <= ticket.acquired.leased < 8
    assert type(ticket.error) is kvkeep.DeadlineError


def test_a_window_belongs_to_the_whole(client, daemon):
    groups = [
        kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=4096),
        kvkeep.Group.window("w", tokens_per_block=16, block_nbytes=4096, window_tokens=32),
    ]
    namespace = client.open_namespace(spec(groups=groups))
    opened, keys = namespace._require(), chain(6)
    for key in keys:
        for group in (0, 1):
            namespace_id = opened._namespace_ids[0]
            daemon.put(namespace_id, group, key, bytes(4096))
    daemon.late.ready_at_once, daemon.late.never_come = 2, 1
    ticket = namespace.submit_acquire(keys)
    assert collected(client, ticket) == [ticket]
    assert ticket.state is NOTHING
    wait_until(lambda: not daemon.leases, 5.0, "the lease is given back")


def test_a_deadline_ends_it_and_a_late_lease_goes_back(client, daemon, namespace, keys):
    gate = daemon.gates["Acquire"] = threading.Event()
    ticket = namespace.submit_acquire(keys, timeout_s=0.1)
    began_s = time.monotonic()
    collected(client, ticket)
    assert 0.05 < time.monotonic() - began_s < 5
    assert (ticket.state, type(ticket.error)) == (FAILED, kvkeep.DeadlineError)
    assert str(ticket.error) == "Acquire: no answer in time"
    gate.set()
    wait_until(lambda: "Release" in daemon.calls and not daemon.leases, 5.0, "it goes back")


def test_a_waiting_callers_late_lease_goes_back_too(client, daemon, namespace, keys):
    gate = daemon.gates["Acquire"] = threading.Event()
    with pytest.raises(kvkeep.DeadlineError):
        namespace.acquire(keys, timeout_s=0.1)
    gate.set()
    wait_until(lambda: "Acquire" in daemon.calls and not daemon.leases, 5.0, "it goes back")


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_cancelled_one_is_not_told_and_keeps_nothing(client, daemon, namespace, keys, when):
    gate = daemon.gates["Acquire"] = threading.Event()
    if when != "before":
        gate.set()
    ticket = namespace.submit_acquire(keys)
    if when == "between":
        wait_until(lambda: daemon.leases, 5.0, "it is leased")
    elif when == "after":
        collected(client, ticket)
        ticket.acquired.release()
    ticket.cancel()
    ticket.cancel()
    assert (ticket.state is TicketState.CANCELLED) == (when != "after")
    gate.set()
    other = namespace.submit_acquire(keys)
    assert collected(client, other) == [other]
    other.acquired.release()
    wait_until(lambda: not daemon.leases, 5.0, "nothing is leased")


def test_refusals_are_the_tickets(client, daemon, namespace, keys):
    trailing = (("kvkeep-retry-after-ms", "70"),)
    daemon.fail_next("Acquire", grpc.StatusCode.RESOURCE_EXHAUSTED, trailing=trailing)
    ticket = namespace.submit_acquire(keys)
    collected(client, ticket)
    assert (ticket.state, ticket.error.retry_after_s) == (FAILED, 0.07)
    assert str(ticket.error) == "Acquire: planted"
    with pytest.raises(kvkeep.InvalidArgumentError):
        namespace.submit_acquire(keys, skip_blocks=9)
    with pytest.raises(kvkeep.InvalidArgumentError):
        namespace.submit_acquire(keys, timeout_s=-1)


def test_a_lost_session_ends_its_tickets(client, daemon, namespace, keys):
    daemon.gates["Acquire"] = daemon.gates["Commit"] = threading.Event()
    pending = [namespace.submit_acquire(keys), namespace.store(chain(2, "b")).submit_commit()]
    daemon.end(daemon.only_session())
    collected(client, *pending)
    assert [ticket.state for ticket in pending] == [FAILED] * 2
    assert {type(ticket.error) for ticket in pending} == {kvkeep.SessionLostError}
    daemon.gates["Acquire"].set()
    wait_until(lambda: client.health is kvkeep.Health.ANSWERS, 5.0, "it attaches again")
    ticket = namespace.submit_acquire(keys)
    collected(client, ticket)
    assert ticket.state is READY


def test_without_a_daemon_tickets_have_failed_already(client, daemon, namespace, keys):
    daemon.stop()
    wait_until(lambda: client.health is kvkeep.Health.AWAY, 5.0, "it is gone")
    ticket = namespace.submit_acquire(keys)
    assert (ticket.state, type(ticket.error)) == (FAILED, kvkeep.UnavailableError)
    assert client.poll() == [ticket]


def test_a_daemon_that_comes_back_while_it_is_asked(client, namespace, keys, monkeypatch):
    """It was away when the ticket was made, and there when the reason was looked for."""
    with monkeypatch.context() as patch:
        patch.setattr(type(namespace), "_live", lambda _: None)
        ticket = namespace.submit_acquire(keys, timeout_s=5)
    assert ticket.state is TicketState.FAILED
    assert isinstance(ticket.error, kvkeep.UnavailableError)
    assert client.poll() == [ticket]


def test_another_epoch_is_not_waited_for(client, namespace, keys):
    opened = namespace._require()
    opened.session.over.add(opened.set_index)
    ticket = namespace.submit_acquire(keys)
    assert (ticket.state, type(ticket.error)) == (FAILED, kvkeep.UnavailableError)
    namespace.open_present_epoch()
    ticket = namespace.submit_acquire(keys)
    collected(client, ticket)
    assert ticket.state is READY


def test_a_silent_daemon_is_not_asked_until_it_answers(client, daemon, namespace, keys, caplog):
    caplog.set_level("INFO", "kvkeep")
    frozen = threading.Event()
    daemon.gates.update(dict.fromkeys(("Acquire", "Release"), frozen))
    assert client.health is kvkeep.Health.ANSWERS
    first = namespace.submit_acquire(keys, timeout_s=0.05)
    collected(client, first)
    wait_until(
        lambda: (
            namespace.submit_acquire(keys, timeout_s=0.05).done
            and client.health is kvkeep.Health.SILENT
        ),
        5.0,
        "calls fail at once",
    )
    assert namespace.lookup(keys) == kvkeep.results.NOTHING_FOUND
    assert namespace.read_into(keys, bytearray(8 * 10_000)) == 0
    asked = daemon.calls.count("Acquire")
    for _ in range(10):
        with pytest.raises(kvkeep.UnavailableError, match="does not answer"):
            namespace.acquire(keys)
    with pytest.raises(kvkeep.UnavailableError, match="does not answer"):
        namespace.store(chain(1, "b"))
    assert daemon.calls.count("Acquire") == asked
    # One probe, however long it takes.
    assert daemon.calls.count("Release") == 1
    frozen.set()
    wait_until(lambda: client.health is kvkeep.Health.ANSWERS, 2.0, "it is asked again")
    assert namespace.lookup(keys).blocks == 8
    wait_until(lambda: len(caplog.records) >= 2, 5.0, "both changes are logged")
    assert [record.message for record in caplog.records] == [
        "the daemon does not answer: calls fail at once until it does",
        "the daemon answers again",
    ]


def test_a_daemon_that_never_answers_again_gets_another_session(
    client, daemon, namespace, keys, caplog, monkeypatch
):
    """Its fd socket lives, and nothing else does."""
    monkeypatch.setattr(Session, "silence_max_s", 0.5)
    frozen = threading.Event()
    daemon.gates.update(dict.fromkeys(("Acquire", "Release"), frozen))
    before = client._keeper.current()
    for _ in range(3):
        with pytest.raises((kvkeep.UnavailableError, kvkeep.DeadlineError)):
            namespace.acquire(keys, timeout_s=0.1)
    wait_until(lambda: client.health is kvkeep.Health.SILENT, 5.0, "it is silent")
    wait_until(lambda: client._keeper.current() not in {None, before}, 5.0, "there is another")
    assert not before.alive
    frozen.set()
    with namespace.acquire(keys) as acquired:
        assert acquired.leased == len(keys)


def test_tickets_are_bounded(client, daemon, namespace, keys, monkeypatch):
    monkeypatch.setattr(tickets, "TICKETS_OPEN_MAX", 3)
    daemon.gates["Acquire"] = threading.Event()
    pending = [namespace.submit_acquire(keys) for _ in range(3)]
    with pytest.raises(kvkeep.ResourceExhaustedError, match="3 tickets are open") as refused:
        namespace.submit_acquire(keys)
    assert refused.value.retry_after_s > 0
    store_ = namespace.store(chain(1, "b"))
    with pytest.raises(kvkeep.ResourceExhaustedError):
        store_.submit_commit()
    assert store_.commit().stored == 1
    pending[0].cancel()
    pending[0] = namespace.submit_acquire(keys)
    daemon.gates["Acquire"].set()
    collected(client, *pending)
    assert all(ticket.state is READY for ticket in pending)


def test_a_poll_hands_out_no_more_than_asked_for(client, daemon, namespace, keys):
    pending = {namespace.submit_acquire(keys) for _ in range(5)}
    told = []
    while len(told) < 5:
        select.select([client.fileno()], [], [], 5.0)
        some = client.poll(2)
        assert len(some) <= 2
        told += some
    assert set(told) == pending


def test_the_descriptor_is_quiet_when_there_is_nothing(client, namespace, keys):
    ticket = namespace.submit_acquire(keys)
    collected(client, ticket)
    client.poll()
    assert select.select([client.fileno()], [], [], 0.05)[0] == []
    # What another thread read for us is told as well.
    ticket = namespace.submit_acquire(keys)
    with namespace.acquire(keys):
        pass
    assert collected(client, ticket) == [ticket]


def test_a_loop_that_only_waits_learns_of_deadlines(client, daemon, namespace, keys):
    daemon.gates["Acquire"] = threading.Event()
    client.fileno()
    ticket = namespace.submit_acquire(keys, timeout_s=0.1)
    assert select.select([client.fileno()], [], [], 5.0)[0]
    client.poll()
    select.select([client.fileno()], [], [], 5.0)
    client.poll()
    assert ticket.state is FAILED


def test_memory_that_is_mapped_just_after_the_look_is_not_missed(
    client, namespace, keys, monkeypatch
):
    """A loop that only waits for the descriptor must not sleep until the deadline."""
    mapped, looks = Acquired.mapped, []

    def too_early(acquired):
        looks.append(1)
        if len(looks) > 1:
            return mapped(acquired)
        client._keeper._on_memory()  # the keeper's thread, right behind it
        return False

    monkeypatch.setattr(Acquired, "mapped", too_early)
    ticket = namespace.submit_acquire(keys, timeout_s=20.0)
    while not looks:
        assert select.select([client.fileno()], [], [], 10.0)[0]
        client.poll()
    assert select.select([client.fileno()], [], [], 1.0)[0]
    assert client.poll() == [ticket]
    assert ticket.state is READY
    ticket.acquired.release()


def test_a_deadline_that_ends_it_before_its_call_went_out(client, namespace, keys, monkeypatch):
    """Another thread polls between `admit` and the call."""
    client.fileno()
    follow = AcquireTicket.follow

    def polled_before(ticket, call):
        assert client.poll() == [ticket]
        follow(ticket, call)

    monkeypatch.setattr(AcquireTicket, "follow", polled_before)
    ticket = namespace.submit_acquire(keys, timeout_s=0.0)
    assert type(ticket.error) is kvkeep.DeadlineError
    assert client.poll() == []


def test_many_threads_submit_and_one_collects(client, namespace, keys):
    submitted, lock = [], threading.Lock()

    def work():
        for _ in range(50):
            ticket = namespace.submit_acquire(keys)
            with lock:
                submitted.append(ticket)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    told = []
    until_s = time.monotonic() + 30
    while len(told) < 200 and time.monotonic() < until_s:
        select.select([client.fileno()], [], [], 0.1)
        told += client.poll()
    for worker in workers:
        worker.join()
    assert len(set(told)) == len(told) == 200
    assert {ticket.state for ticket in told} == {READY}


def test_a_forked_childs_tickets_are_its_parents(client, daemon, namespace, keys):
    daemon.gates["Acquire"] = threading.Event()
    client.fileno()
    ticket = namespace.submit_acquire(keys)
    client._tickets.after_fork_in_child()
    assert (ticket.state, type(ticket.error)) == (FAILED, kvkeep.SessionLostError)
    assert client.poll() == []
    daemon.gates["Acquire"].set()
    again = namespace.submit_acquire(keys)
    assert collected(client, again) == [again]


def test_what_did_not_go_out_at_once_goes_out_by_itself(client, daemon, namespace, keys):
    """A daemon that takes nothing for a while, and a caller that does nothing more."""
    calls = client._keeper.require().transport.calls
    acquired = namespace.acquire(keys)
    daemon.open_to_calls.clear()
    blocked = [namespace.submit_acquire(keys * 1000, timeout_s=10.0) for _ in range(4)]
    wait_until(lambda: calls.unsent, 5.0, "the socket is full")
    acquired.release()
    assert calls.unsent > 1
    daemon.open_to_calls.set()
    wait_until(lambda: "Release" in daemon.calls, 5.0, "the lease is given back")
    collected(client, *blocked)

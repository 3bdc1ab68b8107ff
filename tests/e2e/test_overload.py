"""More clients and more calls at a time than the daemon can serve at once: each call is answered or
refused with a time to come again, none is lost."""

import sys
from collections import Counter

import grpc
import pytest

from kvkeep.v1 import block_cache_pb2 as pb
from tests.e2e.overloading_clients import overload
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.raw_session import PAGE, RawSession

CONFIG = """
[ram]
size = "64MiB"
[limits]
commits_running_max = 16
calls_running_max = 1000
session_calls_running_max = 500
"""
CLIENTS = 200
OUTSTANDING = 5000
DEADLINE_S = 60.0
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as process:
        yield process


@pytest.mark.promise("P14", gate=1, nightly=100, unit="rounds of 800 calls of 200 clients")
def test_no_call_of_200_clients_is_lost(daemon, promise_count):
    with client_processes() as start:
        clients = [start(overload, daemon.runtime_dir, n, promise_count) for n in range(CLIENTS)]
        for client in clients:
            assert client.hear() == "attached"
        for client in clients:
            client.tell("go")
        wait_s = 30.0 * promise_count
        counts = sum((Counter(client.hear(wait_s)) for client in clients), Counter())
    say(counts["completed"], counts["refused"], counts["lost"])
    assert counts["lost"] == counts["wrong"] == counts["given up"] == 0, counts
    assert counts["completed"] == 4 * CLIENTS * promise_count
    assert counts["verified"] > CLIENTS
    daemon.check_log()


def test_of_5000_calls_of_one_client_on_grpc_each_is_answered_or_refused(daemon):
    with RawSession(daemon.runtime_dir) as session, RawSession(daemon.runtime_dir) as other:
        opened = session.open_namespace(PAGE)
        key, mine = b"k" * 32, (("kvkeep-session-bin", session.token),)
        session.staging[:PAGE] = b"v" * PAGE
        assert session.commit(opened.set_index, key, [0]).stored == 1
        request = pb.AcquireRequest(set_index=opened.set_index, keys=key)
        calls = [
            session.stub.Acquire.future(request, metadata=mine, timeout=DEADLINE_S)
            for _ in range(OUTSTANDING)
        ]
        # Another client is not refused for that.
        other.open_namespace(PAGE)
        ended = Counter(call.code() for call in calls)
        answers = [call.result() for call in calls if call.code() is grpc.StatusCode.OK]
        refusals = [dict(call.trailing_metadata()) for call in calls if call.code() is REFUSED]
        completed, refused = ended.pop(grpc.StatusCode.OK), ended.pop(REFUSED, 0)
        say(completed, refused, sum(ended.values()))
        assert not ended
        assert all(answer.leased_blocks == 1 for answer in answers)
        assert all(session.block(address_of(answer), PAGE) == b"v" * PAGE for answer in answers)
        assert all("kvkeep-retry-after-ms" in refusal for refusal in refusals)
    daemon.check_log()


def say(completed, refused, lost):
    sys.stdout.write(f"completed {completed}, refused {refused}, lost {lost}\n")


def address_of(answer):
    return int.from_bytes(answer.columns[0].addresses, "little")

"""P14: beside ten thousand streams, announcements of a GiB or a hundred times too many look-ups,
the daemon takes little memory, refuses with a time to come again, and others' look-ups go on."""

import statistics
import sys
import threading
import time
from pathlib import Path

import pytest

import kvkeep
from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2
from tests.e2e.streaming_clients import spin, stream
from tests.fakes.client_process import client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.raw_session import PAGE, RawSession
from tests.fakes.waiting import wait_until

MIB = 1 << 20
# Beside pool, staging and index, which are no anonymous memory.
OWN_NBYTES_MAX = 256 * MIB
LONGER = 2.0
CALL_S = 0.05
ROUND_S = 0.3
PAUSE_S = 0.001
CONFIG = """
[ram]
size = "64MiB"
[sessions]
staging = "64KiB"
timeout = "3s"
[limits]
calls_running_max = 100
"""
OPEN_MAX = 512
# What becomes of the calls that are neither refused nor held. OK, or UNAVAILABLE of a Watch: the
# session ended before.
FLOODS = {
    "Attach without a token": "UNAUTHENTICATED",
    "Attach with a token": "FAILED_PRECONDITION, OK",
    "Attach with a hello": "OK",
    "Await without a token": "UNAUTHENTICATED",
    "Await with a token": "NOT_FOUND",
    "Watch without a token": "UNAUTHENTICATED",
    "Watch with a token": "UNAVAILABLE",
    "Lookup with a token": "OK",
    "1 GiB on gRPC": "announced",
    "1 GiB on a call socket": "hung up on",
}
KEYS = chain_keys("asked for", 8)


class Bystander:
    """Looks up in shared memory, and by a call."""

    def __init__(self, client: kvkeep.Client, session: RawSession) -> None:
        self._namespace = client.open_namespace(spec(PAGE))
        store_chain(self._namespace, KEYS)
        self._session = session
        opened = session.open_namespace(PAGE)
        self._request = pb.LookupRequest(set_index=opened.set_index, keys=b"k" * 32)

    def p99s(self) -> tuple[float, float]:
        """Of one round, seconds."""
        own, calls, until_s = [], [], time.monotonic() + ROUND_S
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            assert self._namespace.lookup(KEYS).blocks == 8
            looked_s = time.perf_counter()
            self._session.frame_call(session_pb2.CALL_METHOD_LOOKUP, self._request)
            own.append(looked_s - began_s)
            calls.append(time.perf_counter() - looked_s)
            time.sleep(PAUSE_S)
        return p99(own), p99(calls)

    def beside(self, client) -> tuple[float, float, object]:
        """Medians of the rounds until `client` has told its result, and that."""
        assert client.hear() == "ready"
        heard: list[object] = []
        hearing = threading.Thread(target=lambda: heard.append(client.hear(120)))
        hearing.start()
        rounds = [self.p99s()]
        while hearing.is_alive():
            rounds.append(self.p99s())
        own, calls = zip(*rounds, strict=True)
        return statistics.median(own), statistics.median(calls), heard[0]


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


def anonymous_nbytes(daemon) -> int:
    """What `kvkeep_process_anonymous_bytes` says."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Memory(threading.Thread):
    """Notes the most that the daemon takes."""

    def __init__(self, daemon) -> None:
        super().__init__()
        self._daemon = daemon
        self._over = threading.Event()
        self.peak_nbytes = 0

    def run(self) -> None:
        while not self._over.wait(0.05):
            self.peak_nbytes = max(self.peak_nbytes, anonymous_nbytes(self._daemon))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as process:
        yield process
        process.check_log()


@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.promise("P14", gate=800, nightly=10_000, unit="calls at a time")
def test_others_go_on_and_memory_is_bounded(daemon, promise_count, what):
    count = promise_count // 20 if "call socket" in what else promise_count
    where = str(daemon.runtime_dir)
    with (
        client_processes() as start,
        kvkeep.connect(where, timeout_s=20) as client,
        RawSession(daemon.runtime_dir) as session,
    ):
        bystander = Bystander(client, session)
        busy = [start(spin) for _ in range(2)]
        assert [one.hear() for one in busy] == ["ready", "ready"]
        usual = [bystander.p99s() for _ in range(3)]
        for one in busy:
            one.kill()
        own_usual_s, call_usual_s = (statistics.median(one) for one in zip(*usual, strict=True))
        with Memory(daemon) as memory:
            flooding = start(stream, where, what, count)
            own_s, call_s, ended = bystander.beside(flooding)
            flooding.kill()
        figures = f"{own_s * 1e3:.2f} ({own_usual_s * 1e3:.2f}) ms in memory, {call_s * 1e3:.2f} "
        figures += f"({call_usual_s * 1e3:.2f}) ms by call, {memory.peak_nbytes / MIB:.0f} MiB"
        sys.stdout.write(f"{what}: {ended}; p99 {figures}\n")
        assert set(ended) - {"refused", "open"} <= set(FLOODS[what].split(", "))
        assert ended.get("open", 0) <= OPEN_MAX
        assert sum(ended.values()) == count
        assert memory.peak_nbytes <= OWN_NBYTES_MAX
        assert own_s <= LONGER * max(own_usual_s, 0.001)
        assert call_s <= max(LONGER * call_usual_s, CALL_S)
        wait_until(lambda: session.stats().sessions == 2, 10.0, "their sessions are over")

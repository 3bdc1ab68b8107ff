"""P08, for the daemon itself: whatever becomes of it, a client's look-ups cost nothing more once it
knows, and hits are back soon after. Prints a table, one line a fault."""

import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

import kvkeep
from kvkeep.call_socket import CallSocket
from tests.fakes.daemon_process import DaemonProcess, running_daemon
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec, store_chain
from tests.fakes.waiting import wait_until

BLOCK_NBYTES = 4096
BLOCKS = 8
SPEC = spec(BLOCK_NBYTES)
KEYS = chain_keys("asked for", BLOCKS)
CALL_S = 0.1
PAUSE_S = 0.001
FAULT_S = 0.6
HEALTHY_S = 0.3
AWAKE_S = 0.05
PULSES = 3
GIVE_UP_S = 20.0

ADDED_P99_S = 0.005
TIMEOUTS = 3
BACK_S = 2.0


def freeze(daemon: DaemonProcess) -> None:
    daemon.send(signal.SIGSTOP)
    time.sleep(FAULT_S)
    daemon.send(signal.SIGCONT)


def slow_down(daemon: DaemonProcess) -> None:
    for _ in range(PULSES):
        freeze(daemon)
        time.sleep(AWAKE_S)


def kill(daemon: DaemonProcess) -> None:
    daemon.kill()
    time.sleep(FAULT_S)
    daemon.start()


def restart(daemon: DaemonProcess) -> None:
    assert daemon.end() == 0
    daemon.start()


def restart_frozen(daemon: DaemonProcess) -> None:
    """It stands still before it has said welcome to anybody."""
    daemon.kill()
    daemon.launch()
    freeze(daemon)
    daemon.wait_until_serving()


def lose_directory(daemon: DaemonProcess) -> None:
    """It lives on for a while where nobody can find it any more."""
    shutil.rmtree(daemon.runtime_dir)
    time.sleep(FAULT_S)
    kill(daemon)


FAULTS = {
    "killed": kill,
    "frozen": freeze,
    "slow": slow_down,
    "restarted": restart,
    "frozen at its start": restart_frozen,
    "its directory gone": lose_directory,
}


@dataclass(slots=True)
class Round:
    """What a client saw of one fault.

    Attributes:
        known_s: How long each look-up took while the client knew that nothing answers.
        timeouts: Most calls without an answer in their time, before the client knew.
        back_s: From the end of the fault to the first hit.
        right: Blocks whose bytes were compared.
    """

    known_s: list[float] = field(default_factory=list)
    timeouts: int = 0
    back_s: float = 0.0
    right: int = 0


class Engine:
    """One thread that looks up, leases and reads, and stores what it did not find."""

    def __init__(self, client: kvkeep.Client) -> None:
        self._client = client
        self._namespace = client.open_namespace(SPEC)
        self._expected = blocks_of(place_of(""), KEYS, BLOCK_NBYTES)
        self._timeouts = 0

    def healthy_s(self) -> list[float]:
        """How long look-ups take while nothing is wrong."""
        seconds, until_s, seen = [], time.monotonic() + HEALTHY_S, Round()
        while time.monotonic() < until_s:
            seconds.append(self._timed(seen)[0])
        return seconds

    def beside(self, fault: Callable[[], None]) -> Round:
        seen, healed = Round(), threading.Event()
        thread = threading.Thread(target=lambda: (fault(), healed.set()))
        thread.start()
        while thread.is_alive():
            self._turn(seen)
        assert healed.is_set(), "the fault itself failed"
        healed_s = time.monotonic()
        while not self._turn(seen):
            assert time.monotonic() - healed_s < GIVE_UP_S, "no hit came back"
        seen.back_s = time.monotonic() - healed_s
        return seen

    def _turn(self, seen: Round) -> bool:
        knew = self._client.health is not kvkeep.Health.ANSWERS
        took_s, hit = self._timed(seen)
        if knew:
            self._timeouts = 0
            if self._client.health is not kvkeep.Health.ANSWERS:
                seen.known_s.append(took_s)
        seen.timeouts = max(seen.timeouts, self._timeouts)
        return hit

    def _timed(self, seen: Round) -> tuple[float, bool]:
        """How long a look-up and what follows it took; whether it was a hit."""
        began_s, hit = time.monotonic(), False
        try:
            found = self._namespace.lookup(KEYS).blocks
            with self._namespace.acquire(KEYS, timeout_s=CALL_S) as acquired:
                views = acquired.views()
                for view, row in zip(views, self._expected, strict=False):
                    assert view == row.data, "wrong bytes"
                seen.right += len(views)
                hit = len(views) == found == BLOCKS
        except kvkeep.DeadlineError:
            self._timeouts += 1
        except (kvkeep.UnavailableError, kvkeep.LeaseLostError):
            pass
        took_s = time.monotonic() - began_s
        if not hit and self._client.health is kvkeep.Health.ANSWERS:
            self._store()
        time.sleep(PAUSE_S)
        return took_s, hit

    def _store(self) -> None:
        try:
            store_chain(self._namespace, KEYS)
        except kvkeep.DeadlineError:
            self._timeouts += 1
        except kvkeep.UnavailableError:
            pass


def say(name: str, *figures: object) -> None:
    sys.stdout.write(f"{name:<20}{''.join(f'{figure:>11}' for figure in figures)}\n")


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


@pytest.fixture
def probes(monkeypatch):
    """How many probes were on their way, each time that one was sent."""
    under_way, send = [], CallSocket._send_probe

    def send_probe(self):
        send(self)
        waiting = list(self._waiting.values())
        under_way.append(sum(pending.on_reply == self._on_probe for pending in waiting))

    monkeypatch.setattr(CallSocket, "_send_probe", send_probe)
    return under_way


@pytest.mark.promise("P08", gate=12, nightly=120, unit="faults of the daemon")
def test_a_daemon_in_trouble_costs_its_clients_nothing(tmp_path, probes, promise_count):
    daemon = DaemonProcess(tmp_path)
    say("daemon", "look-ups", "added p99", "timeouts", "probes", "back")
    try:
        daemon.start()
        with kvkeep.connect(daemon.runtime_dir) as client:
            engine = Engine(client)
            usual_s = statistics.median(p99(engine.healthy_s()) for _ in range(3))
            for name, fault in FAULTS.items():
                probes.clear()
                rounds = [
                    engine.beside(lambda fault=fault: fault(daemon))
                    for _ in range(promise_count // len(FAULTS))
                ]
                known = [seen.known_s for seen in rounds]
                assert all(known), f"{name}: the client never knew"
                added_s = statistics.median(map(p99, known)) - usual_s
                timeouts = max(seen.timeouts for seen in rounds)
                back_s = max(seen.back_s for seen in rounds)
                asked, at_once = sum(map(len, known)), max(probes, default=0)
                added, back = f"{added_s * 1e3:.2f} ms", f"{back_s:.2f} s"
                say(name, asked, added, timeouts, at_once, back)
                assert added_s <= ADDED_P99_S, name
                assert timeouts <= TIMEOUTS, name
                assert at_once <= 1, name
                assert back_s <= BACK_S, name
                assert all(seen.right for seen in rounds), name
    finally:
        daemon.kill()
    daemon.check_log()


@pytest.mark.parametrize("call", ["prefetch", "stats"])
def test_calls_on_grpc_find_out_as_well(tmp_path, call):
    with running_daemon(tmp_path) as daemon, kvkeep.connect(daemon.runtime_dir) as client:
        namespace = client.open_namespace(SPEC)
        calls = {
            "prefetch": lambda: namespace.prefetch(KEYS, timeout_s=CALL_S),
            "stats": lambda: client.stats(CALL_S),
        }
        calls[call]()
        daemon.send(signal.SIGSTOP)
        try:
            failures = []
            for _ in range(20):
                with pytest.raises((kvkeep.UnavailableError, kvkeep.DeadlineError)) as failed:
                    calls[call]()
                failures.append(failed.type)
        finally:
            daemon.send(signal.SIGCONT)
        assert failures.count(kvkeep.DeadlineError) <= TIMEOUTS
        assert client.health is kvkeep.Health.SILENT
        wait_until(lambda: client.health is kvkeep.Health.ANSWERS, BACK_S, "it answers")
        calls[call]()

"""When nothing is asked of a daemon any more, and when again."""

import pytest

from kvkeep import breaker as module
from kvkeep.breaker import PROBE_S, SILENCE_S, Breaker


class Daemon:
    """Counts what it is sent; the test moves the clock and answers."""

    def __init__(self, monkeypatch):
        self.now_s, self.probes, self.changes = 100.0, 0, []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        self.breaker = Breaker(send_probe=self.probe, take=self.take, on_change=self.changed)
        self.fails = self.answered = False
        self.taking = 0

    def probe(self):
        if self.fails:
            raise KeyboardInterrupt
        self.probes += 1

    def take(self):
        """As a call socket has it: whether there was something to take, None = another takes."""
        if self.taking:
            self.taking -= 1
            return None
        answered, self.answered = self.answered, False
        if answered:
            self.breaker.probed()
        return answered

    def times_out(self, after_s=PROBE_S):
        """A call that was sent so long ago."""
        self.breaker.timed_out(self.now_s - after_s)

    def changed(self):
        self.changes.append(self.breaker.open)


@pytest.fixture
def daemon(monkeypatch):
    return Daemon(monkeypatch)


def test_who_is_far_away_has_longer(daemon):
    far = Breaker(send_probe=daemon.probe, take=daemon.take, on_change=daemon.changed, probe_s=1.0)
    daemon.breaker = far
    daemon.times_out(0.5)
    daemon.now_s += 0.9
    far.check()
    assert daemon.changes == []
    daemon.now_s += 0.2
    far.check()
    assert daemon.changes == [True]
    far.probed()
    daemon.now_s += 0.9
    far.probed()
    assert daemon.changes == [True, False]


def test_short_deadlines_of_a_daemon_that_answers_open_nothing(daemon):
    for _ in range(50):
        daemon.times_out(0.001)
        daemon.now_s += PROBE_S / 50
        daemon.breaker.probed()
        daemon.breaker.check()
    assert (daemon.changes, daemon.probes) == ([], 50)


@pytest.mark.parametrize("deadline_s", [0.0, 0.001, 0.05])
def test_a_short_deadline_is_no_silence(daemon, deadline_s):
    """A daemon that is well may take so long on a busy host."""
    for _ in range(100):
        asked_s = daemon.now_s
        daemon.now_s += deadline_s
        daemon.breaker.timed_out(asked_s)
        while daemon.now_s + SILENCE_S / 10 < asked_s + SILENCE_S:
            daemon.now_s += SILENCE_S / 10
            daemon.times_out(deadline_s)
        daemon.breaker.probed()
        daemon.breaker.check()
    assert (daemon.changes, daemon.probes) == ([], 100)


@pytest.mark.parametrize("deadline_s", [0.001, 0.03, 0.1, 2.0])
def test_silence_is_known_after_three_calls_of_a_tenth_of_a_second(daemon, deadline_s):
    """P08, from the first call without an answer; and with it, where calls are slower."""
    began_s = daemon.now_s
    while not daemon.breaker.open:
        asked_s = daemon.now_s
        daemon.now_s += deadline_s
        daemon.breaker.timed_out(asked_s)
        if deadline_s == 2.0:
            daemon.now_s += PROBE_S + 0.001
            daemon.breaker.check()
    assert daemon.now_s - began_s <= max(0.3 + 1e-6, deadline_s + PROBE_S + 0.002)


def test_who_did_not_look_finds_the_answer_waiting(daemon):
    """A client that stood still itself has not heard that the daemon is silent."""
    daemon.times_out()
    daemon.now_s += 5.0
    daemon.answered = True
    daemon.breaker.check()
    daemon.times_out()
    assert (daemon.changes, daemon.probes) == ([], 2)
    # Another is just taking what came: it knows in a moment.
    daemon.now_s += 5.0
    daemon.taking = 1
    daemon.breaker.check()
    assert not daemon.breaker.open
    daemon.breaker.check()
    assert daemon.breaker.open


def test_silence_opens_it_and_an_answer_in_time_closes_it(daemon):
    daemon.times_out()
    daemon.now_s += (SILENCE_S - PROBE_S) * 0.9
    daemon.times_out()
    assert not daemon.breaker.open
    daemon.now_s += (SILENCE_S - PROBE_S) * 0.2
    daemon.breaker.check()
    assert daemon.breaker.open
    for _ in range(20):
        daemon.now_s += 5.0
        daemon.times_out()
        daemon.breaker.go_on()
    # Never more than one is under way.
    assert daemon.probes == 1
    daemon.breaker.probed()
    # That was a late one: it says that there is life, not that there is an answer in time.
    assert (daemon.breaker.open, daemon.probes) == (True, 2)
    daemon.now_s += 0.001
    daemon.breaker.probed()
    assert daemon.changes == [True, False]
    daemon.times_out()
    assert daemon.probes == 3


def test_a_slow_daemon_stays_unasked(daemon):
    daemon.times_out()
    daemon.now_s += 2.0
    daemon.breaker.check()
    for number in range(1, 6):
        daemon.now_s += 2.0
        daemon.breaker.probed()
        assert (daemon.breaker.open, daemon.probes) == (True, number + 1)
    assert daemon.changes == [True]


def test_an_interrupt_loses_no_probe_for_good(daemon):
    daemon.fails = True
    with pytest.raises(KeyboardInterrupt):
        daemon.times_out()
    daemon.fails = False
    daemon.times_out()
    daemon.now_s += 1.0
    daemon.breaker.check()
    daemon.fails = True
    with pytest.raises(KeyboardInterrupt):
        daemon.breaker.probed()
    daemon.fails = False
    assert daemon.breaker.open
    daemon.breaker.go_on()
    assert daemon.probes == 2
    daemon.breaker.probed()
    assert not daemon.breaker.open

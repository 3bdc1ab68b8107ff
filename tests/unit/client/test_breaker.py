"""When nothing is asked of a daemon any more, and when again."""

import pytest

from kvkeep import breaker as module
from kvkeep.breaker import PROBE_S, Breaker


class Daemon:
    """Counts what it is sent; the test moves the clock and answers."""

    def __init__(self, monkeypatch):
        self.now_s, self.probes, self.changes = 100.0, 0, []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        self.breaker = Breaker(send_probe=self.probe, on_change=self.changed)
        self.fails = False

    def probe(self):
        if self.fails:
            raise KeyboardInterrupt
        self.probes += 1

    def changed(self):
        self.changes.append(self.breaker.open)


@pytest.fixture
def daemon(monkeypatch):
    return Daemon(monkeypatch)


def test_short_deadlines_of_a_daemon_that_answers_open_nothing(daemon):
    for _ in range(50):
        daemon.breaker.timed_out()
        daemon.now_s += PROBE_S / 50
        daemon.breaker.probed()
        daemon.breaker.check()
    assert (daemon.changes, daemon.probes) == ([], 50)


def test_silence_opens_it_and_an_answer_in_time_closes_it(daemon):
    daemon.breaker.timed_out()
    daemon.now_s += PROBE_S * 0.9
    daemon.breaker.timed_out()
    assert not daemon.breaker.open
    daemon.now_s += PROBE_S * 0.2
    daemon.breaker.check()
    assert daemon.breaker.open
    for _ in range(20):
        daemon.now_s += 5.0
        daemon.breaker.timed_out()
        daemon.breaker.go_on()
    # Never more than one is under way.
    assert daemon.probes == 1
    daemon.breaker.probed()
    # That was a late one: it says that there is life, not that there is an answer in time.
    assert (daemon.breaker.open, daemon.probes) == (True, 2)
    daemon.now_s += 0.001
    daemon.breaker.probed()
    assert daemon.changes == [True, False]
    daemon.breaker.timed_out()
    assert daemon.probes == 3


def test_a_slow_daemon_stays_unasked(daemon):
    daemon.breaker.timed_out()
    for number in range(1, 6):
        daemon.now_s += 2.0
        daemon.breaker.probed()
        assert (daemon.breaker.open, daemon.probes) == (True, number + 1)
    assert daemon.changes == [True]


def test_an_interrupt_loses_no_probe_for_good(daemon):
    daemon.fails = True
    with pytest.raises(KeyboardInterrupt):
        daemon.breaker.timed_out()
    daemon.fails = False
    daemon.breaker.timed_out()
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

"""Readings of a core under random work: they add up at every moment, and each is in the catalogue.

The work is a hypothesis state machine; the sums are those that an operator would check.
"""

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkeep_server.core.errors import KVKeepError, ResourceExhaustedError
from kvkeep_server.metrics.catalog import CATALOG
from kvkeep_server.metrics.collector import process_readings, render
from kvkeep_server.metrics.metric import MetricKind
from tests.fakes.core_harness import Harness, keys_of, spec
from tests.fakes.core_readings import page_of, readings_of
from tests.fakes.scraping import Page


@pytest.fixture
def core():
    with Harness(ram="4MiB", extra="[leases]\nleases_max = 2") as harness:
        yield harness


def test_every_metric_is_fed_and_every_reading_is_in_the_catalogue(core):
    own = {"kvkeep_snapshot_age_seconds", "kvkeep_scrapes_dropped_total"}
    taken = [*readings_of(core.core).take(), *process_readings()]
    assert {reading.name for reading in taken} | own == set(CATALOG)
    for reading in taken:
        labels = CATALOG[reading.name].labels
        for label, value in zip(labels, reading.labels, strict=True):
            assert not label.values or value in label.values
        is_histogram = CATALOG[reading.name].kind is MetricKind.HISTOGRAM
        assert is_histogram == (not isinstance(reading.value, int | float))


def test_a_page_survives_the_round_trip(core):
    session = core.session()
    core.put(session, core.open(session), keys_of("a", 5))
    taken = readings_of(core.core).take()
    page = Page.parse(render(taken).decode())
    for reading in taken:
        names = [label.name for label in CATALOG[reading.name].labels]
        labels = dict(zip(names, reading.labels, strict=True))
        if isinstance(reading.value, int | float):
            assert page.sum(reading.name, **labels) == reading.value
        else:
            assert page.sum(f"{reading.name}_count", **labels) == sum(reading.value.counts)
            assert page.sum(f"{reading.name}_sum", **labels) == reading.value.total


def test_hits_misses_and_failures_are_told_apart(core):
    session = core.session()
    opened = core.open(session)
    keys = keys_of("a", 4)
    core.put(session, opened, keys[:3])
    core.lookup(session, opened, keys)
    for _ in range(2):
        core.acquire(session, opened, keys)
    with pytest.raises(KVKeepError, match="leases_max"):
        core.acquire(session, opened, keys)
    page = page_of(core)
    assert page.sum("kvkeep_blocks_hit_total", call="lookup", tier="ram") == 3
    assert page.sum("kvkeep_blocks_missed_total", call="lookup", reason="never_seen") == 1
    assert page.sum("kvkeep_blocks_hit_total", call="acquire") == 6
    assert page.sum("kvkeep_blocks_missed_total", call="acquire") == 2
    assert page.sum("kvkeep_blocks_failed_total", call="acquire") == 4
    assert page.sum("kvkeep_reads_total") == 4


def test_ages_at_eviction_are_those_since_the_last_use(core):
    session = core.session()
    opened = core.open(session)
    core.put(session, opened, keys_of("old", 3))
    core.clock.advance(100 * 3600)
    core.put(session, opened, keys_of("young", 2))
    core.clock.advance(1800)
    assert core.core.residency.evict(5) == 5
    page = page_of(core)
    name = "kvkeep_block_age_at_eviction_seconds"
    assert page.sum(f"{name}_bucket", le="259200.0", tier="ram") == 2
    assert page.sum(f"{name}_count") == core.core.residency.evicted_total == 5
    assert page.sum(f"{name}_sum") == 3 * 361800 + 2 * 1800


def test_an_evicted_block_is_missed_as_evicted(core):
    session = core.session()
    opened = core.open(session)
    keys = keys_of("a", 3)
    core.put(session, opened, keys)
    core.core.residency.evict(1)
    core.lookup(session, opened, keys)
    assert page_of(core).sum("kvkeep_blocks_missed_total", reason="evicted") == 1


def test_what_is_used_again_leaves_its_age(core):
    session = core.session()
    opened = core.open(session)
    keys = keys_of("a", 3)
    core.put(session, opened, keys)
    core.clock.advance(50)
    core.lookup(session, opened, keys)
    page = page_of(core)
    assert page.sum("kvkeep_block_reuse_age_seconds_count") == 3
    assert page.sum("kvkeep_block_reuse_age_seconds_bucket", le="60.0") == 3
    assert page.sum("kvkeep_block_reuse_age_seconds_bucket", le="10.0") == 0


def test_a_commit_that_fails_is_counted_as_failed(core, monkeypatch):
    session = core.session()
    opened = core.open(session)

    async def fail(*_):
        raise KVKeepError("no")

    monkeypatch.setattr(core.core.room, "reserve", fail)
    with pytest.raises(KVKeepError, match="no"):
        core.put(session, opened, keys_of("a", 3))
    page = page_of(core)
    assert page.sum("kvkeep_commit_blocks_total", status="failed") == 3
    assert page.sum("kvkeep_commits_total") == 1


def test_two_daemons_of_one_process_do_not_meet(core):
    with Harness(ram="4MiB") as other:
        session = other.session()
        other.put(session, other.open(session), keys_of("a", 3))
        assert page_of(other).sum("kvkeep_tier_blocks") == 3
        assert page_of(core).sum("kvkeep_tier_blocks") == 0


NAMES = st.sampled_from("abcd")
COUNTS = st.integers(1, 300)


class ReadingsUnderWork(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.core = Harness(ram="4MiB", extra="[leases]\nleases_max = 3")
        self.session = self.core.session(4 << 20)
        self.opened = self.core.open(self.session)
        self.seen: dict = {}

    @rule(name=NAMES, count=COUNTS)
    def store(self, name, count):
        self.core.put(self.session, self.opened, keys_of(name, count))

    @rule(name=NAMES, count=COUNTS)
    def lookup(self, name, count):
        self.core.lookup(self.session, self.opened, keys_of(name, count))

    @rule(name=NAMES, count=COUNTS)
    def acquire(self, name, count):
        # Three leases at most.
        with contextlib.suppress(ResourceExhaustedError):
            self.core.acquire(self.session, self.opened, keys_of(name, count))

    @rule(seconds=st.sampled_from([0.5, 20.0, 4000.0]))
    def wait(self, seconds):
        self.core.clock.advance(seconds)
        self.core.core.service.manager.leases.expire()

    @rule(count=st.integers(1, 50))
    def evict(self, count):
        self.core.core.residency.evict(count)

    @rule(name=NAMES)
    def open_another(self, name):
        self.core.open(self.session, spec(tenant=name))

    @rule()
    def attach_and_leave(self):
        session = self.core.session(4096)
        self.core.core.sessions.end(session.session_id, "test")

    @invariant()
    def adds_up(self):
        page = page_of(self.core)
        counters = dict(page.counters())
        assert not [series for series, v in self.seen.items() if counters.get(series, 0.0) < v]
        self.seen = counters
        stats = self.core.core.ram.stats()
        assert page.sum("kvkeep_pool_bytes") == stats.nbytes
        assert page.sum("kvkeep_tier_payload_bytes") <= page.sum("kvkeep_tier_used_bytes")
        table = self.core.core.residency.table
        assert page.sum("kvkeep_index_rows") == table.geometry.rows
        assert page.sum("kvkeep_sessions") == page.sum("kvkeep_sessions_opened_total") - page.sum(
            "kvkeep_sessions_ended_total"
        )

    def teardown(self):
        self.core.close()


ReadingsUnderWork.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
TestReadingsUnderWork = ReadingsUnderWork.TestCase

"""P13: a loop that is always busy, as an engine's scheduler is, never waits for its cache: beside a
daemon that answers, that is frozen, slow, or killed and started again."""

import pytest

import kvkeep
from kvkeep_server.cli import bench_engine
from kvkeep_server.cli.bench_daemon import DaemonProcess
from kvkeep_server.cli.bench_engine import BACK_S, EngineBench, EnginePlan
from kvkeep_server.cli.engine_loop import LoopPlan

PHASES = ("healthy", "frozen", "slow", "killed")


@pytest.mark.promise("P13", gate=400, nightly=10_000, unit="requests of a loop that never waits")
def test_an_engines_loop_never_waits(tmp_path, monkeypatch, promise_count):
    # Several times the deadline of a ticket, a quarter of a second.
    monkeypatch.setattr(bench_engine, "FROZEN_S", 1.0)
    monkeypatch.setattr(bench_engine, "AWAY_S", 0.5)
    plan = EnginePlan(requests=promise_count, loop=LoopPlan(chains=32))
    with (
        DaemonProcess(tmp_path, {"ram": {"size": "64MiB"}}) as daemon,
        kvkeep.connect(tmp_path) as client,
    ):
        bench = EngineBench(plan, client=client, daemon=daemon, progress=lambda _: None)
        rows = {row.name: row for row in bench.rows()}
        counts, timings = bench.loop.counts, bench.timings
        assert client.health is kvkeep.Health.ANSWERS
    assert bench.requests >= promise_count
    # Every ticket was handed out, right or without a hit.
    assert bench.loop.open == 0
    assert counts["wrong"] == 0
    assert counts["verified"] >= counts["hits"] > promise_count // 4
    assert counts["failed"] > 0
    for phase in PHASES[1:]:
        assert rows[f"{phase}/back"].median <= BACK_S * 1000
    for phase in PHASES:
        timing = timings[phase]
        # However busy the machine: who never gives the processor up does not wait. A few times
        # another thread of the client is just in the way.
        assert timing.slept <= len(timing.calls_s) * 0.05, phase

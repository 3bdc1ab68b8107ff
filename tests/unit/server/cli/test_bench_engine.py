"""`kvkeep bench engine` at its smallest: the rows, and what ends it."""

import json

import pytest
from click.testing import CliRunner

from kvkeep_server.cli import bench as bench_command
from kvkeep_server.cli import bench_engine
from kvkeep_server.cli.bench_engine import EnginePlan
from kvkeep_server.cli.bench_rows import ENGINE_BOUNDS
from kvkeep_server.cli.engine_loop import EngineLoop, LoopPlan

SMALL = EnginePlan(requests=50, loop=LoopPlan(step_s=0.001, chains=4, chain_blocks=4))


@pytest.fixture(autouse=True)
def short_faults(monkeypatch):
    monkeypatch.setattr(bench_engine, "FROZEN_S", 0.5)
    monkeypatch.setattr(bench_engine, "AWAY_S", 0.1)
    monkeypatch.setattr(bench_command, "EnginePlan", lambda: SMALL)


def test_the_command_reports_every_phase():
    result = CliRunner().invoke(bench_command.bench, ["engine", "--json", "--requests", "50"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["machine"]["requests"] > 50
    assert report["machine"]["counts"]["wrong"] == 0
    rows = {row["name"]: row for row in report["results"]}
    assert set(ENGINE_BOUNDS) <= set(rows)
    assert rows["frozen/back"]["baseline"] == "2000 ms"
    assert rows["healthy/calls/p99"]["ratio"] == pytest.approx(
        rows["healthy/calls/p99"]["p99"] / 5, rel=0.01
    )


def test_wrong_bytes_end_it(monkeypatch):
    def check(self, views, content):
        self.counts["hits"] += 1
        self.counts["wrong"] += 1

    monkeypatch.setattr(EngineLoop, "_check", check)
    result = CliRunner().invoke(bench_command.bench, ["engine", "--requests", "50"])
    assert result.exit_code != 0
    assert "wrong bytes" in str(result.exception)

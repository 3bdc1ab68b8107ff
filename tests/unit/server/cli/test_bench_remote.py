"""`kvkeep bench remote` at its smallest: the rows, what they stand beside, and what ends it."""

import json

import pytest
from click.testing import CliRunner

import kvkeep
from kvkeep_server.cli import bench as bench_command
from kvkeep_server.cli import bench_remote
from kvkeep_server.cli.bench_remote import RemotePlan

WAYS = [
    ("local", "read"),
    ("remote", "read"),
    ("remote", "acquire"),
    ("local", "store"),
    ("remote", "store"),
]
SIZES = {"4KiB": 4096, "8KiB": 8192}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(bench_remote, "SIZES", SIZES)


def run(*options):
    line = ["remote", "--batches", "1", "--rounds", "1", *options]
    return CliRunner().invoke(bench_command.bench, line)


def test_the_command_reports_both_ways():
    result = run("--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["machine"]["batches"], report["machine"]["rounds"]) == (1, 1)
    rows = {row["name"]: row for row in report["results"]}
    moved = {f"{way}/{what}/{size}" for size in SIZES for way, what in WAYS}
    assert set(rows) == moved | {"local/lookup/64", "remote/lookup/64"}
    for name, row in rows.items():
        assert row["median"] > 0, name
        local = name.replace("remote/acquire", "local/read").replace("remote/", "local/")
        assert row["baseline"] == (None if name == local else local), name


def test_blocks_that_are_missing_end_it(monkeypatch):
    read_into = kvkeep.Namespace.read_into
    monkeypatch.setattr(
        kvkeep.Namespace, "read_into", lambda self, keys, into: read_into(self, keys, into) - 1
    )
    result = run()
    assert result.exit_code != 0
    assert "63 of 64 blocks" in str(result.exception)


def test_a_plan_has_room_for_what_it_stores():
    plan = RemotePlan(batches=2)
    assert plan.staging_nbytes == 64 * 8192
    assert plan.pool_nbytes > 4 * 64 * sum(SIZES.values())
    assert plan.pool_nbytes % (2 << 20) == 0
    tables = plan.daemon_tables("127.0.0.1:1")
    assert tables["remote"] == {"listen": "127.0.0.1:1"}

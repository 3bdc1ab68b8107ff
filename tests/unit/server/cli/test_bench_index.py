"""`kvkeep bench index` at its smallest: the rows, and what they count."""

import json

import pytest
from click.testing import CliRunner

from kvkeep.shared_index import Found
from kvkeep_server.cli import bench as bench_command
from kvkeep_server.cli import bench_index
from kvkeep_server.cli.bench_index import BUDGET_NBYTES, IndexBench, IndexPlan
from kvkeep_server.cli.bench_load import WrongBytesError
from kvkeep_server.cli.bench_rows import INDEX_BOUNDS
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.tiering.residency import Residency

BLOCKS = 30_000
SMALL = IndexPlan(blocks=BLOCKS, rows_initial=20_000, rounds=1, calls=3)


def measured(plan: IndexPlan = SMALL) -> dict[str, float]:
    bench = IndexBench(plan, rpc=lambda: True, progress=lambda _: None)
    return {row.name: row.median for row in bench.rows()}


def test_the_parts_add_up_to_a_block_and_every_bound_has_its_row():
    rows = measured()
    parts = sum(rows[f"bytes_a_block/{part}"] for part in ("table", "columns", "policy"))
    assert rows["bytes_a_block"] == pytest.approx(parts)
    assert set(INDEX_BOUNDS) <= set(rows)
    assert all(figure > 0 for figure in rows.values())


def test_a_block_weighs_what_the_arrays_hold(monkeypatch):
    """The sum of what numpy has, over all blocks; the figure that the decision about it names."""
    seen = []
    move = IndexBench._move

    def watched(self, residency: Residency, blocks: int):
        columns = residency.columns
        arrays = [getattr(columns, name) for name in columns._names()]
        tree = residency._policy._tree
        arrays += [residency.table.ids, tree._state, tree._children]
        arrays += [residency._policy._stamps, residency._policy._queued]
        nbytes = sum(array.nbytes for array in arrays) + residency.table.geometry.nbytes
        seen.append(nbytes / blocks)
        ids = sum(array.itemsize for array in arrays if array is not residency.table.ids)
        assert ids == 54, "bytes an id"
        return move(self, residency, blocks)

    monkeypatch.setattr(IndexBench, "_move", watched)
    # The leaves, which are few, come on top.
    assert measured()["bytes_a_block"] == pytest.approx(seen[0], abs=0.1)


def test_the_table_moved_while_it_was_filled_and_is_as_large_as_it_gets_after_a_move():
    small, large = measured(), measured(IndexPlan(BLOCKS, 1 << 16, rounds=1, calls=3))
    assert small["bytes_a_block/table"] < large["bytes_a_block/table"]
    assert small["insert/with_moves"] < small["insert"]
    rows = small["bytes_a_block/moved"] - sum(
        small[f"bytes_a_block/{part}"] for part in ("columns", "policy")
    )
    assert rows == pytest.approx(32.25 * 1.25 / 0.85, rel=0.02)


def test_a_look_up_that_finds_too_little_ends_it(monkeypatch):
    monkeypatch.setattr(bench_index.ClientTable, "find", lambda *_: Found(1, 0, 0))
    with pytest.raises(WrongBytesError, match="found 1"):
        measured()


def test_the_command_reports_against_a_daemon_of_its_own(monkeypatch):
    monkeypatch.setattr(bench_command, "IndexPlan", lambda: SMALL)
    result = CliRunner().invoke(bench_command.bench, ["index", "--json", "--blocks", "8192"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["machine"]["blocks"] == 8192
    rows = {row["name"]: row for row in report["results"]}
    assert rows["bytes_a_block"]["baseline"] == f"{BUDGET_NBYTES} B"
    assert rows["lookup/64"]["baseline"] == "noop_rpc"


def test_too_little_memory_is_said_before_anything_is_done(monkeypatch):
    limit = MemoryLimit(nbytes=1 << 30, free_nbytes=1 << 20, source="a test")
    monkeypatch.setattr(bench_command, "read_memory_limit", lambda: limit)
    result = CliRunner().invoke(bench_command.bench, ["index"])
    assert result.exit_code == 2
    assert "take a smaller --blocks" in result.output

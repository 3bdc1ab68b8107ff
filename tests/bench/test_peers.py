"""The comparison with other stores: the verdict of its table, and its loop over dicts."""

import sys

import pytest

from tests.bench.peers import compare

KIB, MIB = 1 << 10, 1 << 20
SCALE = compare.Scale(2 * MIB, MIB, put_rounds=2, get_rounds=2, batch_blocks=4)

DICT_PEER = """
import sys
sys.path.insert(0, {peers!r})
from workload import private_buffer, serve

class DictPeer:
    warm_share = 1.0
    def __init__(self):
        self.blocks = {{}}
    def open(self, plan):
        {open}
    def buffer(self, nbytes):
        return private_buffer(nbytes)
    def stage(self, keys, sources):
        return keys, sources
    def put(self, staged):
        self.blocks.update((k, bytes(s)) for k, s in zip(*staged))
        return len(staged[0])
    def get(self, keys, into):
        for key, view in zip(keys, into.blocks):
            view[:] = list(self.blocks[key])
        {get}
        return len(keys)
    def warm_done(self):
        self.blocks.clear()
    def close(self):
        pass

serve(DictPeer())
"""


@pytest.fixture
def stores(tmp_path, monkeypatch):
    """Makes scripts of stores; each is a dict, `how` breaks one of them."""

    def make(how=None):
        for name in compare.PEERS:
            parts = {"open": "pass", "get": "pass", **((how or {}).get(name, {}))}
            text = DICT_PEER.format(peers=str(compare.HERE), **parts)
            (tmp_path / f"{name}_peer.py").write_text(text)
        monkeypatch.setattr(compare, "HERE", tmp_path)
        monkeypatch.setattr(compare, "_python", lambda _name: sys.executable)

    return make


def measured(block_nbytes=57 * KIB):
    with compare.running(compare.PEERS, block_nbytes, SCALE) as processes:
        series = compare.measure(processes, SCALE.batches(block_nbytes), SCALE)
    return compare.rows_of(series, block_nbytes, block_nbytes * SCALE.batch_blocks)


def test_every_store_gets_its_rows(stores):
    stores()
    rows = measured()
    assert {(row.peer, row.operation) for row in rows} == {
        (peer, operation) for peer in compare.PEERS for operation in ("get", "put")
    }
    assert all(row.gbps > 0 and row.p99_ms > 0 for row in rows)
    reference = [row for row in rows if row.peer == compare.REFERENCE]
    assert [row.ratio for row in reference] == [1.0, 1.0]
    assert [row.bound for row in rows if row.peer == "kvkeep"] == [2.0, 0.9]


def test_a_wrong_byte_loses_the_row(stores, capfd):
    stores({"redis": {"get": "into.blocks[1][5] ^= 1"}})
    rows = measured()
    assert {row.peer for row in rows} == {"kvkeep", "mooncake"}
    assert "redis: batch" in capfd.readouterr().err
    assert "missing: redis get 57KiB" in compare.verdict(rows)


def test_a_store_that_does_not_start_loses_the_row(stores, capfd):
    stores({"mooncake": {"open": "raise OSError('no such library')"}})
    rows = measured()
    assert {row.peer for row in rows} == {"kvkeep", "redis"}
    assert "FAILED mooncake: OSError: no such library" in capfd.readouterr().err
    assert "missing: mooncake put 57KiB" in compare.verdict(rows)
    assert any(line.startswith("missed: get 57KiB") for line in compare.verdict(rows))


def rows_at(factor):
    return [
        compare.Row(
            peer, operation, nbytes, 1.0, 1.0, bound * factor, bound if peer == "kvkeep" else None
        )
        for (operation, nbytes), bound in compare.BOUNDS.items()
        for peer in compare.PEERS
    ]


def test_the_verdict_names_every_bound_that_is_missed():
    assert compare.verdict(rows_at(1.0)) == []
    assert len(compare.verdict(rows_at(0.99))) == len(compare.BOUNDS) == 4
    assert "MISSED" in compare.table(rows_at(0.99))


def test_no_rows_at_all_is_a_failure():
    assert len(compare.verdict([])) == len(compare.BOUNDS) * len(compare.PEERS)


def test_ratios_are_of_rounds_not_of_totals():
    fast, slow = [0.001, 0.001], [0.01, 0.01]
    series = {
        ("kvkeep", "get"): compare.Series([fast, slow, fast]),
        ("mooncake", "get"): compare.Series([[2 * s for s in r] for r in (fast, slow, fast)]),
    }
    ours = compare.rows_of(series, 57 * KIB, MIB)[0]
    assert ours.peer == "kvkeep"
    assert ours.ratio == pytest.approx(2.0)

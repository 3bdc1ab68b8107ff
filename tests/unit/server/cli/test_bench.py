"""`kvkeep bench local` against a client that keeps everything in a dict: rows, bounds, shapes."""

import json
import statistics
import sys
import time
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from kvkeep_server.cli import bench as bench_command
from kvkeep_server.cli import bench_daemon, bench_load
from kvkeep_server.cli.bench_daemon import DaemonError, DaemonProcess, toml
from kvkeep_server.cli.bench_load import GrownPool, NoRoomError, Source, WrongBytesError
from kvkeep_server.cli.bench_local import LocalBench, Plan, machine
from kvkeep_server.cli.bench_rows import (
    BOUNDS,
    Row,
    as_json,
    as_text,
    busy_rows,
    missed,
    rate_row,
    time_row,
)
from kvkeep_server.cli.bench_timing import (
    BusyThread,
    Operation,
    Samples,
    interleaved,
    loop,
    memcpy,
)
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.core.memory_limit import MemoryLimit

MiB = 1 << 20
# 64 blocks of 2 MiB are 128 MiB, whatever the plan; the rest is as small as it can be.
SMALL = Plan(
    resident_nbytes=MiB, index_blocks=8192, source_nbytes=128 * MiB, rounds=1, round_s=0, busy_s=0
)


class DictNamespace:
    """What the benchmark uses of a namespace. `spoil` changes what a read gives."""

    key_nbytes = 32

    def __init__(self, block_nbytes, spoil):
        self.block_nbytes = block_nbytes
        self.blocks = {}
        self.spoil = spoil

    def _cut(self, keys):
        return [keys[i : i + self.key_nbytes] for i in range(0, len(keys), self.key_nbytes)]

    def store(self, keys):
        return DictStore(self, self._cut(keys))

    def lookup(self, keys):
        found = sum(key in self.blocks for key in self._cut(keys))
        return SimpleNamespace(blocks=found)

    def acquire(self, keys):
        return SimpleNamespace(blocks=self.lookup(keys).blocks, release=lambda: None)

    def remove(self, keys):
        for key in self._cut(keys):
            del self.blocks[key]

    def read_into(self, keys, buffer):
        for i, key in enumerate(self._cut(keys)):
            buffer[i * self.block_nbytes : (i + 1) * self.block_nbytes] = self.blocks[key]
        self.spoil(buffer)
        return len(keys) // self.key_nbytes


class DictStore:
    def __init__(self, namespace, keys):
        self.namespace = namespace
        self.keys = keys
        self.staging = [np.zeros(namespace.block_nbytes, np.uint8) for _ in keys]
        self.views = [memoryview(block) for block in self.staging]

    def commit(self):
        self.namespace.blocks.update(zip(self.keys, self.staging, strict=True))
        return SimpleNamespace(stored=len(self.keys), already_stored=0, refused=0)


@dataclass
class DictClient:
    spoil: object = staticmethod(lambda _buffer: None)
    pool_nbytes: int = 1 << 40

    def stats(self):
        pool = SimpleNamespace(
            chunk_nbytes=self.pool_nbytes, slot_nbytes_used=0, chunks=1, huge_chunks=1
        )
        return SimpleNamespace(leases=0, pool=pool)

    def open_namespace(self, spec):
        return DictNamespace(spec.groups[0].block_nbytes, self.spoil)


def measured(client, plan=SMALL):
    return list(LocalBench(plan, client=client, rpc=lambda: True, progress=lambda _: None).rows())


def samples(*seconds):
    return Samples(tuple((s,) for s in seconds))


def test_every_bound_has_its_row_and_the_report_has_its_shape():
    rows = measured(DictClient())

    assert set(BOUNDS) <= {row.name for row in rows}
    report = json.loads(as_json(machine(SMALL, {"index_rows": 1}), rows))
    assert set(report) == {"machine", "results"}
    fields = ["name", "median", "p99", "unit", "baseline", "ratio"]
    assert all(list(result) == fields for result in report["results"])
    named = {result["name"] for result in report["results"]}
    baselines = {result["baseline"] for result in report["results"]} - {None}
    assert baselines <= named
    assert {"memcpy/57KiB", "memcpy/128KiB", "memcpy/2MiB", "noop_rpc"} <= baselines
    assert {
        "store/57KiB",
        "store/2MiB",
        "busy/acquire/64/mean",
        "busy_tight/lookup/64/p99",
    } <= named
    assert len(named) == len(report["results"])


@pytest.mark.parametrize("position", [0, -1])
def test_wrong_bytes_end_the_run(position):
    def spoil(buffer):
        buffer[position] ^= 1

    with pytest.raises(WrongBytesError, match="1 of 64 blocks had wrong bytes"):
        measured(DictClient(spoil))


def test_missing_blocks_end_the_run(monkeypatch):
    monkeypatch.setattr(
        DictNamespace, "lookup", lambda _self, keys: SimpleNamespace(blocks=len(keys) // 32 - 1)
    )
    with pytest.raises(WrongBytesError, match="found 63 of 64"):
        measured(DictClient())


def test_sources_of_different_blocks_differ():
    source = Source(4 * MiB, np.random.default_rng(1))
    numbers = np.arange(500)
    read = np.stack([source.block(i, 4096) for i in numbers])
    source.check(numbers, read)
    with pytest.raises(WrongBytesError, match="500 of 500"):
        source.check(numbers + 1, read)


def test_default_plan_is_what_the_bounds_were_set_for():
    plan = Plan()
    for block_nbytes in (57 << 10, 128 << 10, 2 << 20):
        assert plan.blocks(block_nbytes) * block_nbytes >= 1.5 * (1 << 30)
        assert plan.blocks(block_nbytes) % (64 * plan.rounds) == 0
    assert plan.index_blocks >= 1_000_000
    assert plan.source_nbytes >= 256 * MiB
    assert plan.busy_s >= 2
    assert plan.index_rows * 0.66 > plan.index_blocks


@pytest.mark.parametrize(
    ("name", "ratio", "holds"),
    [
        ("read_copy/57KiB", 0.45, True),
        ("read_copy/57KiB", 0.44, False),
        ("lookup/64", 0.3, True),
        ("lookup/64", 0.31, False),
        ("store/2MiB", 0.01, True),
        ("commit/57KiB", None, False),
    ],
)
def test_bounds_have_a_direction(name, ratio, holds):
    row = Row(name, 1.0, 1.0, "us", "noop_rpc", ratio)
    assert row.holds is holds
    assert ("MISSED" in as_text({}, [row])) is not holds


def test_a_bound_without_a_row_is_missed():
    assert set(missed([])) == {f"{name}: not measured" for name in BOUNDS}
    good = [Row(n, 1, 1, "us", "x", 1e9 if b.at_least else 0.0) for n, b in BOUNDS.items()]
    assert missed(good) == []
    assert missed([*good[1:], Row("read_copy/57KiB", 1, 1, "GB/s", "memcpy/57KiB", 0.2)]) == [
        "read_copy/57KiB: 0.20 x memcpy/57KiB, >= 0.45 wanted"
    ]


def test_ratios_are_of_rounds_not_of_totals():
    slow_phase = samples(1.0, 10.0, 1.0)
    ours = samples(2.0, 20.0, 2.0)
    assert time_row("a", ours, ("b", slow_phase)).ratio == 2.0
    assert rate_row("a", 10**9, ours, ("b", slow_phase)).ratio == 0.5
    assert rate_row("a", 10**9, ours).median == 0.5


def test_p99_is_the_slow_end():
    taken = Samples((tuple([1e-3] * 98 + [2e-3, 9e-3]),))
    assert time_row("a", taken).p99 == pytest.approx(9e3)
    assert rate_row("a", 9 * 10**6, taken).p99 == pytest.approx(1.0)


def test_busy_rows_hold_the_mean_and_the_p99_apart():
    alone = Samples((tuple([1.0] * 100),))
    busy = Samples((tuple([1.0] * 98 + [101.0] * 2),))
    rows = {row.name: row for row in busy_rows("busy", "lookup/64", alone, busy)}
    assert rows["busy/lookup/64/mean"].ratio == pytest.approx(3.0)
    assert rows["busy/lookup/64/p99"].ratio == pytest.approx(101.0)
    assert rows["busy_alone/lookup/64"].ratio is None
    assert not rows["busy/lookup/64/p99"].holds


def test_rounds_interleave():
    calls = []
    first = Operation("first", lambda _: calls.append("first"))
    second = Operation("second", lambda _: calls.append("second"))
    taken = interleaved([(first, 2), (second, 1)], 2)
    assert calls == ["first", "first", "second"] * 2
    assert [len(a_round) for a_round in taken["first"].rounds] == [2, 2]


def test_only_run_is_timed():
    slow = Operation(
        "x", lambda _: None, prepare=lambda: time.sleep(0.02), finish=lambda *_: time.sleep(0.02)
    )
    assert statistics.median(slow.once() for _ in range(3)) < 0.01


def test_loop_lasts_and_runs_at_least_once():
    assert len(loop(Operation("x", lambda _: None), 0, pause_s=0.0).seconds) == 1
    start = time.monotonic()
    assert len(loop(Operation("x", lambda _: None), 0.05, pause_s=0.001).seconds) > 2
    assert time.monotonic() - start >= 0.05


def test_busy_thread_computes_until_it_is_left():
    with BusyThread() as busy:
        deadline = time.monotonic() + 10
        while busy.turns < 1000 and time.monotonic() < deadline:
            time.sleep(0.001)
    turns = busy.turns
    assert turns >= 1000
    time.sleep(0.01)
    assert busy.turns == turns


def test_memcpy_moves_its_source_and_copies():
    source = np.arange(256, dtype=np.uint8)
    copy = memcpy(source, 100, "memcpy")
    windows = [copy.prepare() for _ in range(3)]
    assert [int(window[0]) for window in windows] == [0, 100, 0]
    copy.run(windows[1])


def test_settings_file_reads_back():
    tables = {"ram": {"size": "2GiB", "huge_pages": True}, "index": {"load_max": 0.5, "rows": 7}}
    tables["nvme"] = {"directories": ["/a", 'with "quotes"'], "segment": "64MiB"}
    assert tomllib.loads(toml(tables)) == tables
    assert tomllib.loads(toml(Plan().daemon_tables()))["index"]["rows_initial"] > 2_000_000


def test_a_daemon_that_does_not_start_is_reported_with_its_log(tmp_path, monkeypatch):
    script = tmp_path / "broken"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no room for the pool')\n")
    script.chmod(0o755)
    monkeypatch.setattr(bench_daemon.sys, "executable", str(script))
    daemon = DaemonProcess(tmp_path, {})
    with pytest.raises(DaemonError, match=r"ended with 1; .*\nno room for the pool"):
        daemon.start()
    with pytest.raises(DaemonError, match="not running"):
        _ = daemon.pid


def test_too_little_memory_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(
        bench_command, "read_memory_limit", lambda: MemoryLimit(8 << 30, 4 << 30, "host")
    )
    result = CliRunner().invoke(bench_command.bench, ["local"])
    assert result.exit_code == 2
    assert "4GiB is free; take a smaller --resident" in result.output


def test_sizes_are_checked():
    result = CliRunner().invoke(bench_command.bench, ["local", "--resident", "5"])
    assert result.exit_code == 2
    assert "'5' is not a size of at least 1MiB" in result.output


def test_blocks_are_stored_when_the_pool_has_grown(monkeypatch):
    client = DictClient(pool_nbytes=0)
    monkeypatch.setattr(bench_load, "GROWTH_S", 0.05)
    with pytest.raises(NoRoomError, match="did not grow by 5 bytes"):
        GrownPool(client).wait_for(5)
    client.pool_nbytes = bench_load.GROWTH_MARGIN_NBYTES + 5
    GrownPool(client).wait_for(5)


def test_an_early_end_is_explained_by_the_daemon_if_it_ended(monkeypatch):
    ended = []

    @contextmanager
    def daemon(_directory, _tables):
        def check(_grace_s):
            if ended:
                raise DaemonError("the bench's daemon ended with 3")

        yield SimpleNamespace(socket="nowhere", check=check)

    @contextmanager
    def connect(*_args, **_options):
        yield DictClient(pool_nbytes=0)

    monkeypatch.setattr(bench_command, "DaemonProcess", daemon)
    monkeypatch.setattr(bench_command.kvkeep, "connect", connect)
    monkeypatch.setattr(bench_load, "GROWTH_S", 0.0)
    with pytest.raises(KVKeepError, match="ended early: the daemon's pool did not grow"):
        bench_command._run(SMALL)
    ended.append(True)
    with pytest.raises(DaemonError, match="ended with 3"):
        bench_command._run(SMALL)

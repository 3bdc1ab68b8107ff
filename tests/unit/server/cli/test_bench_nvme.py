"""`kvkeep bench nvme` at its smallest, with a program that passes for fio."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from kvkeep_server.cli import bench as bench_command
from kvkeep_server.cli import bench_nvme, bench_nvme_log
from kvkeep_server.cli.bench_fio import EXIT_NO_FIO, Fio, FioError, FioRun, NoFioError
from kvkeep_server.cli.bench_load import WrongBytesError
from kvkeep_server.cli.bench_nvme import NvmePlan, runs_at_once
from kvkeep_server.cli.bench_nvme_log import MeasuredLog, Slots
from kvkeep_server.cli.bench_rows import NVME_BOUNDS, missed
from kvkeep_server.cli.main import run
from tests.fakes.fio import FakeFio

KIB, MIB = 1 << 10, 1 << 20
NBYTES = 57 * KIB
SMALL = {"57KiB": NBYTES, "128KiB": 128 * KIB, "2MiB": 128 * KIB}
SIZES = ("57KiB", "128KiB", "2MiB")


@pytest.fixture
def small(monkeypatch):
    """Blocks of 2 MiB would make 128 MiB a batch."""
    monkeypatch.setattr(bench_nvme, "SIZES", SMALL)


@pytest.fixture
def fio(tmp_path, monkeypatch):
    fake = FakeFio(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    return fake


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    return directory


def command(data, *options):
    arguments = ["nvme", "--directory", str(data), "--stored", "1MiB", "--rounds", "2", *options]
    return CliRunner().invoke(bench_command.bench, arguments)


def started(path):
    return Fio(path, np.random.default_rng(1))


@pytest.fixture
def log(data):
    slots = Slots(4 * MIB)
    random = np.random.default_rng(1)
    with MeasuredLog(data, slots, max_nbytes=1 << 30, read_threads=2, random=random) as log:
        yield log
    slots.close()


@pytest.mark.usefixtures("small")
def test_the_report_has_a_row_for_each_bound_beside_fio(fio, data):
    result = command(data, "--json")

    report = json.loads(result.stdout)
    rows = {row["name"]: row for row in report["results"]}
    assert set(rows) == {*NVME_BOUNDS, *(f"fio/{name}" for name in NVME_BOUNDS)}
    for name in NVME_BOUNDS:
        assert rows[name]["baseline"] == f"fio/{name}"
        assert rows[name]["unit"] == "GB/s"
        assert rows[name]["ratio"] == pytest.approx(rows[name]["median"], rel=0.5)
        assert rows[f"fio/{name}"]["median"] == 1.0
    assert report["machine"]["fio"] == "fio-3.99"
    assert set(report["machine"]["fio_request_nbytes"]) == set(NVME_BOUNDS)
    assert not list(data.iterdir()), "the bench left something behind"
    assert {call["ioengine"] for call in fio.calls} == {"libaio"}


@pytest.mark.parametrize(("slow", "merges"), [(NBYTES, True), (0, False)])
def test_rounds_of_fio_are_at_the_size_that_was_best(tmp_path, monkeypatch, data, slow, merges):
    rates = {slow: 10**8} if slow else {NBYTES: 2 * 10**9}
    fake = FakeFio(tmp_path / "bin", rates=rates)
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.setattr(bench_nvme, "SIZES", {"57KiB": NBYTES})
    command(data)
    for pattern in ("write", "read", "randread"):
        sizes = [int(call["bs"]) for call in fake.calls if call["rw"] == pattern]
        assert NBYTES in sizes[:-2]
        assert len(set(sizes[-2:])) == 1
        assert (sizes[-1] > NBYTES) == merges


@pytest.mark.usefixtures("fio")
def test_a_missed_bound_is_said_and_is_the_exit_code(data, monkeypatch, capsys):
    monkeypatch.setattr(bench_nvme, "SIZES", {"57KiB": NBYTES})
    options = ["--directory", str(data), "--stored", "1MiB", "--rounds", "1"]
    assert run(["bench", "nvme", *options]) == 0
    assert run(["bench", "nvme", *options, "--check"]) == bench_command.EXIT_MISSED
    assert "missed: write/128KiB: not measured" in capsys.readouterr().err


def test_without_fio_it_says_where_to_get_it(monkeypatch, data, capsys):
    monkeypatch.setenv("PATH", str(data))
    assert run(["bench", "nvme", "--directory", str(data)]) == EXIT_NO_FIO == 69
    assert "apt-get install fio" in capsys.readouterr().err
    assert not list(data.iterdir())


def test_without_room_it_says_so_before_anything_is_written(monkeypatch, data):
    monkeypatch.setattr(bench_command.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    result = CliRunner().invoke(bench_command.bench, ["nvme", "--directory", str(data)])
    assert result.exit_code == 2
    assert "1GiB is free; take a smaller --stored" in " ".join(result.output.split())


def test_fio_syncs_as_often_as_a_batch_is_long_and_leaves_nothing(fio, data):
    one = FioRun("write", NBYTES, 10 * 64 * NBYTES, sync_nbytes=64 * NBYTES)
    assert started(data).write(one) == pytest.approx(one.nbytes / 1e9)
    started(data).write(one.at(MIB))
    equal, merged = fio.calls
    assert (equal["bs"], equal["fdatasync"]) == (str(NBYTES), "64")
    assert (merged["bs"], merged["fdatasync"]) == (str(MIB), "3")
    assert int(merged["io_size"]) % MIB == 0
    assert equal["direct"] == "1"
    assert equal["iodepth"] == "16"


def test_fio_reads_files_of_the_log_and_never_writes_them(fio, data):
    files = [data / "a:b", data / "c"]
    for file in files:
        file.write_bytes(bytes(MIB))
    program = started(data)
    program.read(FioRun("randread", NBYTES, MIB), files)
    program.read(FioRun("read", NBYTES, MIB), files)
    scattered, along = fio.calls
    assert scattered["filename"] == f"{data}/a\\:b:{data}/c"
    assert int(scattered["size"]) == 2 * MIB
    assert along["filename"] in {f"{data}/a\\:b", f"{data}/c"}
    lines = (data.parent / "bin" / "calls").read_text().splitlines()
    assert all("--readonly" in json.loads(line) for line in lines)


def test_a_fio_that_fails_ends_the_run(tmp_path, monkeypatch, data):
    monkeypatch.setenv("PATH", FakeFio(tmp_path / "bad", code=1).path)
    with pytest.raises(FioError, match="ended with 1: no such device"):
        started(data).write(FioRun("write", MIB, MIB))
    monkeypatch.setenv("PATH", FakeFio(tmp_path / "idle", rate=0).path)
    with pytest.raises(FioError, match="gave no figures"):
        started(data).write(FioRun("write", MIB, MIB))
    monkeypatch.setenv("PATH", str(data))
    with pytest.raises(NoFioError):
        started(data)


def test_a_log_is_read_back_and_wrong_bytes_end_the_run(log, data):
    log.write(log.fill(64, NBYTES), 2)
    log.seal()
    log.read(log.draw(5, 1), 2)
    log.read(log.draw(3, 64), 1)
    [segment] = log.full_segments()
    assert segment.parent == data
    flipped = bytearray(segment.read_bytes())
    flipped[3 * 4096] ^= 1  # of the first block's payload
    segment.write_bytes(flipped)
    with pytest.raises(WrongBytesError, match="read something else"):
        log.read(log.draw(20, 64), 1)


def test_a_batch_without_room_ends_the_run(data):
    slots = Slots(4 * MIB)
    random = np.random.default_rng(1)
    with (
        MeasuredLog(data, slots, max_nbytes=MIB, read_threads=1, random=random) as log,
        pytest.raises(WrongBytesError, match="no room"),
    ):
        log.write(log.fill(64, NBYTES), 1)
    slots.close()


def test_only_files_of_the_same_order_are_read_by_fio(log, data, monkeypatch):
    monkeypatch.setattr(bench_nvme_log, "SEGMENT_NBYTES", MIB)
    for name, size in (("1.kvks", 100), ("2.kvks", 90), ("3.kvks", 20), ("other", 100)):
        (data / name).write_bytes(bytes(size))
    assert [file.name for file in log.full_segments()] == ["1.kvks", "2.kvks"]


def test_the_default_plan_is_what_the_bounds_were_set_for():
    plan = NvmePlan()
    for nbytes in (NBYTES, 128 * KIB, 2 * MIB):
        batches = plan.batches_a_round(nbytes) * (plan.rounds + 1)
        assert batches * 64 * nbytes >= plan.stored_nbytes == 1 << 30
        assert runs_at_once(nbytes) * 64 * nbytes <= plan.slots_nbytes
        assert plan.log_nbytes(nbytes) > batches * 64 * nbytes
    assert plan.rounds >= 5
    assert missed([], NVME_BOUNDS) == [f"{name}: not measured" for name in NVME_BOUNDS]
    assert {name.split("/")[1] for name in NVME_BOUNDS} == set(SIZES)
    smaller = dataclasses.replace(plan, stored_nbytes=MIB)
    assert smaller.disk_nbytes < plan.disk_nbytes

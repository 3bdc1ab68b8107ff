"""`kvkeep replay`, `stats` and `check` as an operator types them, against a real daemon."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvkeep
from kvkeep_server.cli.main import kvkeep as command
from kvkeep_server.cli.main import run
from kvkeep_server.cli.replay_engine import TraceKeys, replay_spec
from kvkeep_server.sim.mooncake import read_mooncake
from tests.fakes.daemon_process import running_daemon
from tests.fakes.waiting import wait_until

COMMAND = [sys.executable, "-m", "kvkeep_server"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon
        daemon.check_log()


@pytest.fixture
def where(daemon):
    return ["--runtime-dir", str(daemon.runtime_dir)]


@pytest.fixture
def trace(tmp_path):
    """20 requests of 4 conversations, each 3 blocks longer than the one before, 0.1 s apart."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for number in range(20):
        session, turn = number % 4, number // 4
        ids = [1000 * session + i for i in range(3 * (turn + 1))]
        request = {"timestamp": 100 * number, "input_length": 512 * len(ids) - 100}
        lines.append(json.dumps({**request, "output_length": 5, "hash_ids": ids}))
    path.write_text("\n".join(lines) + "\n")
    return path


def invoke(*arguments):
    """(exit code, standard output, standard error) of a command line, in this process."""
    result = CliRunner().invoke(command, [str(one) for one in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value or 0, result.stdout, result.stderr


def replayed(trace, where, *more):
    code, output, _ = invoke("replay", trace, *where, "--block-size", "4KiB", "--json", *more)
    return code, json.loads(output)


BLOCKS = sum((3 * (n // 4 + 1) * 512 - 100) // 128 for n in range(20))


@pytest.mark.parametrize("clients", [1, 3])
def test_a_trace_is_replayed_and_every_byte_is_checked(trace, where, clients):
    options = ["--namespace", f"by {clients}", "--clients", clients, "--ranks", 2]
    code, first = replayed(trace, where, *options)
    assert code == 0
    assert (first["requests"], first["blocks_asked"]) == (20, BLOCKS)
    assert first["blocks_hit"] + first["blocks_missed"] == BLOCKS
    # The longest prompt of each of the four conversations is stored, 400 of its tokens' blocks not.
    whole = 4 * (15 * 512 - 100) // 128
    assert first["blocks_refused"] == 0
    if clients == 1:
        assert first["blocks_stored"] == whole // 4 * 4
        assert first["blocks_hit"] == BLOCKS - first["blocks_stored"]
    code, second = replayed(trace, where, *options)
    assert code == 0
    assert second["blocks_hit"] == second["blocks_verified"] == BLOCKS
    assert second["hit_ratio"] == 1.0
    assert second["tokens_saved"] == BLOCKS * 128
    assert second["nbytes_read"] == BLOCKS * 4096 * 2
    assert second["latency_ms"]["read"]["count"] == 20
    assert second["latency_ms"]["store"]["count"] == 0


@pytest.mark.parametrize("command", [["stats"], ["stats", "--json"], ["check"], ["health"]])
def test_output_that_finds_no_room_is_one_line(where, command):
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >/dev/full', "sh", *COMMAND, *command, *where],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr == "kvkeep: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 74


def test_a_refusal_is_not_taken_for_a_daemon_that_is_away(trace, where, capfd):
    assert run(["replay", str(trace), *where, "--block-size", "1GiB"]) == 1
    said = capfd.readouterr().err
    assert "refused the session: staging_nbytes" in said
    assert "no daemon" not in said


def test_requests_wait_for_their_time(trace, where):
    _, slow = replayed(trace, where, "--rate", 2, "--clients", 2, "--namespace", "in time")
    assert slow["seconds"] >= 1.9 / 2
    assert slow["requests"] == 20


def test_the_first_requests_only_and_text(trace, where):
    code, output, _ = invoke(
        "replay", trace, *where, "--requests", 3, "--block-size", "4KiB", "--namespace", "some"
    )
    assert code == 0
    assert "requests    3 in " in output
    assert "0 wrong" in output


def test_a_wrong_byte_is_exit_code_1(trace, where, daemon):
    hasher = kvkeep.chain_hash.KvkeepBlake2b(128)
    spec = replay_spec(hasher=hasher, block_nbytes=4096, ranks=1, names=("replay", "poisoned"))
    keys = TraceKeys(hasher).of(next(read_mooncake(trace)))
    with kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client:
        namespace = client.open_namespace(spec)
        namespace.store_blocks(keys, bytes(len(keys) // 32 * 4096))
        code, report = replayed(trace, where, "--namespace", "poisoned")
    assert code == 1
    # All of the first prompt's blocks, in each of the five turns of its conversation.
    assert report["blocks_wrong"] == 5 * len(keys) // 32
    assert report["blocks_verified"] > 0


def test_an_npz_trace(tmp_path, where):
    path = tmp_path / "trace.npz"
    np.savez(
        path,
        par=np.array([-1, 0, 1, 1], np.int32),
        leaf=np.array([2, 3, 2], np.int32),
        ts=np.array([0.0, 1.0, 2.0]),
        typ=np.zeros(3, np.int8),
        outl=np.zeros(3, np.int32),
        sess=np.zeros(3, np.int32),
    )
    code, report = replayed(path, where, "--namespace", "npz", "--tokens-per-block", 512)
    assert code == 0
    assert (report["blocks_asked"], report["blocks_hit"], report["blocks_stored"]) == (9, 5, 4)


# ---- what is refused


def code_and_words(capsys, *arguments):
    code = run([str(one) for one in arguments])
    return code, capsys.readouterr().err


def test_bad_input_names_file_line_and_field(capsys, tmp_path, trace, where):
    lines = trace.read_text().splitlines()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*lines[:4], lines[4].replace("512", "x"), *lines[5:]]) + "\n")
    bad.write_text(bad.read_text().replace('"output_length": 5', '"output_length": -5', 5))
    code, words = code_and_words(capsys, "replay", bad, *where, "--block-size", "4KiB")
    assert code == 65
    assert f"{bad}:1: output_length is -5; allowed: " in words
    other = tmp_path / "trace.csv"
    other.write_text("x")
    code, words = code_and_words(capsys, "replay", other, *where)
    assert (code, "neither an .npz nor a .jsonl" in words) == (2, True)
    broken = tmp_path / "broken.npz"
    broken.write_text("x")
    code, words = code_and_words(capsys, "replay", broken, *where)
    assert (code, str(broken) in words) == (65, True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tokens-per-block", "100"),
        ("--block-size", "0B"),
        ("--block-size", "12"),
        ("--clients", "0"),
        ("--rate", "0"),
        ("--ranks", "65"),
        ("--check-one-in", "0"),
    ],
)
def test_options_that_make_no_sense(capsys, trace, where, option, value):
    code, words = code_and_words(capsys, "replay", trace, *where, option, value)
    assert code == 2
    assert option in words


@pytest.mark.parametrize("name", ["stats", "check", "replay"])
def test_where_no_daemon_is(capsys, tmp_path, trace, name):
    arguments = [name, trace] if name == "replay" else [name]
    code, words = code_and_words(capsys, *arguments, "--runtime-dir", tmp_path)
    assert code == 69
    assert str(tmp_path) in words
    assert "kvkeep serve" in words


def test_a_daemon_that_dies_ends_a_replay(tmp_path, trace):
    with running_daemon(tmp_path / "d") as daemon:
        arguments = ["replay", trace, "--runtime-dir", daemon.runtime_dir, "--rate", "0.1"]
        with subprocess.Popen(
            [sys.executable, "-m", "kvkeep_server", *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as replay:
            with kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client:
                wait_until(lambda: client.stats().sessions == 2, 30, "the replay attaches")
            daemon.kill()
            _, words = replay.communicate(timeout=120)
    assert replay.returncode == 69, words
    assert str(daemon.runtime_dir) in words


# ---- stats and check


def test_stats_tell_what_there_is(trace, where):
    _, report = replayed(trace, where, "--namespace", "counted")
    code, output, _ = invoke("stats", *where)
    assert code == 0
    assert "replay/counted/kvkeep replay/uint8" in output
    code, output, _ = invoke("stats", *where, "--json")
    stats = json.loads(output)
    by_name = {one["model"]: one for one in stats["namespaces"]}
    assert by_name["counted"]["blocks"] == report["blocks_stored"]
    assert stats["blocks_missed_total"] == sum(stats["misses"].values())
    assert stats["blocks_asked_total"] == stats["blocks_hit_total"] + stats["blocks_missed_total"]


def test_stats_watch_until_interrupted(daemon):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    arguments = ["stats", "--watch", "--json", "--interval", "0.1"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvkeep_server", *arguments, "--runtime-dir", daemon.runtime_dir],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as watching:
        looks = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.terminate()
    assert looks[0]["uptime_ms"] < looks[1]["uptime_ms"] < looks[2]["uptime_ms"]


def test_check_finds_nothing_in_a_sound_daemon(where):
    code, output, _ = invoke("check", *where)
    assert code == 0
    assert output.endswith("ok\n")
    code, output, _ = invoke("check", *where, "--bytes", "--json")
    report = json.loads(output)
    assert (code, report["ok"], report["findings"]) == (0, True, [])
    assert report["blocks_verified"] == report["blocks_checked"] > 0


def test_bytes_are_read_at_the_rate(where):
    _, output, _ = invoke("check", *where, "--bytes", "--rate", "1GiB", "--json")
    nbytes = json.loads(output)["nbytes_verified"]
    began = os.times().elapsed
    invoke("check", *where, "--bytes", "--rate", f"{nbytes}B")
    assert os.times().elapsed - began >= 0.7


# ---- removal by real clients (B040)


def hammer(directory: Path, seed: int, failures: list[str]) -> None:
    source = np.random.default_rng(seed)
    hasher = kvkeep.chain_hash.KvkeepBlake2b(16)
    spec = replay_spec(hasher=hasher, block_nbytes=4096, ranks=1, names=("replay", "hammer"))
    chains = [hasher.keys(range(1000 * one, 1000 * one + 160)) for one in range(5)]
    blocks = [[key * 128 for key in map(bytes, np.frombuffer(c, "V32"))] for c in chains]
    with kvkeep.connect(directory, timeout_s=30, staging_nbytes=1 << 20) as client:
        namespace = client.open_namespace(spec)
        for _ in range(120):
            one, what = int(source.integers(5)), int(source.integers(4))
            first = int(source.integers(10))
            if what == 0:
                namespace.remove(chains[one][first * 32 :], with_descendants=bool(first % 2))
            elif what == 1:
                namespace.store_blocks(chains[one], blocks[one])
            elif what == 2:
                into = bytearray(10 * 4096)
                found = namespace.read_into(chains[one], into)
                if into[: found * 4096] != b"".join(blocks[one][:found]):
                    failures.append("read_into")
            else:
                with namespace.acquire(chains[one]) as lease:
                    if [bytes(view) for view in lease.views()] != blocks[one][: lease.blocks]:
                        failures.append("lease")


def test_workers_that_store_read_and_remove(daemon, where):
    """B040, by real clients."""
    failures: list[str] = []
    workers = [
        threading.Thread(target=hammer, args=(daemon.runtime_dir, seed, failures))
        for seed in range(8)
    ]
    for worker in workers:
        worker.start()
    codes = [invoke("check", *where, "--bytes")[0] for _ in range(3)]
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
    assert failures == []
    assert [*codes, invoke("check", *where, "--bytes")[0]] == [0] * 4
    stats = json.loads(invoke("stats", *where, "--json")[1])
    assert stats["blocks_removed_total"] > 0
    assert stats["leases"] == 0

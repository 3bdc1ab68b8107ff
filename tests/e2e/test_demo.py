"""`kvkeep demo` kills its own daemon: all bytes right and back from disk, or exit 1."""

import re
import subprocess
import sys

import pytest

from kvkeep_server.cli import demo_crash, replay_engine
from kvkeep_server.cli.bench_daemon import DaemonProcess
from kvkeep_server.cli.main import run

LAST_LINE = re.compile(r"(\d+) blocks verified, (\d+) wrong")


def last_line(output):
    verified, wrong = LAST_LINE.fullmatch(output.rstrip().splitlines()[-1]).groups()
    return int(verified), int(wrong)


def number_in(pattern, output):
    return int(re.search(pattern, output)[1].replace(",", ""))


def demo(directory, *options):
    return ["demo", "--ram", "256MiB", "--directory", str(directory), *options]


def test_every_byte_of_the_real_trace_is_right_and_outlives_the_daemon(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep_server", *demo(tmp_path, "--requests", "30")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verified, wrong = last_line(done.stdout)
    assert verified > 10_000
    assert wrong == 0
    for told in ("prefill", "Prefill saved", "hit ratio", "SIGKILL", "30/30 requests"):
        assert told in done.stdout
    assert "\x1b" not in done.stdout, "escape codes on what is not a terminal"
    back, of = re.search(r"([\d,]+) of ([\d,]+) blocks that had been ack", done.stdout).groups()
    assert back == of != "0"
    assert number_in(r"([\d,]+) blocks were only there: the states", done.stdout) > 0
    assert number_in(r"States +([\d,]+) prompts went on from a state", done.stdout) > 0
    assert number_in(r"For the others\s+([\d,]+) of", done.stdout) > 0
    assert not done.stderr
    rows = r"30/30 requests: .*found on nvme ([\d,]+) blocks.* after SIGKILL ([\d,]+) blocks"
    on_nvme, after = re.search(rows, done.stdout).groups()
    assert on_nvme != "0"
    assert number_in(r"([\d,]+) times one was read", done.stdout) == int(after.replace(",", "")) > 0
    assert not list(tmp_path.iterdir()), "it leaves something behind"


@pytest.mark.parametrize("at", [0, 113_919])
def test_a_wrong_byte_makes_it_exit_1(monkeypatch, capsys, tmp_path, at):
    """One byte of the third block that is stored is not the one that it must be."""
    fill = replay_engine.BlockBytes.fill
    filled = []

    def fill_wrong_once(self, key, block):
        fill(self, key, block)
        filled.append(key)
        if len(filled) == 3:
            block[at] ^= 0x01

    monkeypatch.setattr(replay_engine.BlockBytes, "fill", fill_wrong_once)
    code = run(demo(tmp_path, "--requests", "4"))
    verified, wrong = last_line(capsys.readouterr().out)
    assert code == 1
    assert wrong > 0
    assert verified > 0


def test_a_disk_that_lost_everything_makes_it_exit_1(monkeypatch, capsys, tmp_path):
    """What the first daemon wrote is gone when the second one starts."""
    kill = DaemonProcess.kill

    def kill_and_lose(self):
        kill(self)
        segments = list(tmp_path.glob("*/*.kvks"))
        assert segments
        for segment in segments:
            segment.unlink()

    monkeypatch.setattr(DaemonProcess, "kill", kill_and_lose)
    code = run(demo(tmp_path, "--requests", "4"))
    told = capsys.readouterr().out
    assert last_line(told)[1] == 0
    assert code == 1
    assert "  0 of " in told
    assert "Not all that had been acknowledged" in told


def test_nothing_from_disk_after_the_kill_makes_it_exit_1(monkeypatch, capsys, tmp_path):
    """All is there and nobody asks for it: the requests after the kill begin anew."""

    def crash_and_forget(daemon, client, clock):
        cost = demo_crash.crash(daemon, client, clock)
        monkeypatch.setattr(replay_engine.TraceKeys, "of", lambda *_: b"")
        return cost

    monkeypatch.setattr("kvkeep_server.cli.demo.crash", crash_and_forget)
    code = run(demo(tmp_path, "--requests", "4"))
    told = capsys.readouterr().out
    assert last_line(told)[1] == 0
    assert code == 1
    assert "Nothing was read from disk after the kill" in told


def test_a_daemon_that_does_not_start_is_one_line(capsys, tmp_path):
    code = run(["demo", "--requests", "2", "--ram", "1TiB", "--directory", str(tmp_path)])
    captured = capsys.readouterr()
    assert code != 0
    assert "ram.size" in captured.err
    assert "Traceback" not in captured.err

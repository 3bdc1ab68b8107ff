"""`kvkeep demo` with its own daemon: all bytes right, or exit 1."""

import re
import subprocess
import sys

import pytest

from kvkeep_server.cli import replay_engine
from kvkeep_server.cli.main import run

LAST_LINE = re.compile(r"(\d+) blocks verified, (\d+) wrong")


def last_line(output):
    verified, wrong = LAST_LINE.fullmatch(output.rstrip().splitlines()[-1]).groups()
    return int(verified), int(wrong)


def test_every_byte_of_the_real_trace_is_right():
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep_server", "demo", "--requests", "60", "--ram", "256MiB"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    verified, wrong = last_line(done.stdout)
    assert verified > 10_000
    assert wrong == 0
    for told in ("prefill", "Prefill saved", "hit ratio", "evicted", "restart", "60/60 requests"):
        assert told in done.stdout
    assert "\x1b" not in done.stdout, "escape codes on what is not a terminal"
    assert int(re.search(r"([\d,]+) blocks were evicted", done.stdout)[1].replace(",", "")) > 0


@pytest.mark.parametrize("at", [0, 113_919])
def test_a_wrong_byte_makes_it_exit_1(monkeypatch, capsys, at):
    """One byte of the third block that is stored is not the one that it must be."""
    fill = replay_engine.BlockBytes.fill
    filled = []

    def fill_wrong_once(self, key, block):
        fill(self, key, block)
        filled.append(key)
        if len(filled) == 3:
            block[at] ^= 0x01

    monkeypatch.setattr(replay_engine.BlockBytes, "fill", fill_wrong_once)
    code = run(["demo", "--requests", "4", "--ram", "256MiB"])
    verified, wrong = last_line(capsys.readouterr().out)
    assert code == 1
    assert wrong > 0
    assert verified > 0


def test_a_daemon_that_does_not_start_is_one_line(capsys):
    code = run(["demo", "--requests", "1", "--ram", "1TiB"])
    captured = capsys.readouterr()
    assert code != 0
    assert "ram.size" in captured.err
    assert "Traceback" not in captured.err

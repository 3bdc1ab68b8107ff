"""What ends a command from outside is one line and an exit code, whichever command it is."""

import os
import subprocess
import sys

import pytest

from kvkeep_server.cli.main import run

COMMAND = [sys.executable, "-m", "kvkeep_server"]
PRINTING = [
    ["config", "reference"],
    ["config", "metrics"],
    ["config", "show"],
    ["config", "check"],
    ["--help"],
    ["--version"],
]


def shell(
    arguments: list[str], redirection: str, unbuffered: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_output_that_finds_no_room_is_one_line(arguments, unbuffered):
    ended = shell(arguments, ">/dev/full", unbuffered)
    assert ended.stderr == "kvkeep: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 74


@pytest.mark.parametrize(
    "command", [["serve"], ["stats"], ["health"], ["check"], ["namespace-mode", "normal"]]
)
def test_an_empty_directory_is_not_the_default(command, capfd):
    assert run([*command, "--runtime-dir", ""]) == 2
    assert "name a directory, or leave the option out" in capfd.readouterr().err


def test_a_reader_that_leaves_is_no_word():
    ended = shell(["config", "reference"], "| head -1")
    assert (ended.stdout, ended.stderr) == ("# Settings\n", "")


def test_a_closed_output_is_no_traceback():
    ended = shell(["config", "reference"], ">&-")
    assert ended.stderr == ""


def test_an_error_that_cannot_be_told_keeps_its_exit_code():
    assert shell(["config", "check", "/nowhere"], "2>/dev/full").returncode == 78
    assert shell(["health", "--runtime-dir", "/nowhere"], "2>/dev/full").returncode == 1
    assert shell(["health", "--what"], "2>/dev/full").returncode == 2
    assert shell(["config", "check", "/nowhere"], "2>&-").returncode == 78
    assert shell(["health", "--what"], "2>&-").returncode == 2

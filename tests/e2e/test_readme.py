"""The README's example and the programs in client/examples do what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep_server.cli.bench_daemon import DaemonProcess
from tests.fakes.scraping import free_port

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SHOWN = re.findall(r"^```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What a user has who typed `kvkeep serve`: the default directory of the sockets."""
    above = tmp_path_factory.mktemp("runtime")
    directory = above / "kvkeep"
    directory.mkdir(mode=0o700)
    with DaemonProcess(directory, {"ram": {"size": "64MiB"}}):
        yield {**os.environ, "XDG_RUNTIME_DIR": str(above), "PYTHONDEVMODE": "1"}


def output_of(program, environment):
    done = subprocess.run(
        [sys.executable, *program], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_what_the_readme_shows(environment):
    setting, six_lines, *_ = BLOCKS
    assert len(six_lines.splitlines()) == 6
    program = setting + six_lines
    assert output_of(["-c", program], environment) == SHOWN[0]
    assert output_of(["-c", program], environment) == SHOWN[0], "the second run differs"


def test_the_readmes_scheduler_runs(environment):
    setting, six_lines, two_calls, _ = BLOCKS
    program = f"{setting}{six_lines}keys = hasher.keys(range(64))\n{two_calls}print(ticket.state)"
    assert output_of(["-c", program], environment).startswith(SHOWN[0])


def test_the_readmes_client_of_another_host_connects(tmp_path):
    settings = {"ram": {"size": "64MiB"}, "remote": {"listen": f"127.0.0.1:{free_port()}"}}
    address = settings["remote"]["listen"]
    with DaemonProcess(tmp_path, settings):
        setting, six_lines, _, connects = BLOCKS
        connects = re.sub(r"127\.0\.0\.1:\d+", address, connects)
        program = setting + six_lines.replace("client = kvkeep.connect()\n", connects)
        assert output_of(["-c", program], os.environ) == SHOWN[0]


def test_the_smallest_example_is_the_readmes(environment):
    assert output_of([ROOT / "client/examples/hello.py"], environment) == SHOWN[0]


def test_the_second_turn_reuses_the_first(environment):
    output = output_of([ROOT / "client/examples/prefix_reuse.py"], environment)
    assert output.splitlines() == [
        "100 tokens: 0 found, 100 computed",
        "160 tokens: 96 found, 64 computed",
    ]


def test_a_hybrid_model_finds_its_window_and_its_state(environment):
    assert output_of([ROOT / "client/examples/hybrid_model.py"], environment).splitlines() == [
        "160 of 240 tokens, the last 32 with a replay",
        "global: blocks [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]",
        "window: blocks [8, 9]",
        "state: blocks [7]",
    ]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_the_readmes_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_the_readmes_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_a_scheduler_finds_without_waiting(environment):
    assert output_of([ROOT / "client/examples/scheduler.py"], environment).splitlines() == [
        "64 tokens: 0 found",
        "96 tokens: 64 found",
        "96 tokens: 96 found",
    ]

"""`kvkeep namespace-mode` against a daemon that serves: what its clients find and may store."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from kvkeep.results import CommitStatus
from kvkeep_server.cli.main import kvkeep as command
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN, connect, place

NBYTES = 5000
KEYS = chain_keys("a", 6)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("d"), LISTEN) as daemon:
        yield daemon
        daemon.check_log()


@pytest.fixture
def client(daemon, way):
    with connect(place(daemon, way), timeout_s=20) as client:
        yield client


@pytest.fixture
def turn(daemon):
    def turn(*arguments):
        line = ["namespace-mode", *arguments, "--runtime-dir", str(daemon.runtime_dir)]
        result = CliRunner().invoke(command, line, standalone_mode=False)
        if result.exception is not None:
            raise result.exception
        return result.stdout

    return turn


def test_a_bypassed_set_is_as_if_it_were_not_there(client, daemon, turn, way):
    model = f"bypassed {way}"
    namespace = client.open_namespace(spec(NBYTES, model=model))
    assert store_chain(namespace, KEYS).stored == 6
    said = turn("bypass", "--set", namespace.set_id.hex()[:8])
    assert said == f"{namespace.set_id.hex()} was normal, is bypass\n"
    # The client looks in shared memory by itself: it must have been told.
    wait_until(lambda: namespace.lookup(KEYS).blocks == 0, 5, "the client knows")
    assert not namespace.lookup(KEYS).complete
    assert namespace.read_into(KEYS, np.empty(6 * NBYTES, np.uint8)) == 0
    with namespace.acquire(KEYS) as found:
        assert found.leased == 0
    result = store_chain(namespace, chain_keys("b", 2))
    assert set(result.status) == {CommitStatus.REFUSED_READ_ONLY}
    # Who comes later is told when it opens the set.
    with connect(place(daemon, way), timeout_s=20) as other:
        assert other.open_namespace(spec(NBYTES, model=model)).lookup(KEYS).blocks == 0
    # Twice is no error, and not said to be a change.
    assert turn("bypass", "--model", model) == f"{namespace.set_id.hex()} is bypass already\n"
    turn("normal", "--model", model)
    wait_until(lambda: namespace.lookup(KEYS).blocks == 6, 5, "the client knows")


def test_a_read_only_set_is_found_and_takes_nothing(client, turn, way):
    model = f"read only {way}"
    namespace = client.open_namespace(spec(NBYTES, model=model))
    store_chain(namespace, KEYS)
    answer = json.loads(turn("read-only", "--model", model, "--json"))
    assert answer["namespaces"][0]["previous"] == "normal"
    result = store_chain(namespace, chain_keys("b", 2))
    assert set(result.status) == {CommitStatus.REFUSED_READ_ONLY}
    assert namespace.lookup(KEYS).blocks == 6


def test_what_is_set_is_shown(client, daemon, turn, way):
    client.open_namespace(spec(NBYTES, model=f"shown {way}"))
    turn("read-only", "--model", f"shown {way}")
    line = ["stats", "--runtime-dir", str(daemon.runtime_dir)]
    text = CliRunner().invoke(command, line, standalone_mode=False).stdout
    assert any(f"shown {way}" in row and "[read-only]" in row for row in text.splitlines())
    shown = json.loads(CliRunner().invoke(command, [*line, "--json"], standalone_mode=False).stdout)
    modes = {one["model"]: one["mode"] for one in shown["namespaces"]}
    assert modes[f"shown {way}"] == "read-only"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "no such model"), "no such model"),
        (("--set", "zz"), "kvkeep stats"),
    ],
)
def test_what_names_no_set_is_refused(client, turn, options, sentence):
    with pytest.raises(Exception, match=sentence):
        turn("bypass", *options)


def test_who_names_no_set_is_told_how_before_a_daemon_is_asked(tmp_path):
    line = ["namespace-mode", "bypass", "--runtime-dir", str(tmp_path / "nobody serves here")]
    result = CliRunner().invoke(command, line)
    assert result.exit_code == 2
    for part in ("--set HEX", "--tenant NAME", "--model NAME", "at least one", "kvkeep stats"):
        assert part in result.stderr

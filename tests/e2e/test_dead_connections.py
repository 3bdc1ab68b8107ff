"""Connections to a daemon on another host that die without a word."""

import contextlib
import time

import pytest

import kvkeep
from tests.fakes.black_hole import black_hole
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.waiting import wait_until
from tests.fakes.ways import LISTEN

CONFIG = LISTEN + '[ram]\nsize = "64MiB"\n'
NBYTES, BLOCKS = 4096, 4
KEYS = chain_keys("a", BLOCKS)
# A ping a second, three for its answer, one to attach again; and two busy cores.
BACK_S = 12.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(tmp_path_factory.mktemp("daemon"), CONFIG) as started:
        yield started
        started.check_log()


@contextlib.contextmanager
def attached(daemon):
    with (
        black_hole(daemon.address) as hole,
        kvkeep.connect(address=hole.address, timeout_s=2.0) as client,
    ):
        namespace = client.open_namespace(spec(NBYTES))
        store_chain(namespace, KEYS)
        yield hole, client, namespace


def answers(namespace):
    with contextlib.suppress(kvkeep.KVKeepError), namespace.acquire(KEYS, timeout_s=0.25) as got:
        return got.leased == BLOCKS
    return False


def test_a_client_that_asks_is_back_over_new_connections(daemon):
    with attached(daemon) as (hole, client, namespace):
        assert answers(namespace)
        hole.swallow()
        assert not answers(namespace)
        took_s = wait_until(lambda: answers(namespace), BACK_S, "it is back")
        assert took_s <= BACK_S
        assert client.health is kvkeep.Health.ANSWERS


def test_a_client_that_asks_nothing_is_back_too(daemon):
    """What it asks then is answered at once, not by a deadline."""
    with attached(daemon) as (hole, client, namespace):
        before = hole.connections
        hole.swallow()
        wait_until(lambda: hole.connections > before, BACK_S, "it attaches again")
        wait_until(lambda: client.attached, BACK_S, "it is attached")
        time.sleep(0.5)
        assert answers(namespace)


@pytest.mark.parametrize("upwards", [True, False])
def test_frames_without_end_are_not_waited_for(daemon, upwards):
    with attached(daemon) as (hole, client, namespace):
        hole.damage(upwards=upwards)
        assert not answers(namespace)
        wait_until(lambda: answers(namespace), BACK_S, "it is back")
        assert client.health is kvkeep.Health.ANSWERS


def test_a_connection_that_lives_and_is_idle_stays(daemon):
    """The daemon permits the pings."""
    with attached(daemon) as (hole, client, namespace):
        before = hole.connections
        time.sleep(5.0)
        assert hole.connections == before
        assert client.attached
        assert answers(namespace)

"""Connections to a daemon on another host that die without a word."""

import contextlib
import socket
import time

import pytest

import kvkeep
from kvkeep.v1 import block_cache_pb2
from tests.fakes.black_hole import black_hole
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.raw_remote import RawRemote
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


def test_connections_that_are_cut_in_a_read_are_no_errors(daemon):
    keys, nbytes = chain_keys("large", 10), 2_000_000
    with RawRemote(daemon.address) as near:
        opened = near.open_namespace(nbytes, model="cut").set_index
        payload = bytes(nbytes)
        for number in range(10):
            header = near.header(opened, keys[32 * number : 32 * number + 32], nbytes)
            header.parent_key = keys[32 * number - 32 : 32 * number] if number else b""
            assert near.write(header, payload).stored == 1
        for _ in range(10):
            with black_hole(daemon.address) as hole, RawRemote(hole.address) as far:
                leased = far.acquire(far.open_namespace(nbytes, model="cut").set_index, keys)
                request = block_cache_pb2.ReadRequest(lease_id=leased.lease_id)
                next(far.call("Read", request))
        wait_until(lambda: near.stats().sessions == 1, 5.0, "they are over")
    daemon.check_log()


# An indexed path would do as well; gRPC looks at the text of all that comes.
def header_field(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def test_metadata_that_is_no_text_is_no_traceback(daemon):
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/kvkeep.v1.BlockCache/Lookup"),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"kvkeep", b"\xff\xfe secret"),
    ]
    block = b"".join(header_field(*one) for one in fields)
    host, _, port = daemon.address.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
            head = len(block).to_bytes(3, "big") + bytes([1, 5]) + (1).to_bytes(4, "big")
            connection.sendall(head + block)
            connection.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                while connection.recv(1 << 16):
                    pass
            if "no text" in daemon.log:
                break
    assert "secret" not in daemon.log
    assert daemon.log.count("metadata that is no text") == 1
    daemon.check_log()


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

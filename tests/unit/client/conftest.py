"""A daemon in this process, a client of it, and a namespace."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from pathlib import Path

import pytest

import kvkeep
from tests.fakes.in_process_daemon import FakeDaemon, block_bytes

BLOCK_NBYTES = 10_000


@pytest.fixture
def directory():
    # pytest's tmp_path can be longer than a socket's path may be.
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as name:
        yield Path(name)


@pytest.fixture
def daemon(directory):
    with FakeDaemon(directory) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with kvkeep.connect(daemon.directory, client_name="test", timeout_s=10) as client:
        yield client
    gc.collect()


@pytest.fixture
def namespace(client):
    return client.open_namespace(spec())


def spec(**change):
    fields = {
        "model": "m",
        "weights_fingerprint": "sha256:00",
        "engine": "test",
        "layout_version": "1",
        "kv_dtype": "bfloat16",
        "hash_algorithm": "sha256",
        "groups": [kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=BLOCK_NBYTES)],
    }
    return kvkeep.NamespaceSpec(**fields | change)


def mapped(address: int) -> bool:
    """Whether this process has anything there now."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def chain(count: int, name: str = "a") -> list[bytes]:
    return [hashlib.sha256(f"{name}{number}".encode()).digest() for number in range(count)]


def contents(keys: list[bytes], nbytes: int = BLOCK_NBYTES) -> list[bytes]:
    return [block_bytes(key, nbytes) for key in keys]


def store(namespace, keys: list[bytes], **more):
    """Store all of these keys' blocks; the commit's result."""
    with namespace.store(keys, **more) as store:
        for position, view in zip(store.new, store.views, strict=True):
            view[:] = block_bytes(keys[position], len(view))
    return store.result

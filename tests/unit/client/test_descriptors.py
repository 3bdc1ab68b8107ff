"""A client that is short of descriptors says so, and goes on when there are some again."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import kvkeep
from kvkeep.fd_socket import FdSocket
from kvkeep.v1.session_pb2 import FdDescription, SidePacket
from tests.unit.client.conftest import chain, store

ROOT = Path(__file__).parents[3]
CHUNK_NBYTES = 4 << 20


@pytest.fixture
def full_table():
    """Call it, and this process can open nothing more until the test is over."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def fill() -> None:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(0))

    yield fill
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def pair(directory):
    """An fd socket and the daemon's end of it."""
    path = directory / "kvkeep.fd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        ours = FdSocket(path)
        ours._socket.connect(str(path))
        theirs, _ = listener.accept()
        with theirs:
            yield ours, theirs
        ours.close()


@pytest.mark.parametrize("count", [1, 3])
def test_descriptors_that_find_no_room_are_no_hang_up(pair, full_table, count):
    ours, theirs = pair
    packet = SidePacket(sequence=1, fds=[FdDescription(id=one) for one in range(count)])
    socket.send_fds(theirs, [packet.SerializeToString()], [0] * count)
    full_table()
    with pytest.raises(kvkeep.UnavailableError, match="RLIMIT_NOFILE"):
        ours.receive()


def test_more_descriptors_than_a_packet_has_are_a_hang_up(pair):
    ours, theirs = pair
    socket.send_fds(theirs, [SidePacket().SerializeToString()], [0] * 65)
    before = len(os.listdir("/proc/self/fd"))
    assert ours.receive() is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("where", [{"runtime_dir": "/nowhere"}, {"address": "127.0.0.1:1"}])
def test_a_client_that_can_open_nothing_says_why(where, full_table):
    connect = kvkeep.connect  # imports what it needs
    full_table()
    with pytest.raises(kvkeep.UnavailableError, match="RLIMIT_NOFILE"):
        connect(**where)


def short_client(directory: Path, how: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.client.short_client", str(directory), how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_attaching_with_too_few_descriptors_names_them(daemon):
    with short_client(daemon.directory, "attach") as process:
        said = process.communicate(timeout=120)[0].splitlines()
    assert said[-1].endswith("attached"), said
    assert len(said) > 3
    for line in said[:-1]:
        assert "NoDescriptorsError" in line, said


def test_a_chunk_that_finds_no_descriptor_ends_the_session_with_a_word(daemon, namespace):
    with short_client(daemon.directory, "grow") as process:

        def said(count: int) -> str:
            return "".join(process.stdout.readline() for _ in range(count))

        def go_on() -> None:
            process.stdin.write("\n")
            process.stdin.flush()

        assert said(1) == "full\n"
        daemon.add_chunk(CHUNK_NBYTES)
        go_on()
        lines = said(1)
        while "lost\n" not in lines.splitlines(keepends=True):
            lines += said(1)
        assert "RLIMIT_NOFILE" in lines
        assert store(namespace, chain(1)).stored == 1
        go_on()
        lines = ""
        while not lines.endswith(("read 1\n", "read 0\n")):
            lines += said(1)
        assert lines.endswith("read 1\n")
        assert process.wait(60) == 0

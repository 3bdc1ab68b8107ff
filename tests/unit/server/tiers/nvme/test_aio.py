"""Several reads at once: bytes, ends of files, errors of each, a kernel that refuses."""

import errno
import gc
import mmap
import os
import threading

import pytest

from kvkeep_server.tiers.nvme import aio, files
from kvkeep_server.tiers.nvme.aio import BatchReader, ReadOp
from kvkeep_server.tiers.nvme.files import DiskFiles

PAGE = 4096
PAGES = 40


@pytest.fixture
def content():
    return b"".join(bytes([number]) * PAGE for number in range(PAGES))


@pytest.fixture
def fd(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    fd = DiskFiles().open(str(tmp_path / "file"))
    yield fd
    os.close(fd)


def room(pages):
    return memoryview(mmap.mmap(-1, pages * PAGE))


def ops_of(fd, starts):
    """Two pages each, into buffers that are apart."""
    return [ReadOp(fd, [room(1), room(1)], start * PAGE) for start in starts]


def read_all(ops):
    return b"".join(bytes(view) for op in ops for view in op.into)


@pytest.mark.parametrize("count", [1, 2, 16, 20])
def test_many_reads_bring_what_single_ones_would(fd, content, count):
    starts = [(7 * i) % (PAGES - 2) for i in range(count)]
    ops = ops_of(fd, starts)
    assert DiskFiles().read_many(ops) == [2 * PAGE] * count
    assert read_all(ops) == b"".join(content[s * PAGE : (s + 2) * PAGE] for s in starts)


def test_each_has_its_own_end_and_its_own_error(fd, content):
    closed = os.open(os.devnull, os.O_WRONLY)
    ops = [*ops_of(fd, [PAGES - 1, PAGES]), *ops_of(closed, [0]), *ops_of(fd, [3])]
    short, nothing, error, whole = DiskFiles().read_many(ops)
    os.close(closed)
    assert (short, nothing, whole) == (PAGE, 0, 2 * PAGE)
    assert isinstance(error, OSError)
    assert error.errno == errno.EBADF
    assert read_all(ops[3:]) == content[3 * PAGE : 5 * PAGE]


def test_a_kernel_that_refuses_is_asked_once_and_reads_go_one_by_one(fd, content, monkeypatch):
    asked = []

    def refused(_ops_max):
        asked.append(1)
        raise OSError(errno.EPERM, "confined")

    monkeypatch.setattr(files, "BatchReader", refused)
    disk = DiskFiles()
    for _ in range(2):
        ops = ops_of(fd, [1, 5])
        assert disk.read_many(ops) == [2 * PAGE] * 2
        assert read_all(ops) == content[PAGE : 3 * PAGE] + content[5 * PAGE : 7 * PAGE]
    assert len(asked) == 1


def test_an_unknown_machine_has_none(monkeypatch):
    monkeypatch.setattr(aio.platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="not implemented"):
        BatchReader(4)


def test_what_the_kernel_did_not_take_is_said(fd):
    """A bad descriptor in front ends the taking there."""
    reader = BatchReader(4)
    first, second = reader.read([*ops_of(9999, [0]), *ops_of(fd, [0])])
    assert first is None
    assert second is None


def readers():
    gc.collect()
    return sum(isinstance(thing, BatchReader) for thing in gc.get_objects())


def test_a_thread_takes_its_context_with_it(fd):
    disk, before, inside = DiskFiles(), readers(), []

    def work():
        disk.read_many(ops_of(fd, [1, 2]))
        inside.append(readers())

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert inside == [before + 1] * 5
    assert readers() == before


def test_a_context_that_is_given_back_takes_nothing(fd):
    reader = BatchReader(4)
    assert reader.read(ops_of(fd, [1, 2])) == [2 * PAGE] * 2
    reader.close()
    assert reader.read(ops_of(fd, [1, 2])) == [None, None]

"""Sealed memfds: what the seals forbid, how they are mapped, when the memory goes."""

import errno
import fcntl
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvkeep_server.core import memfd as memfd_module
from kvkeep_server.core.memfd import F_SEAL_FUTURE_WRITE, AddressRange, create_sealed

PAGE = 4096
HUGE = 2 << 20


@pytest.fixture
def chunk():
    memfd = create_sealed("test", 3 * PAGE, future_write_seal=True)
    yield memfd
    memfd.close()


@pytest.fixture
def staging():
    memfd = create_sealed("test", 3 * PAGE, future_write_seal=False)
    yield memfd
    memfd.close()


def seals_of(fd):
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)


def smaps_of(memfd):
    """The lines of /proc/self/smaps for the memfd's map."""
    start = np.frombuffer(memfd.buffer, np.uint8).ctypes.data
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{start:x}-"))
    return lines[at : at + 30]


def shmem_nbytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def test_seals_are_those_of_the_contract(chunk, staging):
    common = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert seals_of(chunk.fd) & (common | F_SEAL_FUTURE_WRITE) == common | F_SEAL_FUTURE_WRITE
    assert seals_of(staging.fd) & (common | F_SEAL_FUTURE_WRITE) == common


def test_size_is_rounded_up_to_pages():
    memfd = create_sealed("test", PAGE + 1, future_write_seal=True)
    assert memfd.nbytes == 2 * PAGE == len(memfd.buffer) == os.fstat(memfd.fd).st_size
    memfd.close()


def test_the_daemons_map_stays_writable_and_clients_see_it(chunk):
    fd = chunk.client_fd()
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
        chunk.buffer[PAGE : PAGE + 5] = b"hello"
        assert view[PAGE : PAGE + 5] == b"hello"
    os.close(fd)


def test_a_client_descriptor_of_a_chunk_is_read_only(chunk):
    fd = chunk.client_fd()
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0)
    os.close(fd)


def test_a_client_descriptor_of_staging_is_writable(staging):
    fd = staging.client_fd()
    with mmap.mmap(fd, 0) as view:
        view[:5] = b"bytes"
    os.close(fd)
    assert bytes(staging.buffer[:5]) == b"bytes"
    with pytest.raises(PermissionError):
        os.ftruncate(staging.fd, PAGE)


def test_memory_is_there_before_it_is_touched(chunk):
    assert os.fstat(chunk.fd).st_blocks * 512 == chunk.nbytes


def test_the_map_is_aligned_and_left_out_of_core_dumps(chunk):
    assert np.frombuffer(chunk.buffer, np.uint8).ctypes.data % HUGE == 0
    flags = next(line for line in smaps_of(chunk) if line.startswith("VmFlags"))
    assert "dd" in flags.split()


def test_touch_maps_every_page():
    before = shmem_nbytes()
    memfd = create_sealed("test", 8 << 20, future_write_seal=True, touch=True)
    assert shmem_nbytes() - before >= 8 << 20
    memfd.close()


def test_huge_says_what_the_kernel_did():
    memfd = create_sealed("test", 4 << 20, future_write_seal=True, huge=True, touch=True)
    mapped = next(line for line in smaps_of(memfd) if line.startswith("ShmemPmdMapped"))
    assert int(mapped.split()[1]) * 1024 == (memfd.nbytes if memfd.huge else 0)
    memfd.close()


def test_without_huge_pages_it_works_as_well(monkeypatch):
    # B076: there is no hugetlb option. Collapse is best effort, and what came of it is reported.
    real = AddressRange.advise

    def advise(self, offset, nbytes, advice):
        if advice in {memfd_module._MADV_COLLAPSE, memfd_module._MADV_POPULATE_WRITE}:
            raise OSError(errno.EINVAL, "an old kernel")
        real(self, offset, nbytes, advice)

    monkeypatch.setattr(AddressRange, "advise", advise)
    memfd = create_sealed("test", 4 << 20, future_write_seal=True, huge=True, touch=True)
    assert not memfd.huge
    memfd.buffer[-1] = 7
    memfd.close()


def test_close_keeps_memory_that_is_still_viewed():
    memfd = create_sealed("test", PAGE, future_write_seal=True)
    array = np.frombuffer(memfd.buffer, np.uint64)
    memfd.close()
    memfd.close()
    assert array.sum() == 0, "the map lives as long as its last view"


def test_closed_memory_goes_back():
    gc.collect()
    before = shmem_nbytes()
    memfd = create_sealed("test", 32 << 20, future_write_seal=True, touch=True)
    assert shmem_nbytes() - before >= 32 << 20
    memfd.close()
    assert shmem_nbytes() - before < 1 << 20


def test_no_room_is_an_error_and_leaves_nothing(monkeypatch):
    # B067 needs no test of a small /dev/shm: a memfd lies on no mount that a container could make
    # small. What is left of it: memory is allocated before it is touched, so that "none left" is an
    # error and not a SIGBUS.
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "full")

    descriptors = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        create_sealed("test", PAGE, future_write_seal=True)
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_failed_seal_unmaps(monkeypatch):
    target = AddressRange.reserve(8 << 20)
    before = shmem_nbytes()

    def refuse(fd, *, future_write_seal):
        raise OSError(errno.EINVAL, "no such seal")

    monkeypatch.setattr(memfd_module, "_seal", refuse)
    with pytest.raises(OSError, match="no such seal"):
        create_sealed("test", 4 << 20, future_write_seal=True, within=target, touch=True)
    assert shmem_nbytes() - before < 1 << 20


def test_a_range_maps_one_behind_the_other_and_says_when_full():
    target = AddressRange.reserve(2 * HUGE + PAGE)
    first = create_sealed("a", PAGE, future_write_seal=True, within=target)
    second = create_sealed("b", HUGE + PAGE, future_write_seal=True, within=target)
    assert (first.offset, second.offset) == (0, HUGE)
    second.buffer[:1] = b"x"
    assert bytes(target.view[HUGE : HUGE + 1]) == b"x"
    with pytest.raises(OSError, match="exceed a range") as caught:
        create_sealed("c", PAGE, future_write_seal=True, within=target)
    assert caught.value.errno == errno.ENOMEM
    first.close()
    second.close()


def test_kernels_before_6_3_get_a_memfd_without_noexec(monkeypatch):
    real = os.memfd_create

    def memfd_create(name, flags):
        if flags & memfd_module._MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "unknown flag")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    memfd = create_sealed("test", PAGE, future_write_seal=True)
    assert seals_of(memfd.fd) & F_SEAL_FUTURE_WRITE
    memfd.close()


def test_discarded_memory_is_gone_at_once():
    memfd = create_sealed("test", 8 << 20, future_write_seal=False, touch=True)
    view = memfd.buffer  # as a task that is over may still hold it
    before = mapped_nbytes("memfd:test")
    assert before >= 8 << 20
    memfd.discard()
    assert mapped_nbytes("memfd:test") == before - (8 << 20)
    memfd.discard()
    assert len(view) == 8 << 20


def mapped_nbytes(name):
    """Of all maps of files with this name."""
    nbytes = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"/{name} " in line:
            start, _, end = line.split()[0].partition("-")
            nbytes += int(end, 16) - int(start, 16)
    return nbytes

"""The check of directories that nobody runs: what is right, what is wrong; nothing is touched."""

import asyncio
import os
import struct

import numpy as np
import pytest

from kvkeep_server.core.clock import SystemClock
from kvkeep_server.tiers.nvme import offline
from kvkeep_server.tiers.nvme.epoch_format import EpochState, encode, file_name
from kvkeep_server.tiers.nvme.files import DiskFiles
from kvkeep_server.tiers.nvme.offline import OfflineCheck
from tests.fakes.nvme_blocks import blocks_of
from tests.fakes.nvme_tier import MIB, IndexOwner, directory_settings, nvme_tier, put, started

PAGE = 4096
NBYTES = 10_000
RECORD_PAGES = 4
COUNT = 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "d"


@pytest.fixture
def write(path, threads):
    """One life that stores `COUNT` blocks, and ends by itself or not."""

    def run(*, seed=1, close=True, count=COUNT, paths=None, **options):
        owner = IndexOwner()
        tier = nvme_tier(paths or [path], threads, owner=owner, **options)
        blocks, contents = blocks_of(count, nbytes=NBYTES, seed=seed)

        async def live():
            await started(tier, owner)
            await put(tier, owner, blocks, contents)
            if close:
                await tier.close()
                return
            for log, lock in zip(tier._logs, tier._locks, strict=True):
                log.directory.table.close_all()
                lock.release()

        asyncio.run(live())

    return run


def check(*paths, verify=True, files=None, clock=None, nbytes_per_s=0, **changes):
    return OfflineCheck(
        directories=[directory_settings(path, **changes) for path in paths],
        files=files or DiskFiles(),
        clock=clock or SystemClock(),
        nbytes_per_s=nbytes_per_s if verify else None,
    ).run()


def segments(path):
    return sorted(path.glob("*.kvks"))


def flip(path, position):
    image = bytearray(path.read_bytes())
    image[position] ^= 1
    path.write_bytes(image)


def contents(path):
    return {one.name: (one.read_bytes(), one.stat().st_mtime_ns) for one in path.iterdir()}


@pytest.mark.parametrize("verify", [True, False])
def test_a_sound_directory(path, write, verify):
    write()
    write(seed=2)
    before = contents(path)
    report = check(path, verify=verify)
    assert (report.findings, report.notes) == ([], [])
    assert (report.segments, report.blocks_checked) == (2, 2 * COUNT)
    assert report.blocks_verified == (2 * COUNT if verify else 0)
    assert report.nbytes_verified == (2 * COUNT * NBYTES if verify else 0)
    assert report.blocks_corrupt == 0
    used = sum(one.stat().st_size for one in segments(path))
    assert report.disks == [(str(path), used, 4 * MIB)]
    assert contents(path) == before


def test_what_a_killed_daemon_left_is_no_fault(path, write):
    write(close=False)
    before = contents(path)
    report = check(path, verify=False)
    assert report.findings == []
    (note,) = report.notes
    assert f"not sealed, its daemon was killed or could not write; {COUNT} blocks are whole" in note
    # Where a segment without a table ends, is known only from its bytes.
    assert (report.blocks_checked, report.blocks_verified) == (COUNT, COUNT)
    assert contents(path) == before


def test_a_torn_tail_is_told_and_no_fault(path, write):
    write(close=False)
    (file,) = segments(path)
    image = bytearray(file.read_bytes())
    last = (1 + (COUNT - 1) * RECORD_PAGES) * PAGE
    image[last + 2 * PAGE : last + 4 * PAGE] = bytes(2 * PAGE)
    image[last + 4 * PAGE] = 7
    file.write_bytes(image)
    report = check(path)
    assert report.findings == []
    (note,) = report.notes
    assert f"{COUNT - 1} blocks are whole; 1 records with wrong bytes; behind its last rec" in note


@pytest.mark.parametrize(
    ("at", "needs_bytes"),
    [(3, False), (200, False), (PAGE - 1, False), (PAGE + 5, True), (PAGE + NBYTES - 1, True)],
    ids=["magic", "key", "fill of the header", "first bytes", "last byte"],
)
def test_a_flipped_bit_of_a_record_is_found(path, write, at, needs_bytes):
    write()
    (file,) = segments(path)
    page = 1 + 7 * RECORD_PAGES
    flip(file, page * PAGE + at)
    report = check(path)
    assert report.blocks_corrupt == 1
    (finding,) = report.findings
    assert finding == (
        f"{file}: 1 blocks are not what its table says, the first of them at page {page}"
    )
    assert len(check(path, verify=False).findings) == (0 if needs_bytes else 1)


@pytest.mark.parametrize("verify", [True, False])
def test_records_that_were_swapped_are_found(path, write, verify):
    write()
    (file,) = segments(path)
    image = bytearray(file.read_bytes())
    size = RECORD_PAGES * PAGE
    first, second = slice(PAGE, PAGE + size), slice(PAGE + size, PAGE + 2 * size)
    image[first], image[second] = image[second], image[first]
    file.write_bytes(image)
    assert check(path, verify=verify).blocks_corrupt == 2


@pytest.mark.parametrize("part", ["table", "footer", "cut"])
def test_a_segment_whose_end_is_damaged_is_found(path, write, part):
    write()
    (file,) = segments(path)
    nbytes = file.stat().st_size
    if part == "cut":
        os.truncate(file, nbytes - 3 * PAGE)
    else:
        flip(file, nbytes - (PAGE if part == "footer" else 2 * PAGE) + 20)
    report = check(path)
    (finding,) = report.findings
    assert "without a right table; it was cut, or its end is damaged" in finding
    assert f"{COUNT} blocks are whole" in finding


def test_files_that_are_not_to_be_used_are_named(path, write):
    write()
    good = segments(path)[0].read_bytes()
    newer, damaged = bytearray(good), bytearray(good)
    newer[8] = 2
    damaged[30] ^= 1
    (path / "00000010.kvks").write_bytes(b"x")
    (path / "00000012.kvks").write_bytes(newer)
    (path / "00000013.kvks").write_bytes(damaged)
    (path / "00000014.kvks").write_bytes(good)
    (path / "notes.txt").write_bytes(b"mine")
    (path / "lost+found").mkdir()
    report = check(path)
    unused = "; nothing of it is used, its bytes count until you remove it"
    assert report.findings == [
        f"{path}/00000014.kvks: is a copy of segment 1{unused}",
        f"{path}/00000013.kvks: its header is damaged{unused}",
        f"{path}/00000010.kvks: shorter than its header{unused}",
    ]
    foreign = "is not ours: its bytes count, nobody touches it"
    assert report.notes == [
        f"{path}/lost+found {foreign}",
        f"{path}/notes.txt {foreign}",
        f"{path}/00000012.kvks: format version 2 is newer than 1{unused}",
    ]
    assert (report.segments, report.blocks_checked) == (1, COUNT)


def test_more_than_the_limit_is_found(path, write):
    write(count=60)
    write(count=60, seed=2)
    used = sum(one.stat().st_size for one in segments(path))
    assert check(path, max_nbytes=used).findings == []
    (finding,) = check(path, max_nbytes=used - 1).findings
    assert f"{path} takes 1.9MiB, more than the " in finding


def test_a_copy_in_another_directory_is_found(path, write, tmp_path):
    write()
    other = tmp_path / "other"
    other.mkdir()
    (file,) = segments(path)
    (other / file.name).write_bytes(file.read_bytes())
    report = check(path, other)
    unused = "nothing of it is used, its bytes count until you remove it"
    assert report.findings == [f"{other}/{file.name} is a copy of {file}; {unused}"]
    assert report.blocks_checked == COUNT


def test_directories_of_two_daemons_are_found(path, write, tmp_path):
    write()
    other = tmp_path / "other"
    write(seed=2, paths=[other])
    (file,) = segments(path)
    report = check(path, other)
    two = "and is another segment: a daemon does not start with both directories"
    assert report.findings == [
        f"{other}/{file.name} has the number of {file}, {two}",
        f"{COUNT} record numbers were given out twice",
    ]


def test_files_of_epochs_are_looked_at(path, write):
    write()
    state = EpochState({b"f" * 16: 1}, (b"b" * 16,))
    first, second = path / file_name(1), path / file_name(2)
    first.write_bytes(encode(state, 1))
    (path / "epochs-ffffffffffffffff.kvke").write_bytes(b"x")
    (path / file_name(7)).write_bytes(b"x")
    assert check(path).findings == []
    notes = check(path).notes
    assert [note.split(" is ")[0] for note in notes] == [
        f"{path}/epochs-ffffffffffffffff.kvke",
        f"{path}/{file_name(7)}",
    ]
    second.write_bytes(encode(state, 2)[:50])
    (finding,) = check(path).findings
    assert finding.startswith(f"{second} is damaged; an earlier or later one")
    second.unlink()
    flip(first, 40)
    before = contents(path)
    (finding,) = check(path).findings
    assert finding.startswith(f"a daemon does not start: {first} is damaged. It says which blocks")
    assert contents(path) == before


def test_what_never_counted_is_not_held_against_it(path, threads):
    """Records that were given up have any bytes; a void says so."""
    owner = IndexOwner()
    tier = nvme_tier([path], threads, owner=owner)
    blocks, data = blocks_of(4, nbytes=NBYTES)

    async def live():
        await started(tier, owner)
        with tier.reserve(NBYTES, 4) as batch:
            await batch.write(blocks, [memoryview(one) for one in data], durable=True)
            batch.commit(np.array([True, True, False, True]))
        await tier.close()

    asyncio.run(live())
    (file,) = segments(path)
    flip(file, (1 + 2 * RECORD_PAGES + 1) * PAGE)
    report = check(path)
    assert report.findings == []
    assert report.blocks_checked == 3


class FailingFiles(DiskFiles):
    """One file cannot be read."""

    def __init__(self, name):
        super().__init__()
        self._name = name
        self._fds = set()

    def open(self, path, *, write=False):
        assert not write
        fd = super().open(path)
        if path.endswith(self._name):
            self._fds.add(fd)
        return fd

    def preadv(self, fd, into, offset):
        if fd in self._fds:
            raise OSError(5, "Input/output error")
        return super().preadv(fd, into, offset)

    def close(self, fd):
        self._fds.discard(fd)
        super().close(fd)

    def _refuse(self, *_):
        raise AssertionError("a check writes")

    create = pwritev = allocate = truncate = unlink = fdatasync = sync_directory = _refuse


def test_a_file_that_cannot_be_read_is_named_and_the_rest_checked(path, write):
    write()
    write(seed=2)
    first, second = segments(path)
    report = check(path, files=FailingFiles(first.name))
    assert report.findings == [f"{first}: cannot be read: Input/output error"]
    assert report.blocks_verified == COUNT
    assert check(path, files=FailingFiles("none")).blocks_verified == 2 * COUNT
    assert second.exists()


def test_sentences_are_bounded(path):
    path.mkdir()
    for number in range(1, 151):
        (path / f"{number:08x}.kvks").write_bytes(b"x" * PAGE)
        (path / f"foreign {number}").write_bytes(b"x")
    report = check(path)
    assert (len(report.findings), len(report.notes)) == (100, 100)


def test_bytes_are_read_at_the_rate(path, write, monkeypatch):
    waits = []

    class Pause:
        def wait(self, seconds):
            waits.append(seconds)

    class Clock:
        def monotonic_s(self):
            return 7.0

    monkeypatch.setattr(offline, "Event", Pause)
    write()
    check(path, nbytes_per_s=COUNT * NBYTES // 2, clock=Clock())
    assert waits[-1] == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_of_a_segment_makes_it_stumble(path, write, seed):
    """Random damage, lengths included: it ends, with a finding, a note, or neither."""
    write(count=6)
    (file,) = segments(path)
    source = np.random.default_rng(seed)
    image = bytearray(file.read_bytes())
    for _ in range(int(source.integers(1, 4))):
        at = int(source.integers(len(image) - 8))
        image[at : at + 8] = struct.pack("<Q", int(source.integers(1 << 62)))
    file.write_bytes(image[: int(source.integers(len(image) // 2, len(image) + 1))])
    before = contents(path)
    report = check(path)
    assert report.findings or report.notes
    assert contents(path) == before

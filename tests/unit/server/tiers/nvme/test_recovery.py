"""What a start finds: tables, torn tails, damage, files of others; quickly, and with sane times."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.tiers import record
from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme import segment_format as form
from kvkeep_server.tiers.nvme.files import DiskFiles
from kvkeep_server.tiers.nvme.segments import SegmentState
from tests.fakes.nvme_blocks import blocks_of, with_facts
from tests.fakes.nvme_lives import NBYTES, crash, hits, read_back, write
from tests.fakes.nvme_tier import MIB, IndexOwner, get, nvme_tier, put, started


class CountingFiles(DiskFiles):
    """Says how much was read."""

    def __init__(self):
        super().__init__()
        self.read_nbytes = 0

    def preadv(self, fd, into, offset):
        got = super().preadv(fd, into, offset)
        self.read_nbytes += got
        return got


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def make(tmp_path, threads):
    """Makes (tier, owner) over one directory."""

    def build(**options):
        owner = IndexOwner()
        return nvme_tier([tmp_path / "d"], threads, owner=owner, **options), owner

    return build


def the_file(tmp_path):
    (path,) = (tmp_path / "d").glob("*.kvks")
    return path


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_everything_is_found_again(make, close):
    keys, contents = write(make(), close=close)
    got, stats = read_back(make(), keys)
    assert got == hits(contents)
    assert stats.counts.recovered == 20


def test_a_sealed_segment_is_recovered_from_its_table(make, tmp_path):
    write(make(), count=60)
    assert the_file(tmp_path).stat().st_size > 60 * NBYTES
    files = CountingFiles()
    tier, owner = make(files=files)
    asyncio.run(started(tier, owner))
    assert len(owner.places) == 60
    assert files.read_nbytes <= 16 * 4096
    asyncio.run(tier.close())


def test_an_unsealed_one_is_walked_once_and_sealed(make, tmp_path):
    keys, contents = write(make(), close=False)
    assert the_file(tmp_path).stat().st_size == MIB
    assert read_back(make(), keys)[0] == hits(contents)
    assert the_file(tmp_path).stat().st_size < MIB, "its tail is given back"
    files = CountingFiles()
    tier, owner = make(files=files)
    asyncio.run(started(tier, owner))
    assert files.read_nbytes <= 8 * 4096
    asyncio.run(tier.close())


def test_a_torn_tail_is_cut(make, tmp_path):
    """Each cut of the last record, and what is in front of it stays."""
    keys, contents = write(make(), count=3, close=False)
    image = the_file(tmp_path).read_bytes()
    last = 4096 * (1 + 2 * 4)
    for torn in (last, last + 100, last + 4096, last + 2 * 4096, last + 3 * 4096 + 512):
        the_file(tmp_path).write_bytes(image[:torn].ljust(MIB, b"\0"))
        got, _ = read_back(make(), keys)
        assert got[:2] == hits(contents[:2])
        assert got[2] is None
        (tmp_path / "d").joinpath("00000001.kvks").write_bytes(image)
    assert read_back(make(), keys)[0] == hits(contents)


def test_a_header_inside_a_payload_is_never_taken(make, tmp_path):
    """Whoever stores bytes that look like a record gets no record by it, also after damage."""
    tier, owner = make()
    rows = record.rows_of(blocks_of(1, nbytes=5000, seed=77)[0])
    rows["record_seq"] = 1 << 60
    rows["location"] = (1 << 32) | 3
    forged = record.seal_headers(rows).tobytes().ljust(4096, b"\0")
    blocks, _ = blocks_of(1, nbytes=12_288)
    contents = [b"x" * 4096 + forged + b"y" * 4096]
    blocks = with_facts(blocks, contents)

    async def run():
        await started(tier, owner)
        await put(tier, owner, blocks, contents)
        await crash(tier)

    asyncio.run(run())
    image = bytearray(the_file(tmp_path).read_bytes())
    assert image[3 * 4096 : 4 * 4096] == forged
    image[4096 + 20] ^= 1
    the_file(tmp_path).write_bytes(image)
    tier, owner = make()
    asyncio.run(started(tier, owner))
    assert not owner.newest
    asyncio.run(tier.close())


@pytest.mark.promise("P17", gate=7, unit="kinds of files that are not to be used")
def test_damaged_foreign_and_newer_files_are_skipped_named_and_left_alone(make, tmp_path):
    keys, contents = write(make())
    good = the_file(tmp_path).read_bytes()
    newer = bytearray(good)
    newer[8] = 2
    damaged = bytearray(good)
    damaged[30] ^= 1
    strange = {
        "00000010.kvks": b"short",
        "00000011.kvks": os.urandom(50_000),
        "00000012.kvks": bytes(newer),
        "00000013.kvks": bytes(damaged),
        "00000014.kvks": good,
        "notes.txt": b"mine",
        "0000000G.kvks": b"not a name of ours",
    }
    for name, data in strange.items():
        (tmp_path / "d" / name).write_bytes(data)
    (tmp_path / "d" / "lost+found").mkdir()
    (tmp_path / "d" / "00000020.kvks").symlink_to("/etc/passwd")
    got, stats = read_back(make(), keys)
    assert got == hits(contents)
    (directory,) = stats.directories
    assert set(directory.foreign) == {
        "notes.txt",
        "0000000G.kvks",
        "lost+found",
        "00000020.kvks",
    }
    reasons = {os.path.basename(path): why for path, why in directory.skipped.items()}
    assert reasons == {
        "00000010.kvks": "shorter than its header",
        "00000011.kvks": "its header is damaged",
        "00000012.kvks": "format version 2 is newer than 1",
        "00000013.kvks": "its header is damaged",
        "00000014.kvks": "is a copy of segment 1",
    }
    assert directory.segments[SegmentState.SKIPPED] == 5
    for name, data in strange.items():
        assert (tmp_path / "d" / name).read_bytes() == data
    assert directory.used_nbytes >= sum(len(data) for data in strange.values())


@pytest.mark.promise("P15", gate=1, unit="segments that a death left unbegun")
@pytest.mark.parametrize("nbytes", [0, MIB])
def test_a_segment_that_was_made_and_never_begun_is_given_back(make, tmp_path, nbytes):
    """A process died between making the file and writing its first page: its room must not be lost
    with it. A segment whose first page became zeros is damage, and stays."""
    keys, contents = write(make(), close=False)
    good = the_file(tmp_path)
    unbegun = good.with_name("00000002.kvks")
    unbegun.write_bytes(bytes(nbytes))
    zeroed = good.with_name("00000003.kvks")
    zeroed.write_bytes(bytes(4096) + good.read_bytes()[4096:])
    got, stats = read_back(make(), keys)
    assert got == hits(contents)
    assert not unbegun.exists()
    (directory,) = stats.directories
    assert directory.skipped == {str(zeroed): "its header is damaged"}
    assert directory.used_nbytes == good.stat().st_size + zeroed.stat().st_size


@pytest.mark.promise("P01", gate=300, nightly=10_000, unit="bits flipped at rest")
def test_flipped_bits_at_rest_are_misses(make, tmp_path, promise_count):
    """In headers, payloads, fill, table and footer: right bytes or a miss, and it is dropped."""
    keys, contents = write(make(), count=12)
    good = the_file(tmp_path).read_bytes()
    rng = np.random.default_rng(5)
    missed = 0
    for position in rng.integers(0, len(good) * 8, promise_count).tolist():
        flipped = bytearray(good)
        flipped[position // 8] ^= 1 << position % 8
        the_file(tmp_path).write_bytes(flipped)
        got, stats = read_back(make(), keys)
        for answer, data in zip(got, contents, strict=True):
            assert answer is None or answer[0] != ReadStatus.HIT or answer[1] == data
        lost = sum(answer is None or answer[0] != ReadStatus.HIT for answer in got)
        missed += lost
        assert lost <= 1 or lost == 12, "one flip costs a block, or the segment's header"
        assert lost != 1 or stats.counts.corrupt == 1
    assert missed > promise_count // 2


@pytest.mark.promise("P01", gate=1, unit="kinds of misplaced records")
@pytest.mark.parametrize("damage", ["swap", "zero", "misdirect", "truncate"])
def test_records_in_wrong_places_are_misses(make, tmp_path, damage):
    keys, contents = write(make(), count=4)
    image = bytearray(the_file(tmp_path).read_bytes())
    size = 4 * 4096
    first, second = slice(4096, 4096 + size), slice(4096 + size, 4096 + 2 * size)
    match damage:
        case "swap":
            image[first], image[second] = image[second], image[first]
        case "zero":
            image[first] = bytes(size)
        case "misdirect":
            image[first] = image[second]
        case "truncate":
            image = image[: 4096 + 3 * size]
    the_file(tmp_path).write_bytes(image)
    got, _ = read_back(make(), keys)
    ok = [answer is not None and answer[0] == ReadStatus.HIT for answer in got]
    assert (
        ok
        == {
            "swap": [False, False, True, True],
            "zero": [False, True, True, True],
            "misdirect": [False, True, True, True],
            "truncate": [True, True, True, False],
        }[damage]
    )
    assert all(
        answer[1] == data for answer, data, hit in zip(got, contents, ok, strict=True) if hit
    )


def test_a_corrupt_block_is_dropped_and_then_a_plain_miss(make, tmp_path):
    keys, _ = write(make(), count=4)
    image = bytearray(the_file(tmp_path).read_bytes())
    image[3 * 4096] ^= 1
    the_file(tmp_path).write_bytes(image)
    tier, owner = make()

    async def run():
        await started(tier, owner)
        place = owner.places[keys[0]]
        first = (await get(tier, owner, keys, NBYTES))[keys[0]]
        assert owner.dropped_places == [place]
        owner.store(keys[0], *place)
        again = (await get(tier, owner, keys, NBYTES))[keys[0]]
        await tier.close()
        return first[0], again[0]

    assert asyncio.run(run()) == (ReadStatus.CORRUPT, ReadStatus.MISS)
    assert tier.stats().counts.corrupt == 1


@pytest.mark.promise("P17", gate=100_000, unit="records recovered")
def test_many_records_are_recovered_quickly(make, tmp_path):
    """10^5 records in 13 segments; serving begins before any of it is read."""
    tier, _ = make(segment_nbytes=64 * MIB, max_nbytes=2048 * MIB)
    path = tmp_path / "d"
    path.mkdir()
    for number in range(1, 14):
        _sealed_segment(path / f"{number:08x}.kvks", number, 7700)
    seen = np.zeros(0, np.uint64)

    async def run():
        nonlocal seen
        begun = time.perf_counter()
        await tier.start()
        ready = time.perf_counter() - begun
        numbers = []
        async for rows in tier.recover():
            numbers.append(int(rows["location"][0]) >> 32)
            seen = np.append(seen, rows["record_seq"])
        assert numbers == sorted(numbers, reverse=True), "newest first"
        await tier.close()
        return ready

    ready = asyncio.run(run())
    assert len(np.unique(seen)) == 100_100
    assert ready < 30, "it lists the directory, no more"


def _sealed_segment(path, number, count):
    """A sparse file: no payloads, since recovery reads tables only."""
    rows = np.zeros(count, record.RECORD)
    rows["key"][:, :4] = np.random.default_rng(number).integers(1, 1 << 62, (count, 4))
    rows["key_nbytes"], rows["boundary_members"] = 32, 1
    rows["payload_nbytes"] = rows["stored_nbytes"] = 4096
    rows["record_seq"] = np.arange(count) + (number << 32)
    rows["location"] = (number << 32) + 1 + 2 * np.arange(count)
    encoded = record.seal_headers(rows).tobytes()
    end = 1 + 2 * count
    footer = form.Footer(number, end, count, form.table_checksum(encoded))
    with path.open("wb") as file:
        file.write(form.encode_segment_header(form.SegmentHeader(number, 16384, 1000, "global")))
        file.seek(end * 4096)
        file.write(encoded.ljust(form.table_pages(count) * 4096, b"\0"))
        file.write(form.encode_footer(footer))


class JumpingClock:
    def __init__(self, wall_s):
        self.jump_s = wall_s

    def monotonic_s(self):
        return time.monotonic()

    def wall_s(self):
        return self.jump_s + time.monotonic()


@pytest.mark.promise("P18", gate=1, unit="steps of the wall clock")
@pytest.mark.parametrize("days", [-3, 0, 3])
def test_ages_after_a_restart_are_sane(make, days):
    """A step back makes nothing younger than it is; one forward cannot be told from time that
    passed."""
    day_s = 86_400
    base_s = 1_800_000_000
    for age_h, seed in ((50, 1), (0, 2)):
        used_ms = int((base_s + time.monotonic() - age_h * 3600) * 1000)
        write(make(clock=JumpingClock(base_s)), seed=seed, used_ms=used_ms)
    tier, _ = make(clock=JumpingClock(base_s + days * day_s))

    async def run():
        await tier.start()
        ages_h = []
        async for rows in tier.recover():
            assert (rows["last_used_ms"] <= tier.now_ms()).all()
            ages_h += ((tier.now_ms() - rows["last_used_ms"].astype(np.int64)) / 3_600_000).tolist()
        await tier.close()
        return ages_h

    ages_h = asyncio.run(run())
    later_h = max(0, days) * 24
    assert np.allclose(sorted(ages_h), [later_h] * 20 + [later_h + 50] * 20, atol=1 / 60)


def test_the_logs_clock_does_not_jump_while_it_runs(make):
    clock = JumpingClock(1_800_000_000)
    tier, owner = make(clock=clock)
    asyncio.run(started(tier, owner))
    before = tier.now_ms()
    for jump_s in (4 * 86_400, -4 * 86_400):
        clock.jump_s += jump_s
        assert abs(tier.now_ms() - before) < 60_000
    asyncio.run(tier.close())


def test_record_numbers_go_on_above_those_found(make):
    keys, _ = write(make(), count=3)
    tier, owner = make()

    async def run():
        # Before anything is recovered, a new record of a key already wins over the old ones.
        await tier.start()
        blocks, again = blocks_of(3, nbytes=NBYTES, seed=1)
        again = [bytes(NBYTES)] * 3
        await put(tier, owner, with_facts(blocks, again), again)
        async for rows in tier.recover():
            owner.learn(rows)
        got = await get(tier, owner, keys, NBYTES)
        assert [got[key] for key in keys] == hits(again)
        await crash(tier)
        return again

    again = asyncio.run(run())
    assert read_back(make(), keys)[0] == hits(again)


def test_two_owners_of_a_directory_are_refused(make):
    first, _ = make()
    second, _ = make()
    asyncio.run(first.start())
    with pytest.raises(FailedPreconditionError, match=r"pid \d+.*nvme\.directories"):
        asyncio.run(second.start())
    asyncio.run(first.close())
    asyncio.run(second.start())
    asyncio.run(second.close())


def test_files_are_for_their_owner_only(make, tmp_path):
    write(make(), count=1)
    assert the_file(tmp_path).stat().st_mode & 0o777 == 0o600

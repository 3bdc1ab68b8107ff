"""Which epochs are over, on disk: the format, and files through crashes and faults."""

import asyncio
import errno
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.errors import FailedPreconditionError, TierUnavailableError
from kvkeep_server.tiers.nvme.epoch_files import EpochFiles
from kvkeep_server.tiers.nvme.epoch_format import (
    EPOCHS_NUMBER_MAX,
    UNFINISHED_NAME,
    EpochState,
    decode,
    encode,
    file_name,
    number_of,
)
from kvkeep_server.tiers.nvme.files import DiskFiles
from tests.fakes.faulty_files import FaultyFiles

IDS = st.binary(min_size=16, max_size=16)
STATES = st.builds(
    EpochState,
    st.dictionaries(IDS, st.integers(0, (1 << 64) - 1), max_size=300),
    st.lists(IDS, unique=True, max_size=300).map(tuple),
)
A, B = b"a" * 16, b"b" * 16
ONE, TWO = EpochState({A: 1}, (A,)), EpochState({A: 2, B: 7}, (A, B))


@given(STATES, st.integers(0, (1 << 64) - 1))
def test_what_is_written_is_read(state, number):
    content = encode(state, number)
    assert len(content) % 4096 == 0
    assert decode(content, number) == state
    assert decode(content, number ^ 1) is None


@given(STATES, st.data())
def test_any_flipped_byte_is_noticed(state, data):
    content = bytearray(encode(state, 5))
    end = len(bytes(content).rstrip(b"\0"))
    at = data.draw(st.integers(0, end - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    assert decode(content, 5) is None
    assert decode(content[: data.draw(st.integers(0, 31))], 5) is None


@given(st.lists(STATES, max_size=4))
def test_of_several_the_latest_epoch_counts(states):
    merged = EpochState.merged(states)
    for state in states:
        assert all(merged.epochs[family] >= epoch for family, epoch in state.epochs.items())
        assert set(state.retired) <= set(merged.retired)


def test_names():
    assert number_of(file_name(77)) == 77
    assert number_of("epochs-77.kvke") is None
    assert number_of("00000001.kvks") is None


@pytest.fixture
def store(tmp_path):
    writers = ThreadPoolExecutor(1)
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()

    def store(files=None):
        paths = list(map(str, directories))
        return EpochFiles(directories=paths, files=files or DiskFiles(), writers=writers)

    yield store
    writers.shutdown()


def saved(store, *states):
    async def work():
        files = store()
        await files.load()
        for state in states:
            await files.save(state)

    asyncio.run(work())


def loaded(store):
    return asyncio.run(store().load())


def names(tmp_path, directory="one"):
    return sorted(path.name for path in (tmp_path / directory).iterdir())


def test_nothing_is_there_at_first(store):
    assert loaded(store) == EpochState({}, ())


def test_the_last_one_counts_and_is_alone(store, tmp_path):
    saved(store, ONE, TWO)
    assert loaded(store) == TWO
    assert names(tmp_path) == names(tmp_path, "two") == [file_name(2)]


def test_directories_are_read_together(store, tmp_path):
    saved(store, TWO)
    for path in (tmp_path / "two").iterdir():
        path.write_bytes(encode(EpochState({A: 9}, ()), 1))
    assert loaded(store).epochs == {A: 9, B: 7}


def test_a_file_that_was_cut_gives_way_to_the_one_before(store, tmp_path):
    saved(store, ONE)
    for directory in ("one", "two"):
        (tmp_path / directory / file_name(2)).write_bytes(encode(TWO, 2)[:100])
    assert loaded(store) == ONE
    saved(store, TWO)
    assert loaded(store) == TWO


@pytest.mark.parametrize("damage", [b"", b"KVK", b"x" * 4096, bytes(4096)])
def test_without_a_right_file_a_directory_is_refused(store, tmp_path, damage):
    saved(store, ONE)
    (tmp_path / "two" / file_name(1)).write_bytes(damage)
    with pytest.raises(FailedPreconditionError, match=r"two/epochs-0+1\.kvke is damaged"):
        loaded(store)


@pytest.mark.parametrize("at", [0, 9, 13, 27, 40, 63])
def test_any_flipped_byte_of_the_only_file_is_refused(store, tmp_path, at):
    saved(store, ONE)
    flip(tmp_path / "two" / file_name(1), at)
    with pytest.raises(FailedPreconditionError, match=r"two/epochs-0+1\.kvke is "):
        loaded(store)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 2
    path.write_bytes(content)


def test_a_file_that_is_cut_is_refused(store, tmp_path):
    saved(store, ONE)
    (tmp_path / "two" / file_name(1)).write_bytes(encode(ONE, 1)[:60])
    with pytest.raises(FailedPreconditionError, match=r"delete it only if"):
        loaded(store)


def test_a_newer_release_wrote_it(store, tmp_path):
    saved(store, ONE)
    newer = bytearray(encode(TWO, 2))
    newer[8] = 2
    (tmp_path / "one" / file_name(2)).write_bytes(newer)
    with pytest.raises(FailedPreconditionError, match="newer release, format version 2"):
        loaded(store)


LAST = "epochs-ffffffffffffffff.kvke"
JUNK = [(name, b"\x93junk" * 1000) for name in (LAST, file_name(1), file_name(3), file_name(9))]
JUNK += [(LAST, b""), (LAST, b"x" * 8192), (file_name(1), b"x")]


@pytest.mark.parametrize(("name", "content"), JUNK)
def test_a_file_that_was_never_ours_stops_nobody_and_is_not_touched(store, tmp_path, name, content):
    junk = tmp_path / "one" / name
    junk.write_bytes(content)
    assert loaded(store) == EpochState({}, ())
    saved(store, ONE)
    saved(store, TWO, ONE, TWO)
    assert loaded(store) == TWO
    assert junk.read_bytes() == content
    assert len(names(tmp_path)) == 2
    assert len(names(tmp_path, "two")) == 1


def test_a_daemon_that_died_while_it_wrote_is_no_damage(store, tmp_path):
    (tmp_path / "one" / UNFINISHED_NAME).write_bytes(b"")
    assert loaded(store) == EpochState({}, ())
    saved(store, ONE)
    assert loaded(store) == ONE
    assert names(tmp_path) == [file_name(1)]


def test_a_full_file_system_leaves_nothing_that_stops_the_next_start(store):
    """The first file ever: there is none before it."""

    async def work():
        files = store(FaultyFiles(lambda call, _: errno.ENOSPC if call == "pwritev" else 0))
        await files.load()
        with pytest.raises(TierUnavailableError, match="No space left"):
            await files.save(ONE)

    asyncio.run(work())
    assert loaded(store) == EpochState({}, ())


def test_what_is_counted_does_not_fall_back_when_it_is_damaged_later(store, tmp_path):
    """The one before it was left by a crash; once its successor counted, it is gone."""
    saved(store, ONE)
    for directory in ("one", "two"):
        (tmp_path / directory / file_name(2)).write_bytes(encode(TWO, 2))
    assert loaded(store) == TWO
    assert names(tmp_path) == [file_name(2)]


def test_the_last_number_is_not_passed(store, tmp_path):
    (tmp_path / "one" / file_name(EPOCHS_NUMBER_MAX)).write_bytes(encode(ONE, EPOCHS_NUMBER_MAX))

    async def work():
        files = store()
        assert await files.load() == ONE
        with pytest.raises(TierUnavailableError, match="has the last number"):
            await files.save(TWO)

    asyncio.run(work())
    assert loaded(store) == ONE


CALLS = ["listing", "create", "pwritev", "fdatasync", "sync_directory", "unlink", "rename"]


@pytest.mark.parametrize("directory", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_is_told_and_never_loses_what_was_there(store, name, directory):
    saved(store, ONE)
    seen = []

    def plan(call, _):
        if call == name:
            seen.append(call)
            return errno.EIO if len(seen) == 1 + directory + 2 * (name == "listing") else 0
        return 0

    async def work():
        files = store(FaultyFiles(plan))
        await files.load()
        with pytest.raises(TierUnavailableError, match="not on the medium"):
            await files.save(TWO)
        assert (await store().load()).epochs[A] == 2, "the other directory has it"
        await files.save(TWO)

    asyncio.run(work())
    assert loaded(store) == TWO


def test_while_an_earlier_file_is_left_nobody_is_told_that_all_is_well(store, tmp_path):
    """Damage to the later file would make the earlier one count."""
    saved(store, ONE)

    async def work():
        files = store(FaultyFiles(lambda call, _: errno.EIO if call == "unlink" else 0))
        await files.load()
        with pytest.raises(TierUnavailableError, match="not on the medium"):
            await files.save(TWO)

    asyncio.run(work())
    assert loaded(store) == TWO


def test_a_file_that_cannot_be_read_is_as_good_as_damaged(store):
    saved(store, ONE)
    with pytest.raises(FailedPreconditionError, match="cannot be read: Input/output error"):
        asyncio.run(store(FaultyFiles(lambda call, _: errno.EIO * (call == "preadv"))).load())

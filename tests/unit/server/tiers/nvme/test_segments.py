"""The table of a directory's segments: lives, files that are open, what counts."""

import itertools

import pytest

from kvkeep_server.tiers.nvme.files import DiskFiles, Found
from kvkeep_server.tiers.nvme.segments import (
    Segment,
    SegmentEvent,
    SegmentState,
    SegmentTable,
)
from tests.fakes.nvme_tier import MIB, directory_settings

ALLOWED = {
    (SegmentState.FOUND, SegmentEvent.RECOVER): SegmentState.SEALED,
    (SegmentState.FOUND, SegmentEvent.SKIP): SegmentState.SKIPPED,
    (SegmentState.FOUND, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
    (SegmentState.ACTIVE, SegmentEvent.SEAL): SegmentState.SEALED,
    (SegmentState.ACTIVE, SegmentEvent.QUARANTINE): SegmentState.QUARANTINED,
    (SegmentState.ACTIVE, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
    (SegmentState.ACTIVE, SegmentEvent.SKIP): SegmentState.SKIPPED,
    (SegmentState.SEALED, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
    (SegmentState.QUARANTINED, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
}


@pytest.fixture
def table(tmp_path):
    return SegmentTable(settings=directory_settings(tmp_path), files=DiskFiles())


@pytest.mark.parametrize(("state", "event"), [*itertools.product(SegmentState, SegmentEvent)])
def test_only_what_the_table_names_can_happen(state, event):
    segment = Segment(1, "", 0, 10, "", state)
    if (state, event) in ALLOWED:
        segment.advance(event)
        assert segment.state == ALLOWED[state, event]
    else:
        with pytest.raises(KeyError):
            segment.advance(event)
        assert segment.state == state


def test_users_leave_the_segment_that_reclaim_needs(tmp_path):
    aside = 4 * 4096
    settings = directory_settings(tmp_path, max_nbytes=4 * MIB + aside)
    table = SegmentTable(settings=settings, files=DiskFiles())
    for number in range(1, 4):
        assert table.may_create()
        table.begin(number, "a")
    assert not table.may_create()
    assert table.may_create(for_reclaim=True)
    assert not table.is_over
    table.begin(4, "a")
    assert table.used_nbytes + aside == settings.max_nbytes
    assert table.is_over
    assert not table.may_create(for_reclaim=True)


def test_files_of_others_count_and_keep_their_names(table):
    found = [
        Found("0000000a.kvks", MIB, MIB, regular=True),
        Found("0000000A.kvks", MIB, MIB, regular=True),
        Found("00000000.kvks", MIB, MIB, regular=True),
        Found("../x.kvks", MIB, 4096, regular=True),
        Found("kvkeep.lock", 40, 4096, regular=True),
        Found("0000000b.kvks", MIB, 0, regular=False),
    ]
    assert table.load(found) == {0, 10, 11}
    assert list(table.segments) == [10]
    assert table.foreign == ["0000000A.kvks", "00000000.kvks", "../x.kvks", "0000000b.kvks"]
    assert table.used_nbytes == 3 * MIB + 4096


def test_a_segment_that_goes_waits_for_its_readers(table):
    segment = table.begin(1, "a")
    table.hold(segment)
    table.hold(segment)
    table.retire(segment)
    assert not table.segments
    table.release(segment)
    assert table.take_unlinkable() == []
    table.release(segment)
    assert table.take_unlinkable() == [segment]
    assert table.used_nbytes == MIB
    table.unlink_failed(segment)
    assert table.waiting_to_go == 1
    assert table.take_unlinkable() == [segment]
    table.unlinked(segment)
    assert table.used_nbytes == 0


def test_more_releases_than_holds_are_a_bug(table):
    segment = table.begin(1, "a")
    with pytest.raises(AssertionError):
        table.release(segment)


def test_check_notices_what_leaked_and_what_is_gone(table, tmp_path):
    segment = table.begin(1, "a")
    (tmp_path / "00000001.kvks").write_bytes(bytes(MIB))
    files = DiskFiles()
    table.check(files.listing(str(tmp_path)))
    (tmp_path / "00000002.kvks").write_bytes(b"")
    with pytest.raises(AssertionError, match="leaked"):
        table.check(files.listing(str(tmp_path)))
    (tmp_path / "00000002.kvks").unlink()
    table.resize(segment, MIB // 2)
    with pytest.raises(AssertionError, match="has 1048576 bytes"):
        table.check(files.listing(str(tmp_path)))
    (tmp_path / "00000001.kvks").unlink()
    with pytest.raises(AssertionError, match="gone"):
        table.check(files.listing(str(tmp_path)))

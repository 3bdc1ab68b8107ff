"""Numbers of segments: what was there at the start and the names that are taken, in one directory
and in several."""

import asyncio

import pytest

from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.tiers.nvme import segment_format as form
from kvkeep_server.tiers.nvme.files import DiskFiles
from tests.fakes.nvme_lives import hits, read_back, write
from tests.fakes.nvme_tier import IndexOwner, nvme_tier


@pytest.fixture
def make_in(tmp_path, threads):
    """Makes (tier, owner) over directories of these names."""

    def build(*names, **options):
        owner = IndexOwner()
        paths = [tmp_path / name for name in names]
        return nvme_tier(paths, threads, owner=owner, **options), owner

    return build


JUNK = [b"", b"?", b"x" * 50_000, (form.SEGMENT_MAGIC + b"\1\0\0\0").ljust(4096, b"x")]


@pytest.mark.parametrize("content", JUNK)
@pytest.mark.parametrize("number", ["00000002", "000000ff", "ffffffff"])
def test_a_file_that_is_none_of_ours_uses_no_numbers_up(make_in, tmp_path, number, content):
    """Its name is never taken; what is written beside it is found by later lives."""
    keys, contents = write(make_in("d"), count=3)
    junk = tmp_path / "d" / f"{number}.kvks"
    junk.write_bytes(content)
    more_keys, more = write(make_in("d"), count=3, seed=2)
    names = {path.name for path in (tmp_path / "d").glob("*.kvks")}
    unbegun = {junk.name} if not content else set()
    new = "00000003.kvks" if number == "00000002" else "00000002.kvks"
    assert names | unbegun == {"00000001.kvks", new, junk.name}
    if content:
        assert junk.read_bytes() == content
    got, _ = read_back(make_in("d"), keys + more_keys)
    assert got == hits(contents + more)


def test_the_name_of_a_directory_or_a_link_is_not_taken(make_in, tmp_path):
    (tmp_path / "d" / "00000001.kvks").mkdir(parents=True)
    (tmp_path / "d" / "00000002.kvks").symlink_to("/etc/passwd")
    write(make_in("d"), count=1)
    assert (tmp_path / "d" / "00000003.kvks").is_file()


def test_a_copy_of_a_segment_uses_no_numbers_up(make_in, tmp_path):
    write(make_in("d"), count=1)
    copy = tmp_path / "d" / "ffffffff.kvks"
    copy.write_bytes((tmp_path / "d" / "00000001.kvks").read_bytes())
    write(make_in("d"), count=1, seed=2)
    assert (tmp_path / "d" / "00000002.kvks").exists()


@pytest.mark.parametrize("close", [True, False])
def test_directories_of_two_daemons_are_not_used_together(make_in, tmp_path, close):
    """Their numbers say nothing of each other; blocks of one were read where those of the other
    lie."""
    keys, contents = write(make_in("a"), count=3)
    others, more = write(make_in("b"), count=3, seed=2, close=close)
    tier, _ = make_in("a", "b")
    with pytest.raises(FailedPreconditionError) as caught:
        asyncio.run(tier.start())
    assert f"{tmp_path}/a/00000001.kvks and {tmp_path}/b/00000001.kvks are two" in str(caught.value)
    assert read_back(make_in("a"), keys)[0] == hits(contents), "each alone is as it was"
    assert read_back(make_in("b"), others)[0] == hits(more)


def test_a_copy_in_another_directory_is_left_out(make_in, tmp_path):
    keys, contents = write(make_in("a"))
    (tmp_path / "b").mkdir()
    copy = tmp_path / "b" / "00000001.kvks"
    copy.write_bytes((tmp_path / "a" / "00000001.kvks").read_bytes())
    got, stats = read_back(make_in("a", "b"), keys)
    assert got == hits(contents)
    assert stats.counts.corrupt == 0
    assert stats.counts.recovered == len(keys)
    assert stats.directories[1].skipped == {str(copy): f"is a copy of {tmp_path}/a/00000001.kvks"}
    assert copy.exists()


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_file_that_is_none_may_have_the_name_of_a_segment_elsewhere(make_in, tmp_path, first):
    keys, contents = write(make_in("a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "00000001.kvks").write_bytes(b"x" * 9000)
    got, stats = read_back(make_in(*sorted("ab", reverse=first == "b")), keys)
    assert got == hits(contents)
    assert stats.counts.corrupt == 0


class UnreadableFiles(DiskFiles):
    """Of one file, for a while."""

    def open(self, path, *, write=False):
        if path.endswith("00000009.kvks"):
            raise OSError(5, "Input/output error")
        return super().open(path, write=write)


def test_what_cannot_be_read_now_or_by_this_release_has_its_number(make_in, tmp_path):
    """Its records may count another time: those of now must have higher numbers."""
    write(make_in("d"), count=1)
    newer = bytearray((tmp_path / "d" / "00000001.kvks").read_bytes())
    newer[8] = 2
    (tmp_path / "d" / "00000005.kvks").write_bytes(newer)
    write(make_in("d"), count=1, seed=2)
    assert (tmp_path / "d" / "00000006.kvks").exists()
    (tmp_path / "d" / "00000009.kvks").write_bytes(b"x" * 8192)
    write(make_in("d", files=UnreadableFiles()), count=1, seed=3)
    assert (tmp_path / "d" / "0000000a.kvks").exists()

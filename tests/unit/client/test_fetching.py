"""Blocks fetched from another host: what comes, what does not, and what the answer says of it."""

from __future__ import annotations

import time
import zlib

import numpy as np
import pytest

from kvkeep.errors import DeadlineError, ResourceExhaustedError, UnavailableError
from kvkeep.fetched import FetchedChunk
from kvkeep.fetching import RemoteLease, cut_acquired, cut_arrived
from kvkeep.reading import Came, Wanted, put_into, read_blocks
from kvkeep.results import BlockStatus, MissReason
from kvkeep.v1 import block_cache_pb2 as pb

NBYTES = 1000
READY, MISS = BlockStatus.READY, BlockStatus.MISS


def content(group, number):
    return bytes([group * 50 + number]) * NBYTES


class FakeChannel:
    """A daemon that sends blocks in odd pieces, and does what a test plans before it does so.

    Attributes:
        plans: For one stream each: an error to raise after so many bytes, or a message in their
            place.
    """

    def __init__(self, *plans) -> None:
        self.plans = list(plans)
        self.requests: list[pb.ReadRequest] = []
        self.paused_s = 0.0

    def pause(self, seconds):
        self.paused_s += seconds

    def read(self, request, timeout_s):
        assert timeout_s > 0
        self.requests.append(request)
        after, what = self.plans.pop(0) if self.plans else (None, None)
        numbers = range(request.first_block, request.first_block + request.blocks)
        data = b"".join(content(request.group, number) for number in numbers)
        for at in range(0, len(data), 300):
            if after is not None and at >= after:
                if isinstance(what, Exception):
                    raise what
                what.crc32 = what.crc32 or request.message_crc32
                yield what
                return
            block, offset = divmod(at, NBYTES)
            piece = data[at : at + 300]
            yield pb.ReadResponse(
                block=request.first_block + block,
                offset=offset,
                data=piece,
                status=READY,
                crc32=zlib.crc32(piece, request.message_crc32),
            )


def read(channel, blocks=5, first=0, within_s=5.0):
    into = bytearray(blocks * NBYTES)
    wanted = Wanted(7, 0, 0, blocks, NBYTES, first)
    came = read_blocks(
        channel, wanted, put_into(memoryview(into), NBYTES), time.monotonic() + within_s
    )
    right = b"".join(content(0, first + number) for number in range(came.blocks))
    assert into[: came.blocks * NBYTES] == right
    return came


def test_all_of_it_comes():
    assert read(FakeChannel()) == Came(5, READY)
    assert read(FakeChannel(), first=3) == Came(5, READY)
    assert read(FakeChannel(), blocks=0) == Came(0, READY)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (pb.ReadResponse(block=2, status=BlockStatus.CORRUPT), BlockStatus.CORRUPT),
        (pb.ReadResponse(block=2, status=BlockStatus.PENDING), BlockStatus.PENDING),
        (pb.ReadResponse(block=2, status=99), BlockStatus.TIER_DOWN),
        (DeadlineError("late"), BlockStatus.TIMEOUT),
        (UnavailableError("gone"), BlockStatus.TIER_DOWN),
        # Damaged on the way, out of order, twice, more than was asked for.
        (pb.ReadResponse(block=2, offset=400, data=b"x", status=READY), BlockStatus.CORRUPT),
        (pb.ReadResponse(block=3, data=b"", status=READY), BlockStatus.CORRUPT),
        (pb.ReadResponse(block=0, data=b"", status=READY), BlockStatus.CORRUPT),
        (
            pb.ReadResponse(block=2, offset=400, data=bytes(9000), status=READY),
            BlockStatus.CORRUPT,
        ),
    ],
)
def test_what_goes_wrong_leaves_the_blocks_before_it(what, why):
    """P25."""
    assert read(FakeChannel((2400, what))) == Came(2, why)


def test_a_stream_that_ends_early_is_no_answer():
    assert read(FakeChannel((1200, pb.ReadResponse(block=1, offset=200, status=READY)))) == Came(
        1, BlockStatus.TIER_DOWN
    )


def test_a_stream_without_a_turn_is_asked_for_again():
    full = ResourceExhaustedError("full", 0.01)
    channel = FakeChannel((0, full), (2400, full))
    assert read(channel) == Came(5, READY)
    assert [request.first_block for request in channel.requests] == [0, 0, 2]
    assert channel.paused_s == pytest.approx(0.02)
    assert read(FakeChannel(*[(0, full)] * 99), within_s=0.0) == Came(0, BlockStatus.TIMEOUT)


def columns(*shapes):
    """(group, blocks) each."""
    return [
        pb.LeasedColumn(
            rank=0,
            group=group,
            addresses=bytes(8 * blocks),
            generations=bytes(8 * blocks),
            positions=np.arange(blocks, dtype="<u4").tobytes() if group else b"",
        )
        for group, blocks in shapes
    ]


def lease_of(full=frozenset({0})):
    return RemoteLease(7, time.monotonic() + 30, (NBYTES, 700), full)


def fetch(lease, channel, shown):
    chunk = FetchedChunk(5, lease.pages(shown))
    came = lease.fetch(channel, shown, chunk, time.monotonic() + 5)
    return chunk, lease.cut(shown, came)


def test_addresses_name_what_was_fetched():
    lease, shown = lease_of(), columns((0, 3))
    chunk, came = fetch(lease, FakeChannel(), shown)
    assert came == Came(3, READY)
    for number, address in enumerate(np.frombuffer(shown[0].addresses, np.uint64).tolist()):
        assert address >> 32 == chunk.chunk_id
        start = (address & 0xFFFFFFFF) * 4096
        assert start >= chunk.data_offset
        assert chunk.buffer[start : start + NBYTES] == content(0, number)
    assert chunk.buffer.readonly
    # What becomes readable later follows in the column.
    later = columns((0, 2))
    channel = FakeChannel()
    fetch(lease, channel, later)
    assert channel.requests[0].first_block == 3


@pytest.mark.parametrize("good", range(4))
def test_the_answer_speaks_of_what_came(good):
    response = pb.AcquireResponse(
        lease_id=7,
        prefix_blocks=7,
        leased_blocks=4,
        status=bytes([READY] * 6 + [BlockStatus.PENDING, MISS]),
        columns=columns((0, 4)),
    )
    corrupt = pb.ReadResponse(block=good, status=BlockStatus.CORRUPT)
    channel = FakeChannel((good * NBYTES, corrupt))
    cut_acquired(response, fetch(lease_of(), channel, response.columns)[1])
    assert (response.leased_blocks, response.prefix_blocks) == (good, good + 2)
    assert response.status == bytes(
        [READY] * (good + 2) + [BlockStatus.CORRUPT] + [MISS] * (5 - good)
    )
    assert response.ended == MissReason.CORRUPT
    assert len(response.columns[0].addresses) == 8 * good


def test_a_prefix_with_a_window_comes_whole_or_not_at_all():
    response = pb.AcquireResponse(
        lease_id=7,
        prefix_blocks=4,
        leased_blocks=4,
        status=bytes([READY] * 4),
        columns=columns((0, 4), (1, 2)),
    )
    late = (1200, DeadlineError("late"))
    came = fetch(lease_of(), FakeChannel((None, None), late), response.columns)[1]
    cut_acquired(response, came)
    assert (response.leased_blocks, response.prefix_blocks) == (0, 0)
    assert response.status == bytes([BlockStatus.TIMEOUT] + [MISS] * 3)
    assert not any(column.addresses or column.positions for column in response.columns)


def test_what_arrives_is_cut_too():
    response = pb.AwaitResponse(first_block=3, status=bytes([READY] * 4), columns=columns((0, 4)))
    channel = FakeChannel((1500, UnavailableError("gone")))
    cut_arrived(response, fetch(lease_of(), channel, response.columns)[1])
    assert response.status == bytes([READY, BlockStatus.TIER_DOWN, MISS, MISS])

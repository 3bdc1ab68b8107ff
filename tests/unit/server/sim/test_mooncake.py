"""Mooncake's traces: what they yield, and every way in which a line may be wrong."""

import json

import pytest

from kvkeep_server.sim import mooncake
from kvkeep_server.sim.mooncake import read_mooncake
from kvkeep_server.sim.trace import TraceError, TraceRequest

GOOD = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


def line(**changes):
    return json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v is not None}).encode()


def test_requests_come_in_order(write):
    last = line(timestamp=1500.5, input_length=512, hash_ids=[2**64 - 1], tool="ignored")
    assert list(read_mooncake(write(line(), last))) == [
        TraceRequest(1.5, [4, 5, 6], 0, 7, -1, 1030),
        TraceRequest(1.5005, [2**64 - 1], 0, 7, -1, 512),
    ]
    # A prompt shorter than a block has begun one; an empty one has none.
    short = line(input_length=3, hash_ids=[1]), line(input_length=0, hash_ids=[])
    assert [request.blocks for request in read_mooncake(write(*short))] == [[1], []]


def test_blank_lines_are_passed_and_counted(write):
    path = write(b"", line(), b" \r", b"\t", line(), b"")
    assert len(list(read_mooncake(path))) == 2
    with pytest.raises(TraceError, match=r"trace\.jsonl:4: timestamp"):
        list(read_mooncake(write(line(), b"", b"  ", line(timestamp=-1))))
    with pytest.raises(TraceError, match="at least one request"):
        list(read_mooncake(write(b"", b" ")))


def test_a_trace_is_read_as_it_is_used(write):
    requests = read_mooncake(write(line(), b"damaged"))
    assert next(requests).blocks == [4, 5, 6]
    with pytest.raises(TraceError, match=r"trace\.jsonl:2"):
        next(requests)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (b"{", "JSON object"),
        (b"[1]", "JSON object"),
        (b"\xff\xfe", "JSON object"),
        (b"[" * 100_000, "JSON object"),
        (line(timestamp=None), "timestamp"),
        (line(timestamp="1"), "timestamp"),
        (line(timestamp=True), "timestamp"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp=float("nan")), "timestamp"),
        (line(timestamp=float("inf")), "timestamp"),
        (line(timestamp=1e300), "timestamp is 1e.300; allowed: a number from 0 to 4294967295999;"),
        (line(output_length=2**60), "a whole number from 0 to 4294967295999;"),
        (line(timestamp=100), "timestamp"),  # earlier than the line before
        (line(input_length=1.5), "input_length"),
        (line(input_length=None), "input_length"),
        (line(output_length="x"), "output_length"),
        (line(hash_ids=None), "hash_ids"),
        (line(hash_ids=[1, 2]), "hash_ids"),
        (line(hash_ids=[1, 2, 3, 4]), "hash_ids"),
        (line(hash_ids=[1, 2, -3]), "hash_ids"),
        (line(hash_ids=[1, 2, 2**64]), "hash_ids"),
        (line(hash_ids=[1, 2, True]), "hash_ids"),
        (line(hash_ids=[1, 2, "3"]), "hash_ids"),
        (line(hash_ids={"1": 2}), "hash_ids"),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else value,
)
def test_a_wrong_line_names_file_line_field_and_what_is_allowed(write, wrong, named):
    path = write(line(), wrong)
    with pytest.raises(TraceError, match=named) as refused:
        list(read_mooncake(path))
    assert f"{path}:2" in str(refused.value)
    assert "allowed: " in str(refused.value)
    assert "b'" not in str(refused.value), "as Python writes it"


def test_a_line_is_never_longer_than_the_limit(write, monkeypatch):
    monkeypatch.setattr(mooncake, "LINE_NBYTES_MAX", 200)
    with pytest.raises(TraceError, match="at most 200 bytes"):
        list(read_mooncake(write(b" " * 1000 + line())))


def test_no_file_and_an_empty_one(write, tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        list(read_mooncake(tmp_path / "absent.jsonl"))
    with pytest.raises(TraceError, match="at least one request"):
        list(read_mooncake(write()))

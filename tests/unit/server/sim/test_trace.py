"""The trace reader: what it yields, and every way in which a file may be wrong."""

import io
import zipfile

import numpy as np
import pytest

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.sim import trace as trace_module
from kvkeep_server.sim.trace import TraceRequest, read_trace

GOOD = {
    "par": np.array([-1, 0, 1, 0, -1], dtype=np.int32),
    "leaf": np.array([2, 3, 2, 4], dtype=np.int32),
    "ts": np.array([0.0, 1.5, 1.5, 9.0]),
    "typ": np.array([1, 2, 0, 5], dtype=np.int8),
    "outl": np.array([10, 0, 3, 4], dtype=np.int32),
    "sess": np.array([0, 0, -1, 7], dtype=np.int32),
}


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        path = tmp_path / "trace.npz"
        arrays = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
        np.savez_compressed(path, **arrays)
        return path

    return write


def test_requests_come_root_first_and_in_order(write):
    trace = read_trace(write())
    assert len(trace) == 4
    assert list(trace.requests()) == [
        TraceRequest(0.0, [0, 1, 2], 1, 10, 0, 3 * 512),
        TraceRequest(1.5, [0, 3], 2, 0, 0, 2 * 512),
        TraceRequest(1.5, [0, 1, 2], 0, 3, -1, 3 * 512),
        TraceRequest(9.0, [4], 5, 4, 7, 512),
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"par": None}, "par"),
        ({"par": np.array([0, 0, 1, 0, -1])}, "par"),  # its own parent: an endless walk
        ({"par": np.array([-1, 2, 1, 0, -1])}, "par"),
        ({"par": np.array([-2, 0, 1, 0, -1])}, "par"),
        ({"par": np.array([[-1, 0, 1, 0, -1]])}, "par"),
        ({"par": np.array([-1.0, 0, 1, 0, -1])}, "par"),
        ({"leaf": np.array([2, 3, 2, 5])}, "leaf"),
        ({"leaf": np.array([2, 3, 2, -1])}, "leaf"),
        ({"leaf": np.array([2, 3, 2])}, "leaf"),
        ({name: array[:0] for name, array in GOOD.items() if name != "par"}, "leaf"),
        ({"ts": np.array([0.0, 2.0, 1.0, 9.0])}, "ts"),
        ({"ts": np.array([0.0, 1.0, np.nan, 9.0])}, "ts"),
        ({"ts": np.array([0, 1, 2, 3])}, "ts"),
        ({"outl": np.array([0, 1, 2, -3])}, "outl"),
        ({"sess": None}, "sess"),
        ({"typ": np.array(["a", "b", "c", "d"])}, "typ"),
    ],
)
def test_wrong_contents_are_named(write, changes, named):
    with pytest.raises(InvalidArgumentError, match=named):
        read_trace(write(**changes))


def test_objects_are_refused_not_loaded(write):
    with pytest.raises(InvalidArgumentError, match="readable"):
        read_trace(write(typ=np.array([1, "x", None, 2], dtype=object)))


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04" + bytes(100)])
def test_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="readable"):
        read_trace(path)


def test_a_truncated_or_flipped_file_is_refused_or_read_right(write):
    whole = write().read_bytes()
    good = list(read_trace(write()).requests())
    for at in range(0, len(whole), 7):
        for damaged in (whole[:at], whole[:at] + bytes((whole[at] ^ 0x41,)) + whole[at + 1 :]):
            path = write()
            path.write_bytes(damaged)
            try:
                trace = read_trace(path)
            except InvalidArgumentError:
                continue
            assert list(trace.requests()) == good


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgumentError, match="nowhere"):
        read_trace(tmp_path / "nowhere.npz")


def test_a_file_that_unpacks_too_large_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "UNPACKED_NBYTES_MAX", 100_000)
    array = io.BytesIO()
    np.save(array, np.zeros(1_000_000, dtype=np.int8))
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("par.npy", array.getvalue())
    assert path.stat().st_size < 10_000
    with pytest.raises(InvalidArgumentError, match="unpacked"):
        read_trace(path)

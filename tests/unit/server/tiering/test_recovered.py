"""What recovery makes of records, against the same rules written as loops over dicts."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.tiering.recovered import Mixer, judged
from kvkeep_server.tiers.record import RECORD, TOMBSTONE

# (rank, group, key, parent or None, tombstone, known keyspace)
ROW = st.tuples(
    st.integers(0, 1),
    st.integers(0, 1),
    st.integers(1, 9),
    st.none() | st.integers(1, 9),
    st.sampled_from([False, False, False, False, True]),
    st.sampled_from([True, True, True, True, True, False]),
)


def rows_of(entries):
    rows = np.zeros(len(entries), RECORD)
    for seq, (row, entry) in enumerate(zip(rows, entries, strict=True)):
        rank, group, key, parent, removed, _ = entry
        row["namespace_id"], row["group"] = [7, rank], group
        row["boundary_id"], row["boundary_members"], row["boundary_member"] = [8, 8], 2, group
        row["key"][:2], row["key_nbytes"] = [key, key], 16
        if parent is not None:
            row["parent"][:2], row["parent_nbytes"] = [parent, parent], 16
        row["flags"] = TOMBSTONE if removed else 0
        row["record_seq"], row["location"] = seq + 1, 1000 + seq
    return rows


def expected(entries):
    """(rank, group, key) -> location of what is of use, and the parent of each key."""
    last = {}
    for seq, (rank, group, key, parent, removed, known) in enumerate(entries):
        last[rank, group, key] = (1000 + seq, parent, removed, known)
    there = {
        name: (location, parent)
        for name, (location, parent, removed, known) in last.items()
        if not removed and known
    }
    return {
        name: content
        for name, content in there.items()
        if all((name[0], group, name[2]) in there for group in (0, 1))
    }


@given(entries=st.lists(ROW, max_size=60), cut=st.integers(0, 60))
def test_last_words_whole_boundaries_and_reachable_chains(entries, cut):
    # All records of a key name one parent, as those of an engine's hashes do.
    parents = {}
    entries = [
        (rank, group, key, parents.setdefault(key, None if parent == key else parent), gone, known)
        for rank, group, key, parent, gone, known in entries
    ]
    rows = rows_of(entries)
    keyspaces = np.array(
        [
            (2 * rank + group if known and not removed else -1)
            for rank, group, _, _, removed, known in entries
        ],
        np.int32,
    )
    mixer = Mixer.draw(random.Random(1))
    pieces = [slice(0, cut), slice(cut, None)]
    parts = [mixer.kept(rows[at], keyspaces[at]) for at in pieces if len(rows[at])]
    if not parts:
        return
    found = judged(parts[::-1])
    whole = expected(entries)
    keys = {name[2] for name in whole}

    def reachable(key, seen=()):
        if key in seen or key not in keys:
            return False
        parent = parents[key]
        return parent is None or reachable(parent, (*seen, key))

    # A chain that leads into a circle (records of several lives of its keys) has no root.
    wanted = {name: content[0] for name, content in whole.items() if reachable(name[2])}
    got = {
        (int(row["keyspace"]) // 2, int(row["keyspace"]) % 2, int(row["key"][0])): int(
            row["location"]
        )
        for row in found.rows
    }
    assert got == wanted
    assert found.useless >= 0
    key_of_unit = {
        int(u): int(row["key"][0]) for u, row in zip(found.unit, found.rows, strict=True)
    }
    for unit, parent in enumerate(found.parent.tolist()):
        assert parent < unit, "parents come first"
        above = parents[key_of_unit[unit]]
        assert (key_of_unit[parent] if parent >= 0 else None) == above
    assert found.starts.tolist() == [found.unit.tolist().index(u) for u in range(found.units)]

"""Who descends from whom, in columns of parents. Numbers only.

A block knows its parent and how many children it has, not who they are: lists of children would
cost every block 12 bytes for a question that is asked rarely.
"""

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.tiering.columns import BlockColumns

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


def descended(parents: NDArray[np.int32], marked: Mask) -> Mask:
    """Which ids are marked, or have a marked ancestor.

    Args:
        parents: The parent of each id, -1 = none; shape (ids,).
        marked: Shape (ids,).
    """
    found = marked.copy()
    has = np.flatnonzero(parents >= 0)
    up = parents.astype(np.int64)
    # Pointer doubling: after k rounds an id is found if one of its 2^k nearest ancestors is marked.
    while len(has):
        above = up[has]
        found[has] |= found[above]
        up[has] = up[above]
        has = has[up[has] >= 0]
    return found


def deepest_first(parents: NDArray[np.int32], units: I64) -> I64:
    """The units, each behind all of its descendants, which are among them."""
    depth = np.zeros(len(parents), np.int64)
    depth[units] = 1
    up = np.full(len(parents), -1, np.int64)
    linked = units[parents[units] >= 0]
    linked = linked[depth[parents[linked]] > 0]
    up[linked] = parents[linked]
    has = linked
    while len(has):
        above = up[has]
        depth[has] += depth[above]
        up[has] = up[above]
        has = has[up[has] >= 0]
    return units[np.argsort(-depth[units], kind="stable")]


def closed_part(columns: BlockColumns, units: I64, children: I64 | None = None) -> I64:
    """Those of `units` whose resident descendants are among `units`.

    Args:
        columns: Of the units.
        units: Resident, ascending, each once.
        children: How many of the children of each count; None = all.
    """
    if children is None:
        children = columns.children[units].astype(np.int64)
    parents = columns.parent[units].astype(np.int64)
    place = np.searchsorted(units, parents)
    place[place == len(units)] = 0
    inside = np.bincount(place[units[place] == parents], minlength=len(units))
    stays = np.flatnonzero(children != inside)
    if not len(stays):
        return units
    leaving = np.ones(len(units), bool)
    above = np.where(units[place] == parents, place, -1).tolist()
    for first in stays.tolist():
        at = first
        while at >= 0 and leaving[at]:
            leaving[at] = False
            at = above[at]
    return units[leaving]


def children_on_nvme(columns: BlockColumns, units: I64) -> I64:
    """How many children of each of these units, ascending and each once, nvme has. O(ids)."""
    marked = np.zeros(columns.capacity, bool)
    marked[units] = True
    parents = columns.parent[: columns.capacity]
    children = np.flatnonzero(marked[parents] & (parents >= 0))
    above = parents[children[columns.recorded(children)]]
    return np.bincount(np.searchsorted(units, above), minlength=len(units))


def chain_to(columns: BlockColumns, unit: int, length_max: int) -> I64:
    """Units from the root (or `length_max` before) down to `unit`; none for -1."""
    chain: list[int] = []
    while unit >= 0 and len(chain) < length_max:
        chain.append(unit)
        unit = int(columns.parent[unit])
    return np.array(chain[::-1], np.int64)

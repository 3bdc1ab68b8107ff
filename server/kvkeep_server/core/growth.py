"""Arrays by dense id that grow without being copied, as long as reserved addresses last.

Memory that was reserved and never written to takes no room, so a column reserves far ahead: from
262,144 items on for 16 million at once. A copy of a column of 10 million would hold up the event
loop for 10 to 30 ms, and there are a dozen of them.
"""

from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_Item = TypeVar("_Item", bound=np.generic)
_Array = TypeVar("_Array", bound=NDArray[np.generic])

RESERVED_FIRST = 1024
_STEP = 16
_NEAR = 1 << 18
_FAR = 1 << 24


def reserved(count: int) -> int:
    """How many items are reserved for `count` of them."""
    items = RESERVED_FIRST
    while items < count:
        items = items * _STEP if items < _NEAR else max(2 * items, _FAR)
    return items


def column(count: int, kind: type[_Item]) -> NDArray[_Item]:
    """A column of `count` zeros that `extended` makes longer; shape (count,)."""
    return np.zeros(reserved(count), kind)[:count]


def extended(old: _Array, count: int) -> _Array:
    """`old` with zeros at its end, `count` items in all; the same memory if that was reserved.

    Args:
        old: Made by `column` or here, not written to behind its end; or an array that is no
            view, which is copied then.
        count: At least as many as there are.
    """
    base = old.base
    if isinstance(base, np.ndarray) and base.ndim == old.ndim and len(base) >= count:
        return cast("_Array", base[:count])
    room = np.zeros((reserved(count), *old.shape[1:]), old.dtype)
    room[: len(old)] = old
    return cast("_Array", room[:count])

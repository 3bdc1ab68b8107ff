"""Sizes and durations as people write them: "2GiB", "1.5MiB", "500ms", "3d"."""

import re
from decimal import Decimal

SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
DURATION_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

# At most 15 digits in all, so that no arithmetic below can grow.
_QUANTITY = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?([A-Za-z]+)")


def parse_size(text: str) -> int | None:
    """Bytes of "2GiB"; None if it is not a whole number of bytes in a unit of `SIZE_UNITS`."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in SIZE_UNITS:
        return None
    nbytes = Decimal(match[1]) * SIZE_UNITS[match[2]]
    return int(nbytes) if nbytes == int(nbytes) else None


def format_size(nbytes: int) -> str:
    """The shortest exact spelling that `parse_size` reads back, at most 3 decimals: "1.5GiB"."""
    for unit, factor in reversed(SIZE_UNITS.items()):
        if nbytes >= factor and nbytes * 1000 % factor == 0:
            return f"{(Decimal(nbytes) / factor).normalize():f}{unit}"
    return f"{nbytes}B"


def show_size(nbytes: int) -> str:
    """A size for a reader, rounded down to one decimal: "23.5GiB". Not for a file: most such sizes
    are no whole number of bytes, and `parse_size` refuses them."""
    unit = _unit_below(nbytes)
    return _tenths(nbytes * 10 // SIZE_UNITS[unit], unit)


def show_size_up(nbytes: int) -> str:
    """As `show_size`, rounded up: for what is needed."""
    unit = _unit_below(nbytes)
    return _tenths(-(-nbytes * 10 // SIZE_UNITS[unit]), unit)


def size_at_most(nbytes: int, multiple: int) -> str:
    """A size to write into a file, within 1 % below `nbytes` where `multiple` allows it.

    `multiple` is a power of two, of which the size is a multiple.
    """
    unit = SIZE_UNITS[_unit_below(nbytes // 100)]
    step = max(unit, multiple)
    return format_size(nbytes // step * step)


def _unit_below(nbytes: int) -> str:
    """The largest unit that is no more than this, bytes for less than one."""
    return next((unit for unit, factor in reversed(SIZE_UNITS.items()) if nbytes >= factor), "B")


def _tenths(count: int, unit: str) -> str:
    return f"{count // 10}.{count % 10}{unit}".replace(".0", "")


def parse_duration(text: str) -> float | None:
    """Seconds of "30s"; None if it is not a number in a unit of `DURATION_UNITS_MS`."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in DURATION_UNITS_MS:
        return None
    return float(Decimal(match[1]) * DURATION_UNITS_MS[match[2]] / 1000)


def format_duration(seconds: float) -> str:
    """The shortest exact spelling that `parse_duration` reads back, down to a millisecond."""
    milliseconds = round(seconds * 1000)
    for unit, factor in reversed(DURATION_UNITS_MS.items()):
        count, rest = divmod(milliseconds, factor)
        if count and not rest:
            return f"{count}{unit}"
    return f"{milliseconds}ms"

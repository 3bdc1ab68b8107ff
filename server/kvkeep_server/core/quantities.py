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
    """A size for a reader, rounded down to one decimal: "23.5GiB"; `parse_size` reads it too."""
    for unit, factor in reversed(SIZE_UNITS.items()):
        if nbytes >= factor:
            tenths = nbytes * 10 // factor
            return f"{tenths // 10}.{tenths % 10}{unit}".replace(".0", "")
    return f"{nbytes}B"


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

"""Kinds of values in the settings file: what is allowed, and what to write instead of what is not.

A kind turns a TOML value into a Python value or raises `ValueError` whose text is the fix: one
sentence that begins with a verb. No I/O.
"""

import difflib
import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvkeep_server.core.quantities import (
    DURATION_UNITS_MS,
    SIZE_UNITS,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

Value = str | int | float | bool | tuple[str, ...]
AUTO = "auto"


class Kind(Protocol):
    """One kind of value."""

    @property
    def allowed(self) -> str:
        """What is allowed, as a noun phrase."""
        ...

    def parse(self, raw: object, memory_nbytes: int) -> Value | None:
        """The Python value; None for "auto", which the caller fills in.

        Args:
            raw: What TOML gave.
            memory_nbytes: What a share such as "50%" is a share of, in bytes.

        Raises:
            ValueError: Not allowed; the text is the fix.
        """
        ...

    def render(self, value: Value) -> str:
        """The TOML literal that `parse` reads back as `value`."""
        ...


def nearest(word: str, words: Sequence[str]) -> str | None:
    """The word that was probably meant."""
    found = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    return found[0] if found else None


def shown(raw: object) -> str:
    """A value as the file has it, cut at 60 characters and without control characters."""
    if isinstance(raw, bool):
        return str(raw).lower()
    text = f'"{raw}"' if isinstance(raw, str) else str(raw)
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: "2GiB", a plain integer, and where the key says so a share "50%" or "auto".

    Attributes:
        least: Smallest value in bytes.
        most: Largest value in bytes.
        multiple: The value is a multiple of this; a share is rounded down to it.
        share: Whether "50%" is allowed.
        auto: What "auto" means, or "" where it is not allowed.
    """

    least: int
    most: int
    multiple: int = 1
    share: bool = False
    auto: str = ""

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        words = ['a size such as "2GiB"']
        if self.share:
            words.append('a share of the memory limit such as "50%"')
        if self.auto:
            words.append('"auto"')
        multiple = f", a multiple of {format_size(self.multiple)}" if self.multiple > 1 else ""
        bounds = f", {format_size(self.least)} to {format_size(self.most)}{multiple}"
        return " or ".join(words) + bounds

    def parse(self, raw: object, memory_nbytes: int) -> int | None:
        """See `Kind`."""
        if raw == AUTO and self.auto:
            return None
        if isinstance(raw, str) and raw.endswith("%"):
            nbytes = self._share(raw, memory_nbytes)
        elif isinstance(raw, str):
            found = parse_size(raw)
            if found is None:
                raise ValueError(self._spelling(raw))
            nbytes = found
        elif isinstance(raw, int) and not isinstance(raw, bool):
            nbytes = raw
        else:
            raise ValueError(
                f'write a string with a unit, "{format_size(self.least)}" for instance'
            )
        return self._in_bounds(nbytes)

    def _share(self, raw: str, memory_nbytes: int) -> int:
        match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) ?%", raw)
        if not self.share:
            raise ValueError(
                "write a size with a unit; a share of memory is not taken for this key"
            )
        if match is None or not 0 < float(match[1]) <= 100:
            raise ValueError('write a share above 0% and up to 100%, "50%" for instance')
        return int(memory_nbytes * float(match[1]) / 100) // self.multiple * self.multiple

    def _spelling(self, raw: str) -> str:
        match = re.match(r"\s*([0-9.]+)\s*([A-Za-z]?)", raw.replace("_", ""))
        if match is not None:
            units = {name[0].lower(): name for name in SIZE_UNITS} | {"": "MiB"}
            unit = units.get(match[2].lower())
            guess = f"{match[1]}{unit}"
            if parse_size(guess) is not None:
                return (
                    f'write "{guess}"'
                    if match[2]
                    else f'write the unit too, "{guess}" for instance'
                )
        return f"write a whole number of bytes in one of the units {', '.join(SIZE_UNITS)}"

    def _in_bounds(self, nbytes: int) -> int:
        if nbytes < self.least:
            raise ValueError(f'set it to "{format_size(self.least)}" or more')
        if nbytes > self.most:
            raise ValueError(f'set it to "{format_size(self.most)}" or less')
        if nbytes % self.multiple:
            down = nbytes // self.multiple * self.multiple
            raise ValueError(f'set it to "{format_size(down)}"')
        return nbytes

    def render(self, value: Value) -> str:
        """See `Kind`."""
        assert isinstance(value, int)
        return f'"{format_size(value)}"'


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds: "30s"."""

    least_s: float
    most_s: float

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        bounds = f"{format_duration(self.least_s)} to {format_duration(self.most_s)}"
        return f'a duration such as "30s", {bounds}'

    def parse(self, raw: object, memory_nbytes: int) -> float:
        """See `Kind`."""
        del memory_nbytes
        if isinstance(raw, int | float) and not isinstance(raw, bool):
            raise ValueError(f'write the unit too: "{raw}s" if seconds are meant')  # noqa: TRY004
        seconds = parse_duration(raw) if isinstance(raw, str) else None
        if seconds is None:
            raise ValueError(self._spelling(str(raw)))
        if seconds < self.least_s:
            raise ValueError(f'set it to "{format_duration(self.least_s)}" or more')
        if seconds > self.most_s:
            raise ValueError(f'set it to "{format_duration(self.most_s)}" or less')
        return seconds

    def _spelling(self, raw: str) -> str:
        match = re.match(r"\s*([0-9.]+)\s*([A-Za-z])", raw)
        guess = f"{match[1]}{match[2].lower()}" if match is not None else ""
        if parse_duration(guess) is not None:
            return f'write "{guess}"'
        units = ", ".join(DURATION_UNITS_MS)
        return f'write a number and one of the units {units}, "30s" for instance'

    def render(self, value: Value) -> str:
        """See `Kind`."""
        assert isinstance(value, int | float)
        return f'"{format_duration(value)}"'


@dataclass(frozen=True, slots=True)
class Whole:
    """A count."""

    least: int
    most: int
    power_of_two: bool = False

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        noun = "a power of two" if self.power_of_two else "a whole number"
        return f"{noun}, {self.least} to {self.most}"

    def parse(self, raw: object, memory_nbytes: int) -> int:
        """See `Kind`."""
        del memory_nbytes
        if not isinstance(raw, int) or isinstance(raw, bool):
            hint = f"write {raw}" if isinstance(raw, str) and raw.isdecimal() else "write a number"
            raise ValueError(f"{hint}, without quotes, point or unit")  # noqa: TRY004
        if raw < self.least:
            raise ValueError(f"set it to {self.least} or more")
        if raw > self.most:
            raise ValueError(f"set it to {self.most} or less")
        if self.power_of_two and raw & (raw - 1):
            raise ValueError(f"set it to {1 << (raw.bit_length() - 1)} or {1 << raw.bit_length()}")
        return raw

    def render(self, value: Value) -> str:
        """See `Kind`."""
        assert isinstance(value, int)
        return str(value)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A share of one, bounds included."""

    least: float
    most: float

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return f"a number, {self.least} to {self.most}"

    def parse(self, raw: object, memory_nbytes: int) -> float:
        """See `Kind`."""
        del memory_nbytes
        if not isinstance(raw, int | float) or isinstance(raw, bool) or math.isnan(raw):
            raise ValueError(f"write a number, {self.most} for instance")
        if raw < self.least:
            raise ValueError(f"set it to {self.least} or more")
        if raw > self.most:
            raise ValueError(f"set it to {self.most} or less")
        return float(raw)

    def render(self, value: Value) -> str:
        """See `Kind`."""
        assert isinstance(value, int | float)
        return repr(float(value))


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    allowed: str = "true or false"

    def parse(self, raw: object, memory_nbytes: int) -> bool:
        """See `Kind`."""
        del memory_nbytes
        if not isinstance(raw, bool):
            off = str(raw).lower() in {"0", "no", "off", "false"}
            raise ValueError(f"write {'false' if off else 'true'}, without quotes")  # noqa: TRY004
        return raw

    def render(self, value: Value) -> str:
        """See `Kind`."""
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return " or ".join(f'"{name}"' for name in self.names)

    def parse(self, raw: object, memory_nbytes: int) -> str:
        """See `Kind`."""
        del memory_nbytes
        if isinstance(raw, str) and raw in self.names:
            return raw
        meant = nearest(raw, self.names) if isinstance(raw, str) else None
        raise ValueError(f'write "{meant or self.names[0]}"')

    def render(self, value: Value) -> str:
        """See `Kind`."""
        return f'"{value}"'


@dataclass(frozen=True, slots=True)
class Directory:
    """An absolute path, or "" for the default place.

    The bound is that of a unix socket's address, 107 bytes, less the longest socket name.
    """

    nbytes_max: int = 90

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return f'an absolute path of at most {self.nbytes_max} bytes, or ""'

    def parse(self, raw: object, memory_nbytes: int) -> str:
        """See `Kind`."""
        del memory_nbytes
        if not isinstance(raw, str):
            raise ValueError('write the path as a string, "/run/kvkeep" for instance')  # noqa: TRY004
        if raw and not raw.startswith("/"):
            raise ValueError("write the whole path, from / on")
        if len(raw.encode()) > self.nbytes_max:
            raise ValueError("choose a shorter path: a unix socket's address has 107 bytes")
        if not raw.isprintable() or '"' in raw or "\\" in raw:
            raise ValueError("choose a path of printable characters without quotes or backslashes")
        return raw

    def render(self, value: Value) -> str:
        """See `Kind`."""
        return f'"{value}"'


@dataclass(frozen=True, slots=True)
class DirectoryList:
    """Absolute paths, or none."""

    most: int = 16
    allowed: str = 'a list of at most 16 absolute paths such as ["/var/lib/kvkeep"]'

    def parse(self, raw: object, memory_nbytes: int) -> tuple[str, ...]:
        """See `Kind`."""
        if not isinstance(raw, list | tuple):
            raise ValueError('write a list, ["/var/lib/kvkeep"] for instance')  # noqa: TRY004
        if len(raw) > self.most:
            raise ValueError(f"name at most {self.most}")
        one = Directory(nbytes_max=1024)
        paths = tuple(one.parse(path, memory_nbytes).rstrip("/") for path in raw)
        if "" in paths:
            raise ValueError("write whole paths, from / on, and not / itself")
        # Where links lead: two logs in one directory would take each other's files.
        places = [_resolved(path) for path in paths]
        if len(set(places)) < len(places):
            raise ValueError("name each directory once, also by way of symbolic links")
        return paths

    def render(self, value: Value) -> str:
        """See `Kind`."""
        assert isinstance(value, tuple)
        return "[" + ", ".join(f'"{path}"' for path in value) + "]"


def _resolved(path: str) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:  # a loop is the latter up to Python 3.12
        raise ValueError(f"name another directory: the links of {path} lead in a circle") from error


@dataclass(frozen=True, slots=True)
class DiskShare:
    """Bytes of a file system, or a share of it; kept as it is written, since its size is known only
    where the file system is."""

    allowed: str = 'a share of the file system such as "50%" or a size such as "800GiB"'

    def parse(self, raw: object, memory_nbytes: int) -> str:
        """See `Kind`."""
        del memory_nbytes
        if not isinstance(raw, str):
            raise ValueError('write a share or a size with a unit, "50%" for instance')  # noqa: TRY004
        disk_nbytes(raw, 1 << 40)
        return raw

    def render(self, value: Value) -> str:
        """See `Kind`."""
        return f'"{value}"'


def disk_nbytes(text: str, total_nbytes: int) -> int:
    """What a `DiskShare` means on a file system of that size.

    Raises:
        ValueError: It is none; the text is the fix.
    """
    return Size(4 << 20, 1 << 60, 4096, share=True).parse(text, total_nbytes) or 0


@dataclass(frozen=True, slots=True)
class Listen:
    """An address and a port of this machine, or "" for none. No names: what they mean changes."""

    allowed: str = 'an address and a port such as "127.0.0.1:9464" or "[::1]:9464", or ""'

    def parse(self, raw: object, memory_nbytes: int) -> str:
        """See `Kind`."""
        del memory_nbytes
        if not isinstance(raw, str):
            raise ValueError('write both as a string, "127.0.0.1:9464" for instance')  # noqa: TRY004
        if raw:
            listen_address(raw)
        return raw

    def render(self, value: Value) -> str:
        """See `Kind`."""
        return f'"{value}"'


def listen_address(text: str) -> tuple[str, int]:
    """Address and port of a `Listen` that is not "".

    Raises:
        ValueError: It is none; the text is the fix.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):([0-9]{1,5})", text)
    if match is None:
        raise ValueError('write an IP address, a colon and a port: "127.0.0.1:9464" for instance')
    host, port = match[1] or match[2], int(match[3])
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"write an IP address in the place of {host}") from None
    if port > 65535:
        raise ValueError(
            "choose a port from 0 to 65535; with 0 the kernel chooses, and the log tells"
        )
    return host, port


@dataclass(frozen=True, slots=True)
class SocketMode:
    """Permission bits of a unix socket, octal, as a string: TOML reads a bare 0660 as an error."""

    allowed: str = 'octal permissions "0600" to "0666" with "06" for the owner'

    def parse(self, raw: object, memory_nbytes: int) -> int:
        """See `Kind`."""
        del memory_nbytes
        if not isinstance(raw, str) or re.fullmatch("0?[0-7]{3}", raw) is None:
            raise ValueError('write four octal digits as a string, "0660" for instance')
        mode = int(raw, 8)
        if mode & 0o111 or mode >> 6 != 6:
            raise ValueError(
                'write "0600" (this user), "0660" (its group too) or "0666" (everybody)'
            )
        return mode

    def render(self, value: Value) -> str:
        """See `Kind`."""
        assert isinstance(value, int)
        return f'"0{value:o}"'

"""How much memory this process may use, and how it is shared out.

The limit is the smallest of its cgroups' (v1 or v2) and the host's. A daemon in a container sees
the host's memory in /proc/meminfo but is killed at its cgroup's limit, so every size that is a
share of memory starts from here. The pages of a memfd are charged like any other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvkeep_server.core.errors import FailedPreconditionError

MiB, GiB = 1 << 20, 1 << 30

# What the daemon itself holds beside pool, staging and index: interpreter, gRPC, sessions, leases.
PROCESS_NBYTES = 96 * MiB
# The bound of the index, a row, with what policies keep.
INDEX_ROW_NBYTES = 96


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit.

    Attributes:
        nbytes: The limit in bytes.
        free_nbytes: What is free under all of these limits, in bytes; file cache that can be
            dropped counts as free.
        source: Where the limit was read, for messages.
    """

    nbytes: int
    free_nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the daemon will use at most, in bytes."""

    pool_nbytes: int
    staging_nbytes: int
    index_rows: int

    @property
    def rest_nbytes(self) -> int:
        """Index and process."""
        return self.index_rows * INDEX_ROW_NBYTES + PROCESS_NBYTES

    @property
    def nbytes(self) -> int:
        """The sum."""
        return self.pool_nbytes + self.staging_nbytes + self.rest_nbytes


def pool_nbytes_auto(limit_nbytes: int) -> int:
    """The pool of a daemon that was told nothing."""
    return min(2 * GiB, limit_nbytes // 4)


def staging_nbytes_auto(limit_nbytes: int, plan: MemoryPlan) -> int:
    """All staging together: half of what the rest of the plan leaves, so that there is a margin."""
    return max(0, min(4 * GiB, (limit_nbytes - plan.pool_nbytes - plan.rest_nbytes) // 2))


@dataclass(frozen=True, slots=True)
class _Flavour:
    """File names of one cgroup version."""

    limit: str
    usage: str
    inactive_file: str


_V1 = _Flavour("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Flavour("memory.max", "memory.current", "inactive_file")


def read_memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Reads the limit that holds for this process now.

    Args:
        root: Where proc/ and the cgroup file systems are looked up; a test passes a fake tree.

    Raises:
        FailedPreconditionError: The host does not say how much it has.
    """
    limits = [_host_limit(root), *_cgroup_limits(root)]
    tightest = min(limits, key=lambda limit: limit.nbytes)
    return MemoryLimit(
        nbytes=tightest.nbytes,
        free_nbytes=min(limit.free_nbytes for limit in limits),
        source=tightest.source,
    )


def _host_limit(root: Path) -> MemoryLimit:
    path = root / "proc/meminfo"
    try:
        total, free = (_meminfo(path.read_text(), name) for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError) as error:
        raise FailedPreconditionError(
            f"the memory of this host is unknown, which all sizes rest on: {path} cannot be read"
            f" ({error}); fix: mount /proc, whole"
        ) from error
    return MemoryLimit(total, free, "memory of the host")


def _meminfo(text: str, name: str) -> int:
    """Bytes. Raises ValueError where it is not there."""
    match = re.search(rf"^{name}: *([0-9]+) kB$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"it has no {name}")
    return int(match[1]) * 1024


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    """Limits of every level from this process's cgroup up to the mount."""
    paths = _cgroup_paths(root)
    for line in _lines(root / "proc/self/mountinfo"):
        # 36 35 98:0 /mount-root /mount-point options... - type source super-options
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        if kind == "cgroup2" and "" in paths:
            flavour, path = _V2, paths[""]
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
            flavour, path = _V1, paths["memory"]
        else:
            continue
        yield from _levels(root / fields[4].lstrip("/"), _below(path, fields[3]), flavour)


def _cgroup_paths(root: Path) -> dict[str, str]:
    """Path of this process by controller; the one of cgroup v2 under ""."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _below(path: str, mount_root: str) -> str:
    """The path under the mount point, which may show only a part of the hierarchy.

    In a container without a cgroup namespace of its own the path is the host's and the mount begins
    at the container's cgroup; a path outside the mount leaves the mount point itself.
    """
    if mount_root != "/" and (path + "/").startswith(mount_root + "/"):
        return path[len(mount_root) :]
    return "" if mount_root != "/" or ".." in path.split("/") else path


def _levels(mount: Path, path: str, flavour: _Flavour) -> Iterator[MemoryLimit]:
    directory = mount / path.lstrip("/")
    while True:
        limit = _read_level(directory, flavour)
        if limit is not None:
            yield limit
        if directory == mount:
            return
        directory = directory.parent


def _read_level(directory: Path, flavour: _Flavour) -> MemoryLimit | None:
    try:
        limit = int((directory / flavour.limit).read_text())
        used = int((directory / flavour.usage).read_text())
    except (OSError, ValueError):
        return None  # no memory controller at this level, or "max"
    for line in _lines(directory / "memory.stat"):
        name, _, amount = line.partition(" ")
        if name == flavour.inactive_file:
            used -= int(amount)
    return MemoryLimit(limit, max(0, limit - used), f"memory limit of the cgroup at {directory}")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

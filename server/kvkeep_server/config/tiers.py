"""Settings of the tiers and of what finds blocks in them."""

from dataclasses import dataclass

from kvkeep_server.config.keys import PAGE_NBYTES, GiB, KiB, MiB, TiB, setting
from kvkeep_server.core.settings_kinds import (
    AUTO,
    Choice,
    DirectoryList,
    DiskShare,
    Flag,
    Ratio,
    Size,
    Whole,
)
from kvkeep_server.policies.registry import ADMISSION, EVICTION, PREFETCH


@dataclass(frozen=True, slots=True)
class RamSettings:
    """The ram tier."""

    size_nbytes: int = setting(
        "size",
        Size(
            4 * MiB,
            16 * TiB,
            PAGE_NBYTES,
            share=True,
            auto="25 % of the memory limit, at most 2GiB",
        ),
        AUTO,
        "Most that the pool may hold. A share is one of the memory limit: the smallest of the"
        " cgroup's and the host's.",
    )
    chunk_nbytes: int = setting(
        "chunk",
        Size(4 * MiB, 1 * GiB, 2 * MiB, auto="1/16 of the pool within 64MiB to 1GiB"),
        AUTO,
        "The pool grows by this much: one memfd, charged to the daemon when it is added.",
    )
    slab_nbytes: int = setting(
        "slab",
        Size(
            64 * KiB,
            256 * MiB,
            PAGE_NBYTES,
            auto="1/16 of the pool within 1MiB to 64MiB",
        ),
        AUTO,
        "A chunk is cut into slabs, a slab into equal slots. A block is never larger than a slab.",
    )
    policy: str = setting("policy", Choice(tuple(EVICTION)), "lru", "Which blocks leave first.")
    admission: str = setting(
        "admission", Choice(tuple(ADMISSION)), "always", "Which blocks may enter."
    )
    huge_pages: bool = setting(
        "huge_pages",
        Flag(),
        True,  # noqa: FBT003 - the value of a key, not a flag of the call
        "Ask the kernel to back the pool and staging with huge pages, as far as it has them.",
    )


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """The nvme tier. Without directories there is none."""

    directories: tuple[str, ...] = setting(
        "directories",
        DirectoryList(),
        [],
        "Where blocks outlive the daemon: one directory on each device, which it makes and owns.",
    )
    max: str = setting(
        "max",
        DiskShare(),
        "50%",
        "Most that it takes in each directory at any moment, of the file system or in bytes. One"
        " segment of it is for reclaim.",
    )
    segment_nbytes: int = setting(
        "segment",
        Size(1 * MiB, 4 * GiB, PAGE_NBYTES),
        "256MiB",
        "Size of its files. Room is given back one at a time; a block is never larger.",
    )
    free_min_nbytes: int = setting(
        "free_min",
        Size(0, 16 * TiB),
        "1GiB",
        "Left free on the file system for others. Once they use it, the oldest blocks give way.",
    )
    queue_nbytes: int = setting(
        "queue",
        Size(1 * MiB, 64 * GiB, auto="1/8 of the pool, at most 256MiB"),
        AUTO,
        "Blocks that wait in ram to be written; they cannot leave it meanwhile. Full: blocks stay"
        " in ram only, until it is empty.",
    )
    queue_blocks_max: int = setting(
        "queue_blocks", Whole(1, 1 << 22), 65536, "As `queue`, in blocks."
    )
    prefetch: str = setting(
        "prefetch",
        Choice(tuple(PREFETCH)),
        "chain",
        "What of a chain that a client says it will ask for is brought into ram; none: nothing.",
    )
    prefetch_nbytes_max: int = setting(
        "prefetch_max",
        Size(0, 64 * GiB, auto="1/8 of the pool, at most 1GiB"),
        AUTO,
        "Blocks that wait to be brought for such hints. Full: hints are dropped.",
    )
    read_threads: int = setting(
        "read_threads", Whole(1, 64), 8, "Threads that read from it, as deep as the device likes."
    )


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The shared index."""

    rows_initial: int = setting(
        "rows_initial",
        Whole(64, 1 << 30),
        65536,
        "Rows of the first table, rounded up to buckets of 8. A full table moves to a larger one.",
    )
    load_max: float = setting(
        "load_max", Ratio(0.25, 0.9), 0.85, "Share of rows in use at which the table moves."
    )

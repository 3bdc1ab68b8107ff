"""What the nvme tier says of itself."""

from dataclasses import dataclass

from kvkeep_server.tiers.nvme.directory import Counts, Directory
from kvkeep_server.tiers.nvme.segments import SegmentState


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """One directory now.

    Attributes:
        path: Of it.
        max_nbytes: What it may take.
        used_nbytes: What it takes, files that are not ours included.
        segments: Number of files by state.
        waiting_to_go: Reclaimed segments whose file is still there.
        sick: Why it takes no writes; "" = it does.
        shortage: Why it has to do with less than `max_nbytes`; "" = it has not.
        read_errors: Records that could not be read, for errors of the system, since the start.
        read_reason: What it said the last time.
        foreign: Names that are not ours.
        skipped: Files of which nothing is used, and why.
    """

    path: str
    max_nbytes: int
    used_nbytes: int
    segments: dict[SegmentState, int]
    waiting_to_go: int
    sick: str
    shortage: str
    read_errors: int
    read_reason: str
    foreign: tuple[str, ...]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True)
class NvmeStats:
    """The tier now; `counts` are since the start."""

    counts: Counts
    directories: tuple[DirectoryStats, ...]
    reading_nbytes: int
    writing_nbytes: int


def directory_stats(directory: Directory) -> DirectoryStats:
    """Of one directory."""
    table = directory.table
    states = [segment.state for segment in table.segments.values()]
    return DirectoryStats(
        path=table.settings.path,
        max_nbytes=table.settings.max_nbytes,
        used_nbytes=table.used_nbytes,
        segments={state: states.count(state) for state in set(states)},
        waiting_to_go=table.waiting_to_go,
        sick=directory.sick,
        shortage=table.shortage() if table.is_limited else "",
        read_errors=directory.reads.errors,
        read_reason=directory.reads.reason,
        foreign=tuple(table.foreign),
        skipped=dict(table.skipped),
    )

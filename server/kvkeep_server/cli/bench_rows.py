"""The report of a benchmark: rows, the bounds that they must keep, JSON and a table for people."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvkeep_server.cli.bench_timing import Samples

MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class Bound:
    """A ratio's limit: at least or at most `limit` times the baseline."""

    at_least: bool
    limit: float

    def holds(self, ratio: float) -> bool:
        """True when the ratio keeps it."""
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


def _at_least(limit: float) -> Bound:
    return Bound(at_least=True, limit=limit)


def _at_most(limit: float) -> Bound:
    return Bound(at_least=False, limit=limit)


# Of `bench local`. Rates: over memcpy. Times: over a no-op RPC. busy/*: over the same loop without
# the busy thread.
BOUNDS: Mapping[str, Bound] = {
    "read_copy/57KiB": _at_least(0.45),
    "read_copy/128KiB": _at_least(0.6),
    "read_copy/2MiB": _at_least(0.85),
    "lookup/64": _at_most(0.3),
    "lookup/1000": _at_most(1.1),
    "lookup/8000": _at_most(8),
    "acquire/64": _at_most(1.7),
    "acquire/1000": _at_most(2.5),
    "acquire/8000": _at_most(6),
    "commit/57KiB": _at_most(4),
    "commit/2MiB": _at_least(0.6),
    **{
        f"busy/{name}/{figure}": _at_most(limit)
        for name in (
            "lookup/64",
            "lookup/1000",
            "read_copy/57KiB",
            "read_copy/128KiB",
            "read_copy/2MiB",
        )
        for figure, limit in (("mean", 3), ("p99", 5))
    },
}
# Of `bench nvme`. Rates, over fio.
NVME_BOUNDS: Mapping[str, Bound] = {
    f"{what}/{size}": _at_least(limit)
    for what, limit in (("prefix_read", 0.8), ("random_read", 0.6), ("write", 0.6))
    for size in ("57KiB", "128KiB", "2MiB")
}
# Of `bench index`. Bytes over 96, rates over a million a second, times over a no-op RPC.
INDEX_BOUNDS: Mapping[str, Bound] = {
    "bytes_a_block": _at_most(1),
    "insert": _at_least(1),
    **{name: bound for name, bound in BOUNDS.items() if name.startswith("lookup/")},
}
# Of `bench engine`. Times, over what an engine's loop can bear.
ENGINE_BOUNDS: Mapping[str, Bound] = {
    f"{phase}/{figure}": _at_most(1)
    for phase in ("healthy", "frozen", "slow", "killed")
    for figure in ("calls/median", "calls/p99", "late", "back")
    if (phase, figure) != ("healthy", "back")
}
_ALL_BOUNDS = {**BOUNDS, **NVME_BOUNDS, **INDEX_BOUNDS, **ENGINE_BOUNDS}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    Attributes:
        name: Of the operation.
        median: Of all calls, in `unit`.
        p99: What 99 % of the calls reach: the slow end, so for a rate the figure below the median.
        unit: "us", "GB/s", "B", "M/s" or "ms".
        baseline: Name of the row that `ratio` is over; None for a baseline.
        ratio: Of times or of rates, as the unit says; None for a baseline.
    """

    name: str
    median: float
    p99: float
    unit: str
    baseline: str | None = None
    ratio: float | None = None

    @property
    def bound(self) -> Bound | None:
        """What the ratio must keep; None: it is only reported."""
        return _ALL_BOUNDS.get(self.name)

    @property
    def holds(self) -> bool:
        """False when a bound is missed."""
        return self.bound is None or (self.ratio is not None and self.bound.holds(self.ratio))

    def as_json(self) -> dict[str, str | float | None]:
        """The six fields of the machine-readable report, figures to four digits."""
        return {
            "name": self.name,
            "median": _digits(self.median),
            "p99": _digits(self.p99),
            "unit": self.unit,
            "baseline": self.baseline,
            "ratio": None if self.ratio is None else _digits(self.ratio),
        }


def time_row(name: str, samples: Samples, baseline: tuple[str, Samples] | None = None) -> Row:
    """A row in microseconds; the ratio is of times: less is better."""
    over = None if baseline is None else samples.over(baseline[1])
    named = None if baseline is None else baseline[0]
    return Row(name, samples.median_s * 1e6, samples.p99_s * 1e6, "us", named, over)


def rate_row(
    name: str, nbytes: int, samples: Samples, baseline: tuple[str, Samples] | None = None
) -> Row:
    """A row in GB/s (10^9) for calls that move `nbytes`; the ratio is of rates: more is better."""
    over = None if baseline is None else 1 / samples.over(baseline[1])
    named = None if baseline is None else baseline[0]
    median, slow = (nbytes / seconds / 1e9 for seconds in (samples.median_s, samples.p99_s))
    return Row(name, median, slow, "GB/s", named, over)


def busy_rows(prefix: str, name: str, alone: Samples, busy: Samples) -> list[Row]:
    """An operation beside a busy thread: its mean and p99, each over that of the loop without."""
    median, p99 = busy.median_s * 1e6, busy.p99_s * 1e6
    ratios = {"mean": busy.mean_s / alone.mean_s, "p99": busy.p99_s / alone.p99_s}
    baseline = f"{prefix}_alone/{name}"
    return [
        Row(baseline, alone.median_s * 1e6, alone.p99_s * 1e6, "us"),
        *(
            Row(f"{prefix}/{name}/{figure}", median, p99, "us", baseline, ratio)
            for figure, ratio in ratios.items()
        ),
    ]


def missed(rows: Sequence[Row], bounds: Mapping[str, Bound] = BOUNDS) -> list[str]:
    """A sentence for each of a bench's bounds that is missed or whose row is not there."""
    sentences = [
        f"{row.name}: {row.ratio or 0:.2f} x {row.baseline}, {row.bound} wanted"
        for row in rows
        if not row.holds
    ]
    there = {row.name for row in rows}
    return sentences + [f"{name}: not measured" for name in bounds if name not in there]


def as_json(machine: Mapping[str, object], rows: Sequence[Row]) -> str:
    """{"machine": {...}, "results": [...]}, indented."""
    report = {MACHINE: machine, "results": [row.as_json() for row in rows]}
    return json.dumps(report, indent=1)


def as_text(machine: Mapping[str, object], rows: Sequence[Row]) -> str:
    """The same for people, with the bounds and whether they hold."""
    lines = [f"{key}: {_shown(value)}" for key, value in machine.items()]
    width = max([len("name"), *(len(row.name) for row in rows)])
    base = max([len("x baseline"), *(len(row.baseline or "") for row in rows)])
    lines += [
        "",
        f"{'name':{width}} {'median':>10} {'p99':>10} unit  {'ratio':>7} {'x':{base}}  bound",
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        bound = "" if row.bound is None else f"{row.bound} {'holds' if row.holds else 'MISSED'}"
        figures = f"{row.median:10.2f} {row.p99:10.2f} {row.unit:5} {ratio:>7}"
        lines.append(f"{row.name:{width}} {figures} {row.baseline or '':{base}}  {bound}".rstrip())
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")

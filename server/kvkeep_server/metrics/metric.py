"""What a metric is: name, type, meaning, labels; and one figure of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import prod
from typing import NamedTuple

from kvkeep_server.core.histogram import HistogramValue


class MetricKind(StrEnum):
    """Prometheus's types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Reading(NamedTuple):
    """One figure.

    Attributes:
        name: Of a metric in the catalogue.
        labels: A value for each of its labels.
        value: A `HistogramValue` where it is a histogram.
    """

    name: str
    labels: tuple[str, ...]
    value: float | HistogramValue


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a metric.

    Attributes:
        name: As in a query.
        values: All that it can have; empty: one value for the life of the process.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: With its unit at the end, and `_total` where it counts.
        kind: See `MetricKind`.
        meaning: One or two sentences.
        labels: In the order of the values of a `Reading`.
        bounds: Of a histogram's buckets.
    """

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def series_max(self) -> int:
        """Series that it can ever have."""
        combinations = prod(max(1, len(label.values)) for label in self.labels)
        # The buckets, the one above them all, sum and count.
        return combinations * (len(self.bounds) + 3 if self.bounds else 1)


def value_of(member: Enum) -> str:
    """The label value of an enum's member: "ram" of `TierId.RAM`."""
    return member.name.lower()


def label_of(name: str, members: Iterable[Enum]) -> Label:
    """A label with the values of an enum."""
    return Label(name, tuple(value_of(member) for member in members))

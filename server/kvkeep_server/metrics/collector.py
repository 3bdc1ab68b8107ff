"""From readings to Prometheus's text format, by way of `prometheus_client` and the catalogue."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvkeep_server.core.histogram import HistogramValue
from kvkeep_server.metrics.catalog import CATALOG
from kvkeep_server.metrics.metric import MetricKind, Reading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATUS = Path("/proc/self/status")


class ReadingsCollector(Collector):
    """One page's figures, in the order of the catalogue.

    Args:
        readings: Those of the daemon.
    """

    def __init__(self, readings: Iterable[Reading]) -> None:
        """See the class."""
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """A family for each metric that was read.

        Raises:
            KeyError: A reading that is not in the catalogue.
        """
        by_name: dict[str, list[Reading]] = {name: [] for name in CATALOG}
        for reading in self._readings:
            by_name[reading.name].append(reading)
        for name, found in by_name.items():
            if found:
                yield _family(name, found)


def _family(name: str, readings: Iterable[Reading]) -> Metric:
    metric = CATALOG[name]
    labels = [label.name for label in metric.labels]
    match metric.kind:
        case MetricKind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, metric.meaning, labels=labels)
            for _, values, value in readings:
                assert isinstance(value, HistogramValue)
                histogram.add_metric(values, list(_buckets(value)), value.total)
            return histogram
        case MetricKind.COUNTER:
            family: CounterMetricFamily | GaugeMetricFamily
            family = CounterMetricFamily(name, metric.meaning, labels=labels)
        case MetricKind.GAUGE:
            family = GaugeMetricFamily(name, metric.meaning, labels=labels)
    for _, values, value in readings:
        assert not isinstance(value, HistogramValue)
        family.add_metric(values, value)
    return family


def _buckets(value: HistogramValue) -> Iterator[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    sum_so_far = 0
    for bound, count in zip((*value.bounds, None), value.counts, strict=True):
        sum_so_far += count
        yield ("+Inf" if bound is None else str(bound), sum_so_far)


def process_readings() -> list[Reading]:
    """What the kernel says of this process, as far as it does. Any thread."""
    readings = [
        Reading(family.name + ("_total" if family.type == "counter" else ""), (), sample.value)
        for family in ProcessCollector(registry=None).collect()
        for sample in family.samples
    ]
    try:
        status = _STATUS.read_text()
    except OSError:  # out of descriptors: the page comes without it
        return readings
    for line in status.splitlines():
        name, _, amount = line.partition(":")
        if name == "RssAnon":
            nbytes = int(amount.split()[0]) * 1024
            readings.append(Reading("kvkeep_process_anonymous_bytes", (), nbytes))
    return readings


def render(readings: Iterable[Reading]) -> bytes:
    """The page."""
    return generate_latest(ReadingsCollector(readings))

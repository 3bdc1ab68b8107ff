"""A scraper: gets pages of the metrics endpoint and reads them with Prometheus's own parser."""

import http.client
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvkeep_server.metrics.catalog import CATALOG
from kvkeep_server.metrics.metric import MetricKind

Series = tuple[str, frozenset[tuple[str, str]]]
WAIT_S = 120.0


@dataclass(slots=True)
class Page:
    """One scrape, by name of the sample and its labels."""

    samples: dict[Series, float]

    @classmethod
    def parse(cls, text: str) -> "Page":
        samples: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                assert series not in samples, f"{series} twice"
                samples[series] = sample.value
        return cls(samples)

    def sum(self, name: str, **labels: str) -> float:
        """Over all series with these labels, and any others."""
        wanted = set(labels.items())
        return sum(v for (found, has), v in self.samples.items() if found == name and wanted <= has)

    def check(self) -> None:
        """What holds on every page, whatever the daemon is doing."""
        assert len(self.samples) <= 2000
        for call in ("lookup", "acquire"):
            parts = ("hit", "missed", "failed")
            answered = sum(self.sum(f"kvkeep_blocks_{part}_total", call=call) for part in parts)
            assert self.sum("kvkeep_blocks_asked_total", call=call) == answered
        assert {series: v for series, v in self.samples.items() if v < 0} == {}
        stored = self.sum("kvkeep_commit_blocks_total", status="stored")
        demoted = self.sum("kvkeep_blocks_demoted_total")
        for tier, stay in (("ram", demoted), ("nvme", 0)):
            left = self.sum("kvkeep_blocks_left_total", tier=tier, reason="evicted")
            aged = self.sum("kvkeep_block_age_at_eviction_seconds_count", tier=tier)
            assert aged == left + stay, tier
        if not self.sum("kvkeep_tier_limit_bytes", tier="nvme"):
            left = self.sum("kvkeep_blocks_left_total")
            assert self.sum("kvkeep_tier_blocks") == stored - left
        assert self.sum("kvkeep_pool_bytes") <= self.sum("kvkeep_tier_limit_bytes", tier="ram")
        for metric in CATALOG.values():
            if metric.kind is MetricKind.HISTOGRAM:
                self.check_histogram(metric.name)

    def check_histogram(self, name: str) -> None:
        """Buckets never fall, and the last is the count."""
        rows: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        for (found, labels), value in self.samples.items():
            if found == f"{name}_bucket":
                bound = dict(labels)["le"]
                rest = frozenset(pair for pair in labels if pair[0] != "le")
                rows.setdefault(rest, []).append((float(bound), value))
        for labels, buckets in rows.items():
            counts = [count for _, count in sorted(buckets)]
            assert counts == sorted(counts)
            assert counts[-1] == self.samples[f"{name}_count", labels]

    def counters(self) -> Iterator[tuple[Series, float]]:
        """What may never fall while a daemon lives."""
        for series, value in self.samples.items():
            if series[0].endswith(("_total", "_bucket", "_count")):
                yield series, value


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> Page:
    """A page, checked."""
    status, text = get(port)
    assert status == 200, text
    page = Page.parse(text)
    page.check()
    return page


def port_in(log: str) -> int:
    """The port that the last daemon of a log chose."""
    found = re.findall(r"metrics host=\S+ port=(\d+)", log)
    assert found, log
    return int(found[-1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])

"""Reads as much of PromQL as the dashboard and the rules use, and holds it to the catalogue."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep_server.metrics.catalog import CATALOG
from kvkeep_server.metrics.metric import Metric, MetricKind

FUNCTIONS = {"absent", "count", "histogram_quantile", "increase", "rate", "sum"}
KEYWORDS = {"and", "or", "unless"}
# Labels that Prometheus adds.
TARGET = {"instance", "job"}
_GROUPING = re.compile(r"\b(?:by|without|ignoring|on|group_left|group_right)\s*\(([^()]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_WORD = re.compile(r'([a-zA-Z_:][\w:]*)\s*(\(|\{(?:[^{}"]|"[^"]*")*\})?')
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')


@dataclass(frozen=True)
class Selector:
    """A metric in a query: name of its samples, and (label, operator, value) of its matchers."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def grouped_by(expression: str) -> set[str]:
    lists = _GROUPING.findall(expression)
    return {label.strip() for labels in lists for label in labels.split(",") if label.strip()}


def selectors(expression: str) -> Iterator[Selector]:
    """Raises AssertionError at a function that nobody knows."""
    text = _RANGE.sub("", _GROUPING.sub("", expression))
    for word, after in _WORD.findall(text):
        if after == "(":
            assert word in FUNCTIONS, f"no such function: {word}"
        elif word not in KEYWORDS:
            inside = after.strip("{}")
            matchers = tuple(_MATCHER.findall(inside))
            assert not _MATCHER.sub("", inside).strip(), f"cannot read {{{inside}}}"
            yield Selector(word, matchers)


def metric_of(sample: str) -> Metric:
    """Raises AssertionError where the catalogue has no such sample."""
    metric = CATALOG.get(sample)
    if metric is None:
        metric = CATALOG.get(re.sub(r"_(bucket|sum|count)$", "", sample))
        assert metric is not None, f"{sample} is not in the catalogue"
        assert metric.kind is MetricKind.HISTOGRAM, f"{sample} is no histogram"
    else:
        assert metric.kind is not MetricKind.HISTOGRAM, f"{sample} is a histogram: _bucket, _sum"
    return metric


def labels_of(selector: Selector) -> set[str]:
    names = {label.name for label in metric_of(selector.name).labels} | TARGET
    return names | ({"le"} if selector.name.endswith("_bucket") else set())


def check_selector(selector: Selector) -> None:
    metric = metric_of(selector.name)
    values = {label.name: label.values for label in metric.labels}
    values["le"] = (*map(str, metric.bounds), "+Inf")
    for label, operator, value in selector.matchers:
        assert label in labels_of(selector), f"{selector.name} has no label {label}"
        wanted = value.split("|") if "~" in operator else [value]
        for word in wanted:
            known = word.startswith("$") or label in TARGET or word in values[label]
            assert known, f"{label} of {selector.name} is never {word!r}"


def check(expression: str) -> set[str]:
    """Holds a query to the catalogue; returns the names of the metrics in it.

    Raises:
        AssertionError: It names something that is not there.
    """
    found = list(selectors(expression))
    assert found, "a query without a metric"
    for selector in found:
        check_selector(selector)
    there = set().union(*map(labels_of, found))
    assert grouped_by(expression) <= there, f"grouped by {grouped_by(expression) - there}"
    if "histogram_quantile" in expression:
        assert "le" in grouped_by(expression), "a quantile needs the buckets apart"
    counters = {s.name for s in found if s.name.endswith(("_total", "_bucket", "_sum", "_count"))}
    for name in counters:
        use = rf"(?:rate|increase)\({name}\b"
        assert re.search(use, expression), f"{name} only grows: rate() or increase()"
    return {metric_of(selector.name).name for selector in found}

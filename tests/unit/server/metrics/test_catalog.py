"""The catalogue: names, units, bounded labels; what it repeats of gRPC and of our services."""

import re
import tomllib
from pathlib import Path

import grpc
import pytest

from kvkeep_server.cli.config import metrics_lines
from kvkeep_server.core.results import CommitStatus, MissReason, TierId
from kvkeep_server.metrics.catalog import CATALOG, series_max
from kvkeep_server.metrics.metric import MetricKind, value_of
from kvkeep_server.metrics.rpc_names import RPC_CODES, RPC_METHODS
from kvkeep_server.rpc.server import METHODS

ROOT = Path(__file__).parents[4]
UNITS = ("_bytes", "_seconds", "_info")


@pytest.mark.promise("P27", gate=2000, unit="series at most, by the catalogue")
def test_series_are_bounded_whoever_calls(promise_count):
    assert series_max() <= promise_count


@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_names_say_what_they_are(metric):
    assert re.fullmatch(r"(kvkeep|process)_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert bool(metric.bounds) == (metric.kind is MetricKind.HISTOGRAM)
    if metric.bounds:
        assert metric.name.endswith("_seconds")
    assert metric.meaning.endswith(".")
    names = [label.name for label in metric.labels]
    assert len(names) == len(set(names))
    assert "le" not in names


def test_a_label_means_the_same_everywhere():
    values = {}
    for metric in CATALOG.values():
        for label in metric.labels:
            assert values.setdefault(label.name, label.values) == label.values
            assert len(set(label.values)) == len(label.values)


def test_tiers_reasons_and_statuses_are_the_enums():
    values = {label.name: label.values for m in CATALOG.values() for label in m.labels}
    assert set(values["tier"]) == {value_of(tier) for tier in TierId} - {"unspecified"}
    assert set(values["reason"]) == {value_of(reason) for reason in MissReason}
    assert set(values["status"]) == {value_of(status) for status in CommitStatus} - {"unspecified"}


def test_methods_are_those_of_the_services():
    assert {f"/kvkeep.v1.{method}" for method in RPC_METHODS} == set(METHODS)
    assert len(set(RPC_METHODS)) == len(RPC_METHODS) == len(METHODS)


def test_codes_are_those_of_grpc():
    assert set(RPC_CODES) == {code.name for code in grpc.StatusCode}


def test_the_reference_is_printed_from_the_catalogue():
    written = (ROOT / "deploy/METRICS.md").read_text().splitlines()
    assert written == list(metrics_lines()), "run: kvkeep config metrics > deploy/METRICS.md"


def test_limits_name_their_key():
    keys = tomllib.loads((ROOT / "deploy/kvkeep.toml").read_text()).keys()
    assert "metrics" in keys
    for metric in CATALOG.values():
        if "_limit" in metric.name and metric.name.startswith("kvkeep_") and not metric.labels:
            assert "`" in metric.meaning or metric.name == "kvkeep_memory_limit_bytes"

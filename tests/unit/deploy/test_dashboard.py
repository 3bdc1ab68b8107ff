"""The dashboard: every query holds to the catalogue, every metric is looked at by somebody."""

import json
import re
from pathlib import Path

import pytest

from kvkeep_server.metrics.catalog import CATALOG
from tests.unit.deploy.promql import check, grouped_by, labels_of, selectors

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/kvkeep.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]

# Standard names that other dashboards and tools look for.
NOT_LOOKED_AT = {"process_virtual_memory_bytes", "process_start_time_seconds"}


def name_of(pair) -> str:
    return f"{pair[0]['title']}/{pair[1]['refId']}"


@pytest.mark.parametrize("pair", TARGETS, ids=name_of)
def test_every_query_holds_to_the_catalogue(pair):
    _, target = pair
    expression = target["expr"]
    check(expression)
    assert all(("instance", "=~", "$instance") in s.matchers for s in selectors(expression))
    there = set().union(*map(labels_of, selectors(expression)))
    left = grouped_by(expression) if re.search(r"\b(sum|count)\b", expression) else there
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left


def test_every_metric_is_looked_at():
    looked_at = set().union(*(check(target["expr"]) for _, target in TARGETS))
    assert set(CATALOG) - looked_at == NOT_LOOKED_AT


def test_panels_do_not_overlap_and_say_what_they_are():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["description"].endswith(".") for panel in PANELS)


def test_variables_are_there():
    variables = DASHBOARD["templating"]["list"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == {variable["name"] for variable in variables}
    metrics = re.findall(r"label_values\((\w+)", json.dumps(variables))
    assert metrics
    assert set(metrics) <= set(CATALOG)


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("kvkeep_no_such_bytes", "not in the catalogue"),
        ('kvkeep_leases{tier="ram"}', "no label tier"),
        ('rate(kvkeep_blocks_hit_total{tier="disk"}[5m])', "never 'disk'"),
        ('rate(kvkeep_blocks_hit_total{tier=~"ram|disk"}[5m])', "never 'disk'"),
        ("sum by (tenant) (rate(kvkeep_blocks_hit_total[5m]))", "tenant"),
        ("kvkeep_blocks_hit_total", "only grows"),
        ("rate(kvkeep_rpc_duration_seconds[5m])", "is a histogram"),
        ("rate(kvkeep_leases_sum[5m])", "no histogram"),
        ('rate(kvkeep_block_reuse_age_seconds_bucket{le="77.0"}[5m])', "never '77.0'"),
        ("histogram_quantile(0.9, rate(kvkeep_event_loop_lag_seconds_bucket[5m]))", "buckets"),
        ("median(kvkeep_leases)", "no such function"),
        ("sum(1)", "without a metric"),
        ("kvkeep_leases{instance=~'x'}", "cannot read"),
    ],
)
def test_a_wrong_query_is_found(query, wrong):
    with pytest.raises((AssertionError, KeyError), match=wrong):
        assert check(query) == set()

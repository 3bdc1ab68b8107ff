"""The alerts: each query holds to the catalogue; each says what happened and what to do."""

import re
from pathlib import Path

import pytest
import yaml

from tests.unit.deploy.promql import check, grouped_by, labels_of, selectors

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy/prometheus/rules.yml"
RULES = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = [rule for rule in RULES if "alert" in rule]


def spelled_out(expression: str) -> str:
    """With the recorded queries in the place of their names."""
    for name, recorded in RECORDED.items():
        expression = expression.replace(name, f"({recorded})")
    return expression


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_query_holds_to_the_catalogue(rule):
    check(spelled_out(rule["expr"]))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_say_what_happened_and_what_to_do(rule):
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "action"}
    expression = spelled_out(rule["expr"])
    there = set().union(*map(labels_of, selectors(expression)))
    left = grouped_by(expression) if re.search(r"\b(sum|count)\b", expression) else there
    for text in rule["annotations"].values():
        assert text.endswith(".")
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= left


def test_they_are_few():
    assert 5 <= len(ALERTS) <= 12
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)

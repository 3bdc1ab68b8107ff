"""A real Prometheus scrapes a real daemon: it takes every page, every rule, and every query.

Taken from the PATH, or from Debian's package, unpacked only.
"""

import json
import shutil
import subprocess
import time
import urllib.parse
from pathlib import Path

import pytest

from tests.e2e.test_metrics import LOADED, engines
from tests.fakes.daemon_process import running_daemon
from tests.fakes.scraping import free_port, get, port_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules.yml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/kvkeep.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The folder with `prometheus` and `promtool`."""
    installed = shutil.which("prometheus")
    if installed and shutil.which("promtool"):
        return Path(installed).parent
    folder = tmp_path_factory.mktemp("debian")
    script = (
        "get='apt-get -qq download prometheus'; ($get || (apt-get -qq update && $get))"
        " && dpkg-deb -x ./*.deb ."
    )
    unpacked = subprocess.run(
        ["sh", "-c", script], cwd=folder, capture_output=True, timeout=200, check=False
    )
    if unpacked.returncode:
        pytest.skip(
            "needs prometheus and promtool: none are installed, and no Debian package is to be had"
        )
    return folder / "usr/bin"


@pytest.fixture(scope="module")
def scraped(programs, tmp_path_factory):
    """The port of a Prometheus that scrapes a daemon under load, and that of the daemon."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    with running_daemon(folder / "daemon", LOADED) as daemon:
        target = port_in(daemon.log)
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": "kvkeep", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        command = [
            programs / "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "log").open("wb") as log, engines(daemon.runtime_dir, 1):
            server = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                wait_for(port, 'count_over_time(up{job="kvkeep"}[5m]) > 8')
                yield port, target
            finally:
                server.terminate()
                server.wait(30)


def ask(port: int, path: str, **parameters: str) -> dict:
    status, text = get(port, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
    answer = json.loads(text)
    assert status == 200, answer
    assert answer["status"] == "success"
    return answer["data"]


def wait_for(port: int, query: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if ask(port, "query", query=query)["result"]:
                return
        except (OSError, ValueError, AssertionError):
            pass  # it starts
        assert time.monotonic() < deadline
        time.sleep(0.2)


def in_effect(query: str) -> str:
    """As Grafana would send it."""
    query = query.replace("$__rate_interval", "10s").replace("[1h]", "[10s]")
    return query.replace("$instance", ".*").replace("$job", ".*")


def test_every_scrape_is_taken_whole(scraped):
    port, target = scraped
    (found,) = ask(port, "targets")["activeTargets"]
    assert (found["health"], found["lastError"]) == ("up", "")
    names = set(ask(port, "label/__name__/values"))
    sent = {line.split("{")[0].split(" ")[0] for line in get(target)[1].splitlines()}
    assert {name for name in sent if name and not name.startswith("#")} <= names


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_dashboard_finds_something(scraped, query):
    result = ask(scraped[0], "query", query=in_effect(query))["result"]
    # What may be quiet is asked for with "> 0".
    assert result or query.endswith("> 0")


def test_every_rule_is_evaluated(scraped):
    groups = ask(scraped[0], "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 6
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert not firing & {"KvkeepDown", "KvkeepHangs", "KvkeepCallsFail"}


def test_promtool_takes_rules_and_pages(programs, scraped):
    checked = subprocess.run(
        [programs / "promtool", "check", "rules", RULES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    page = get(scraped[1])[1]
    linted = subprocess.run(
        [programs / "promtool", "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr

"""deploy/: the files are well formed, agree with each other, with the settings and the daemon."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep_server.cli.main import EXIT_CONFIG
from kvkeep_server.config import memory_plan, parse
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.core.quantities import parse_size
from kvkeep_server.core.settings_kinds import listen_address
from tests.unit.deploy.deployments import (
    DEPLOY,
    DEPLOYMENTS,
    ROOT,
    dockerfile,
    healthcheck,
    kubernetes,
    of_docker,
    unit,
)

GiB = 1 << 30
HOST = MemoryLimit(64 * GiB, 60 * GiB, "test")
# None of the deployments sets it.
DRAIN_S = parse("", "nothing", HOST).settings.server.drain_timeout_s


@pytest.fixture(params=DEPLOYMENTS)
def deployment(request):
    return DEPLOYMENTS[request.param]()


def memory_of(name: str) -> int:
    """The memory limit that a deployment gives, in bytes."""
    if name == "kubernetes":
        (_, pod) = kubernetes()
        size = pod["spec"]["initContainers"][1]["resources"]["limits"]["memory"]
        return parse_size(f"{size}B")
    if name == "systemd":
        return parse_size(f"{unit()['Service']['MemoryMax'][:-1]}GiB")
    return HOST.nbytes


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_settings_are_taken_and_fit_the_limit(name):
    nbytes = memory_of(name)
    limit = MemoryLimit(nbytes, nbytes, "test")
    settings = parse(DEPLOYMENTS[name]().settings, "test", limit).settings
    assert settings.ram.size_nbytes == nbytes // 2
    assert memory_plan(settings).nbytes < nbytes * 0.85


def test_it_serves_the_settings_it_is_given(deployment):
    assert deployment.command[1] == "serve"
    assert deployment.config_path == "/etc/kvkeep/kvkeep.toml"
    assert deployment.runtime_dir.startswith("/run/kvkeep")


def test_loopback_on_a_host_and_everywhere_in_a_container():
    hosts = {
        name: listen_address(make().values["metrics"]["listen"])[0]
        for name, make in DEPLOYMENTS.items()
    }
    assert hosts == {"docker": "0.0.0.0", "kubernetes": "0.0.0.0", "systemd": "127.0.0.1"}


# ---- Docker


def test_the_image_copies_what_is_there_and_runs_as_nobody_special():
    for rest in of_docker("COPY"):
        *sources, _ = rest.split()
        assert all((ROOT / source).exists() for source in sources)
    assert {rest.split()[0] for rest in of_docker("FROM")} == {"python:3.11-slim"}
    (user,) = of_docker("USER")
    assert min(map(int, user.split(":"))) >= 10000
    order = [name for name, _ in dockerfile()]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name == "RUN")
    ports = {listen_address(DEPLOYMENTS["docker"]().values["metrics"]["listen"])[1]}
    assert {int(port) for port in of_docker("EXPOSE")} == ports


def test_the_image_asks_the_daemon_where_it_listens():
    check = healthcheck()
    assert check[:2] == ["kvkeep", "health"]
    assert check[check.index("--runtime-dir") + 1] == DEPLOYMENTS["docker"]().runtime_dir
    (made,) = [rest for rest in of_docker("RUN") if "install -d" in rest]
    assert "-m 2750 /run/kvkeep" in made


@pytest.mark.slow
def test_the_wheel_of_the_image_can_be_built(tmp_path):
    """From what the image copies, and nothing else."""
    source = tmp_path / "src"
    for rest in of_docker("COPY"):
        *sources, target = rest.split()
        if target.startswith("/src"):
            for name in sources:
                found, to = ROOT / name, source / target.removeprefix("/src").strip("/")
                if found.is_dir():
                    shutil.copytree(found, to)
                else:
                    to.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(found, to)
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, source],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert len(list(tmp_path.glob("kvkeep-*.whl"))) == 1


# ---- Kubernetes


def test_the_pod_shares_the_sockets_and_little_else():
    _, pod = kubernetes()
    spec = pod["spec"]
    prepare, kvkeep = spec["initContainers"]
    (engine,) = spec["containers"]
    runtime_dir = DEPLOYMENTS["kubernetes"]().runtime_dir
    for container in (prepare, kvkeep, engine):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert runtime_dir.startswith(f"{mounts['kvkeep-run']}/")
    assert prepare["command"][-1] == runtime_dir
    assert prepare["image"] == kvkeep["image"]
    assert kvkeep["restartPolicy"] == "Always"
    (user,) = of_docker("USER")
    for container in (prepare, kvkeep):
        context = container["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert context["runAsNonRoot"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["fsGroup"] == int(user.split(":")[1])
    assert "emptyDir" in next(v for v in spec["volumes"] if v["name"] == "kvkeep-run")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert spec["terminationGracePeriodSeconds"] > DRAIN_S + 1


def test_the_probes_ask_the_endpoint():
    _, pod = kubernetes()
    kvkeep = pod["spec"]["initContainers"][1]
    ports = {port["name"]: port["containerPort"] for port in kvkeep["ports"]}
    port = listen_address(DEPLOYMENTS["kubernetes"]().values["metrics"]["listen"])[1]
    assert ports == {"metrics": port}
    paths = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = kvkeep[name]
        assert probe["httpGet"]["port"] == "metrics"
        # The endpoint waits for the event loop for 2 s before it says 503.
        assert name == "startupProbe" or probe["timeoutSeconds"] > 2
        paths[name] = probe["httpGet"]["path"]
    assert paths == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    resources = kvkeep["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


# ---- systemd


def test_the_unit_agrees_with_settings_and_daemon():
    service, systemd = unit()["Service"], DEPLOYMENTS["systemd"]()
    assert systemd.runtime_dir == f"/run/{service['RuntimeDirectory']}"
    assert systemd.values["server"]["socket_mode"] == "0660"
    assert int(service["RestartPreventExitStatus"]) == EXIT_CONFIG
    assert float(service["TimeoutStopSec"]) > DRAIN_S + 1
    assert service["User"] == service["Group"] == "kvkeep"
    # It reads /proc/meminfo for its limit.
    assert "ProcSubset" not in service


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path):
    text = (DEPLOY / "systemd/kvkeep.service").read_text()
    program = Path(sys.executable).with_name("kvkeep")
    copy = tmp_path / "kvkeep.service"
    copy.write_text(text.replace("/opt/kvkeep/bin/kvkeep", str(program)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", copy],
        capture_output=True,
        text=True,
        check=False,
    )
    (level,) = re.findall(r"Overall exposure level for kvkeep.service: ([\d.]+)", rated.stdout)
    assert float(level) < 2.5, rated.stdout

"""The command lines of deploy/ are started as they stand there, and serve.

Only what belongs to the machine is put elsewhere: the program, /etc, /run, the port, and a pool
that a test can afford.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvkeep
from tests.fakes.scraping import free_port, get, scrape
from tests.unit.deploy.deployments import DEPLOYMENTS, healthcheck, kubernetes

PROGRAM = str(Path(sys.executable).with_name("kvkeep"))
WAIT_S = 120.0


class Placed:
    """A deployment whose paths lie in `root`."""

    def __init__(self, name: str, root: Path) -> None:
        self.deployment = DEPLOYMENTS[name]()
        self.root = root
        self.port = free_port()

    def moved(self, text: str) -> str:
        text = text.replace("/run/kvkeep", f"{self.root}/run/kvkeep")
        return text.replace("/etc/kvkeep", f"{self.root}/etc/kvkeep")

    def command(self, line) -> list[str]:
        program, *arguments = line
        assert program.rpartition("/")[2] == "kvkeep"
        return [PROGRAM, *map(self.moved, arguments)]

    def prepare(self) -> None:
        deployment = self.deployment
        config = Path(self.moved(deployment.config_path))
        config.parent.mkdir(parents=True)
        settings = self.moved(deployment.settings).replace(":9464", f":{self.port}")
        assert settings.count('"50%"') == 1
        config.write_text(settings.replace('"50%"', '"64MiB"'))
        volume = self.root / "run/kvkeep"
        volume.mkdir(parents=True)
        # As the image and systemd make it, or as Kubernetes makes an emptyDir.
        volume.chmod(deployment.runtime_dir_mode or 0o2777)
        for line in deployment.prepare:
            subprocess.run([self.moved(word) for word in line], check=True)


@pytest.fixture(params=DEPLOYMENTS)
def placed(request, tmp_path):
    placed = Placed(request.param, tmp_path)
    placed.prepare()
    return placed


@contextlib.contextmanager
def running(placed: Placed):
    log = placed.root / "log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            placed.command(placed.deployment.command), stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + WAIT_S
        while b'"event": "serving"' not in log.read_bytes():
            assert daemon.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield daemon
    finally:
        daemon.kill()
        daemon.wait()


def test_it_serves_answers_its_checks_and_ends(placed):
    with running(placed) as daemon:
        runtime_dir = placed.moved(placed.deployment.runtime_dir)
        asked = [PROGRAM, "health", "--runtime-dir", runtime_dir]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        assert (answer.returncode, answer.stdout) == (0, "SERVING\n"), answer.stderr
        page = scrape(placed.port)
        assert page.sum("kvkeep_tier_limit_bytes", tier="ram") == 64 << 20
        with kvkeep.connect(runtime_dir) as client:
            assert client.stats().sessions == 1
        mode = os.stat(f"{runtime_dir}/kvkeep.sock").st_mode & 0o777
        assert mode == 0o660
        daemon.terminate()
        assert daemon.wait(WAIT_S) == 0


def test_the_image_checks_its_health(tmp_path):
    placed = Placed("docker", tmp_path)
    placed.prepare()
    check = placed.command(healthcheck())
    before = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert before.returncode == 1
    assert "no daemon answers" in before.stderr
    with running(placed):
        checked = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
        assert checked.returncode == 0, checked.stderr


def test_the_probes_of_the_pod_are_answered(tmp_path):
    placed = Placed("kubernetes", tmp_path)
    placed.prepare()
    _, pod = kubernetes()
    daemon = pod["spec"]["initContainers"][1]
    with running(placed):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = daemon[probe]["httpGet"]["path"]
            deadline = time.monotonic() + WAIT_S
            while get(placed.port, path)[0] != 200:
                assert time.monotonic() < deadline, path


def test_refused_settings_are_exit_code_78(placed):
    config = Path(placed.moved(placed.deployment.config_path))
    config.write_text(config.read_text() + "\n[nmve]\n")
    command = placed.command(placed.deployment.command)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 78
    assert "[nmve] is not a table" in ended.stderr

"""What `deploy/` says, as data: the command lines, paths and settings of each way to run it."""

import configparser
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SETTINGS = (DEPLOY / "kvkeep.toml").read_text()


@dataclass(frozen=True)
class Deployment:
    """One way to run the daemon.

    Attributes:
        command: The whole command line.
        settings: Text of the file that it names.
        prepare: Commands that run before it, as its user.
        runtime_dir_mode: Mode of a directory that is made for it, 0 = it or `prepare` makes it.
    """

    command: tuple[str, ...]
    settings: str
    prepare: tuple[tuple[str, ...], ...] = ()
    runtime_dir_mode: int = 0

    @property
    def config_path(self) -> str:
        return self.command[self.command.index("--config") + 1]

    @property
    def values(self) -> dict[str, Any]:
        return tomllib.loads(self.settings)

    @property
    def runtime_dir(self) -> str:
        return str(self.values["server"]["runtime_dir"])


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) of each, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    pairs = (line.partition(" ") for line in lines if line)
    return [(instruction, rest) for instruction, _, rest in pairs]


def of_docker(instruction: str) -> list[str]:
    return [rest for name, rest in dockerfile() if name == instruction]


def docker() -> Deployment:
    (entry,), (arguments,) = of_docker("ENTRYPOINT"), of_docker("CMD")
    (edit,) = [rest for rest in of_docker("RUN") if rest.startswith("sed ")]
    _, _, script, _ = shlex.split(edit)
    _, old, new, _ = script.split("/")
    settings, edits = re.subn(old, new, SETTINGS, flags=re.MULTILINE)
    assert edits == 1
    return Deployment(
        (*json.loads(entry), *json.loads(arguments)), settings, runtime_dir_mode=0o2750
    )


def healthcheck() -> list[str]:
    (check,) = of_docker("HEALTHCHECK")
    return list(json.loads(check[check.index("CMD ") + 4 :]))


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and Pod."""
    settings, pod = yaml.safe_load_all((DEPLOY / "kubernetes/sidecar.yaml").read_text())
    return settings, pod


def sidecar() -> Deployment:
    settings, pod = kubernetes()
    prepare, daemon = pod["spec"]["initContainers"]
    (entry,) = of_docker("ENTRYPOINT")
    return Deployment(
        (*json.loads(entry), *daemon["args"]),
        settings["data"]["kvkeep.toml"],
        prepare=(tuple(prepare["command"]),),
    )


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "systemd/kvkeep.service").read_text())
    return parser


def systemd() -> Deployment:
    service = unit()["Service"]
    mode = int(service["RuntimeDirectoryMode"], 8)
    return Deployment(tuple(shlex.split(service["ExecStart"])), SETTINGS, runtime_dir_mode=mode)


DEPLOYMENTS = {"docker": docker, "kubernetes": sidecar, "systemd": systemd}

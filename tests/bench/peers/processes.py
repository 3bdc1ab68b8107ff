"""Server processes of a peer: started with a log file, ended by their ids."""

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START_S = 60.0
STOP_S = 10.0


class Processes:
    """What this object started, it ends; nothing else is ever signalled."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, argv: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in reversed(self._started):
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        self._started.clear()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: _connects(socket.AF_INET, ("127.0.0.1", port)), process, f"port {port}")


def wait_for_socket(path: Path, process: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: _connects(socket.AF_UNIX, str(path)), process, str(path))


def wait_for(ready, process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(
                f"{process.args[0]} exited with {process.returncode} before {what} opened"
            )
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not open within {START_S:.0f} s")
        time.sleep(0.02)


def _connects(family: int, address) -> bool:
    with socket.socket(family) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(address) == 0

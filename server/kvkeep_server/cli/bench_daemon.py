"""A daemon of its own for a benchmark or the demo: `kvkeep serve` as a subprocess, ended by its
process id."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeep_server.core.errors import KVKeepError

START_S = 120.0  # a pool of many GiB is touched on the way
STOP_S = 20.0
LOG_TAIL_NBYTES = 2000

Value = str | float | bool | Sequence[str]
Tables = Mapping[str, Mapping[str, Value]]


class DaemonError(KVKeepError):
    """The daemon did not come up, or ended by itself; the message ends with the tail of its log."""


class DaemonProcess:
    """One daemon with its sockets, settings and log in `directory`.

    A context manager; leaving ends the process. May be started again after its end. Not for use
    from several threads.
    """

    def __init__(self, directory: Path, tables: Tables) -> None:
        """`tables` is the daemon's settings file: {"ram": {"size": "2GiB"}}."""
        self._directory = directory
        self._tables = tables
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """The gRPC socket."""
        return self._directory / "kvkeep.sock"

    @property
    def pid(self) -> int:
        """Id of the running process."""
        if self._process is None:
            raise DaemonError("the daemon is not running: start() it first")
        return self._process.pid

    def start(self) -> None:
        """Starts the process and returns when its health service says SERVING.

        Raises:
            DaemonError: It ended, or did not serve within two minutes.
        """
        config = self._directory / "kvkeep.toml"
        config.write_text(toml(self._tables))
        command = [sys.executable, "-m", "kvkeep_server", "serve"]
        command += ["--config", str(config), "--runtime-dir", str(self._directory)]
        with self._log.open("wb") as log:
            # The command is this interpreter and paths that we made.
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_serving(self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the process and waits for it. Idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        self._process = None

    def kill(self) -> None:
        """SIGKILL: the process ends where it stands."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(STOP_S)
        self._process = None

    def check(self, grace_s: float) -> None:
        """Raises DaemonError when the process ended by itself, or does within `grace_s`."""
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            raise self._error(f"ended with {self._process.wait(grace_s)}")

    def __enter__(self) -> Self:
        """Starts."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops."""
        self.stop()

    @property
    def _log(self) -> Path:
        return self._directory / "daemon.log"

    def _wait_until_serving(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        pause = Event()
        while process.poll() is None:
            if self.socket.exists() and _serves(self.socket):
                return
            if time.monotonic() > deadline:
                raise self._error(f"did not serve within {START_S:.0f} s")
            pause.wait(0.02)
        raise self._error(f"ended with {process.returncode}")

    def _error(self, what: str) -> DaemonError:
        tail = self._log.read_bytes()[-LOG_TAIL_NBYTES:].decode(errors="replace")
        return DaemonError(f"the daemon {what}; its log ends with:\n{tail}")


class NoOpRpc:
    """`grpc.health.v1` Check on the daemon's unix socket, with a synchronous client."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._stub = health_pb2_grpc.HealthStub(self._channel)
        self._request = health_pb2.HealthCheckRequest()

    def __call__(self) -> bool:
        """One call; True when the daemon serves. Raises grpc.RpcError."""
        answer = self._stub.Check(self._request, timeout=10.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


def toml(tables: Tables) -> str:
    """The tables as TOML. Strings, numbers, booleans and lists of strings only."""
    lines: list[str] = []
    for table, entries in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, Sequence):
        return f"[{', '.join(_toml_value(one) for one in value)}]"
    return repr(value)


def _serves(socket: Path) -> bool:
    rpc = NoOpRpc(socket)
    try:
        return rpc()
    except grpc.RpcError:
        return False
    finally:
        rpc.close()

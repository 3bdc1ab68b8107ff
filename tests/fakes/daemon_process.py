"""A real daemon as a child process: started, waited for, and ended by pid."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.warm_programs import WarmProgram

SMALL = '[ram]\nsize = "64MiB"\n'
# What grpc.aio prints when a client cancels a call in the moment in which it begins.
_CANCELLED_EARLY = re.compile(
    r"Traceback \(most recent call last\):\n.* in grpc\._cython\.cygrpc\._schedule_rpc_coro\n"
    r"asyncio\.exceptions\.CancelledError\n"
)
_REMOTE = re.compile(r"INFO remote host=(\S+) port=(\d+)")


@dataclass(slots=True)
class DaemonProcess:
    """One daemon on one runtime directory; may be started again after it ended.

    Attributes:
        directory: Holds the runtime directory, the configuration and the log.
        config: Text of the configuration.
        program: How it is started; `python -m MODULE` without options is a fork, see
            `warm_programs`.
        shared_runtime_dir: A runtime directory elsewhere, that others may want too.
    """

    directory: Path
    config: str = SMALL
    program: tuple[str, ...] = (sys.executable, "-m", "kvkeep_server")
    shared_runtime_dir: Path | None = None
    process: subprocess.Popen[bytes] | WarmProgram | None = field(default=None, init=False)

    @property
    def runtime_dir(self) -> Path:
        return self.shared_runtime_dir or self.directory / "run"

    @property
    def socket(self) -> Path:
        return self.runtime_dir / "kvkeep.sock"

    @property
    def address(self) -> str:
        """Where it listens for other hosts."""
        host, port = _REMOTE.findall(self.log)[-1]
        return f"{host}:{port}"

    @property
    def log(self) -> str:
        return (self.directory / "daemon.log").read_text()

    def check_log(self) -> None:
        """No traceback: each is a bug of ours, but for one that gRPC prints."""
        assert "Traceback" not in _CANCELLED_EARLY.sub("", self.log)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *, wait_s: float = 20.0) -> None:
        """Starts it and returns when its health says SERVING."""
        self.launch()
        self.wait_until_serving(wait_s)

    def wait_until_serving(self, wait_s: float = 20.0) -> None:
        """Returns when its health says SERVING."""
        deadline = time.monotonic() + wait_s
        while not self.serving():
            assert self.process is not None
            assert self.process.poll() is None, f"the daemon ended: {self.log}"
            assert time.monotonic() < deadline, f"the daemon does not serve: {self.log}"
            time.sleep(0.02)

    def launch(self) -> None:
        """Starts it, and waits for nothing."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "kvkeep.toml"
        config.write_text(self.config)
        with (self.directory / "daemon.log").open("ab") as log:
            options = ["--config", str(config), "--runtime-dir", str(self.runtime_dir)]
            self.process = _started([*self.program, "serve", *options], log.fileno())

    def serving(self) -> bool:
        if not self.socket.exists():
            return False
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=2.0
                )
            except grpc.RpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM, *, wait_s: float = 20.0) -> int:
        """Signals it and returns its exit code. Nothing happens if it never ran."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.send(number)
        try:
            return self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise

    def cpu_s(self) -> float:
        """Processor seconds that it used so far, all threads."""
        # After the name in brackets: state is field 3, utime field 14, stime field 15.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_nbytes(self) -> int:
        """Resident memory, shared pages included."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _started(command: list[str], output: int) -> subprocess.Popen[bytes] | WarmProgram:
    if command[:2] == [sys.executable, "-m"]:
        return WarmProgram(command[2], command[3:], output)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


@contextlib.contextmanager
def running_daemon(directory: Path, config: str = SMALL) -> Iterator[DaemonProcess]:
    """A daemon that serves inside the `with` and is gone after it."""
    daemon = DaemonProcess(directory, config)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()

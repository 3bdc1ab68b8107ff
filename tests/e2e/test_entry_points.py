"""`kvkeep serve` by both entry points: it starts, ends on either signal, leaves nothing (B072)."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_S = 30
ENTRY_POINTS = {
    "console_script": [str(Path(sys.executable).with_name("kvkeep"))],
    "module": [sys.executable, "-m", "kvkeep_server"],
}
SMALL = '[ram]\nsize = "32MiB"\n[sessions]\nstaging_total_max = "32MiB"\n[log]\nformat = "json"\n'


@contextlib.contextmanager
def serving(command: list[str], directory: Path, **options):
    """A daemon, from the line that says that it serves."""
    config = directory.parent / "kvkeep.toml"
    config.write_text(SMALL)
    daemon = subprocess.Popen(
        [*command, "serve", "--config", str(config), *options.pop("arguments", [])],
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        wait_for_line(daemon, '"event": "serving"')
        yield daemon
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stderr.close()


def wait_for_line(process: subprocess.Popen[str], words: str) -> str:
    """The first line of standard error with these words."""
    seen = []
    while select.select([process.stderr], [], [], DEADLINE_S)[0]:
        line = process.stderr.readline()
        seen.append(line)
        if words in line:
            return line
        if not line:
            break
    raise AssertionError(f"no line with {words!r} in {seen}")


def is_serving(directory: Path) -> bool:
    with grpc.insecure_channel(f"unix:{directory}/kvkeep.sock") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        reply = check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S, wait_for_ready=True)
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def shared_memory_files(pid: int) -> set[Path]:
    """Files of /dev/shm that a process has mapped or open. What else lies there is others'."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(fd.readlink()))
    return {Path(path) for path in found if path.startswith("/dev/shm/")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("command", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_a_signal_ends_it_without_residue(command, number, tmp_path):
    directory = tmp_path / "run"
    with serving(command, directory, arguments=["--runtime-dir", str(directory)]) as daemon:
        assert is_serving(directory)
        used = shared_memory_files(daemon.pid)
        daemon.send_signal(number)
        assert daemon.wait(DEADLINE_S) == 0
        rest = daemon.stderr.read()
    assert "Traceback" not in rest
    assert not [path for path in directory.iterdir() if path.is_socket()]
    assert not [path for path in used if path.exists()]


def test_the_default_place_is_under_xdg_runtime_dir(tmp_path):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with serving(ENTRY_POINTS["console_script"], tmp_path / "kvkeep", env=environment):
        assert is_serving(tmp_path / "kvkeep")
        assert (tmp_path / "kvkeep").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_hold_a_socket_is_refused(tmp_path):
    ended = subprocess.run(
        [*ENTRY_POINTS["console_script"], "serve", "--runtime-dir", "here"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "write the whole path, from / on" in ended.stderr

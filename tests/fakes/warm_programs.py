"""Python programs that begin as a fork of one interpreter that has imported what daemons need.

A daemon serves after 0.1 s so, not after the 0.7 s of an interpreter that imports grpc and numpy
first. Two things differ from a fresh one: what is imported is there, and hash() of strings has the
same seed in all. Daemons under another program than `python -m` are fresh, as are those of the
entry points, the demo and the jumping clock.

    python -m tests.fakes.warm_programs CONTROL_FD

forks for each message on that socket, until its other end is closed; then it kills what is left.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_PRELOADED = ("kvkeep_server.cli.main", "numpy.ma")
_REQUEST_NBYTES_MAX = 1 << 17
_NUMBER = struct.Struct("=i")
_FIRST_OWN_FD = 3


class WarmProgram:
    """What `subprocess.Popen` is for `python -m module *arguments`, as far as daemons need it.

    Args:
        module: What is run as `__main__`.
        arguments: After its name.
        output: Descriptor of its standard output and standard error.
    """

    def __init__(self, module: str, arguments: Sequence[str], output: int) -> None:
        self.returncode: int | None = None
        self._told, theirs = os.pipe()
        request = {"module": module, "arguments": arguments, "directory": os.getcwd()}
        message = json.dumps({**request, "environment": dict(os.environ)}).encode()
        try:
            socket.send_fds(_control(), [message], [output, theirs])
        finally:
            os.close(theirs)
        self.pid = self._number()

    def _number(self) -> int:
        told = os.read(self._told, _NUMBER.size)
        assert len(told) == _NUMBER.size, "what forks programs has ended"
        return int(_NUMBER.unpack(told)[0])

    def poll(self) -> int | None:
        """Its exit code, minus the signal's number if one killed it; None while it runs."""
        return self._polled(0)

    def _polled(self, wait_ms: float) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._told, select.POLLIN)
            if ended.poll(wait_ms):
                self.returncode = self._number()
                os.close(self._told)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code; subprocess.TimeoutExpired after so many seconds."""
        code = self._polled(timeout * 1000)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@functools.cache
def _control() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        forks = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        forks.wait(20)

    atexit.register(end)
    return ours


def _forked(control: socket.socket) -> dict[str, Any]:
    """Returns in each fork, with what was asked for; in the one that forks it never returns."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([control, *running], [], [])[0]:
            if ready is not control:
                _tell_end(ready, *running.pop(ready))
                continue
            message, fds, _, _ = socket.recv_fds(control, _REQUEST_NBYTES_MAX, 2)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            output, told = fds
            pid = os.fork()
            if pid == 0:
                os.dup2(output, 1)
                os.dup2(output, 2)
                control.detach()
                return json.loads(message)
            os.close(output)
            os.write(told, _NUMBER.pack(pid))
            running[os.pidfd_open(pid)] = (pid, told)


def _tell_end(pidfd: int, pid: int, told: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.write(told, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os.close(told)
    os.close(pidfd)


def _run(request: dict[str, Any]) -> None:
    """As an interpreter would that begins now."""
    os.closerange(_FIRST_OWN_FD, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # An interrupt of the test run is for the test run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _module in _PRELOADED:
        importlib.import_module(_module)
    _run(_forked(socket.socket(fileno=int(sys.argv[1]))))

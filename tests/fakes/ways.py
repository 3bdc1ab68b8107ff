"""The two ways to a daemon: on its host through shared memory, and from another host over TCP."""

import socket

import kvkeep
from tests.fakes.daemon_process import DaemonProcess

LISTEN = '[remote]\nlisten = "127.0.0.1:0"\n'


def place(daemon: DaemonProcess, way: str) -> str:
    """Where a client of this way finds the daemon."""
    return daemon.address if way == "remote" else str(daemon.runtime_dir)


def connect(where: str, **options) -> kvkeep.Client:
    """A client of the daemon at a place: an address, or a runtime directory."""
    if where.startswith("/"):
        return kvkeep.connect(where, **options)
    return kvkeep.connect(address=where, **options)


def at_one_port(config: str) -> str:
    """The same with a port that stays over restarts: one that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return config.replace("127.0.0.1:0", f"127.0.0.1:{found.getsockname()[1]}")

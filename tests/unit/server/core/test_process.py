"""A process that forbade inspection is closed to others of its uid."""

import os
import subprocess
import sys

import pytest

# The interpreter may lie where only root can read it, so processes change their uid after their
# imports. That alone makes them undumpable: prctl(4, 1) takes it back, as an exec would.
VICTIM = """
import ctypes, os, sys
from kvkeep_server.core.process import forbid_inspection
os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)
{call}
print("ready", flush=True)
sys.stdin.read()
"""
PEER = """
import os, sys
os.setgid(65534); os.setuid(65534)
try:
    open(f"/proc/{sys.argv[1]}/mem", "r+b").close()
except PermissionError:
    sys.exit(13)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another uid")
@pytest.mark.parametrize(("call", "status"), [("forbid_inspection()", 13), ("", 0)])
def test_memory_is_closed_to_the_same_uid(call, status):
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM.format(call=call)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with victim:
        try:
            assert victim.stdout.readline() == "ready\n"
            peer = subprocess.run([sys.executable, "-c", PEER, str(victim.pid)], check=False)
            assert peer.returncode == status
        finally:
            victim.kill()

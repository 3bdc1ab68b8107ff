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


def test_numpy_imports_nothing_more_at_a_first_call():
    """Found in a recovery: `np.unique` held the event loop for 100 ms, once."""
    script = """
import sys
import numpy as np
from kvkeep_server.core.process import import_ahead
import_ahead()
before = set(sys.modules)
ids = np.arange(9)
np.unique(ids, return_inverse=True), np.isin(ids, ids), np.setdiff1d(ids, ids)
np.intersect1d(ids, ids), np.lexsort((ids, ids))
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

"""Which end-to-end tests run over TCP as well, and why the others do not.

A test that is about what a client can do asks for the fixture `way` and runs twice: on the daemon's
host and from "another" one.
"""

import re
from pathlib import Path

import pytest

ASKS = re.compile(r"^def (test_\w+|client)\([^)]*\bway\b", re.MULTILINE)
HERE = Path(__file__).parent
NO_CLIENT = "is about the daemon, its commands or its files: a client is only a means"
SHARED = "is about shared memory itself, or a socket that carries descriptors"

LOCAL = {
    "test_both_ways.py": "this list",
    "test_call_cases.py": NO_CLIENT,
    "test_cases_by_design.py": "a list, too",
    "test_check_offline.py": NO_CLIENT,
    "test_clock_jumps.py": NO_CLIENT,
    "test_dead_connections.py": "is about clients on other hosts only",
    "test_demo.py": NO_CLIENT,
    "test_deploy.py": NO_CLIENT,
    "test_engine_loop.py": "measures the loop of an engine that shares memory with its daemon",
    "test_entry_points.py": NO_CLIENT,
    "test_every_byte.py": "has a test of its own for another host, of fewer reads",
    "test_floods.py": SHARED,
    "test_hostile_calls.py": "test_remote_streams.py has what is hostile on TCP",
    "test_hostile_messages.py": "sends what no client would, on both ways",
    "test_many_tickets.py": "many clients of the daemon's own host",
    "test_memory_limits.py": NO_CLIENT,
    "test_metrics.py": "counts the calls and touch records of a local client",
    "test_misses.py": NO_CLIENT,
    "test_names_make_no_paths.py": NO_CLIENT,
    "test_operator_commands.py": NO_CLIENT,
    "test_overload.py": "many clients of the daemon's own host; test_remote_streams.py has limits",
    "test_overload_streams.py": "floods both ways; who looks up beside them is local",
    "test_prometheus.py": NO_CLIENT,
    "test_readme.py": NO_CLIENT,
    "test_remote_sessions.py": "is about clients on other hosts only",
    "test_remote_streams.py": "is about clients on other hosts only",
    "test_reuse_hammer.py": SHARED,
    "test_shared_leases.py": "processes of one host share a lease; see decision 20",
    "test_shm_attack.py": SHARED,
    "test_staging_attack.py": SHARED,
    "test_unserved_calls.py": NO_CLIENT,
    "test_watch.py": "is about what routers hear, which does not depend on how they came",
}


@pytest.mark.parametrize("path", sorted(HERE.glob("test_*.py")), ids=lambda path: path.name)
def test_every_file_goes_both_ways_or_says_why_not(path):
    both = ASKS.search(path.read_text()) is not None
    assert both != (path.name in LOCAL), path.name


def test_the_list_names_files_that_exist():
    assert set(LOCAL) <= {path.name for path in HERE.glob("test_*.py")}

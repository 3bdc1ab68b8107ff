"""P22: whatever tenants and models are called, no path is made of it.

The names go through the whole API; beside it stands what the daemon opens: once as Python's audit
hooks see it, once as strace does, which also sees the C libraries.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
import sysconfig
import time
from pathlib import Path

import pytest

import kvkeep
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.generated_blocks import chain_keys, spec, store_chain
from tests.fakes.waiting import wait_until

CANARY = "QZXJ"
CONFIG = """
[ram]
size = "16MiB"
[limits]
namespaces_max = 65536
session_namespaces_max = 65536
session_shards_max = 65536
[index]
rows_initial = 64
"""
NAMES_A_SPEC = 7 + 40
# Of real bug reports, and of what has gone wrong wherever a name became a path.
REAL = [
    *("mistralai/Mistral-7B-Instruct-v0.2", "org/model-SEP-name", "@@x", "../evil", "n" * 255),
    *(
        "C:\\Users\\me\\model",
        "\\\\host\\share\\x",
        "CON",
        "..",
        ".",
        "/",
        "~/.ssh/authorized_keys",
    ),
    *("/etc/passwd", "/proc/self/mem", "/dev/shm/x", "a/../../b", "%2e%2e%2f", "$(id)", "`id`"),
    *("-rf", "x\x00y", "\u202egnp.exe", "a\nb", "\ud7ff\uffff", "\u00e9", "e\u0301", " ", "\t"),
    *("'; DROP TABLE x", "{x}", "%s%n", "None", "-SEP-", "😀" * 80, "a" * 1024, "\x7f\x1b[2J"),
]
ATOMS = [*REAL, "..", "/", "\\", "\x00", "-SEP-", "@", ":", "%00", "name", "\u202e", "x" * 300]
# The daemon looks how much memory is left, hands its descriptors on, finds its sockets by that of
# their directory, and imports late; gRPC's libraries ask for the processor's frequency when they
# first need a clock.
SYSTEM = re.compile(
    r"/proc/(self|\d+)/(fd/\d+(/kvkeep(\.fd)?\.sock)?|cgroup|mountinfo)|/proc/(meminfo|cpuinfo)"
    r"|/sys/fs/cgroup/.*|/sys/devices/system/.*"
)
MODULES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib"))


def names(source: random.Random, count: int) -> list[str]:
    """So many strange names, each with the canary in it; of 0 to 1,024 bytes, some of more."""
    found = []
    for _ in range(count):
        parts = source.choices(ATOMS, k=source.randrange(4))
        parts.insert(source.randrange(len(parts) + 1), CANARY)
        found.append("".join(parts))
    return found


def use_names(daemon, count: int) -> tuple[int, int]:
    """Opens namespaces with `count` names in all; how many were opened, how many refused."""
    source = random.Random(22)
    opened = refused = 0
    keys = chain_keys("names", 2)
    with kvkeep.connect(daemon.runtime_dir, client_name=f"../{CANARY}", timeout_s=20.0) as client:
        for turn in range(-(-count // NAMES_A_SPEC)):
            tenant, model, weights, engine, layout, dtype, algorithm, *others = names(
                source, NAMES_A_SPEC
            )
            # Of those that are too long seven are enough.
            switches = [f"{name[:80]}={CANARY}/{name[:80]}" for name in others]
            facts = {
                "tenant": tenant,
                "model": model,
                "weights_fingerprint": weights,
                "engine": engine,
                "layout_version": layout,
                "kv_dtype": dtype,
                "hash_algorithm": algorithm,
                "layout_switches": switches,
                "hash_root": os.urandom(16),
            }
            try:
                namespace = client.open_namespace(spec(4096, **facts))
            except kvkeep.InvalidArgumentError:
                refused += 1
                continue
            opened += 1
            if turn % 50 == 0:
                assert store_chain(namespace, keys, ack="nvme").stored == 2
                with namespace.acquire(keys) as acquired:
                    assert acquired.leased == 2
        with pytest.raises(kvkeep.InvalidArgumentError):
            client.open_namespace(
                spec(4096, groups=[kvkeep.Group.full("../x", tokens_per_block=1, block_nbytes=1)])
            )
    return opened, refused


def config(directory: Path) -> str:
    """With an nvme directory, too."""
    path = f'directories = ["{directory}/nvme"]'
    return f'{CONFIG}[nvme]\n{path}\nmax = "64MiB"\nsegment = "1MiB"\nfree_min = "1MiB"\n'


def outside(daemon: DaemonProcess, paths: list[str]) -> list[str]:
    """Paths that are neither the daemon's own nor the system's."""
    kept = re.compile(
        re.escape(f"{daemon.directory}/nvme") + r"(/([0-9a-f]{8}\.kvks|kvkeep\.lock)?)?"
    )
    return [
        path
        for path in paths
        if path.startswith("/")
        and not path.startswith((f"{daemon.runtime_dir}/", *MODULES))
        and not SYSTEM.fullmatch(path)
        and not kept.fullmatch(path)
    ]


@pytest.mark.promise("P22", gate=100_000, nightly=500_000, unit="names")
def test_no_name_becomes_a_path(tmp_path, promise_count):
    events = tmp_path / "events"
    # An option makes it a fresh interpreter: what it imports shows that the hook works.
    program = (sys.executable, "-u", "-m", "tests.e2e.audited_daemon", str(events))
    daemon = DaemonProcess(tmp_path / "daemon", config(tmp_path / "daemon"), program)
    try:
        daemon.start()
        before = events.read_text().count("\n")
        assert before > 100
        opened, refused = use_names(daemon, promise_count)
        seen = [json.loads(line) for line in events.read_text().splitlines()[before:]]
        assert daemon.end() == 0
    finally:
        daemon.kill()
    assert (opened + refused) * NAMES_A_SPEC >= promise_count
    assert opened > refused > 0
    # The hook works: the session's memory was handed over by reopening it.
    assert seen
    assert [event for event in seen if any(CANARY in text for text in event)] == []
    assert outside(daemon, [text for event in seen for text in event[1:]]) == []
    assert set(os.listdir(daemon.runtime_dir)) == {"kvkeep.lock"}
    kept = set(os.listdir(daemon.directory / "nvme"))
    assert len(kept) > 1
    assert all(re.fullmatch(r"[0-9a-f]{8}\.kvks|kvkeep\.lock", name) for name in kept)
    daemon.check_log()


def can_trace() -> bool:
    return shutil.which("strace") is not None and os.geteuid() == 0


@pytest.mark.skipif(not can_trace(), reason="needs strace, and root to trace with it")
def test_strace_sees_no_path_of_a_name(tmp_path):
    calls = "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,link,linkat"
    log = tmp_path / "calls"
    trace = (
        "strace",
        "-f",
        "-ttt",
        "-s",
        "4096",
        "-e",
        f"trace={calls},symlink,symlinkat,truncate,chdir",
    )
    program = (*trace, "-o", str(log), sys.executable, "-m", "kvkeep_server")
    daemon = DaemonProcess(tmp_path / "daemon", config(tmp_path / "daemon"), program)
    try:
        daemon.start(wait_s=60.0)
        started_s = time.time()
        use_names(daemon, 1_000)
        lock = (daemon.runtime_dir / "kvkeep.lock").read_text()
        os.kill(int(lock.split()[1].rstrip(",")), signal.SIGTERM)
        wait_until(lambda: daemon.process.poll() is not None, 30.0, "the daemon ends")
    finally:
        daemon.kill()
    lines = log.read_text().splitlines()
    assert not [line for line in lines if CANARY in line]
    # A line is: pid, seconds, call.
    late = [line for line in lines if float(line.split(maxsplit=2)[1]) > started_s]
    assert len(lines) > 100 + len(late) > 100
    paths = re.findall(r'"((?:[^"\\]|\\.)*)"', "\n".join(late))
    assert outside(daemon, paths) == []

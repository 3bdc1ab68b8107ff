"""The memory limit, from faked trees of both cgroup versions and from a real cgroup."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep_server.core.memory_limit import (
    INDEX_ROW_NBYTES,
    MemoryPlan,
    pool_nbytes_auto,
    read_memory_limit,
    staging_nbytes_auto,
)

MiB, GiB = 1 << 20, 1 << 30
HOST_TOTAL, HOST_FREE = 16 * GiB, 10 * GiB
V1_UNLIMITED = 9223372036854771712
V1_MOUNT = "30 24 0:26 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
V2_MOUNT = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"


@pytest.fixture
def fake(tmp_path):
    """A fake root: fake(cgroup line, mount line, {directory: {file: content}})."""

    def make(cgroup: str = "", mount: str = "", levels: dict[str, dict[str, str]] | None = None):
        files = {
            "proc/meminfo": f"MemTotal: {HOST_TOTAL >> 10} kB\n"
            f"MemAvailable: {HOST_FREE >> 10} kB\n",
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": "22 1 254:0 / / rw - ext4 /dev/vda rw\n" + mount + "\n",
        }
        for directory, contents in (levels or {}).items():
            files |= {f"{directory}/{name}": text for name, text in contents.items()}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def v1(limit: int, used: int = 0, cache: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {cache}\n",
    }


def v2(limit: int | str, used: int = 0, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def test_no_cgroup_is_the_host(fake):
    found = read_memory_limit(fake())
    assert (found.nbytes, found.free_nbytes) == (HOST_TOTAL, HOST_FREE)
    assert found.source == "memory of the host"


def test_v1_limit(fake):
    root = fake(
        "4:memory:/pod/engine",
        V1_MOUNT.format(root="/"),
        {
            "sys/fs/cgroup/memory": v1(V1_UNLIMITED),
            "sys/fs/cgroup/memory/pod": v1(4 * GiB, used=3 * GiB, cache=GiB),
            "sys/fs/cgroup/memory/pod/engine": v1(V1_UNLIMITED),
        },
    )
    found = read_memory_limit(root)
    assert (found.nbytes, found.free_nbytes) == (4 * GiB, 2 * GiB)
    assert found.source.endswith("/sys/fs/cgroup/memory/pod")


def test_v1_path_of_the_host_seen_from_a_container(fake):
    root = fake(
        "4:memory:/docker/abc",
        V1_MOUNT.format(root="/docker/abc"),
        {"sys/fs/cgroup/memory": v1(GiB)},
    )
    assert read_memory_limit(root).nbytes == GiB


def test_v2_limit_is_the_smallest_level(fake):
    root = fake(
        "0::/pod/engine",
        V2_MOUNT.format(root="/"),
        {
            "sys/fs/cgroup": {},
            "sys/fs/cgroup/pod": v2(2 * GiB, used=2 * GiB - MiB),
            "sys/fs/cgroup/pod/engine": v2(3 * GiB, used=GiB),
        },
    )
    found = read_memory_limit(root)
    assert (found.nbytes, found.free_nbytes) == (2 * GiB, MiB)


def test_v2_without_a_limit_is_the_host(fake):
    root = fake("0::/", V2_MOUNT.format(root="/"), {"sys/fs/cgroup": v2("max")})
    assert read_memory_limit(root).nbytes == HOST_TOTAL


def test_v2_path_outside_of_the_namespace(fake):
    root = fake("0::/../other", V2_MOUNT.format(root="/"), {"sys/fs/cgroup": v2(GiB)})
    assert read_memory_limit(root).nbytes == GiB


def test_limit_above_the_host_is_the_host(fake):
    root = fake("0::/", V2_MOUNT.format(root="/"), {"sys/fs/cgroup": v2(64 * GiB)})
    assert read_memory_limit(root).nbytes == HOST_TOTAL


def test_v1_memory_beside_an_empty_v2(fake):
    root = fake(
        "4:memory:/a\n0::/",
        V1_MOUNT.format(root="/") + "\n" + V2_MOUNT.format(root="/").replace("/cgroup rw", "/u rw"),
        {"sys/fs/cgroup/memory/a": v1(GiB), "sys/fs/u": {"cgroup.procs": ""}},
    )
    assert read_memory_limit(root).nbytes == GiB


def test_automatic_sizes_leave_a_margin():
    for limit in (256 * MiB, GiB, 512 * GiB):
        pool = pool_nbytes_auto(limit)
        plan = MemoryPlan(pool, 0, 65536)
        staging = staging_nbytes_auto(limit, plan)
        assert MemoryPlan(pool, staging, 65536).nbytes < limit
    assert plan.rest_nbytes > 65536 * INDEX_ROW_NBYTES


# ---- B074: sizes from the cgroup, not from the host


def own_v1_memory_cgroup() -> Path | None:
    paths = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    path = Path("/sys/fs/cgroup/memory") / paths.get("memory", "").lstrip("/")
    usable = "memory" in paths and os.access(path / "memory.limit_in_bytes", os.W_OK)
    return path if usable and os.geteuid() == 0 else None


@pytest.fixture
def cgroup_of_1_gib():
    parent = own_v1_memory_cgroup()
    if parent is None:
        pytest.skip("needs root and a writable cgroup v1 memory controller")
    directory = parent / f"kvkeep-test-{os.getpid()}"
    directory.mkdir()
    try:
        (directory / "memory.limit_in_bytes").write_text(str(GiB))
        yield directory
    finally:
        directory.rmdir()


def test_half_of_a_container_of_1_gib_is_512_mib(cgroup_of_1_gib, tmp_path):
    config = tmp_path / "kvkeep.toml"
    config.write_text('[ram]\nsize = "50%"\n')
    enter_and_show = (
        "import os, sys, pathlib;"
        "pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()));"
        "from kvkeep_server.__main__ import main;"
        "sys.argv[1:] = ['config', 'show', sys.argv[2]];"
        "sys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", enter_and_show, str(cgroup_of_1_gib), str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (
        f"# memory limit: 1GiB, the memory limit of the cgroup at {cgroup_of_1_gib}" in ended.stdout
    )
    assert 'size = "512MiB"' in ended.stdout

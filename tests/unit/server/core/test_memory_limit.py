"""The memory limit, from faked trees of both cgroup versions and from a real cgroup."""

import subprocess
import sys

import pytest

from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.memory_limit import (
    INDEX_ROW_NBYTES,
    MemoryPlan,
    pool_nbytes_auto,
    read_memory_limit,
    staging_nbytes_auto,
)
from tests.fakes.memory_cgroup import memory_cgroup

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
            "proc/self/mountinfo": "22 1 254:0 / / rw - ext4 /dev/vda rw\n" + mount,
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


@pytest.mark.parametrize(
    "meminfo", [None, "", "MemTotal: 5 kB\n", "MemTotal: many\nMemAvailable: 1 kB\n", "MemTotal:"]
)
def test_a_host_that_does_not_say_how_much_it_has_is_told_in_words(fake, meminfo):
    root = fake()
    (root / "proc/meminfo").unlink()
    if meminfo is not None:
        (root / "proc/meminfo").write_text(meminfo)
    with pytest.raises(FailedPreconditionError, match=r"proc/meminfo.*fix: mount /proc"):
        read_memory_limit(root)


def test_automatic_sizes_leave_a_margin():
    for limit in (256 * MiB, GiB, 512 * GiB):
        pool = pool_nbytes_auto(limit)
        plan = MemoryPlan(pool, 0, 65536)
        staging = staging_nbytes_auto(limit, plan)
        assert MemoryPlan(pool, staging, 65536).nbytes < limit
    assert plan.rest_nbytes > 65536 * INDEX_ROW_NBYTES


def test_half_of_a_container_of_1_gib_is_512_mib(tmp_path):
    """B074: sizes from the cgroup, not from the host."""
    config = tmp_path / "kvkeep.toml"
    config.write_text('[ram]\nsize = "50%"\n')
    show = (sys.executable, "-m", "kvkeep_server", "config", "show", str(config))
    with memory_cgroup("b074", GiB) as cgroup:
        ended = subprocess.run(
            cgroup.command(*show, python=sys.executable),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    first_line = ended.stdout.splitlines()[0]
    assert (
        first_line == f"# memory limit: 1GiB, the memory limit of the cgroup at {cgroup.directory}"
    )
    assert 'size = "512MiB"' in ended.stdout

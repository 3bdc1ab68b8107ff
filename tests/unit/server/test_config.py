"""The settings file: defaults, refusals in words (P26), sums against memory, the command."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvkeep_server.cli.config import effective, reference_lines
from kvkeep_server.cli.main import kvkeep, run
from kvkeep_server.config import KEYS, ConfigError, Settings, load, parse
from kvkeep_server.config.disks import nvme_directories
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.memory_limit import MemoryLimit

MiB, GiB = 1 << 20, 1 << 30
MEMORY = MemoryLimit(8 * GiB, 6 * GiB, "memory limit of the cgroup at /sys/fs/cgroup")
ROOT = Path(__file__).parents[3]
ENTRY_POINTS = [
    [str(Path(sys.executable).with_name("kvkeep"))],
    [sys.executable, "-m", "kvkeep_server"],
]
CASES = tomllib.loads(Path(__file__).with_name("config_errors.toml").read_text())["case"]


def limit(nbytes: int) -> MemoryLimit:
    return MemoryLimit(nbytes, nbytes, "memory of the host")


def python_independent(message: str) -> str:
    """Without the TOML parser's own words, which differ between releases of Python."""
    return re.sub(r"not valid TOML: .*; fix:", "not valid TOML: ...; fix:", message)


def test_there_are_enough_bad_configs():
    assert len({case["name"] for case in CASES}) == len(CASES) >= 40


@pytest.mark.promise("P26", gate=1, unit="bad configs")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bad_config_is_refused_in_golden_words(case, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("kvkeep_server.cli.config.read_memory_limit", lambda: MEMORY)
    (tmp_path / "kvkeep.toml").write_text(case["text"])
    monkeypatch.chdir(tmp_path)

    code = run(["config", "check", "kvkeep.toml"])

    out, err = capfd.readouterr()
    assert code == 78
    assert out == ""
    assert "Traceback" not in err
    messages = [python_independent(line.removeprefix("kvkeep: ")) for line in err.splitlines()]
    assert messages == [python_independent(message) for message in case["messages"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_words_name_what_is_allowed_and_the_fix(case):
    for message in case["messages"]:
        assert "; fix: " in message
        assert "allowed" in message or "not valid TOML" in message


@pytest.mark.parametrize("command", ENTRY_POINTS, ids=["console_script", "module"])
@pytest.mark.parametrize(
    "arguments", [["config", "check"], ["config", "show"], ["serve", "--config"]], ids=" ".join
)
def test_both_entry_points_end_with_78(command, arguments, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text('[ram]\nsise = "1GiB"\n')

    ended = subprocess.run(
        [*command, *arguments, str(bad)], capture_output=True, text=True, timeout=60, check=False
    )

    assert ended.returncode == 78
    assert ended.stdout == ""
    assert ended.stderr == (
        f"kvkeep: {bad}: ram.sise is not a key; allowed in [ram]: size, chunk, slab, policy,"
        " admission, huge_pages; fix: did you mean ram.size?\n"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe[ram]", "is not UTF-8 at byte 0"),
        (b"#" * (MiB + 1), "is larger than 1MiB"),
    ],
    ids=["missing", "not_utf8", "too_large"],
)
def test_unreadable_file_is_refused(content, words, tmp_path):
    path = tmp_path / "kvkeep.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load(path, MEMORY)


def test_a_directory_and_an_endless_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, MEMORY)
    with pytest.raises(ConfigError, match="is larger than 1MiB"):
        load(Path("/dev/zero"), MEMORY)


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep_server.core.settings_file._PATIENCE_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"nobody writes to it; fix: name a readable TOML file"):
        load(tmp_path / "pipe", MEMORY)


def test_a_pipe_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def write():
        with (tmp_path / "pipe").open("w") as pipe:
            pipe.write("[ram]\n")
            pipe.flush()
            time.sleep(0.1)
            pipe.write('size = "64MiB"\n')

    writer = threading.Thread(target=write)
    writer.start()
    loaded = load(tmp_path / "pipe", MEMORY)
    writer.join()
    assert loaded.settings.ram.size_nbytes == 64 * MiB


@given(
    st.dictionaries(
        st.sampled_from([key.table for key in KEYS.values()]) | st.text(max_size=8),
        st.dictionaries(
            st.sampled_from([key.name for key in KEYS.values()]) | st.text(max_size=8),
            st.integers() | st.floats() | st.booleans() | st.text(max_size=8),
            max_size=4,
        ),
        max_size=3,
    )
)
def test_any_value_is_taken_or_refused(tree):
    def literal(value: object) -> str:
        if isinstance(value, str):
            return (
                '"'
                + "".join(f"\\U{ord(c):08X}" for c in value if not 0xD800 <= ord(c) < 0xE000)
                + '"'
            )
        return str(value).lower()

    lines = []
    for table, entries in tree.items():
        lines.append(f"[{literal(table)}]")
        lines += [f"{literal(name)} = {literal(value)}" for name, value in entries.items()]
    problems = ()
    try:
        assert isinstance(parse("\n".join(lines), "x", MEMORY).settings, Settings)
    except ConfigError as refusal:
        problems = refusal.problems
    assert all(problem.isprintable() and "; fix: " in problem for problem in problems)


def test_embedded_default_is_the_documented_one():
    settings = load(None, limit(24 * GiB)).settings
    assert settings.ram.size_nbytes == 2 * GiB
    assert settings.ram.chunk_nbytes == 128 * MiB
    assert settings.sessions.staging_nbytes == 64 * MiB
    assert settings.sessions.staging_nbytes_max == GiB
    assert settings.sessions.staging_total_nbytes_max == 4 * GiB
    assert settings.limits.block_nbytes_max == 64 * MiB
    assert settings.server.socket_mode == 0o660


@pytest.mark.parametrize("nbytes", [512 * MiB, GiB, 3 * GiB, 8 * GiB, 1 << 40])
def test_embedded_default_fits_any_machine(nbytes):
    settings = load(None, limit(nbytes)).settings
    assert settings.ram.size_nbytes <= nbytes // 4
    assert settings.ram.size_nbytes + settings.sessions.staging_total_nbytes_max < nbytes
    assert settings.limits.block_nbytes_max <= settings.ram.slab_nbytes <= settings.ram.chunk_nbytes


def test_share_is_one_of_the_memory_limit():
    assert parse('[ram]\nsize = "50%"', "x", limit(GiB)).settings.ram.size_nbytes == 512 * MiB


def test_share_is_rounded_down_to_pages():
    assert parse('[ram]\nsize = "33.33%"', "x", limit(GiB)).settings.ram.size_nbytes % 4096 == 0


def test_pool_of_three_quarters_of_a_small_container_is_taken():
    settings = parse('[ram]\nsize = "384MiB"', "x", limit(512 * MiB)).settings
    assert settings.sessions.staging_total_nbytes_max + 384 * MiB < 512 * MiB


QUANTITIES = st.builds(
    "{}{}".format,
    st.integers(1, 4000) | st.sampled_from(["1.5", "0.125", "99.9"]),
    st.sampled_from(["KiB", "MiB", "GiB", "%"]),
)
SIZES = ["ram.size", "ram.slab", "ram.chunk", "limits.block_max", "limits.message_max"]
SIZES += ["sessions.staging", "sessions.staging_max", "sessions.staging_total_max"]
SIZES += ["remote.staging_total_max"]


@examples(max_examples=600)
@given(
    values=st.dictionaries(st.sampled_from(SIZES), QUANTITIES, min_size=1, max_size=3),
    keys_max=st.integers(1, 1 << 20),
    memory=st.integers(64 * MiB, 64 * GiB),
)
def test_the_value_that_a_fix_names_is_taken(values, keys_max, memory):
    values = {path: f'"{value}"' for path, value in values.items()} | {"limits.keys_max": keys_max}
    followed = set()
    for _ in range(12):
        text = "\n".join(f"{path} = {value}" for path, value in values.items())
        try:
            parse(text, "x", limit(memory))
        except ConfigError as error:
            problem = error.problems[0]
            found = re.search(r"fix: set (it|[a-z_.]+) to (\"[^\"]+\"|[0-9]+)", problem)
            if found is None:
                limit_only = "fix: raise that limit" in problem
                assert limit_only or problem.split()[0] not in followed, problem
                return
            path = problem.split()[0] if found[1] == "it" else found[1]
            assert values.get(path) != found[2], problem
            values[path] = found[2]
            followed.add(path)
            last = (path, problem)
            continue
        return
    pytest.fail(f"what was named is never taken: {last}")


def test_settings_cannot_be_changed():
    settings = load(None, MEMORY).settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.ram.size_nbytes = 0  # type: ignore[misc]


def test_shown_settings_load_back_as_the_same():
    text = """
        [ram]
        size = "1.5GiB"
        [leases]
        ttl = "90s"
        [server]
        runtime_dir = "/run/kv"
        socket_mode = "0600"
    """
    first = parse(text, "x", MEMORY)
    again = parse("\n".join(effective(first)), "x", MEMORY)
    assert again.settings == first.settings
    assert {path for path, origin in first.origins.items() if origin == "file"} == {
        "ram.size",
        "leases.ttl",
        "server.runtime_dir",
        "server.socket_mode",
    }


def test_every_default_in_the_reference_is_taken():
    lines = []
    for table in tomllib.loads("\n".join(effective(load(None, MEMORY)))):
        lines.append(f"[{table}]")
        for key in KEYS.values():
            if key.table == table:
                raw = key.default
                lines.append(
                    f'{key.name} = "{raw}"'
                    if isinstance(raw, str)
                    else f"{key.name} = {raw}".lower()
                )
    assert parse("\n".join(lines), "x", MEMORY).settings == load(None, MEMORY).settings


def test_reference_in_the_repository_is_current():
    assert (ROOT / "deploy/CONFIG.md").read_text().splitlines() == list(reference_lines())


def test_example_is_taken():
    loaded = load(ROOT / "deploy/kvkeep.toml", MEMORY)
    assert loaded.settings.server.runtime_dir == "/run/kvkeep"


def test_missing_dependencies_are_one_line():
    program = (
        "import sys; sys.modules['click'] = None; from kvkeep_server.__main__ import main;"
        " sys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 69
    assert ended.stderr == (
        "kvkeep: the Python package 'click' is not installed; the command needs the daemon's"
        " dependencies: pip install 'kvkeep[server]'\n"
    )


def test_check_prints_the_sum():
    ended = CliRunner().invoke(kvkeep, ["config", "check"])
    assert ended.exit_code == 0
    assert ended.output.startswith("the embedded default: ok\nmemory: ram ")


@pytest.mark.parametrize("second", ["link", "link/kv/..", "real/"])
def test_one_directory_under_two_names_is_refused(tmp_path, second):
    """Two logs in one directory would take each other's files."""
    (tmp_path / "real" / "kv").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = f'[nvme]\ndirectories = ["{tmp_path}/real", "{tmp_path}/{second}"]'
    with pytest.raises(ConfigError, match=r"nvme\.directories .*once"):
        parse(text, "kvkeep.toml", MEMORY)
    other = text.replace(second, "other")
    assert len(parse(other, "kvkeep.toml", MEMORY).settings.nvme.directories) == 2


def test_a_share_of_a_tiny_file_system_is_refused_with_its_size(tmp_path, monkeypatch):
    tiny = shutil.disk_usage(tmp_path)._replace(total=6 * MiB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: tiny)
    loaded = parse(f'[nvme]\ndirectories = ["{tmp_path}/a"]', "x", MEMORY)
    with pytest.raises(FailedPreconditionError) as refused:
        nvme_directories(loaded.settings)
    assert str(refused.value) == (
        f"nvme.max = '50%' of the {6 * MiB} bytes that the file system of {tmp_path}/a has: set it"
        ' to "4MiB" or more'
    )

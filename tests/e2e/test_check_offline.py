"""`kvkeep check --offline`: what a daemon left on disk, as an operator looks at it."""

import json
import os

import pytest

import kvkeep
from kvkeep_server.cli.main import run
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.generated_blocks import chain_keys, spec, store_chain

BLOCK_NBYTES = 65_536
BLOCKS = 64


@pytest.fixture
def look(capsys):
    """What the command does with a file of settings: exit code, standard output and error."""

    def looked(file, *options):
        code = run(["check", "--offline", str(file), *options])
        return code, *capsys.readouterr()

    return looked


def tree(path):
    return {one.name: (one.read_bytes(), one.stat().st_mtime_ns) for one in path.iterdir()}


@pytest.fixture
def daemon(tmp_path):
    text = (
        f'[ram]\nsize = "32MiB"\n[nvme]\ndirectories = ["{tmp_path}/nvme"]\nmax = "64MiB"\n'
        'segment = "4MiB"\nfree_min = "1MiB"\n'
    )
    daemon = DaemonProcess(tmp_path, text)
    try:
        daemon.start()
        with kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client:
            namespace = client.open_namespace(spec(BLOCK_NBYTES))
            for chain in range(3):
                keys = chain_keys(chain, BLOCKS)
                assert store_chain(namespace, keys, ack="nvme").refused == 0
        yield daemon
    finally:
        daemon.kill()


def test_from_a_daemon_that_runs_to_damage(daemon, tmp_path, look):
    """It refuses, naming the pid; finds nothing after SIGKILL and after SIGTERM; then damage."""
    path, settings = tmp_path / "nvme", daemon.directory / "kvkeep.toml"
    code, said, words = look(settings)
    assert (code, said) == (75, "")
    assert f"pid {daemon.pid}," in words
    daemon.kill()
    before = tree(path)
    code, said, _ = look(settings, "--bytes")
    assert code == 0
    assert f"checked   {3 * BLOCKS} blocks in " in said
    assert f" of {3 * BLOCKS} blocks against their checksums" in said
    assert f"of 64MiB in {path}" in said
    assert "not sealed" in said
    assert said.endswith("\nok\n")
    assert tree(path) == before

    daemon.start()
    assert daemon.end() == 0
    before = tree(path)
    code, said, _ = look(settings, "--json")
    report = json.loads(said)
    assert (code, report["ok"], report["findings"], report["notes"]) == (0, True, [], [])
    assert (report["blocks_checked"], report["blocks_verified"]) == (3 * BLOCKS, 0)
    assert tree(path) == before

    file = max(path.glob("*.kvks"))
    image = bytearray(file.read_bytes())
    image[3 * 4096] ^= 1
    file.write_bytes(image)
    (path / "lost+found").mkdir()
    assert look(settings)[0] == 0
    code, said, _ = look(settings, "--bytes")
    assert code == 1
    assert f"wrong     {file}: 1 blocks are not what its table says" in said
    assert f"note      {path}/lost+found is not ours" in said
    assert said.endswith("\n1 findings\n")
    code, said, _ = look(settings, "--bytes", "--json", "--rate", "1GiB")
    report = json.loads(said)
    assert (code, report["ok"], report["blocks_corrupt"]) == (1, False, 1)


def test_settings_without_a_directory_to_look_at(tmp_path, look):
    def said(text):
        file = tmp_path / "settings.toml"
        file.write_text(text)
        code, _, words = look(file)
        return code, words

    code, words = said("")
    assert (code, "names no nvme.directories" in words) == (2, True)
    code, words = said(f'[nvme]\ndirectories = ["{tmp_path}/none"]\n')
    assert (code, f"{tmp_path}/none: No such file or directory" in words) == (75, True)
    assert not os.path.exists(tmp_path / "none")
    code, words = said("[nvme]\ndirectory = 3\n")
    assert (code, "directories" in words) == (78, True)

"""`[nvme]` against file systems: `config check` and `serve` refuse the same in the same words."""

import shutil

import pytest

from kvkeep_server.cli.main import run

MIB = 1 << 20


@pytest.fixture
def said(tmp_path, capsys):
    """Exit code and messages of a command with these settings; both commands must agree."""

    def say(text):
        file = tmp_path / "kvkeep.toml"
        file.write_text(f'[ram]\nsize = "16MiB"\n[server]\nruntime_dir = "{tmp_path}/rt"\n{text}')
        answers = []
        for command in (["config", "check", str(file)], ["serve", "--config", str(file)]):
            code = run(command)
            answers.append((code, capsys.readouterr().err))
        assert answers[0] == answers[1]
        assert not (tmp_path / "rt").exists(), "nothing was begun"
        return answers[0]

    return say


def nvme(path, **changes):
    keys = {"max": '"64MiB"', "segment": '"1MiB"', "free_min": '"0B"', **changes}
    lines = [f"{key} = {value}" for key, value in keys.items()]
    return "\n".join(["[nvme]", f'directories = ["{path}"]', *lines])


TOO_FEW = (
    'nvme.max is "60MiB" (60MiB in {path}); allowed: at least 4 times nvme.segment, which is'
    ' "16MiB"; fix: set nvme.max to "64MiB" or more, or lower nvme.segment'
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"max": '"60MiB"', "segment": '"16MiB"'},
            TOO_FEW,
        ),
        ({"segment": '"4GiB"'}, 'fix: set nvme.max to "16GiB" or more, or lower nvme.segment'),
        (
            {"free_min": '"16TiB"'},
            'nvme.free_min is "16TiB"; allowed: what leaves room for 4 times',
        ),
    ],
)
def test_what_could_never_write_is_refused(said, tmp_path, changes, sentence):
    path = tmp_path / "kv"
    code, error = said(nvme(path, **changes))
    assert code == 78
    assert sentence.format(path=path) in error
    assert len(error.splitlines()) == 1
    assert not path.exists()


def test_a_share_of_a_tiny_file_system_is_refused(said, tmp_path, monkeypatch):
    tiny = shutil.disk_usage(tmp_path)._replace(total=6 * MIB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: tiny)
    code, error = said(nvme(tmp_path / "kv", max='"50%"'))
    assert code == 78
    assert 'set nvme.max to "4MiB" or more' in error
    code, error = said(nvme(tmp_path / "kv", max='"6MiB"', free_min='"3MiB"'))
    assert code == 78
    assert 'set nvme.free_min to "2MiB" or less' in error


@pytest.fixture
def places(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not" / "there")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("{here}/circle", "lead in a circle"),
        ("{here}/circle/kv", "lead in a circle"),
        ("{here}/nowhere", "is behind a link that leads nowhere, {here}/nowhere"),
        ("{here}/nowhere/kv", "is behind a link that leads nowhere, {here}/nowhere"),
        ("{here}/file", "is no directory, for {here}/file is none"),
        ("{here}/file/kv", "cannot be used: Not a directory"),
        ("{here}/open", "is writable by everybody: chmod o-w it"),
        ("{here}/" + "x" * 300, "cannot be used: File name too long"),
        ("/proc", "is on a file system that takes no files"),
        ("/sys/kvkeep", "is on a file system that takes no files"),
    ],
)
def test_a_directory_that_no_daemon_can_have_is_refused(said, places, capsys, path, why):
    path = path.format(here=places)
    code, error = said(nvme(path))
    assert code == 78
    assert "nvme.directories is " in error
    assert why.format(here=places) in error
    assert len(error.splitlines()) == 1
    offline = run(["check", "--offline", str(places / "kvkeep.toml")])
    assert offline in (0, 1, 75, 78), "and no traceback"
    capsys.readouterr()


def test_more_than_there_is_is_said(tmp_path, capsys):
    file = tmp_path / "kvkeep.toml"
    file.write_text(nvme(tmp_path / "kv", max='"1000TiB"'))
    assert run(["config", "check", str(file)]) == 0
    said = capsys.readouterr().out
    assert f'warning: nvme.max is "1000TiB", 1000TiB in {tmp_path}/kv, where the file sys' in said
    file.write_text(nvme(f'{tmp_path}/a", "{tmp_path}/b', max='"60%"'))
    assert run(["config", "check", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"in {tmp_path}/a, {tmp_path}/b, where the file system has" in said
    file.write_text(nvme(tmp_path / "kv"))
    assert run(["config", "check", str(file)]) == 0
    assert "warning" not in capsys.readouterr().out

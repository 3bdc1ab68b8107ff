"""The committed stubs are what the .proto files give; a change of one without the other is red."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    """A copy of what `make check-stubs` looks at, with the generator of this checkout."""
    made = subprocess.run(
        ["make", ".venv-stubs/.installed"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    shutil.copy2(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copytree(ROOT / "client/kvkeep/v1", tmp_path / "client/kvkeep/v1")
    (tmp_path / ".venv-stubs").symlink_to(ROOT / ".venv-stubs")
    return tmp_path


def check(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "check-stubs"], cwd=tree, capture_output=True, text=True, timeout=120, check=False
    )


def test_committed_stubs_are_current(tree):
    ended = check(tree)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_changed_proto_is_red(tree):
    proto = tree / "proto/kvkeep/v1/admin.proto"
    proto.write_text(
        proto.read_text().replace(
            "message StatsRequest {}", "message StatsRequest { bool all = 1; }"
        )
    )
    ended = check(tree)
    assert ended.returncode != 0
    assert "run `make stubs`" in ended.stderr


def test_an_edited_stub_is_red(tree):
    stub = tree / "client/kvkeep/v1/admin_pb2_grpc.py"
    stub.write_text(stub.read_text() + "\n")
    assert check(tree).returncode != 0


def test_a_stub_without_a_proto_is_red(tree):
    (tree / "client/kvkeep/v1/old_pb2.py").write_text("")
    assert check(tree).returncode != 0

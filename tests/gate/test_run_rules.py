"""What tests/conftest.py adds to every run: unlisted skips are red, promises make a table."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]

# Never listed: each test here ends in another way of not running.
SKIPPING = {
    "mark": "@pytest.mark.skip(reason='no time')\ndef test_it(): pass",
    "call": "def test_it(): pytest.skip('no time')",
    "fixture": "@pytest.fixture\ndef tool(): pytest.skip('no time')\ndef test_it(tool): pass",
    "xfail": "@pytest.mark.xfail(reason='no time')\ndef test_it(): assert False",
    "module": "pytest.skip('no time', allow_module_level=True)\ndef test_it(): pass",
    "missing_module": "pytest.importorskip('no_such_module', reason='no time')",
}


@dataclass
class Ended:
    """One run of pytest."""

    returncode: int
    stdout: str


@pytest.fixture
def project(pytester):
    """Runs pytest on one test file in a project with our conftest: project(test, skip list)."""
    pytester.mkdir("tests")
    shutil.copy2(ROOT / "pyproject.toml", pytester.path)
    shutil.copy2(ROOT / "tests/conftest.py", pytester.path / "tests")

    def run(test: str, skips: str = "", *options: str) -> Ended:
        (pytester.path / "tests/skips.txt").write_text(skips)
        (pytester.path / "tests/test_one.py").write_text(f"import pytest\n\n{test}\n")
        ended = pytester.runpytest_inprocess(*options)
        return Ended(int(ended.ret), ended.stdout.str())

    return run


@pytest.mark.parametrize("test", SKIPPING.values(), ids=SKIPPING)
def test_unlisted_skip_is_red(project, test):
    ended = project(test)
    assert ended.returncode == 1, ended.stdout
    assert "skipped without a line in tests/skips.txt" in ended.stdout
    assert "no time" in ended.stdout


@pytest.mark.parametrize("test", SKIPPING.values(), ids=SKIPPING)
def test_listed_skip_is_green(project, test):
    also_passing = f"{test}\ndef test_that_runs(): pass" if "module" not in test else test
    ended = project(also_passing, "tests/test_one.py* | *no time*\n")
    assert ended.returncode in {0, 5}, ended.stdout


def test_another_reason_is_red(project):
    ended = project(SKIPPING["call"], "tests/test_one.py::test_it | no network\n")
    assert ended.returncode == 1


def test_a_case_of_a_parametrised_test_can_be_listed(project):
    test = (
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_it(n):\n    if n == 2: pytest.skip('no time')\n"
    )
    assert project(test, "tests/test_one.py::test_it[2] | no time\n").returncode == 0
    assert project(test, "tests/test_one.py::test_it[1] | no time\n").returncode == 1


def test_a_line_without_a_reason_is_refused(project):
    ended = project("def test_it(): pass", "tests/test_one.py::test_it\n")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR


PROMISED = """
@pytest.mark.promise("P11", gate=3, nightly=1000, unit="attacks")
def test_attacks(promise_count):
    print(f"ran {promise_count} attacks")

@pytest.mark.promise("P13", gate=2, nightly=7, unit="restarts")
@pytest.mark.parametrize("n", [1, 2])
def test_restarts(n, promise_count): assert promise_count in (2, 7)

@pytest.mark.slow
@pytest.mark.promise("P04", nightly=50, unit="kills")
def test_kills(): pass
"""


def table(output: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("|")] for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 5}


def test_table_of_the_gate(project):
    ended = project(PROMISED, "", "-s", "-m", "not slow")
    assert ended.returncode == 0, ended.stdout
    assert "ran 3 attacks" in ended.stdout
    rows = table(ended.stdout)
    assert rows["promise"] == ["test", "count here", "count in `make nightly`", "outcome"]
    assert rows["P11"] == ["test_one.py::test_attacks", "3 attacks", "1,000 attacks", "passed"]
    assert rows["P13"] == ["test_one.py::test_restarts", "4 restarts", "14 restarts", "passed"]
    assert rows["P04"] == ["test_one.py::test_kills", "0 kills", "50 kills", "not run"]
    assert ended.stdout.splitlines()[-1].startswith("=") is True
    assert "3 passed, 1 deselected" in ended.stdout.splitlines()[-1]


def test_table_of_the_nightly_run(project):
    ended = project(PROMISED, "", "-s", "--nightly")
    assert "ran 1000 attacks" in ended.stdout
    assert table(ended.stdout)["P04"][1:] == ["50 kills", "50 kills", "passed"]


def test_a_broken_promise_says_so(project):
    ended = project("@pytest.mark.promise('P01')\ndef test_it(): assert False")
    assert ended.returncode == 1
    assert table(ended.stdout)["P01"][-1] == "failed"


def test_listed_skips_exist():
    for line in (ROOT / "tests/skips.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert (ROOT / line.partition("|")[0].partition("::")[0].strip()).is_file(), line

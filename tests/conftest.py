"""What every test run does: refuses unlisted skips, prints which promise was proved how often.

`@pytest.mark.promise("P11", gate=10, nightly=100, unit="attacks")` names the promise; the fixture
`promise_count` is the number for this run, so the table and the loop cannot disagree.
`--nightly` switches to the large numbers.
"""

from __future__ import annotations

import fnmatch
import gc
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

SKIP_LIST = "tests/skips.txt"


@dataclass(frozen=True)
class PromiseRow:
    promise: str
    test: str
    gate: int
    nightly: int
    unit: str


@dataclass
class RunRecord:
    """What the hooks note down during one run."""

    listed: list[tuple[str, str]] = field(default_factory=list)
    unlisted: dict[str, str] = field(default_factory=dict)
    promises: dict[str, list[PromiseRow]] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)


RECORD = pytest.StashKey[RunRecord]()


def read_skip_list(path: Path) -> list[tuple[str, str]]:
    """(test pattern, reason pattern) a line; a line without a reason is refused."""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        test, bar, reason = (part.strip() for part in line.partition("|"))
        if not (test and bar and reason):
            raise pytest.UsageError(f"{path}:{number}: expected 'TEST | REASON', got {line!r}")
        entries.append((test, reason))
    return entries


def matches(pattern: str, text: str) -> bool:
    """Like fnmatch, but brackets stand for themselves: node ids are full of them."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="run the promises with their large counts"
    )


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay for the whole run: no collection of garbage need look at
    them again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    record = config.stash[RECORD] = RunRecord()
    path = config.rootpath / SKIP_LIST
    if path.exists():
        record.listed = read_skip_list(path)
    config.pluginmanager.register(_Recorder(record), "kvkeep-recorder")


class _Recorder:
    """Hooks that have no config at hand."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            rows = [_promise_row(item.nodeid, mark) for mark in item.iter_markers("promise")]
            if rows:
                self._record.promises[item.nodeid] = rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report, getattr(report, "wasxfail", None))
        worse = report.failed or report.skipped
        if worse or (report.when == "call" and report.nodeid not in self._record.outcomes):
            self._record.outcomes[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report, None)

    def _note(self, report: pytest.TestReport | pytest.CollectReport, xfail: str | None) -> None:
        if not report.skipped:
            return
        reason = xfail if xfail is not None else _skip_reason(report)
        if not any(
            matches(test, report.nodeid) and matches(why, reason)
            for test, why in self._record.listed
        ):
            self._record.unlisted[report.nodeid] = reason


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _promise_row(nodeid: str, mark: pytest.Mark) -> PromiseRow:
    gate = int(mark.kwargs.get("gate", 1))
    return PromiseRow(
        promise=mark.args[0],
        test=nodeid.rpartition("/")[2],
        gate=gate,
        nightly=int(mark.kwargs.get("nightly", gate)),
        unit=mark.kwargs.get("unit", "runs"),
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[RECORD].unlisted and session.exitstatus in {
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    }:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    record = config.stash[RECORD]
    rows = [
        (row, record.outcomes.get(nodeid, "not run"))
        for nodeid, rows in record.promises.items()
        for row in rows
    ]
    if rows:
        terminalreporter.section("promises")
        for line in promise_table(rows, nightly=config.option.nightly):
            terminalreporter.write_line(line)
    if record.unlisted:
        terminalreporter.section(f"skipped without a line in {SKIP_LIST}", red=True)
        for nodeid, reason in record.unlisted.items():
            terminalreporter.write_line(f"{nodeid} | {reason}")


def promise_table(rows: list[tuple[PromiseRow, str]], *, nightly: bool) -> list[str]:
    """One line a promise and test function; cases of a parametrised test are added up."""
    cells: dict[tuple[str, str], list[tuple[PromiseRow, str]]] = {}
    for row, outcome in rows:
        cells.setdefault((row.promise, row.test.partition("[")[0]), []).append((row, outcome))
    lines = [("promise", "test", "count here", "count in `make nightly`", "outcome")]
    for (promise, test), group in sorted(cells.items()):
        unit = group[0][0].unit
        here = sum(
            row.nightly if nightly else row.gate for row, outcome in group if outcome != "not run"
        )
        in_nightly = sum(row.nightly for row, _ in group)
        outcomes = {outcome for _, outcome in group}
        outcome = next(
            word for word in ("failed", "not run", "skipped", "passed") if word in outcomes
        )
        lines.append((promise, test, f"{here:,} {unit}", f"{in_nightly:,} {unit}", outcome))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]


@pytest.fixture
def promise_count(request: pytest.FixtureRequest) -> int:
    """How often this run repeats the test: the number in its promise mark."""
    mark = request.node.get_closest_marker("promise")
    assert mark is not None, "promise_count needs @pytest.mark.promise on the test"
    row = _promise_row(request.node.nodeid, mark)
    return row.nightly if request.config.option.nightly else row.gate

"""P03: whatever step of a commit fails, nothing of it is visible, everything comes back, and the
next try succeeds."""

from dataclasses import dataclass, field

import pytest

from kvkeep_server.core.results import CommitStatus
from kvkeep_server.index.table import TableFullError
from kvkeep_server.tiering import transfers as transfers_module
from tests.fakes.core_harness import Harness, full, keys_of, spec

STORED = CommitStatus.STORED


class BrokenError(Exception):
    """What a bug would raise."""


@dataclass
class Faults:
    """Counts the steps of a commit, and fails the one that it is told to."""

    monkeypatch: pytest.MonkeyPatch
    error: Exception
    fail_at: int = 0
    counting: bool = False
    steps: list[str] = field(default_factory=list)

    def step(self, name):
        if self.counting:
            self.steps.append(name)
            if len(self.steps) == self.fail_at:
                raise self.error

    def watch(self, owner, *names):
        for name in names:
            self.monkeypatch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def _watched(self, real, name):
        def call(*args, **kwargs):
            self.step(name)
            return real(*args, **kwargs)

        return call

    def watch_copies(self):
        """Every single block of every copy."""
        real = transfers_module.copy_blocks

        def copy_blocks(job, start, stop):
            sums = []
            for i in range(start, stop):
                sums += real(job, i, i + 1)
                self.step("copy of a block")
            return sums

        self.monkeypatch.setattr(transfers_module, "copy_blocks", copy_blocks)


def watch_all(faults, core):
    """Every collaborator of a commit, in whatever order it is called."""
    residency, ram, commits = core.residency, core.ram, core.service.commits
    faults.watch(commits._admission, "admit")
    faults.watch(residency, "find_or_collide", "pin", "evict", "index_room", "insert")
    faults.watch(residency._policy, "insert", "touch", "pin", "victims")
    faults.watch(residency.table, "insert")
    faults.watch(residency.columns, "allocate", "peek")
    faults.watch(commits._room, "reserve", "index_rows")
    faults.watch(ram, "reserve", "grow")
    faults.watch(ram.slabs, "allocate", "room")
    faults.watch(ram.pool, "set_even")
    faults.watch(core.transfers, "copy_in")
    faults.watch_copies()


@dataclass
class Scene:
    """A commit under pressure: some of its keys are there, some need room that others have."""

    harness: Harness

    def __post_init__(self):
        core = self.harness
        groups = (full("a", 4096), full("b", 3 * 4096))
        self.session = core.session(8 << 20)
        self.opened = core.open(self.session, spec(groups=groups, tp_size=2))
        self.keys = keys_of("chain", 7)
        # The other rank has some of them, so that blocks join units.
        assert core.put(self.session, self.opened, self.keys[:5], rank=1) == [STORED] * 5
        assert core.put(self.session, self.opened, self.keys[:3]) == [STORED] * 3
        crowd = core.open(self.session, spec(model="crowd"))
        other_rank = core.open(self.session, spec(groups=groups, tp_size=2), [1])
        while core.core.residency.evicted_total == 0:
            core.put(self.session, crowd, keys_of(core.core.residency.columns.used, 250))
            # Used just now, so that the crowd makes room.
            assert core.lookup(self.session, other_rank, self.keys).blocks == 5
        assert core.lookup(self.session, self.opened, self.keys).blocks == 3

    def commit(self):
        return self.harness.put(
            self.session, self.opened, self.keys[2:], parent=self.keys[1], rank=0
        )

    def visible(self):
        return self.harness.lookup(self.session, self.opened, self.keys).blocks

    def verify(self):
        grant = self.harness.acquire(self.session, self.opened, self.keys)
        self.harness.verify(grant, self.keys)
        self.harness.release(self.session, grant)


def run_once(monkeypatch, error, fail_at):
    """One commit whose step `fail_at` fails; the steps until then."""
    with Harness(ram="4MiB") as harness:
        scene = Scene(harness)
        faults = Faults(monkeypatch, error, fail_at)
        watch_all(faults, harness.core)
        faults.counting = True
        try:
            status = scene.commit()
        except (BrokenError, OSError):
            status = None
        faults.counting = False
        if len(faults.steps) < fail_at or fail_at == 0:
            assert status == [CommitStatus.ALREADY_STORED] + [STORED] * 4
            return faults.steps
        name = faults.steps[-1]
        assert status is None or set(status) <= {
            CommitStatus.ALREADY_STORED,
            CommitStatus.FAILED,
        }, f"{name}: its failure was not told"
        assert scene.visible() == 3, f"{name}: something is visible"
        harness.check_at_rest()
        assert not harness.core.residency.columns.pins.any(), f"{name}: something is pinned"
        status = scene.commit()
        assert set(status) <= {STORED, CommitStatus.ALREADY_STORED}, f"{name}: no second try"
        assert scene.visible() == 5
        scene.verify()
        harness.check_at_rest()
        monkeypatch.undo()
        return faults.steps


def test_the_steps_are_those_of_a_whole_commit(monkeypatch):
    steps = run_once(monkeypatch, BrokenError(), 0)
    assert set(steps) >= {
        "admit",
        "find_or_collide",
        "pin",
        "evict",
        "victims",
        "index_room",
        "insert",
        "touch",
        "allocate",
        "peek",
        "reserve",
        "index_rows",
        "room",
        "set_even",
        "copy_in",
        "copy of a block",
    }
    assert steps.count("copy of a block") == 8
    assert steps.count("insert") == 3, "of residency, policy and table"


def test_a_table_without_a_place_is_told_by_status(monkeypatch):
    """Whatever the seed: the next try may find one, in another table."""
    steps = run_once(monkeypatch, BrokenError(), 0)
    last = len(steps) - steps[::-1].index("insert")
    monkeypatch.undo()
    run_once(monkeypatch, TableFullError(), last)


@pytest.mark.parametrize("kind", ["bug", "OSError"])
@pytest.mark.promise("P03", gate=1, unit="sweeps over all steps")
def test_whatever_fails_leaves_nothing(kind):
    fail_at = 1
    while True:
        error = BrokenError() if kind == "bug" else OSError(5, "Input/output error")
        with pytest.MonkeyPatch.context() as monkeypatch:
            steps = run_once(monkeypatch, error, fail_at)
        if len(steps) < fail_at:
            break
        fail_at += 1
    assert fail_at > 40

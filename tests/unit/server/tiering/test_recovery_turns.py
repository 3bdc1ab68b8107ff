"""Recovery goes on behind the work: it gives the event loop back before anybody notices."""

import pytest

from tests.fakes.core_harness import Harness
from tests.fakes.sealed_segments import write_segments
from tests.fakes.turns import Turns

TURN_S = 0.05


@pytest.mark.parametrize(("records", "members"), [(300_000, 1), (200_000, 16)])
def test_no_turn_of_the_loop_is_long(tmp_path, monkeypatch, records, members):
    write_segments(tmp_path / "nvme", records, members=members)
    extra = f'[nvme]\ndirectories = ["{tmp_path}/nvme"]\nmax = "8GiB"\nfree_min = "0B"\n'
    turns = Turns(monkeypatch)
    harness = Harness(extra=extra)
    try:
        harness.run(harness.core.nvme.recovery.settled())
        assert harness.core.nvme.recovery.counts.blocks > 0.99 * records
        assert turns.longest_s < TURN_S
        harness.core.residency.check()
    finally:
        harness.close()

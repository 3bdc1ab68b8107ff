"""Hints, by a real client of a real daemon with nvme."""

import pytest

import kvkeep
from tests.e2e.nvme_daemon import LENGTH, NBYTES, chains_of, config
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import chain_keys
from tests.fakes.waiting import wait_until


def pending(chains, name) -> int:
    """Blocks of a chain that would have to be waited for."""
    with chains.namespace.acquire(chain_keys(name, LENGTH), wait_s=0) as found:
        return found.pending


def test_a_hinted_chain_is_there_when_it_is_asked_for(tmp_path, way):
    with (
        running_daemon(tmp_path, config(tmp_path / "nvme")) as daemon,
        chains_of(daemon, way=way) as chains,
    ):
        assert chains.store("hinted", "not hinted") == 0
        # The pool holds 13 of them.
        assert chains.store(*range(20)) == 0
        keys = chain_keys("hinted", LENGTH)
        assert chains.namespace.prefetch(keys, byte_budget=5 * NBYTES) == 5
        assert chains.namespace.prefetch(keys) > 0
        wait_until(lambda: chains.namespace.prefetch(keys) == 0, 10, "all of it is in ram")
        assert pending(chains, "hinted") == 0
        assert pending(chains, "not hinted") == LENGTH
        assert chains.read("hinted") == LENGTH
        with pytest.raises(kvkeep.InvalidArgumentError, match="within_s"):
            chains.namespace.prefetch(keys, within_s=0)
        daemon.check_log()

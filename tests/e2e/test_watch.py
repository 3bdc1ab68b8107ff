"""A router in a process of its own client: it knows what the host has, also through evictions."""

import threading

import pytest
import xxhash

import kvkeep
from kvkeep import ChangeKind, Tier
from tests.e2e.nvme_daemon import LENGTH, NBYTES, chains_of, config
from tests.fakes.daemon_process import DaemonProcess, running_daemon
from tests.fakes.generated_blocks import chain_keys, spec, split, store_chain
from tests.fakes.waiting import wait_until


class Router:
    """Listens in a thread."""

    def __init__(self, watch, known=None):
        self.watch = watch
        self.known = known or {tier: set() for tier in Tier}
        self.digests = {}
        self.last = 0
        self.error = None
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self):
        try:
            for change in self.watch:
                self._hear(change)
        except kvkeep.KVKeepError as error:
            self.error = error

    def _hear(self, change):
        self.last, known = change.sequence, self.known[change.tier]
        if change.kind is ChangeKind.ALL_CLEARED:
            self.known = {tier: set() for tier in Tier}
        elif change.kind is ChangeKind.STORED:
            known |= set(change.keys)
        elif change.kind is ChangeKind.REMOVED:
            known -= set(change.keys)
        else:
            self.digests[change.tier] = change.digest
            assert change.digest == sum(map(xxhash.xxh3_64_intdigest, known)) % (1 << 64)

    def stop(self):
        self.watch.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_a_router_knows_both_tiers(tmp_path):
    with (
        running_daemon(tmp_path, config(tmp_path / "nvme")) as daemon,
        chains_of(daemon) as chains,
    ):
        assert chains.store("before") == 0
        with kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client:
            seen = client.open_namespace(spec(NBYTES))
            router = Router(client.watch(seen))
            # The pool holds 13 chains; what leaves it stays on nvme.
            assert chains.store(*range(20)) == 0
            stats = chains.client.stats()
            wait_until(lambda: len(router.known[Tier.NVME]) == 21 * LENGTH, 10, "all is told")
            wait_until(lambda: len(router.known[Tier.RAM]) == stats.pool.blocks, 10, "evictions")
            assert set(router.digests) == {Tier.RAM, Tier.NVME}
            keys = chain_keys("before", LENGTH)
            chains.namespace.remove(keys)
            gone = set(split(keys))
            wait_until(lambda: not gone & router.known[Tier.NVME], 10, "the removal is told")
            router.stop()
            assert router.error is None
            assert client.stats().blocks_removed_total > 0
            chains.store("meanwhile")
            again = Router(client.watch(seen, from_sequence=router.last), router.known)
            new = set(split(chain_keys("meanwhile", LENGTH)))
            wait_until(lambda: new <= again.known[Tier.NVME], 10, "it has gone on")
            wait_until(lambda: again.digests, 10, "and holds what is there")
            again.stop()
            assert again.error is None
            with pytest.raises(kvkeep.InvalidArgumentError, match="begin with 0"):
                next(client.watch(from_sequence=77))
        daemon.check_log()


def test_a_watch_ends_with_the_epoch_of_what_it_watches(tmp_path):
    with (
        running_daemon(tmp_path) as daemon,
        kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client,
    ):
        namespace = client.open_namespace(spec(NBYTES))
        store_chain(namespace, chain_keys("a", 3))
        router = Router(client.watch(namespace))
        wait_until(lambda: len(router.known[Tier.RAM]) == 3, 10, "it is told")
        namespace.advance_epoch()
        router.thread.join(10)
        assert not router.thread.is_alive()
        assert router.error is None
        assert not router.known[Tier.RAM]
        wait_until(lambda: namespace.namespace_epoch == 1, 10, "it is open again")
        store_chain(namespace, chain_keys("b", 2))
        router = Router(client.watch(namespace))
        wait_until(lambda: len(router.known[Tier.RAM]) == 2, 10, "it is told of the next epoch")


def test_a_watch_ends_with_its_daemon_and_its_client(tmp_path):
    daemon = DaemonProcess(tmp_path)
    daemon.start()
    try:
        with kvkeep.connect(daemon.runtime_dir, timeout_s=20) as client:
            namespace = client.open_namespace(spec(NBYTES))
            store_chain(namespace, chain_keys("a", 3))
            router = Router(client.watch())
            wait_until(lambda: len(router.known[Tier.RAM]) == 3, 10, "it is told")
            daemon.kill()
            router.thread.join(10)
            assert isinstance(router.error, kvkeep.UnavailableError)
            daemon.start()
            wait_until(lambda: client.attached, 20, "it is attached again")
            again = client.watch()
            assert next(again).kind is ChangeKind.ALL_CLEARED
            with pytest.raises(kvkeep.InvalidArgumentError, match="begin with 0"):
                next(client.watch(from_sequence=router.last))
            waiting = Router(again)
        waiting.thread.join(10)
        assert not waiting.thread.is_alive()
        daemon.check_log()
    finally:
        daemon.kill()

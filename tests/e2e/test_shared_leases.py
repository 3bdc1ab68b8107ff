"""A lease that one process takes and others read under: a scheduler and its workers."""

import pytest

import kvkeep
from tests.fakes.client_process import Wire, client_processes
from tests.fakes.daemon_process import running_daemon
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec, store_chain
from tests.fakes.waiting import wait_until

BLOCK_NBYTES = 16 * 1024
BLOCKS = 32
RANKS = 2
SPEC = spec(BLOCK_NBYTES, tp_size=RANKS)
KEYS = chain_keys("prompt", BLOCKS)
# Of what a lease tells: in its version, its length, its checksum, and what that covers.
FLIPPED = [0, 5, *range(32, 200)]
CONFIG = '[ram]\nsize = "16MiB"\nslab = "256KiB"\n'


def schedule(wire: Wire, runtime_dir: str) -> None:
    """Leases what is there for all ranks, tells it, and holds it until it is told to go on."""
    with kvkeep.connect(runtime_dir) as client:
        namespace = client.open_namespace(SPEC)
        with namespace.acquire(KEYS) as acquired:
            wire.tell(acquired.share())
            wire.hear()
        wire.tell("given back")
        wire.hear()


def right(acquired: kvkeep.Acquired, rank: int) -> bool:
    expected = blocks_of(place_of("", rank), KEYS, BLOCK_NBYTES)
    views = acquired.views()
    return len(views) == BLOCKS and all(
        view == block.data for view, block in zip(views, expected, strict=True)
    )


def push_out(client: kvkeep.Client) -> None:
    """Stores more than the pool holds."""
    namespace = client.open_namespace(SPEC, [0])
    for chain in range(3 * 16 * 1024 * 1024 // (BLOCKS * BLOCK_NBYTES)):
        store_chain(namespace, chain_keys(("other", chain), BLOCKS), rank=0)


def store_all_ranks(client: kvkeep.Client) -> None:
    namespace = client.open_namespace(SPEC)
    for rank in range(RANKS):
        store_chain(namespace, KEYS, rank=rank)


@pytest.mark.parametrize("scheduler_ends", ["gives it back", "is killed"])
def test_a_worker_reads_under_its_schedulers_lease(tmp_path, scheduler_ends):
    with (
        running_daemon(tmp_path, CONFIG) as daemon,
        client_processes() as start,
        kvkeep.connect(daemon.runtime_dir) as client,
    ):
        store_all_ranks(client)
        workers = [kvkeep.connect(daemon.runtime_dir) for _ in range(RANKS)]
        scheduler = start(schedule, str(daemon.runtime_dir))
        shared = scheduler.hear()
        joined = [
            worker.open_namespace(SPEC, [rank]).join(shared) for rank, worker in enumerate(workers)
        ]
        if scheduler_ends == "is killed":
            scheduler.kill()
        else:
            scheduler.tell("go on")
            assert scheduler.hear() == "given back"
            scheduler.tell("end")
            scheduler.end()
        wait_until(lambda: client.stats().sessions == RANKS + 1, 5.0, "the scheduler is gone")
        push_out(client)
        assert all(right(acquired, rank) for rank, acquired in enumerate(joined))
        # It ends with the last who holds it.
        joined[0].release()
        assert client.stats().leases == 1
        assert joined[1].exact() == BLOCKS
        workers[1].close()
        wait_until(lambda: client.stats().leases == 0, 5.0, "the last one is gone")
        with pytest.raises(kvkeep.LeaseLostError):
            workers[0].open_namespace(SPEC, [0]).join(shared)
        workers[0].close()


@pytest.mark.parametrize("first", ["who joined", "who acquired"])
def test_several_hold_it_in_one_process(tmp_path, first):
    """A scheduler may be its own worker: the daemon counts sessions, not holders."""
    with running_daemon(tmp_path, CONFIG) as daemon, kvkeep.connect(daemon.runtime_dir) as client:
        store_all_ranks(client)
        namespace = client.open_namespace(SPEC, [0])
        acquired = namespace.acquire(KEYS)
        joined = namespace.join(acquired.share())
        holders = [joined, acquired] if first == "who joined" else [acquired, joined]
        holders[0].release()
        push_out(client)
        assert right(holders[1], 0)
        holders[1].renew()
        assert client.stats().leases == 1
        holders[1].release()
        wait_until(lambda: client.stats().leases == 0, 5.0, "the last one gave it back")


def test_who_cannot_join_is_told(tmp_path):
    with running_daemon(tmp_path, CONFIG) as daemon, kvkeep.connect(daemon.runtime_dir) as client:
        store_all_ranks(client)
        namespace = client.open_namespace(SPEC)
        acquired = namespace.acquire(KEYS)
        shared = acquired.share()
        parts = [shared[:nbytes] for nbytes in range(len(shared))]
        flipped = [bytes([*shared[:at], shared[at] ^ 4, *shared[at + 1 :]]) for at in FLIPPED]
        for wrong in (*parts, *flipped, shared[4:], shared + b"x", b"x" * 100, 7):
            with pytest.raises(kvkeep.InvalidArgumentError):
                namespace.join(wrong)
        other = client.open_namespace(spec(BLOCK_NBYTES, model="other"))
        with pytest.raises(kvkeep.InvalidArgumentError, match="another namespace"):
            other.join(shared)
        acquired.release()
        with pytest.raises(kvkeep.LeaseLostError):
            acquired.share()
        with pytest.raises(kvkeep.LeaseLostError):
            namespace.join(shared)
        kept = namespace.acquire(KEYS)
        shared = kept.share()
        epoch = client.server_epoch
        daemon.kill()
        daemon.start()
        wait_until(
            lambda: client.attached and client.server_epoch != epoch, 5.0, "it attaches again"
        )
        with pytest.raises(kvkeep.LeaseLostError, match="the daemon that gave it"):
            namespace.join(shared)
        # What was leased of the dead daemon is still memory, and still right; its lease is not.
        assert kept.exact(rank=0) == BLOCKS
        with pytest.raises(kvkeep.LeaseLostError, match="ended with its session"):
            kept.renew()
        kept.release()

"""Client programs that read under a lease: one is stopped and outlives it, one keeps it alive."""

import time

import kvkeep
from tests.fakes.client_process import Wire
from tests.fakes.generated_blocks import blocks_of, chain_keys, place_of, spec, store_chain

BLOCK_NBYTES = 16 * 1024
BLOCKS = 64
SPEC = spec(BLOCK_NBYTES)


def outlive(wire: Wire, runtime_dir: str, name: str, ttl_s: float) -> None:
    """Leases a chain of its own, tells so and is stopped; then says what it reads and is told.

    For each round (differing blocks, blocks that it is told are exact, renewed, told of the loss).
    """
    keys = chain_keys(("outlive", name), BLOCKS)
    expected = blocks_of(place_of(""), keys, BLOCK_NBYTES)
    with kvkeep.connect(runtime_dir, timeout_s=10.0) as client:
        namespace = client.open_namespace(SPEC)
        while True:
            store_chain(namespace, keys)
            acquired = namespace.acquire(keys, ttl_s=ttl_s)
            views = acquired.views()
            right = [view == row.data for view, row in zip(views, expected, strict=False)]
            wire.tell(right.count(True) if all(right) else "wrong under a live lease")
            what_then = wire.hear()
            if what_then == "end":
                return
            right = [view == row.data for view, row in zip(views, expected, strict=True)]
            exact = acquired.exact()
            assert all(right[:exact]), "a block that was said to be exact is not"
            renewed = _renewed(acquired) if what_then == "renew" else None
            wire.tell((right.count(False), exact, renewed, _told_of_loss(acquired)))


def _renewed(acquired: kvkeep.Acquired) -> bool:
    try:
        acquired.renew()
    except kvkeep.LeaseLostError:
        return False
    return True


def _told_of_loss(acquired: kvkeep.Acquired) -> bool:
    try:
        acquired.release()
    except kvkeep.LeaseLostError:
        return True
    return False


def keep(wire: Wire, runtime_dir: str, name: str, ttl_s: float) -> None:
    """Leases a chain and renews it in time, reading all the while; tells (passes, wrong blocks)."""
    keys = chain_keys(("keep", name), BLOCKS)
    expected = blocks_of(place_of(""), keys, BLOCK_NBYTES)
    with kvkeep.connect(runtime_dir, timeout_s=10.0) as client:
        namespace = client.open_namespace(SPEC)
        store_chain(namespace, keys)
        passes = wrong = 0
        with namespace.acquire(keys, ttl_s=ttl_s) as acquired:
            wire.tell(acquired.leased)
            renewed_s = time.monotonic()
            while not wire.asked():
                wrong += [
                    view == row.data for view, row in zip(acquired.views(), expected, strict=True)
                ].count(False)
                passes += 1
                if time.monotonic() - renewed_s > ttl_s / 4:
                    acquired.renew(ttl_s)
                    renewed_s = time.monotonic()
            assert acquired.exact() == BLOCKS
        wire.tell((passes, wrong))

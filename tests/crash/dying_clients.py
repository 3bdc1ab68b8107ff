"""Client programs that are killed or stopped: one for each phase of a client's life, and a mix."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import kvkeep
from kvkeep.fd_socket import FdSocket
from kvkeep.results import CommitStatus
from kvkeep.v1.session_pb2 import SideHello
from tests.fakes.client_process import Wire
from tests.fakes.generated_blocks import (
    KEY_NBYTES,
    blocks_of,
    chain_keys,
    place_of,
    spec,
    split,
    store_chain,
)

BLOCK_NBYTES = 64 * 1024
BLOCKS = 64
STAGING_NBYTES = BLOCKS * BLOCK_NBYTES
PHASES = ("attached", "half filled", "leased", "in commit")
BEGUN, OVER = "commit begun", "commit over"
SPEC = spec(BLOCK_NBYTES)


def verify(keys: bytes, blocks) -> None:
    expected = blocks_of(place_of(""), keys[: len(blocks) * KEY_NBYTES], BLOCK_NBYTES)
    assert all(block == expected[i].tobytes() for i, block in enumerate(blocks)), "wrong bytes"


def live(wire: Wire, runtime_dir: str, phase: str, name: str) -> None:
    """Enters a phase, tells so, and waits there; told to go on, says what became of it."""
    with kvkeep.connect(runtime_dir, staging_nbytes=STAGING_NBYTES, timeout_s=5.0) as client:
        {
            "attached": _attached,
            "half filled": _half_filled,
            "leased": _leased,
            "in commit": _in_commit,
        }[phase](wire, client, name)


def _attached(wire: Wire, client: kvkeep.Client, name: str) -> None:
    wire.tell("there")
    wire.hear()
    wire.tell(_come_back(client, name))


def _half_filled(wire: Wire, client: kvkeep.Client, name: str) -> None:
    keys = chain_keys((name, "half filled"), BLOCKS)
    namespace = client.open_namespace(SPEC)
    store = namespace.store(keys)
    content = blocks_of(place_of(""), keys, BLOCK_NBYTES)
    for i in range(BLOCKS // 2):
        store.views[i][:] = content[i].data
    wire.tell("there")
    wire.hear()
    # The staging memory is still mapped: filling on hurts nobody.
    for i in range(BLOCKS // 2, BLOCKS):
        store.views[i][:] = content[i].data
    try:
        store.commit()
        wire.tell("committed in a session that is over")
    except kvkeep.SessionLostError:
        wire.tell(_come_back(client, name))


def _leased(wire: Wire, client: kvkeep.Client, name: str) -> None:
    keys = chain_keys((name, "leased"), BLOCKS)
    namespace = client.open_namespace(SPEC)
    assert store_chain(namespace, keys).stored == BLOCKS
    acquired = namespace.acquire(keys)
    verify(keys, acquired.views())
    wire.tell("there")
    wire.hear()
    try:
        acquired.renew()
        wire.tell("renewed in a session that is over")
    except (kvkeep.LeaseLostError, kvkeep.SessionLostError):
        # Its views are memory still; what they show is for the generations to say.
        if acquired.exact() == BLOCKS:
            verify(keys, acquired.views())
        wire.tell(_come_back(client, name))


def _in_commit(wire: Wire, client: kvkeep.Client, name: str) -> None:
    """Commits without a pause; tells when each commit begins and when it is over."""
    namespace = client.open_namespace(SPEC)
    number = 0
    while not wire.asked():
        number += 1
        keys = chain_keys((name, "in commit", number), BLOCKS)
        try:
            store = namespace.store(keys)
            _fill(store, keys)
        except kvkeep.UnavailableError:
            time.sleep(0.02)
            continue
        wire.tell(BEGUN)
        with contextlib.suppress(kvkeep.UnavailableError):
            store.commit(timeout_s=60.0)
        wire.tell(OVER)
    wire.hear()
    wire.tell(_come_back(client, name))


def _fill(store: kvkeep.Store, keys: bytes) -> None:
    content = blocks_of(place_of(""), keys, BLOCK_NBYTES)
    for position, view in zip(store.new, store.views, strict=True):
        view[:] = content[position].data


def _come_back(client: kvkeep.Client, name: str) -> str:
    """Stores and reads in the new session; "back" when that works in 2 s."""
    keys = chain_keys((name, "back"), 8)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        try:
            namespace = client.open_namespace(SPEC)
            store_chain(namespace, keys)
            with namespace.acquire(keys) as acquired:
                verify(keys, acquired.views())
                if acquired.leased == 8:
                    return "back"
        except kvkeep.KVKeepError:
            time.sleep(0.02)
    return "not back"


def say_hello(wire: Wire, runtime_dir: str) -> None:
    """Has its session and its memory, and never gets to use either."""
    fd_socket = FdSocket(Path(runtime_dir) / "kvkeep.fd.sock")
    hello = SideHello(
        layout_versions=[2], staging_nbytes=STAGING_NBYTES, pid=os.getpid(), client_name="early"
    )
    welcome = fd_socket.open(hello, 5.0)
    wire.tell(len(welcome[0].fds))
    wire.hear()


def mix(wire: Wire, runtime_dir: str, seed: int, death: float) -> None:
    """Stores, leases and reads; one operation in `1 / death` ends, somewhere, by its SIGKILL."""
    source = random.Random(seed)

    def may_die() -> None:
        if source.random() < 0.3:
            die()

    with kvkeep.connect(runtime_dir, staging_nbytes=STAGING_NBYTES, timeout_s=10.0) as client:
        namespace = client.open_namespace(SPEC)
        wire.tell("there")
        operations = 0
        while not wire.asked():
            dying = source.random() < death
            keys = chain_keys(("mix", source.randrange(120)), BLOCKS // 4)
            _one_operation(source, namespace, keys, may_die if dying else lambda: None)
            operations += 1
            if dying:
                die()
        wire.tell(operations)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _one_operation(
    source: random.Random, namespace: kvkeep.Namespace, keys: bytes, may_die: Callable[[], None]
) -> None:
    if source.random() < 0.4:
        with namespace.acquire(keys) as acquired:
            may_die()
            verify(keys, acquired.views())
        buffers = [bytearray(BLOCK_NBYTES) for _ in split(keys)]
        verify(keys, buffers[: namespace.read_into(keys, buffers)])
        return
    try:
        store = namespace.store(keys)
        may_die()
        _fill(store, keys)
        pending = store.begin()
        may_die()
        result = store.finish(pending)
        assert CommitStatus.FAILED not in result.status
    except kvkeep.ResourceExhaustedError:
        pass

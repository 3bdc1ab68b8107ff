"""What is no argument is refused in one way: InvalidArgumentError, which names the field."""

import math
from decimal import Decimal

import numpy as np
import pytest

import kvkeep
from tests.unit.client.conftest import BLOCK_NBYTES, chain, spec, store

KEYS = chain(3)
# An int of so many digits has no repr either.
HUGE = 10**5000
NO_NUMBERS = ["x", "", b"", [], {}, (), object(), 1.5, math.nan, math.inf, -1, HUGE, np.arange(2)]
NO_LIMITS = [*NO_NUMBERS, None]
NO_SECONDS = ["1", "", b"", [], object(), math.nan, math.inf, -1, -0.001, HUGE, np.arange(2.0), 1j]
NO_SECONDS += [Decimal("sNaN"), 2**40]
NO_HINTS = [{}, "x", 0, (), b""]
BLOCKS = bytearray(3 * BLOCK_NBYTES)
NO_BUFFERS = [None, "x", 7, object(), [None] * 3, b"x", []]
NO_BUFFERS += [np.zeros(3 * BLOCK_NBYTES // 8, object), np.zeros(6 * BLOCK_NBYTES, np.uint8)[::2]]


class Refuses:
    """Stands for tensors of more than one element, which a float refuses in its own way."""

    def __float__(self):
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


NO_SECONDS.append(Refuses())
CALLS = {
    "open_namespace": lambda _, client, value: client.open_namespace(spec(), value),
    "poll": lambda _, client, value: client.poll(value),
    "stats": lambda _, client, value: client.stats(value),
    "watch": lambda _, client, value: client.watch(value),
    "watch from": lambda _, client, value: client.watch(from_sequence=value),
    "lookup": lambda namespace, _, value: namespace.lookup(value),
    "lookup hints": lambda namespace, _, value: namespace.lookup(KEYS, hints=value),
    "read": lambda namespace, _, value: namespace.read_into(KEYS, value),
    "read rank": lambda namespace, _, value: namespace.read_into(KEYS, BLOCKS, rank=value),
    "read group": lambda namespace, _, value: namespace.read_into(KEYS, BLOCKS, group=value),
    "join": lambda namespace, _, value: namespace.join(value),
    "store": lambda namespace, _, value: namespace.store(value),
    "store parent": lambda namespace, _, value: namespace.store(KEYS, parent_key=value),
    "store rank": lambda namespace, _, value: namespace.store(KEYS, rank=value),
    "store positions": lambda namespace, _, value: namespace.store(KEYS, positions=value),
    "store ack": lambda namespace, _, value: namespace.store(KEYS, ack=value),
    "store hints": lambda namespace, _, value: namespace.store(KEYS, hints=value),
    "store timeout": lambda namespace, _, value: namespace.store(KEYS, timeout_s=value),
    "store blocks": lambda namespace, _, value: namespace.store_blocks(KEYS, value),
    "remove": lambda namespace, _, value: namespace.remove(value),
    "remove all": lambda namespace, _, value: namespace.remove(KEYS, with_descendants=value),
    "remove timeout": lambda namespace, _, value: namespace.remove(KEYS, timeout_s=value),
    "epoch": lambda namespace, _, value: namespace.advance_epoch(value),
    "epoch timeout": lambda namespace, _, value: namespace.advance_epoch(timeout_s=value),
    "prefetch": lambda namespace, _, value: namespace.prefetch(value),
    "prefetch within": lambda namespace, _, value: namespace.prefetch(KEYS, within_s=value),
    "prefetch budget": lambda namespace, _, value: namespace.prefetch(KEYS, byte_budget=value),
    "prefetch hints": lambda namespace, _, value: namespace.prefetch(KEYS, hints=value),
    "prefetch timeout": lambda namespace, _, value: namespace.prefetch(KEYS, timeout_s=value),
    "pin keys": lambda namespace, _, value: namespace.pin(value),
    "pin": lambda namespace, _, value: namespace.pin(KEYS, keep_for_s=value),
    "pin timeout": lambda namespace, _, value: namespace.pin(KEYS, timeout_s=value),
    "unpin": lambda namespace, _, value: namespace.unpin(value),
    "unpin timeout": lambda namespace, _, value: namespace.unpin(timeout_s=value),
}
NO_KEYS = ["x", None, 7, ["x"], [None], [b"short"], b"short", np.arange(32), object()]
# 32 elements of four bytes.
NO_KEYS += [[memoryview(bytes(128)).cast("I")]]
NO_GROUPS = [*NO_NUMBERS, 7]
REFUSED = {
    "open_namespace": ("local_ranks", [7, -1, [1], "0", [None], [HUGE], object()]),
    "poll": ("limit", NO_NUMBERS),
    "stats": ("timeout_s", NO_SECONDS),
    "watch": ("namespaces", ["x", None, 7, object()]),
    "watch from": ("from_sequence", NO_LIMITS),
    "lookup": ("keys", NO_KEYS),
    "lookup hints": ("hints", NO_HINTS),
    "read": ("buffers", [*NO_BUFFERS, bytes(3 * BLOCK_NBYTES)]),
    "read rank": ("rank", NO_GROUPS),
    "read group": ("group", NO_LIMITS),
    "join": ("shared", ["x", None, 7, b"", object(), [b"x"]]),
    "store": ("keys", NO_KEYS),
    "store parent": ("parent_key", ["x" * 32, 7, b"short", [b"k" * 32], object(), HUGE]),
    "store rank": ("rank", NO_GROUPS),
    "store positions": ("positions", [[0], 7, "x", {0: 5}, {"x": [0]}, {0: [0]}, object()]),
    "store ack": ("ack", ["disk", None, 7, ["ram"], {}]),
    "store hints": ("hints", NO_HINTS),
    "store timeout": ("timeout_s", NO_SECONDS),
    "store blocks": ("buffers", [*NO_BUFFERS, np.zeros((2, 3))]),
    "remove": ("keys", NO_KEYS),
    "remove all": ("with_descendants", [None, "x", 7, object()]),
    "remove timeout": ("timeout_s", NO_SECONDS),
    "epoch": ("expected_epoch", NO_NUMBERS),
    "epoch timeout": ("timeout_s", NO_SECONDS),
    "prefetch": ("keys", NO_KEYS),
    "prefetch within": ("within_s", [*NO_SECONDS, 0, None]),
    "prefetch budget": ("byte_budget", NO_NUMBERS),
    "prefetch hints": ("hints", NO_HINTS),
    "prefetch timeout": ("timeout_s", NO_SECONDS),
    "pin keys": ("keys", NO_KEYS),
    "pin": ("keep_for_s", [*NO_LIMITS, 2**32]),
    "pin timeout": ("timeout_s", NO_SECONDS),
    "unpin": ("pins", [None, 7, "x", object()]),
    "unpin timeout": ("timeout_s", NO_SECONDS),
}
ACQUIRE = {
    "ttl_s": NO_SECONDS,
    "byte_budget": NO_NUMBERS,
    "hints": NO_HINTS,
    "timeout_s": NO_SECONDS,
    "skip_blocks": [*NO_LIMITS, 4],
}


def refuses(field, call, values):
    wrong = {}
    for value in values:
        try:
            answer = call(value)
        except kvkeep.InvalidArgumentError as error:
            if not str(error).startswith(field):
                wrong[type(value).__name__] = f"{value!s:.30}: {error}"
        except Exception as error:  # noqa: BLE001 - that it is another is the failure
            wrong[type(value).__name__] = f"{type(error).__name__}: {error}"
        else:
            wrong[type(value).__name__] = f"was taken, and gave {answer!r}"
    assert not wrong


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_argument_is_refused_by_its_name(client, namespace, name):
    field, values = REFUSED[name]
    refuses(field, lambda value: CALLS[name](namespace, client, value), values)


@pytest.mark.parametrize("field", ACQUIRE)
@pytest.mark.parametrize("call", ["acquire", "submit_acquire"])
def test_what_is_no_term_of_an_acquire_is_refused(client, namespace, call, field):
    take = getattr(namespace, call)
    refuses(field, lambda value: take(KEYS, **{field: value}), ACQUIRE[field])
    refuses("keys", take, NO_KEYS)
    assert client.poll() == []


def test_how_long_to_wait_is_seconds(namespace):
    refuses("wait_s", lambda value: namespace.acquire(KEYS, wait_s=value), [*NO_SECONDS, None])


def test_an_open_store_refuses_and_goes_on(namespace):
    with namespace.store(KEYS) as pending:
        refuses("group", pending.group_views, [*NO_LIMITS, 7])
        refuses("group", pending.new_of, [*NO_LIMITS, 7])
        refuses("timeout_s", pending.commit, NO_SECONDS)
        refuses("timeout_s", pending.submit_commit, NO_SECONDS)
    assert pending.result.stored == 3


def test_a_lease_refuses_and_goes_on(namespace):
    store(namespace, KEYS)
    with namespace.acquire(KEYS) as acquired:
        for what in ("views", "positions", "addresses", "exact"):
            refuses("group", lambda value, what=what: getattr(acquired, what)(0, value), NO_GROUPS)
            refuses("rank", getattr(acquired, what), NO_GROUPS)
        refuses("block", acquired.array, ["x", None, 1.0, math.nan, object(), slice(1)])
        with pytest.raises(IndexError):
            acquired.array(3)
        refuses("ttl_s", acquired.renew, NO_SECONDS)
        refuses("timeout_s", lambda value: acquired.renew(timeout_s=value), NO_SECONDS)
        shared = acquired.share()
        refuses("ttl_s", lambda value: namespace.join(shared, ttl_s=value), NO_SECONDS)
        assert acquired.exact() == 3


def test_another_clients_namespace_is_not_watched(daemon, client, namespace):
    with kvkeep.connect(daemon.directory) as other:
        refuses("namespaces", other.watch, [namespace])


@pytest.mark.parametrize("limit", [0, 1, True, np.int64(2)])
def test_what_is_a_limit_is_taken(client, limit):
    assert client.poll(limit) == client.poll(limit=None) == []

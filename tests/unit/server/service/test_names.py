"""P22: no path from a name: whatever tenants, models and clients call themselves."""

import itertools
import random
import sys
from contextlib import contextmanager

import pytest

from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.service.keyspace_numbers import KeyspaceNumbers
from kvkeep_server.service.namespaces import NamespaceLimits, Namespaces
from kvkeep_server.tiering.epochs import Epochs
from tests.fakes.core_harness import Harness, close_offers, hello, keys_of, spec

PIECES = ["..", "/", "\0", "\n", "\\", "~", "$HOME", "-SEP-", "--", "@@x", "../evil", "/etc/passwd"]
PIECES += ["C:\\Windows", "con", ".", " ", "%2e%2e", "\u202e", "\ufeff", "\U0001f600", "a" * 255]
PIECES += ["mistralai/Mistral-7B-Instruct-v0.2", "org/model-SEP-name", "x" * 300, "proc/self/fd/3"]

# Audit events of whatever reaches the file system, starts a program or names a socket.
WATCHED = (
    "open",
    "os.",
    "shutil.",
    "socket.bind",
    "socket.connect",
    "subprocess.",
    "ctypes.dlopen",
)


class Audit:
    """Hears every audit event of the process while it listens. A hook cannot be taken back."""

    def __init__(self):
        self.listening = False
        self.heard = []
        sys.addaudithook(self.hear)

    def hear(self, event, arguments):
        if self.listening and event.startswith(WATCHED):
            self.heard.append((event, arguments))

    @contextmanager
    def listen(self):
        self.heard = []
        self.listening = True
        try:
            yield self.heard
        finally:
            self.listening = False


@pytest.fixture(scope="module")
def audit():
    return Audit()


def test_the_audit_hears_what_it_should(audit, tmp_path):
    with audit.listen() as heard:
        (tmp_path / "file").write_text("x")
        (tmp_path / "file").rename(tmp_path / "other")
    assert {event for event, _ in heard} >= {"open", "os.rename"}


def names(source):
    while True:
        yield "".join(source.choices(PIECES, k=source.randrange(1, 4)))[:256]


@pytest.mark.promise("P22", gate=100_000, nightly=1_000_000, unit="names")
def test_no_name_of_a_namespace_touches_a_file(audit, promise_count):
    drawn = names(random.Random(22))
    opened = refused = 0
    with audit.listen() as heard:
        for _ in range(promise_count // 8 // 1000 + 1):
            limits = NamespaceLimits(1000, 1000, 1000, 1 << 20)
            namespaces = Namespaces(
                limits=limits, numbers=KeyspaceNumbers(lambda _: None), epochs=Epochs()
            )
            for _ in range(1000):
                tenant, model, weights, engine, layout, dtype, algorithm, switch = itertools.islice(
                    drawn, 8
                )
                of = spec(
                    tenant=tenant,
                    model=model,
                    weights_fingerprint=weights,
                    engine=engine,
                    layout_version=layout,
                    kv_dtype=dtype,
                    hash_algorithm=algorithm,
                    layout_switches=(f"{switch}=1",),
                )
                try:
                    namespaces.open(of, [])
                    opened += 1
                except KVKeepError:
                    refused += 1
    assert not heard
    assert (opened + refused) * 8 >= promise_count
    assert opened > refused


def of_a_descriptor(event, arguments):
    """An open of what is open already, or a call that takes a descriptor instead of a path."""
    if event == "open":
        return arguments[0].startswith("/proc/self/fd/")
    return isinstance(arguments[0], int)


def test_a_session_of_any_name_opens_its_own_descriptors_and_nothing_else(audit):
    with Harness(ram="4MiB") as harness:
        first = harness.session()
        harness.put(first, harness.open(first), keys_of("imports what is imported late", 2))
        for name in itertools.islice(names(random.Random(23)), 200):
            own = name.encode()[:200].decode(errors="ignore")
            with audit.listen() as heard:
                welcome = close_offers(
                    harness.run(harness.core.sessions.open(hello(4096, client_name=own)))
                )
                session = harness.core.sessions.get(welcome.token)
                opened = harness.open(session, spec(tenant=name, model=name, engine=name))
            assert heard, "its memory is made and handed out"
            assert all(itertools.starmap(of_a_descriptor, heard)), heard
            with audit.listen() as heard:
                keys = keys_of(name, 1)
                harness.put(session, opened, keys)
                harness.release(session, harness.acquire(session, opened, keys))
                harness.core.sessions.end(welcome.session_id, name)
            assert not heard

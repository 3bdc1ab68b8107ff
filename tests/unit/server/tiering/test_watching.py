"""Watchers: what they are told is what is there, whatever happens meanwhile and however slow they
are."""

import asyncio
import random

import pytest
import xxhash

from kvkeep_server.core.errors import NotFoundError, OutOfRangeError, ResourceExhaustedError
from kvkeep_server.core.results import AckLevel, ChangeKind, GroupKind, StateMode, TierId
from kvkeep_server.service.spec import GroupSpec
from kvkeep_server.tiering import watching
from tests.fakes.core_harness import MIB, Harness, full, keys_of, spec

STORED, REMOVED = ChangeKind.STORED, ChangeKind.REMOVED
CLEARED, DIGEST = ChangeKind.ALL_CLEARED, ChangeKind.RESYNC_DIGEST
RAM, NVME = TierId.RAM, TierId.NVME
GROUPS = spec(
    tp_size=2,
    groups=(full(), GroupSpec("s", GroupKind.STATE, 16, 512, state_mode=StateMode.EXACT)),
)


class Router:
    """Listens, and knows what there is."""

    def __init__(self, core, session, handles=(), from_sequence=0):
        self.core = core
        self.known = {}
        self.told = []
        self.digests = {}
        self.last = 0
        self.error = None
        self._stream = core.core.service.watch(session, handles, from_sequence)

    async def listen(self):
        try:
            async for change in self._stream:
                self.hear(change)
        except Exception as error:  # noqa: BLE001 - is looked at
            self.error = error

    def hear(self, change):
        self.told.append(change)
        assert change.sequence >= self.last
        self.last = change.sequence
        place = change.set_id, change.rank, change.group, change.tier
        known = self.known.setdefault(place, set())
        keys = {change.keys[at : at + 32] for at in range(0, len(change.keys), 32)}
        if change.kind is CLEARED:
            self.known.clear()
        elif change.kind is STORED:
            assert not keys & known, "told twice"
            known |= keys
        elif change.kind is REMOVED:
            assert keys <= known, "removed and never there"
            known -= keys
        else:
            self.digests[place] = change.digest
            assert change.digest == sum(map(xxhash.xxh3_64_intdigest, known)) % (1 << 64)

    def begin(self):
        async def work():
            self._task = asyncio.create_task(self.listen())

        self.core.run(work())

    def hear_all(self):
        async def work():
            for _ in range(2000):
                await asyncio.sleep(0)

        self.core.run(work())

    def stop(self):
        async def work():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

        self.core.run(work())


def there(core, opened_sets):
    """By (set, rank, group, tier): keys, read off the columns."""
    columns, found = core.core.residency.columns, {}
    for opened in opened_sets:
        for space in opened.spaces.everywhere:
            ids = columns.in_use()
            ids = ids[columns.keyspace[ids] == space.index]
            for tier, places in ((RAM, columns.address_of(ids)), (NVME, columns.nvme[ids])):
                keys = {columns.key_words[block].tobytes()[:32] for block in ids[places != 0]}
                if keys:
                    found[opened.namespace_set.set_id, space.rank, space.group, tier] = keys
    return found


def heard(router):
    return {place: keys for place, keys in router.known.items() if keys}


@pytest.fixture
def core():
    with Harness(ram="4MiB", slab="256KiB") as harness:
        yield harness


@pytest.fixture
def session(core):
    return core.session(4 * MIB)


@pytest.fixture
def listening(core):
    routers = []

    def begin(*arguments, **more):
        router = Router(core, *arguments, **more)
        routers.append(router)
        router.begin()
        router.hear_all()
        return router

    yield begin
    for router in routers:
        router.stop()


def test_it_begins_with_all_that_is_there(core, session, listening):
    opened = core.open(session)
    core.put(session, opened, keys_of("a", 10))
    router = listening(session)
    assert [change.kind for change in router.told] == [CLEARED, STORED, DIGEST, DIGEST]
    assert heard(router) == there(core, [opened])
    first = router.told[1]
    assert (first.tier, first.parent_key) == (RAM, b"")


def test_what_comes_and_goes_is_told_with_parents(core, session, listening):
    opened = core.open(session)
    router = listening(session)
    a = keys_of("a", 6)
    core.put(session, opened, a[:4])
    core.put(session, opened, a[4:], parent=a[3])
    router.hear_all()
    stored = [change for change in router.told if change.kind is STORED]
    assert [(change.keys, change.parent_key) for change in stored] == [
        (b"".join(a[:4]), b""),
        (b"".join(a[4:]), a[3]),
    ]
    core.remove(session, opened, a[2:3])
    router.hear_all()
    assert heard(router) == there(core, [opened])
    assert len(next(iter(heard(router).values()))) == 2
    for number in range(40):
        core.put(session, opened, keys_of(number, 50))
    router.hear_all()
    assert heard(router) == there(core, [opened])
    assert core.core.residency.evicted_total > 0


def test_only_sets_that_the_session_has_open(core, session, listening):
    one, two = core.open(session), core.open(session, spec(model="two"))
    stranger = core.session(4 * MIB)
    third = core.open(stranger, spec(model="three"))
    router = listening(session, [two.spaces.index])
    for opened, of in ((one, session), (two, session), (third, stranger)):
        core.put(of, opened, keys_of(opened.spaces.index, 3))
    router.hear_all()
    assert heard(router) == there(core, [two])
    refused = listening(session, [third.spaces.index])
    assert isinstance(refused.error, NotFoundError)


def test_ranks_groups_and_epochs(core, session, listening):
    opened = core.open(session, GROUPS)
    router = listening(session)
    for rank in (0, 1):
        core.put(session, opened, keys_of("a", 5), rank=rank)
    router.hear_all()
    assert heard(router) == there(core, [opened])
    assert {place[1:3] for place in heard(router)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    core.run(core.core.service.advance_epoch(session, opened.spaces.index, 0))
    router.hear_all()

    async def emptied():
        await asyncio.gather(*core.core.service.control._purges.values())

    core.run(emptied())
    router.hear_all()
    assert heard(router) == {}


def test_a_slow_watcher_is_told_all_again(session, core, listening, monkeypatch):
    monkeypatch.setattr(core.core.service.manager.changes, "limits", watching.WatchLimits(16, 100))
    opened = core.open(session)
    router = listening(session)
    core.put(session, opened, keys_of("a", 10))
    router.hear_all()
    paused = asyncio.Event()

    async def flood():
        router.hear_real, router.hear = router.hear, None
        for number in range(8):
            keys = keys_of(number, 30)
            groups = core.lay(session, opened, [[bytes(4096)] * 30])
            await core.commit(session, opened, keys, groups)
        paused.set()

    # It cannot listen while more happens than the log holds.
    router.stop()
    before = router.last
    router = Router(core, session, from_sequence=before)
    stream = router._stream

    async def slowly():
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        await flood()
        router.hear = router.hear_real
        router._stream = _after(first, stream)
        router._task = asyncio.create_task(router.listen())

    async def _after(first, rest):
        yield await first
        async for change in rest:
            yield change

    core.run(slowly())
    router.hear_all()
    router.stop()
    assert core.core.service.manager.changes.gaps_total == 1
    assert CLEARED in [change.kind for change in router.told]
    assert heard(router) == there(core, [opened])


def test_it_goes_on_where_it_broke(core, session, listening):
    opened = core.open(session)
    router = listening(session)
    core.put(session, opened, keys_of("a", 3))
    router.hear_all()
    router.stop()
    core.put(session, opened, keys_of("b", 3))
    core.remove(session, opened, keys_of("a", 3)[1:])
    again = Router(core, session, from_sequence=router.last + 1)
    again.known, again.last = router.known, router.last
    again.begin()
    again.hear_all()
    again.stop()
    kinds = [change.kind for change in again.told]
    assert CLEARED not in kinds
    assert DIGEST in kinds
    assert heard(again) == there(core, [opened])


def test_a_sequence_that_cannot_be_had_is_refused(core, session, listening):
    core.open(session)
    log = core.core.service.manager.changes
    assert isinstance(listening(session, from_sequence=log.next).error, OutOfRangeError)
    listening(session)
    for sequence in (1, log.first - 1, log.next + 1, 1 << 63):
        assert isinstance(listening(session, from_sequence=sequence).error, OutOfRangeError)


def test_watchers_are_few(core, session, listening, monkeypatch):
    monkeypatch.setattr(core.core.service.manager.changes, "limits", watching.WatchLimits(2, 100))
    core.open(session)
    assert [listening(session).error is None for _ in range(3)] == [True, True, False]
    assert isinstance(listening(session).error, ResourceExhaustedError)


def test_nothing_is_written_down_when_nobody_has_watched_for_a_minute(core, session):
    opened = core.open(session)
    log, residency = core.core.service.manager.changes, core.core.residency
    core.put(session, opened, keys_of("a", 3))
    assert residency.onlooker is None
    router = Router(core, session)
    router.begin()
    router.hear_all()
    router.stop()
    assert (log.watchers, opened.namespace_set.watchers) == (0, 0)
    core.put(session, opened, keys_of("b", 3))
    assert log.next > router.last
    core.clock.advance(61)
    core.put(session, opened, keys_of("c", 3))
    assert residency.onlooker is None
    core.put(session, opened, keys_of("d", 3))
    assert log.get(log.next - 1) is None
    again = Router(core, session, from_sequence=router.last + 1)
    again.begin()
    again.hear_all()
    assert isinstance(again.error, OutOfRangeError)
    again.stop()


def test_digests_come_again_when_something_changed(core, session, listening):
    opened = core.open(session)
    router = listening(session)
    core.put(session, opened, keys_of("a", 3))
    router.hear_all()
    assert len([change for change in router.told if change.kind is DIGEST]) == 2
    core.clock.advance(31)
    core.put(session, opened, keys_of("b", 3))
    router.hear_all()
    assert len([change for change in router.told if change.kind is DIGEST]) == 4


def test_it_ends_with_its_session(core, session, listening):
    opened = core.open(session)
    router = listening(session)
    core.core.sessions.end(session.session_id, "gone")
    other = core.session(4 * MIB)
    core.put(other, core.open(other), keys_of("a", 1))
    router.hear_all()
    assert router._task.done()
    assert opened.namespace_set.watchers == 0


class History:
    """Random acts; watchers begin and break at any moment."""

    def __init__(self, core, seed):
        self.core = core
        self.source = random.Random(seed)
        self.session = core.session(4 * MIB)
        self.opened = core.open(self.session)
        self.routers = []

    def keys(self):
        return keys_of(self.source.randrange(30), 1 + self.source.randrange(40))

    def put(self):
        self.core.put(self.session, self.opened, self.keys())

    def get(self):
        grant = self.core.acquire(self.session, self.opened, self.keys())
        if grant.lease:
            self.core.release(self.session, grant)

    def remove(self):
        if self.source.random() < 0.3:
            self.core.remove(self.session, self.opened, self.keys())

    def watch(self):
        if len(self.routers) < 4:
            self.routers.append(Router(self.core, self.session))
            self.routers[-1].begin()

    def stop(self):
        if self.routers:
            self.routers.pop(0).stop()

    def step(self):
        self.source.choice([self.put, self.put, self.get, self.remove, self.watch, self.stop])()

        async def turns():
            for _ in range(self.source.randrange(4)):
                await asyncio.sleep(0)

        self.core.run(turns())
        self.core.clock.advance(1)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_over_both_tiers(tmp_path, monkeypatch, seed):
    """Small slices, so that walks and changes interleave."""
    monkeypatch.setattr(watching, "_KEYS_AT_ONCE", 16)
    extra = f'[nvme]\ndirectories = ["{tmp_path}"]\nmax = "8MiB"\nsegment = "1MiB"\n'
    with Harness(
        ram="4MiB", slab="256KiB", extra=extra + 'free_min = "1MiB"\n', ack=AckLevel.NVME
    ) as core:
        history = History(core, seed)
        for _ in range(80):
            history.step()
        for router in history.routers:
            router.hear_all()
            assert router.error is None
            assert heard(router) == there(core, [history.opened])
            router.stop()


def test_recovery_is_told(tmp_path):
    extra = f'[nvme]\ndirectories = ["{tmp_path}"]\nmax = "64MiB"\nsegment = "1MiB"\n'
    facts = {"extra": extra + 'free_min = "1MiB"\n', "ack": AckLevel.NVME}
    with Harness(**facts) as core:
        session = core.session(4 * MIB)
        core.put(session, core.open(session), keys_of("a", 30))
    with Harness(**facts) as core:
        session = core.session(4 * MIB)
        opened = core.open(session)
        router = Router(core, session)
        router.begin()
        core.run(core.core.nvme.recovery.settled())
        router.hear_all()
        assert heard(router) == there(core, [opened])
        assert len(heard(router)[opened.namespace_set.set_id, 0, 0, NVME]) == 30
        router.stop()

"""Identity is complete and injective (P02), and what contradicts itself is refused by name."""

import contextlib
import dataclasses
import json
import random
import struct
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_server.core.errors import (
    InvalidArgumentError,
    KVKeepError,
    NotFoundError,
    ResourceExhaustedError,
)
from kvkeep_server.core.results import GroupKind, StateMode
from kvkeep_server.service import namespaces as namespaces_module
from kvkeep_server.service.keyspace_numbers import KeyspaceNumbers
from kvkeep_server.service.namespaces import NamespaceLimits, Namespaces
from kvkeep_server.service.spec import (
    GroupSpec,
    NamespaceSpec,
    encode,
    namespace_id_of,
    set_id_of,
)
from kvkeep_server.tiering.epochs import Epochs
from tests.fakes.core_harness import full, spec

VECTORS = json.loads(
    (Path(__file__).parents[4] / "proto/kvkeep/v1/shared_memory_vectors.json").read_text()
)["namespaces"]
STRINGS = ("tenant", "model", "weights_fingerprint", "engine", "layout_version", "kv_dtype")
STRINGS += ("hash_algorithm",)
SIZES = ("tp_size", "pp_size", "dp_size", "cp_size")


@pytest.fixture
def keyspaces():
    return []


@pytest.fixture
def namespaces(keyspaces):
    limits = NamespaceLimits(64, 64, 4096, 1 << 20)
    return Namespaces(limits=limits, numbers=KeyspaceNumbers(keyspaces.append), epochs=Epochs())


# ---- the encoding


def from_vector(values) -> NamespaceSpec:
    groups = tuple(
        GroupSpec(
            **group
            | {"kind": GroupKind(group["kind"]), "state_mode": StateMode(group["state_mode"])}
        )
        for group in values["groups"]
    )
    return NamespaceSpec(
        **values
        | {size: values[size] or 1 for size in SIZES}
        | {
            "groups": groups,
            "hash_root": bytes.fromhex(values["hash_root"]),
            "layout_switches": tuple(values["layout_switches"]),
        }
    )


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_encoding_and_ids_are_those_of_the_vectors(vector):
    of = from_vector(vector["spec"])
    assert encode(of).hex() == vector["encoding"]
    assert set_id_of(of).hex() == vector["set_id"]
    for rank in vector["ranks"]:
        assert namespace_id_of(set_id_of(of), rank["rank"]).hex() == rank["namespace_id"]


def fields_of(encoded: bytes):
    """Undoes the framing, from shared_memory.md alone."""
    at, parts = 0, []
    while at < len(encoded):
        number, nbytes = struct.unpack_from("<BI", encoded, at)
        content = encoded[at + 5 : at + 5 + nbytes]
        assert len(content) == nbytes
        parts.append((number, content))
        at += 5 + nbytes
    return parts


def decode(encoded: bytes) -> NamespaceSpec:
    """Who can be read back is told apart from everybody else: this is what injective means."""
    parts = fields_of(encoded)
    single = dict(part for part in parts if part[0] not in (15, 16))
    assert single[0] == b"kvkeep-namespace-v1"
    values = {name: single[1 + i].decode() for i, name in enumerate(STRINGS)}
    values["hash_root"] = single[8]
    for i, name in enumerate(("key_nbytes", *SIZES)):
        (values[name],) = struct.unpack("<Q", single[9 + i])
    values["replicated"] = bool(single[14][0])
    values["groups"] = tuple(decode_group(raw) for number, raw in parts if number == 15)
    values["layout_switches"] = tuple(raw.decode() for number, raw in parts if number == 16)
    (values["namespace_epoch"],) = struct.unpack("<Q", single[17])
    return NamespaceSpec(**values)


def decode_group(encoded: bytes) -> GroupSpec:
    single = dict(fields_of(encoded))
    kind, tokens, nbytes, window, mode = (
        struct.unpack("<Q", single[number])[0] for number in range(2, 7)
    )
    return GroupSpec(single[1].decode(), GroupKind(kind), tokens, nbytes, window, StateMode(mode))


# What separators, terminators, numbers and other fields look like, and what only looks alike.
PIECES = ["", "a", "b", "ab", "\0", "\0\0\0\0", "\x01\0\0\0\0", "\x02\x01\0\0\0a", ",", ":", "/"]
PIECES += ["|", "=", "\n", "None", "0", "1", "true", "bfloat16", "fp8", "..", "-SEP-", "\u202e"]
PIECES += ["\u00e9", "e\u0301", "\u0430", "\ufeff", "\U0001f600", "mistralai/Mistral-7B"]
NUMBERS = [0, 1, 2, 16, 32, 255, 256, 1 << 32, (1 << 64) - 1]


def draw_string(source: random.Random) -> str:
    return "".join(source.choices(PIECES, k=source.randrange(4)))


def draw_group(source: random.Random) -> GroupSpec:
    return GroupSpec(
        draw_string(source),
        GroupKind(source.randrange(4)),
        source.choice(NUMBERS),
        source.choice(NUMBERS),
        source.choice(NUMBERS),
        StateMode(source.randrange(3)),
    )


def draw_spec(source: random.Random) -> NamespaceSpec:
    values = {name: draw_string(source) for name in STRINGS}
    values |= {name: source.choice(NUMBERS) for name in ("key_nbytes", *SIZES, "namespace_epoch")}
    return NamespaceSpec(
        **values,
        hash_root=source.choice([b"", b"\0", b"\0\0", b"a", b"ab", b"\xff"]),
        replicated=source.random() < 0.5,
        groups=tuple(draw_group(source) for _ in range(source.randrange(1, 3))),
        layout_switches=tuple(draw_string(source) for _ in range(source.randrange(3))),
    )


def neighbour(of: NamespaceSpec, source: random.Random) -> NamespaceSpec:
    """One that an encoding without lengths would confuse with it, or one that is equal."""
    one, other = source.sample(STRINGS, 2)
    match source.randrange(7):
        case 0:  # a character moves over the border
            text = getattr(of, one) + getattr(of, other)
            cut = source.randrange(len(text) + 1)
            changes = {one: text[:cut], other: text[cut:]}
        case 1:
            changes = {one: getattr(of, other), other: getattr(of, one)}
        case 2:
            form = source.choice(["NFC", "NFD", "NFKC"])
            changes = {one: unicodedata.normalize(form, getattr(of, one))}
        case 3:
            first, second = source.sample(SIZES, 2)
            changes = {first: getattr(of, second)}
        case 4:  # a switch becomes two, two become one, or they change places
            text = "".join(of.layout_switches)
            cut = source.randrange(len(text) + 1)
            ways = [(text,), (text[:cut], text[cut:]), of.layout_switches[::-1]]
            changes = {"layout_switches": source.choice(ways)}
        case 5:
            groups = [*of.groups, draw_group(source)]
            source.shuffle(groups)
            changes = {"groups": tuple(groups[: source.randrange(1, 4)])}
        case _:
            changes = {source.choice(STRINGS): draw_string(source)}
    return dataclasses.replace(of, **changes)


@pytest.mark.promise("P02", gate=100_000, nightly=1_000_000, unit="pairs")
def test_encodings_are_equal_if_and_only_if_the_identities_are(promise_count):
    """Every one against every other: a dict compares all pairs of its keys."""
    source = random.Random(2)
    drawn = promise_count // 10
    by_encoding: dict[bytes, NamespaceSpec] = {}
    identities = set()
    one = draw_spec(source)
    for number in range(drawn):
        one = neighbour(one, source) if number % 10 else draw_spec(source)
        encoding = encode(one)
        assert by_encoding.setdefault(encoding, one) == one
        identities.add(one)
        if number % 20 == 0:
            assert decode(encoding) == one
    assert len(by_encoding) == len(identities) == len({set_id_of(one) for one in identities})
    assert drawn // 2 < len(identities) < drawn, "some are equal, most are not"
    assert drawn * (drawn - 1) // 2 >= promise_count


TEXT = st.text(max_size=8)
U64 = st.integers(0, (1 << 64) - 1)
GROUPS = st.builds(
    GroupSpec, TEXT, st.sampled_from(GroupKind), U64, U64, U64, st.sampled_from(StateMode)
)
SPECS = st.builds(
    NamespaceSpec,
    **dict.fromkeys(STRINGS, TEXT),
    **dict.fromkeys(("key_nbytes", *SIZES, "namespace_epoch"), U64),
    hash_root=st.binary(max_size=64),
    replicated=st.booleans(),
    groups=st.lists(GROUPS, min_size=1, max_size=3).map(tuple),
    layout_switches=st.lists(TEXT, max_size=3).map(tuple),
)


@settings(max_examples=60)
@given(SPECS)
def test_an_encoding_can_be_read_back(of):
    assert decode(encode(of)) == of


CHANGED = dict.fromkeys(STRINGS, "changed") | {
    "hash_root": b"changed",
    "key_nbytes": 33,
    "tp_size": 2,
    "pp_size": 2,
    "dp_size": 2,
    "cp_size": 2,
    "replicated": True,
    "groups": (full("other"),),
    "layout_switches": ("A=1",),
    "namespace_epoch": 1,
}
CHANGED_GROUP = {
    "name": "other",
    "kind": GroupKind.WINDOW,
    "tokens_per_block": 17,
    "block_nbytes": 4097,
    "window_tokens": 1,
    "state_mode": StateMode.EXACT,
}


def test_no_field_is_left_out_below():
    assert {field.name for field in dataclasses.fields(NamespaceSpec)} == set(CHANGED)
    of_group = {field.name for field in dataclasses.fields(GroupSpec)}
    assert of_group - {"retention_class"} == set(CHANGED_GROUP)


@pytest.mark.parametrize("field", CHANGED)
def test_every_field_alone_makes_another_namespace(field):
    assert set_id_of(spec(**{field: CHANGED[field]})) != set_id_of(spec())


@pytest.mark.parametrize("field", CHANGED_GROUP)
def test_every_field_of_a_group_alone_makes_another_namespace(field):
    changed = dataclasses.replace(full(), **{field: CHANGED_GROUP[field]})
    assert set_id_of(spec(groups=(changed,))) != set_id_of(spec())


def test_how_long_blocks_are_kept_is_not_who_they_are():
    kept = dataclasses.replace(full(), retention_class="global")
    assert set_id_of(spec(groups=(kept,))) == set_id_of(spec())


def test_every_rank_is_a_namespace():
    """B012."""
    ids = {namespace_id_of(set_id_of(spec()), rank) for rank in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {16}


# ---- opening


def test_opening_twice_gives_the_same_handle_and_nothing_new(namespaces, keyspaces):
    first = namespaces.open(spec(tp_size=2), [])
    assert namespaces.open(spec(tp_size=2), []) is first
    assert namespaces.get(first.spaces.index) is first
    assert [(space.rank, space.group) for space in keyspaces] == [(0, 0), (1, 0)]
    assert [space.index for space in keyspaces] == [0, 1]


def test_local_ranks_share_their_set(namespaces, keyspaces):
    left = namespaces.open(spec(tp_size=4), [0, 1])
    right = namespaces.open(spec(tp_size=4), [1, 2])
    assert left.namespace_set is right.namespace_set
    assert left.spaces.index != right.spaces.index
    assert [space.rank for space in left.spaces.local] == [0, 1]
    assert [space.rank for space in right.spaces.local] == [1, 2]
    assert len(keyspaces) == 3
    assert left.spaces.siblings is right.spaces.siblings


def test_replicated_ranks_are_one_shard(namespaces):
    opened = namespaces.open(spec(tp_size=8, replicated=True), [])
    assert opened.ranks == (0,)
    with pytest.raises(InvalidArgumentError, match=r"replicated: only 0"):
        namespaces.open(spec(tp_size=8, replicated=True), [1])


def test_checksums_are_bound_to_namespace_group_length_and_key(namespaces):
    groups = (full("a"), full("b"))
    spaces = namespaces.open(spec(groups=groups, tp_size=2), []).spaces.local
    other = namespaces.open(spec(groups=groups, tp_size=2, kv_dtype="fp8"), []).spaces.local
    payload = memoryview(bytes(4096))
    sums = {space.checksum(b"k" * 32, payload) for space in (*spaces, *other)}
    assert len(sums) == 8
    assert spaces[0].checksum(b"K" * 32, payload) not in sums


@pytest.mark.parametrize("index", [-1, 1, 10**9])
def test_a_handle_that_was_never_given_is_not_found(namespaces, index):
    namespaces.open(spec(), [])
    with pytest.raises(NotFoundError, match="call OpenNamespace"):
        namespaces.get(index)


def test_handles_are_limited(namespaces):
    for number in range(64):
        namespaces.open(spec(model=f"m{number}"), [])
    with pytest.raises(ResourceExhaustedError, match=r"limits\.namespaces_max = 64") as refusal:
        namespaces.open(spec(model="one too many"), [])
    assert refusal.value.retry_after_s > 0
    namespaces.open(spec(model="m3"), [])  # known ones go on


def test_shards_are_limited_before_any_is_made(namespaces, keyspaces, monkeypatch):
    """Their numbers are u16 in the columns of blocks."""
    monkeypatch.setattr(namespaces_module, "KEYSPACES_MAX", 10)
    namespaces.open(spec(tp_size=8), [])
    with pytest.raises(ResourceExhaustedError, match="local_ranks"):
        namespaces.open(spec(tp_size=3, model="other"), [])
    assert len(keyspaces) == 8
    assert len(list(namespaces)) == 1
    namespaces.open(spec(tp_size=8), [3, 4])  # nothing new
    namespaces.open(spec(tp_size=3, model="other"), [0, 2])
    assert len(keyspaces) == 10


# ---- near misses


def near(namespaces, of):
    return namespaces.near_misses(of)


def test_a_neighbour_of_the_same_tenant_is_named_with_what_differs(namespaces):
    """B010's symptom from the other side: why nothing hits."""
    known = namespaces.open(spec(), [])
    assert near(namespaces, spec(kv_dtype="fp8")) == [(known.namespace_set.set_id, ["kv_dtype"])]
    two = spec(kv_dtype="fp8", groups=(full(block_nbytes=2048),))
    assert near(namespaces, two) == [(known.namespace_set.set_id, ["kv_dtype", "groups"])]
    assert near(namespaces, spec(kv_dtype="fp8", engine="e", model="m")) == []


def test_nobody_is_told_of_other_tenants(namespaces):
    namespaces.open(spec(tenant="rich"), [])
    assert near(namespaces, spec(tenant="poor")) == []


def test_a_namespace_is_no_neighbour_of_itself(namespaces):
    """Also when only the retention class differs, which is not part of the identity."""
    kept = dataclasses.replace(full(), retention_class="global")
    namespaces.open(spec(groups=(kept,)), [])
    assert near(namespaces, spec()) == []
    ((_, differing),) = near(namespaces, spec(engine="other"))
    assert differing == ["engine"]


def test_neighbours_are_bounded_and_the_nearest_come_first(namespaces):
    for number in range(40):
        namespaces.open(spec(model=f"m{number}", engine="e"), [])
    namespaces.open(spec(engine="e"), [])
    found = near(namespaces, spec())
    assert found[0][1] == ["engine"]
    assert len(found) == 16


# ---- refusals

WRONG = {
    "model": {"model": ""},
    "weights_fingerprint": {"weights_fingerprint": ""},
    "engine": {"engine": ""},
    "layout_version": {"layout_version": ""},
    "kv_dtype": {"kv_dtype": ""},
    "hash_algorithm": {"hash_algorithm": ""},
    "tenant": {"tenant": "t" * 1025},
    "kv_dtype ": {"kv_dtype": "\u00e9" * 513},
    "layout_switches": {"layout_switches": ("NOVALUE",)},
    "layout_switches ": {"layout_switches": ("A=" + "b" * 1024,)},
    "layout_switches  ": {"layout_switches": ("A=" + "b" * 1000,) * 9},
    "key_nbytes": {"key_nbytes": 8},
    "key_nbytes ": {"key_nbytes": 0},
    "key_nbytes  ": {"key_nbytes": 65},
    "hash_root": {"hash_root": bytes(65)},
    "tp_size": {"tp_size": 4097},
    "tp_size ": {"tp_size": 1 << 32, "pp_size": 1 << 32},
    "groups": {"groups": ()},
    "groups ": {"groups": tuple(full(f"g{i}") for i in range(17))},
    "groups.name": {"groups": (full("a"), full("a"))},
    "groups.name ": {"groups": (full(""),)},
    "groups.name  ": {"groups": (full("x" * 65),)},
    "groups.name   ": {"groups": (full("../evil"),)},
    "groups.name    ": {"groups": (full("kv\n"),)},
    "block_nbytes": {"groups": (full(block_nbytes=0),)},
    "block_nbytes ": {"groups": (full(block_nbytes=(1 << 20) + 1),)},
    "tokens_per_block": {"groups": (full(tokens=0),)},
    "kind": {"groups": (GroupSpec("a", GroupKind.UNSPECIFIED, 16, 4096),)},
    "window_tokens": {"groups": (GroupSpec("a", GroupKind.FULL, 16, 4096, 128),)},
    "window_tokens ": {"groups": (GroupSpec("a", GroupKind.WINDOW, 16, 4096, 0),)},
    "state_mode": {"groups": (GroupSpec("a", GroupKind.STATE, 16, 4096),)},
    "state_mode ": {"groups": (GroupSpec("a", GroupKind.FULL, 16, 4096, 0, StateMode.EXACT),)},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_field_value_allowed_and_fix(namespaces, keyspaces, case):
    with pytest.raises(InvalidArgumentError) as refusal:
        namespaces.open(spec(**WRONG[case]), [])
    assert refusal.value.field.startswith("spec.")
    assert case.strip() in refusal.value.field
    message = str(refusal.value)
    assert all(part in message for part in (" is ", "; allowed: ", "; fix: "))
    assert len(message) < 500
    assert not keyspaces
    assert not list(namespaces)


@pytest.mark.parametrize("nbytes", [1, 8, 15])
def test_short_keys_are_always_refused_naming_what_is_allowed(namespaces, nbytes):
    """B024: no truncation, so no truncated match."""
    with pytest.raises(InvalidArgumentError, match=r"key_nbytes is \d+; allowed: 16 to 64"):
        namespaces.open(spec(key_nbytes=nbytes), [])


def test_an_oversize_block_is_refused_naming_the_limit(namespaces):
    """B044."""
    with pytest.raises(InvalidArgumentError, match=r"1 to 1048576 \(limits\.block_max"):
        namespaces.open(spec(block_nbytes=(1 << 20) + 1), [])


@pytest.mark.parametrize("ranks", [[2], [0, 0], [0, 1, 2], [4096]])
def test_ranks_that_are_none_of_it_are_refused(namespaces, ranks):
    with pytest.raises(InvalidArgumentError, match=r"local_ranks is .*from 0 to 1"):
        namespaces.open(spec(tp_size=2), ranks)


@settings(max_examples=60)
@given(SPECS, st.lists(st.integers(0, 1 << 32), max_size=3))
def test_whatever_comes_is_opened_or_refused_on_purpose(of, ranks):
    limits = NamespaceLimits(4, 4, 4096, 1 << 20)
    namespaces = Namespaces(limits=limits, numbers=KeyspaceNumbers(lambda _: None), epochs=Epochs())
    opened = None
    with contextlib.suppress(KVKeepError):
        opened = namespaces.open(of, ranks)
    served = [group for group in of.groups if group.kind == GroupKind.FULL]
    assert opened is None or len(opened.spaces.local) == len(opened.ranks) * len(served)

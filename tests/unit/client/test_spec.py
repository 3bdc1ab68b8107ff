"""Specifications are refused with field, value, what is allowed and the fix; packed keys."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import kvkeep
from kvkeep.convert import hints_message, milliseconds, open_request, pack_keys
from kvkeep.spec import GroupKind, Hints, StateMode, StopReason

KV = kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=58_368)
SPEC = kvkeep.NamespaceSpec(
    model="m",
    weights_fingerprint="sha256:00",
    engine="vllm",
    layout_version="1",
    kv_dtype="bfloat16",
    hash_algorithm="sha256_cbor",
    groups=[KV],
)


def test_a_plain_specification_is_valid():
    SPEC.validate()
    assert SPEC.ranks == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": ""}, ["model", "''", "not empty", "name it"]),
        ({"weights_fingerprint": ""}, ["weights_fingerprint"]),
        ({"engine": ""}, ["engine"]),
        ({"layout_version": ""}, ["layout_version"]),
        ({"kv_dtype": ""}, ["kv_dtype"]),
        ({"hash_algorithm": ""}, ["hash_algorithm"]),
        ({"model": "ä" * 513}, ["model", "1026 bytes", "1024", "digest"]),
        ({"tenant": "\udcff"}, ["tenant", "UTF-8"]),
        ({"model": b"m"}, ["model", "give a str"]),
        ({"key_nbytes": 8}, ["key_nbytes", "8", "16 to 64", "128 bits"]),
        ({"key_nbytes": 65}, ["key_nbytes", "65"]),
        ({"hash_root": bytes(65)}, ["hash_root", "65 bytes", "64"]),
        ({"tp_size": 0}, ["tp_size", "0"]),
        ({"cp_size": -1}, ["cp_size", "-1"]),
        ({"namespace_epoch": -1}, ["namespace_epoch"]),
        ({"groups": []}, ["groups", "0 groups", "1 to 16"]),
        ({"groups": [KV] * 17}, ["17 groups"]),
        ({"groups": [KV, KV]}, ["groups.name", "differ"]),
        ({"layout_switches": ["x" * 1025]}, ["layout_switches"]),
        ({"layout_switches": "A=1"}, ["layout_switches", "list or tuple of str"]),
        ({"layout_switches": None}, ["layout_switches"]),
        ({"hash_root": None}, ["hash_root", "None", "give bytes"]),
        ({"hash_root": "00"}, ["hash_root", "give bytes"]),
        ({"key_nbytes": "16"}, ["key_nbytes", "'16'", "16 to 64"]),
        ({"key_nbytes": 16.5}, ["key_nbytes", "16.5"]),
        ({"tp_size": "2"}, ["tp_size", "'2'"]),
        ({"replicated": None}, ["replicated", "None"]),
        ({"groups": None}, ["groups", "None"]),
        ({"groups": ["kv"]}, ["groups", "list or tuple of Group"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_malformed_specification_is_refused(change, words):
    with pytest.raises(kvkeep.InvalidArgumentError) as refusal:
        dataclasses.replace(SPEC, **change).validate()
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, ["groups.name", "[A-Za-z0-9_.-]"]),
        ({"name": "a/b"}, ["groups.name", "a/b"]),
        ({"name": "x" * 65}, ["groups.name"]),
        ({"tokens_per_block": 0}, ["groups['kv'].tokens_per_block"]),
        ({"block_nbytes": 0}, ["groups['kv'].block_nbytes"]),
        ({"window_tokens": 5}, ["window_tokens", "WINDOW"]),
        ({"kind": GroupKind.WINDOW}, ["window_tokens", "Group.window"]),
        ({"kind": GroupKind.STATE}, ["state_mode", "REPLAYABLE"]),
        ({"state_mode": StateMode.EXACT}, ["state_mode"]),
        ({"name": None}, ["groups.name", "None"]),
        ({"kind": 1}, ["groups['kv'].kind", "a GroupKind"]),
        ({"state_mode": "EXACT"}, ["state_mode", "a StateMode"]),
        ({"retention_class": None}, ["retention_class", "give a str"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_malformed_group_is_refused(change, words):
    with pytest.raises(kvkeep.InvalidArgumentError) as refusal:
        dataclasses.replace(SPEC, groups=[dataclasses.replace(KV, **change)]).validate()
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_window_and_state_groups_can_be_declared():
    window = kvkeep.Group.window("w", tokens_per_block=16, block_nbytes=9, window_tokens=4096)
    state = kvkeep.Group.state("s", tokens_per_block=128, block_nbytes=9)
    spec = dataclasses.replace(SPEC, groups=[KV, window, state])
    spec.validate()
    kinds = [group.kind for group in open_request(spec, ()).spec.groups]
    assert kinds == [GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE]


def test_replicated_ranks_are_one():
    assert dataclasses.replace(SPEC, tp_size=8, replicated=True).ranks == 1
    assert dataclasses.replace(SPEC, tp_size=2, pp_size=3, dp_size=4, cp_size=5).ranks == 120


def test_every_field_reaches_the_wire():
    spec = dataclasses.replace(
        SPEC,
        tenant="t",
        hash_root=b"r",
        key_nbytes=20,
        tp_size=2,
        pp_size=3,
        dp_size=4,
        cp_size=5,
        replicated=True,
        layout_switches=["A=1", "B=2"],
        namespace_epoch=6,
        groups=[dataclasses.replace(KV, retention_class="gold")],
    )
    message = open_request(spec, (1, 2))
    assert (list(message.local_ranks), message.layout_version) == ([1, 2], 2)
    for field in dataclasses.fields(spec):
        on_wire = getattr(message.spec, field.name)
        if field.name == "groups":
            (group,) = on_wire
            for name in ("name", "kind", "tokens_per_block", "block_nbytes", "retention_class"):
                assert getattr(group, name) == getattr(spec.groups[0], name)
        else:
            assert (list(on_wire) if field.name == "layout_switches" else on_wire) == getattr(
                spec, field.name
            )


def test_hints_reach_the_wire():
    hints = Hints(
        stop_reason=StopReason.TOOL_USE,
        output_tokens=3,
        sub_agent=True,
        session_id=b"s",
        engine_hit_tokens=4,
        return_expected_s=0.0001,
        ttl_s=2.5,
    )
    message = hints_message(hints)
    assert message is not None
    assert (message.stop_reason, message.output_tokens, message.sub_agent) == (1, 3, True)
    assert (message.session_id, message.engine_hit_tokens) == (b"s", 4)
    assert (message.return_expected_ms, message.ttl_ms) == (1, 2500)
    assert hints_message(None) is None


@pytest.mark.parametrize("wrong", ["x", {"output_tokens": 1}, 5])
def test_what_is_no_hints_is_said(wrong):
    with pytest.raises(kvkeep.InvalidArgumentError, match=r"hints is .*kvkeep\.Hints"):
        hints_message(wrong)


@pytest.mark.parametrize(
    "field", [{"output_tokens": -1}, {"engine_hit_tokens": 2**64}, {"session_id": bytes(65)}]
)
def test_hints_are_checked(field):
    with pytest.raises(kvkeep.InvalidArgumentError, match=next(iter(field))):
        kvkeep.Hints(**field)


@pytest.mark.parametrize(
    ("seconds", "wire"), [(0, 0), (-1, 0), (0.0004, 1), (1.5, 1500), (1e9, 2**32 - 1)]
)
def test_milliseconds(seconds, wire):
    assert milliseconds(seconds) == wire


class Hashes:
    def pack(self) -> bytes:
        return bytes(32)


@pytest.mark.parametrize(
    "keys",
    [
        bytes(32),
        bytearray(32),
        memoryview(bytes(32)),
        memoryview(np.zeros(4, np.uint64)),
        [bytes(16), bytes(16)],
        (bytes(16), bytes(16)),
        Hashes(),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_come_packed_or_one_by_one(keys):
    assert bytes(pack_keys(keys, 16)) == bytes(32)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (bytes(33), "33 bytes.*multiple of key_nbytes = 16"),
        ([bytes(15), bytes(17)], r"\[15, 17\] bytes.*16 bytes each"),
        (7, "int.*packed bytes"),
        ("0123456789abcdef", "str.*packed bytes"),
    ],
)
def test_keys_of_another_length_are_refused(keys, match):
    with pytest.raises(kvkeep.InvalidArgumentError, match=match):
        pack_keys(keys, 16)


@pytest.mark.parametrize(
    "change",
    [
        *({"stop_reason": value} for value in (5, -1, "TOOL_USE", None)),
        *({"output_tokens": value} for value in (-1, 1.5, math.nan, 2**32, "3")),
        *({"engine_hit_tokens": value} for value in (-1, 2**64, None)),
        *({"sub_agent": value} for value in (None, "yes", 2)),
        *({"session_id": value} for value in ("abc", None, bytes(65))),
        *({"return_expected_s": value} for value in (-1, math.nan, math.inf, 1e12, "1", None)),
        *({"ttl_s": value} for value in (-0.1, math.nan, -math.inf, 10**400, b"1")),
    ],
    ids=repr,
)
def test_malformed_hints_are_refused_when_made(change):
    (field,) = change
    with pytest.raises(kvkeep.InvalidArgumentError, match=f"hints.{field} is .*; allowed is .*: "):
        Hints(**change)


@pytest.mark.parametrize("keys", [[1, 2], ["x" * 32], [None], 5, "x" * 32, None], ids=repr)
def test_keys_are_bytes(keys):
    with pytest.raises(kvkeep.InvalidArgumentError, match=r"keys is .*; allowed is .*: "):
        pack_keys(keys, 32)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(kvkeep.InvalidArgumentError) as refused:
        dataclasses.replace(SPEC, key_nbytes=["x" * 100] * 1000).validate()
    assert str(refused.value).startswith("key_nbytes is ['xxx")
    assert "...; allowed is 16 to 64" in str(refused.value)
    assert len(str(refused.value)) < 300

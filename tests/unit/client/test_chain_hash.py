"""Chain hashes against the engines' own vectors, and the real serializers they are defined over."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import chain_hash
from kvkeep.errors import InvalidArgumentError

VECTORS = Path(__file__).parents[3] / "proto/kvkeep/v1/chain_hash_vectors.json"
HASHERS = {
    "sha256": chain_hash.VllmSha256,
    "sha256_cbor": chain_hash.VllmSha256Cbor,
    "sglang_sha256": chain_hash.SglangSha256,
    "kvkeep_blake2b_v1": chain_hash.KvkeepBlake2b,
}
ENGINE_TOKENS = [(i * 37) % 500 + 4 for i in range(64)]
TOKENS = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 2**17), st.integers(0, 2**32 - 1)), max_size=60
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**64), 2**64 - 1),
    st.text(max_size=300),
    st.binary(max_size=300),
)
EXTRA = st.lists(
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5).map(tuple), max_leaves=12),
    max_size=6,
).map(tuple)


def from_json(value):
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    return tuple(map(from_json, value)) if isinstance(value, list) else value


def build(case):
    parameters = {name: from_json(value) for name, value in case["parameters"].items()}
    return HASHERS[case["algorithm"]](case["block_tokens"], **parameters)


def split(keys):
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def reference(encode, block_tokens, tokens, extra_keys, seed="vllm-none-hash"):
    """vLLM's own formula over a real serializer."""
    key = hashlib.sha256(encode(seed)).digest()
    out = b""
    for at in range(len(tokens) // block_tokens):
        block = tuple(tokens[at * block_tokens : (at + 1) * block_tokens])
        key = hashlib.sha256(encode((key, block, extra_keys.get(at)))).digest()
        out += key
    return out


def encode_pickle(value):
    return pickle.dumps(value, protocol=5)


def encode_cbor(value):
    return cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize(
    "case", json.loads(VECTORS.read_text(encoding="utf-8"))["cases"], ids=lambda case: case["name"]
)
def test_vectors(case):
    hasher = build(case)
    extra = {int(at): from_json(value) for at, value in case["extra_keys"].items()}
    keys = hasher.keys(case["tokens"], extra, parent=bytes.fromhex(case["parent"]))
    assert hasher.root.hex() == case["root"]
    assert [key.hex() for key in split(keys)] == case["keys"]
    assert case["keys"]


@pytest.mark.parametrize(
    ("hasher", "tokens", "first", "second"),
    [
        (chain_hash.VllmSha256(32), ENGINE_TOKENS, "ca2efc0e175a3ab5", "d49c671fefc2e498"),
        (chain_hash.VllmSha256Cbor(32), ENGINE_TOKENS, "59d9c57605633017", "754bd6265d4fe4b2"),
        (chain_hash.SglangSha256(64), range(1000, 1128), "5202e60f6130ac4d", "13ad856c486abdbd"),
    ],
    ids=["vllm_sha256", "vllm_sha256_cbor", "sglang"],
)
def test_hashes_that_the_engines_gave(hasher, tokens, first, second):
    keys = split(hasher.keys(tokens))
    assert [key.hex()[:16] for key in keys] == [first, second]


@given(TOKENS, EXTRA, st.integers(1, 20))
def test_vllm_sha256_is_the_hash_of_the_real_serializer(tokens, extra, block_tokens):
    hasher = chain_hash.VllmSha256(block_tokens)
    assert hasher.keys(tokens, {0: extra, 2: extra}) == reference(
        encode_pickle, block_tokens, tokens, {0: extra, 2: extra}
    )


@given(TOKENS, EXTRA, st.integers(1, 40))
def test_vllm_sha256_cbor_is_the_hash_of_the_real_serializer(tokens, extra, block_tokens):
    hasher = chain_hash.VllmSha256Cbor(block_tokens)
    assert hasher.keys(tokens, {0: extra, 2: extra}) == reference(
        encode_cbor, block_tokens, tokens, {0: extra, 2: extra}
    )


@given(st.integers(-(2**2039), 2**2039 - 1))
def test_serializer_ints_of_all_sizes(number):
    extra = {0: (number,)}
    expected = reference(encode_pickle, 1, [1], extra)
    assert chain_hash.VllmSha256(1).keys([1], extra) == expected


@pytest.mark.parametrize(
    "number", [s * 2**e + d for e in range(80) for d in (-1, 0) for s in (1, -1)]
)
def test_serializer_ints_at_the_edges(number):
    extra = {0: (number,)}
    expected = reference(encode_pickle, 1, [1], extra)
    assert chain_hash.VllmSha256(1).keys([1], extra) == expected


def test_serializer_references_follow_identity_not_equality():
    tag, other = "mm", "".join(["m", "m"])
    one = ("img",)
    for extra in (
        ((tag, "a", 1), (tag, "b", 2)),
        ((tag, "a", 1), (other, "b", 2)),
        (one, one, ((one,),)),
        tuple(f"key {number}" for number in range(300)) * 2,  # references above 255
    ):
        expected = reference(encode_pickle, 4, [1, 2, 3, 4], {0: extra})
        assert chain_hash.VllmSha256(4).keys([1, 2, 3, 4], {0: extra}) == expected


@pytest.mark.parametrize(
    ("cls", "encode"),
    [(chain_hash.VllmSha256, encode_pickle), (chain_hash.VllmSha256Cbor, encode_cbor)],
)
def test_the_longest_block_and_the_longest_extra_keys(cls, encode):
    tokens = [2**32 - 1 - i for i in range(4096)] * 2
    extra = {1: ("x" * 16000, b"y" * 300)}
    assert cls(4096, seed="7").keys(tokens, extra) == reference(
        encode, 4096, tokens, extra, seed="7"
    )


def test_kvkeep_hash_is_what_its_page_says():
    hasher = chain_hash.KvkeepBlake2b(600, seed=b"s")
    root = hashlib.blake2b(b"s", digest_size=32, person=b"kvkeep-root-v1").digest()
    tokens = list(range(600))
    extra = ("salt", b"\x00", -1, ("mm", 2**40, None))
    body = np.asarray(tokens, dtype="<u4").tobytes()
    tail = encode_cbor(extra)
    counts = (600).to_bytes(4, "little") + len(tail).to_bytes(4, "little")
    expected = hashlib.blake2b(
        root + counts + body + tail, digest_size=32, person=b"kvkeep-chain-v1"
    ).digest()
    assert hasher.keys(tokens, {0: extra}) == expected


def all_hashers(block_tokens):
    return [cls(block_tokens) for cls in HASHERS.values()]


@pytest.mark.parametrize("hasher", all_hashers(16), ids=lambda hasher: hasher.algorithm)
def test_keys_of_any_integer_sequence_are_the_same(hasher):
    tokens = [(i * 7919) % 130_000 for i in range(50)]
    expected = hasher.keys(tokens)
    assert len(expected) == 3 * hasher.key_nbytes
    for same in (tuple(tokens), np.array(tokens), np.array(tokens, dtype=np.uint32)):
        assert hasher.keys(same) == expected


@pytest.mark.parametrize("hasher", all_hashers(8), ids=lambda hasher: hasher.algorithm)
def test_a_chain_continues_from_its_parent(hasher):
    tokens = list(range(100, 140))
    keys = hasher.keys(tokens)
    assert hasher.keys(tokens[16:], parent=keys[32:64]) == keys[64:]


@given(st.lists(st.integers(0, 25), max_size=12), st.sampled_from(sorted(HASHERS)))
def test_a_growing_chain_gets_the_keys_of_the_whole(pieces, algorithm):
    hasher = HASHERS[algorithm](8)
    extra = {} if algorithm == "sglang_sha256" else {0: ("salt",), 3: ("image", 5)}
    tokens = list(range(500, 500 + sum(pieces)))
    chain = chain_hash.ChainHasher(hasher)
    out, at = b"", 0
    for count in pieces:
        first = (at // 8, (at + count) // 8)
        new = {block: extra[block] for block in range(*first) if block in extra}
        out += chain.extend(tokens[at : at + count], new)
        at += count
    assert out == hasher.keys(tokens, extra)
    assert chain.pending_tokens == len(tokens) % 8
    assert chain.parent == out[-32:]


def test_a_refused_extension_leaves_the_chain_as_it_was():
    chain = chain_hash.ChainHasher(chain_hash.KvkeepBlake2b(4))
    chain.extend([1, 2, 3])
    with pytest.raises(InvalidArgumentError):
        chain.extend([4, -1])
    assert chain.extend([4]) == chain_hash.KvkeepBlake2b(4).keys([1, 2, 3, 4])


@pytest.mark.parametrize("hasher", all_hashers(4), ids=lambda hasher: hasher.algorithm)
def test_each_token_and_its_place_count(hasher):
    tokens = list(range(8))
    seen = {hasher.keys(tokens)[32:]}
    for at in range(8):
        changed = tokens.copy()
        changed[at] += 256
        seen.add(hasher.keys(changed)[32:])
        seen.add(hasher.keys(tokens[:at] + tokens[at + 1 :] + [99])[32:])
    assert len(seen) == 17


@pytest.mark.parametrize("cls", [chain_hash.VllmSha256Cbor, chain_hash.KvkeepBlake2b])
def test_extra_keys_change_the_block_and_all_after_it(cls):
    plain, salted = (split(cls(2).keys(range(6), extra)) for extra in (None, {1: ("salt",)}))
    assert plain[0] == salted[0]
    assert plain[1] != salted[1]
    assert plain[2] != salted[2]


def test_absent_empty_and_joined_salts_of_sglang_differ():
    salts = [(None, None), ("", None), (None, ""), ("a", "b"), ("ab", None), ("ab", ""), ("", "ab")]
    roots = {
        chain_hash.SglangSha256(4, extra_key=extra, cache_salt=salt).root for extra, salt in salts
    }
    assert len(roots) == len(salts)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [None], "text", np.array([0.5])])
@pytest.mark.parametrize("hasher", all_hashers(1), ids=lambda hasher: hasher.algorithm)
def test_wrong_tokens_are_refused(hasher, tokens):
    with pytest.raises(InvalidArgumentError, match="tokens"):
        hasher.keys(tokens)


@pytest.mark.parametrize(
    "extra", [{0: "salt"}, {-1: ("a",)}, {0: (1.5,)}, {0: ([1],)}, {0: ("x" * 20_000,)}]
)
@pytest.mark.parametrize("hasher", all_hashers(1), ids=lambda hasher: hasher.algorithm)
def test_wrong_extra_keys_are_refused(hasher, extra):
    with pytest.raises(InvalidArgumentError, match="extra_keys"):
        hasher.keys([1], extra)


@pytest.mark.parametrize("hasher", all_hashers(1), ids=lambda hasher: hasher.algorithm)
def test_a_parent_of_another_size_is_refused(hasher):
    with pytest.raises(InvalidArgumentError, match="parent"):
        hasher.keys([1], parent=b"short")


@pytest.mark.parametrize("block_tokens", [0, -1, 4097])
def test_block_sizes_out_of_range_are_refused(block_tokens):
    for cls in HASHERS.values():
        with pytest.raises(InvalidArgumentError, match="block_tokens"):
            cls(block_tokens)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "hash", ""])
def test_hashes_with_a_root_of_the_process_are_refused(algorithm):
    with pytest.raises(InvalidArgumentError, match="process to process"):
        chain_hash.vllm_hasher(algorithm, 16)


@pytest.mark.parametrize("seed", ["", "random"])
def test_seeds_of_the_process_are_refused(seed):
    for algorithm in ("sha256", "sha256_cbor"):
        with pytest.raises(InvalidArgumentError, match="same in every process"):
            chain_hash.vllm_hasher(algorithm, 16, python_hash_seed=seed)
    with pytest.raises(InvalidArgumentError, match="same in every process"):
        chain_hash.KvkeepBlake2b(16, seed=os.urandom(65))


def test_vllm_hasher_follows_the_engines_settings():
    tokens = range(32)
    unset = chain_hash.vllm_hasher("sha256_cbor", 16)
    assert unset.keys(tokens) == chain_hash.VllmSha256Cbor(16).keys(tokens)
    seeded = chain_hash.vllm_hasher("sha256", 16, python_hash_seed="0")
    assert seeded.keys(tokens) == chain_hash.VllmSha256(16, seed="0").keys(tokens)


def test_b015_keys_are_the_same_in_every_process():
    """B015: four processes with random string hashes derive the same keys."""
    program = (
        "import kvkeep.chain_hash as c\n"
        "print(hash('per process'))\n"
        "extra = {0: (('cache_salt', 'tenant A'), ('mm', 'image', 3))}\n"
        "for h in (c.VllmSha256(16), c.VllmSha256Cbor(16), c.KvkeepBlake2b(16)):\n"
        "    print(h.root.hex(), h.keys(range(64), extra).hex())\n"
        "print(c.SglangSha256(16, cache_salt='tenant A').keys(range(64)).hex())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True
        ).stdout.splitlines()
        for _ in range(4)
    ]
    assert len({lines[0] for lines in outputs}) > 1, "string hashes were not random"
    assert len({tuple(lines[1:]) for lines in outputs}) == 1
    assert len(outputs[0]) == 5

"""Names blocks by all tokens up to their end: the hashes of vLLM and SGLang, and kvkeep's own.

A chain hash is H(hash of the block before, tokens of this block, extra keys), so equal keys mean
equal whole prefixes. Byte for byte, with vectors: `proto/kvkeep/v1/chain_hash.md`.

A key is the same in every process, on every host and under every PYTHONHASHSEED: nothing here uses
`hash()` or a random root, and roots that differ between processes are refused. Hashers never change
and may be shared by threads; a `ChainHasher` belongs to one thread.

hashlib gives the GIL up for inputs above 2,047 bytes and numpy for arrays of more than 500
elements; beside a busy engine thread each such call costs up to 5 ms. So digests are fed in smaller
pieces, and tokens are packed with `array`, which keeps it.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvkeep.hash_encodings import (
    TokenCodes,
    Value,
    cbor,
    cbor_head,
    framed,
    opcode_int,
    opcodes,
    refusal,
    tuple_ends,
)

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids of a prompt, each 0 to 2**32 - 1."""

ExtraKeys = Mapping[int, tuple[Value, ...]]
"""What blocks depend on beside their tokens, by block position; absent = nothing."""

KEY_NBYTES = 32
# Both keep an encoded block below 64 KiB, where vLLM's encoding would begin a second frame.
_BLOCK_TOKENS_MAX = 4096
_EXTRA_NBYTES_MAX = 16384
_GIL_KEPT_NBYTES_MAX = 2047
_EMPTY_SHA256 = hashlib.sha256()
_Run = TypeVar("_Run", bytes, list[int])


class Hasher(Protocol):
    """Derives the keys of a chain of blocks.

    Attributes:
        algorithm: Name for `NamespaceSpec.hash_algorithm`.
        root: Parent of every first block, at most 32 bytes, for `NamespaceSpec.hash_root`.
        key_nbytes: Bytes of one key, for `NamespaceSpec.key_nbytes`.
        block_tokens: Tokens a block; only full blocks have a key.
    """

    algorithm: str
    root: bytes
    key_nbytes: int
    block_tokens: int

    def keys(
        self, tokens: Tokens, extra_keys: ExtraKeys | None = None, *, parent: bytes = b""
    ) -> bytes:
        """Returns the packed keys of all full blocks of `tokens`, in chain order.

        Args:
            tokens: n token ids; the last n % block_tokens of them have no key.
            extra_keys: By position of the block in `tokens`, from 0.
            parent: Key of the block before tokens[0]; empty = the chain begins at tokens[0].

        Returns:
            (n // block_tokens) * key_nbytes bytes.

        Raises:
            InvalidArgumentError: A token, an extra key or the parent is not allowed.
        """
        ...


class ChainHasher:
    """Names the blocks of one chain while it grows, e.g. while an engine decodes.

    Args:
        hasher: The algorithm.
        parent: Key of the block before the first token; empty = the chain begins here.
    """

    def __init__(self, hasher: Hasher, *, parent: bytes = b"") -> None:
        """See the class."""
        self._hasher = hasher
        self._parent = parent
        self._pending: list[int] = []
        self._blocks = 0

    @property
    def parent(self) -> bytes:
        """Key of the newest full block, or what the constructor got."""
        return self._parent

    @property
    def pending_tokens(self) -> int:
        """How many tokens at the end do not fill a block yet."""
        return len(self._pending)

    def extend(self, tokens: Tokens, extra_keys: ExtraKeys | None = None) -> bytes:
        """Appends tokens; returns the packed keys of the blocks that became full.

        Args:
            tokens: Any number of token ids.
            extra_keys: For blocks that become full now, by position in the whole chain, from 0.

        Raises:
            InvalidArgumentError: See `Hasher.keys`. The chain is unchanged then.
        """
        pending = [*self._pending, *_checked_tokens(tokens)]
        extra = {at - self._blocks: value for at, value in (extra_keys or {}).items()}
        keys = self._hasher.keys(pending, extra, parent=self._parent)
        blocks = len(keys) // self._hasher.key_nbytes
        if blocks:
            self._parent = keys[-self._hasher.key_nbytes :]
        self._blocks += blocks
        self._pending = pending[blocks * self._hasher.block_tokens :]
        return keys


class VllmSha256Cbor:
    """vLLM's `sha256_cbor`: SHA-256 over canonical CBOR.

    Args:
        block_tokens: Tokens a block (vLLM's hash block size), 1 to 4096.
        seed: What vLLM's root is the hash of: PYTHONHASHSEED where the engine has it set, else
            vLLM's constant.
    """

    algorithm = "sha256_cbor"
    key_nbytes = KEY_NBYTES

    def __init__(self, block_tokens: int, *, seed: str = "vllm-none-hash") -> None:
        """See the class."""
        self.block_tokens = _checked_block_tokens(block_tokens)
        self.root = _sha256(cbor(_checked_seed(seed)))
        self._codes = TokenCodes(lambda token: cbor_head(0x00, token))
        self._head = cbor_head(0x80, 3) + cbor_head(0x40, KEY_NBYTES)
        self._middle = cbor_head(0x80, block_tokens)

    def keys(
        self, tokens: Tokens, extra_keys: ExtraKeys | None = None, *, parent: bytes = b""
    ) -> bytes:
        """See `Hasher.keys`. Extra keys as vLLM has them, e.g. {0: (("cache_salt", salt),)}."""
        blocks = _split(_checked_tokens(tokens).tolist(), self.block_tokens)
        extra = _encoded_extra(extra_keys, len(blocks), cbor)
        key = _checked_parent(parent) or self.root
        out = []
        for at, block in enumerate(blocks):
            encoded = self._codes.join(block)
            key = _sha256(self._head, key, self._middle, encoded, extra.get(at, b"\xf6"))
            out.append(key)
        return b"".join(out)


class VllmSha256:
    """vLLM's default, `sha256`: SHA-256 over what CPython's object serializer makes of a block.

    An object that occurs twice in the extra keys of one block (the same object: equality does not
    count) is hashed as a reference, so build them as vLLM does. `sha256_cbor` has no such trap.

    Args:
        block_tokens: Tokens a block (vLLM's hash block size), 1 to 4096.
        seed: As in `VllmSha256Cbor`.
    """

    algorithm = "sha256"
    key_nbytes = KEY_NBYTES

    def __init__(self, block_tokens: int, *, seed: str = "vllm-none-hash") -> None:
        """See the class."""
        self.block_tokens = _checked_block_tokens(block_tokens)
        self.root = _sha256(*framed(opcodes(_checked_seed(seed), {}), b"."))
        self._codes = TokenCodes(opcode_int)
        begin, self._end = tuple_ends(block_tokens)
        self._middle = b"\x94" + begin

    def keys(
        self, tokens: Tokens, extra_keys: ExtraKeys | None = None, *, parent: bytes = b""
    ) -> bytes:
        """See `Hasher.keys`. Extra keys as vLLM has them, e.g. {0: (("cache_salt", salt),)}."""
        blocks = _split(_checked_tokens(tokens).tolist(), self.block_tokens)
        # References 0 and 1 are the parent and the tuple of tokens, which stand before.
        extra = _encoded_extra(
            extra_keys, len(blocks), lambda value: opcodes(value, {-1: 0, -2: 1})
        )
        key = _checked_parent(parent) or self.root
        out = []
        for at, block in enumerate(blocks):
            encoded = self._codes.join(block)
            body = (b"C\x20", key, self._middle, encoded, self._end, extra.get(at, b"N"))
            key = _sha256(*framed(*body, b"\x87\x94."))
            out.append(key)
        return b"".join(out)


class SglangSha256:
    """SGLang's HiCache page hash: SHA-256 over the prior digest and tokens as little-endian u32.

    Args:
        page_tokens: Tokens a page, 1 to 4096.
        extra_key: The request's extra key (LoRA and the like); None = none.
        cache_salt: The request's salt; None = none. With either, the chain has a root of its own.
    """

    algorithm = "sglang_sha256"
    key_nbytes = KEY_NBYTES

    def __init__(
        self, page_tokens: int, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> None:
        """See the class."""
        self.block_tokens = _checked_block_tokens(page_tokens)
        self.root = b""
        if extra_key is not None or cache_salt is not None:
            parts = (_presence_prefixed(part) for part in (extra_key, cache_salt))
            self.root = _sha256(b"sglang-cache-namespace-v1", *parts)

    def keys(
        self, tokens: Tokens, extra_keys: ExtraKeys | None = None, *, parent: bytes = b""
    ) -> bytes:
        """See `Hasher.keys`. Takes no extra keys: SGLang salts whole chains."""
        if extra_keys:
            raise refusal(
                "extra_keys", extra_keys, "none here", "give SglangSha256() extra_key or cache_salt"
            )
        key = _checked_parent(parent) or self.root
        out = []
        for page in _split(_packed_tokens(tokens), 4 * self.block_tokens):
            key = _sha256(key, page)
            out.append(key)
        return b"".join(out)


class KvkeepBlake2b:
    """kvkeep's own, for engines that prescribe no hash: BLAKE2b-256 over a prefixed encoding.

    Args:
        block_tokens: Tokens a block, 1 to 4096.
        seed: Keeps chains apart that must not meet, e.g. of two tokenizers; at most 64 bytes, the
            same in every process.
    """

    algorithm = "kvkeep_blake2b_v1"
    key_nbytes = KEY_NBYTES

    def __init__(self, block_tokens: int, *, seed: bytes = b"") -> None:
        """See the class."""
        self.block_tokens = _checked_block_tokens(block_tokens)
        if not isinstance(seed, bytes) or len(seed) > 64:
            raise refusal(
                "seed", seed, "at most 64 bytes, the same in every process", "give fixed bytes"
            )
        self.root = hashlib.blake2b(seed, digest_size=32, person=b"kvkeep-root-v1").digest()
        self._empty = hashlib.blake2b(digest_size=32, person=b"kvkeep-chain-v1")

    def keys(
        self, tokens: Tokens, extra_keys: ExtraKeys | None = None, *, parent: bytes = b""
    ) -> bytes:
        """See `Hasher.keys`. Use extra keys for whatever changes KV: LoRA, images, a salt."""
        blocks = _split(_packed_tokens(tokens), 4 * self.block_tokens)
        extra = _encoded_extra(extra_keys, len(blocks), cbor)
        key = _checked_parent(parent) or self.root
        out = []
        for at, block in enumerate(blocks):
            suffix = extra.get(at, b"")
            counts = struct.pack("<II", self.block_tokens, len(suffix))
            digest = self._empty.copy()
            for piece in _pieces(key, counts, block, suffix):
                digest.update(piece)
            key = digest.digest()
            out.append(key)
        return b"".join(out)


def vllm_hasher(
    algorithm: str, block_tokens: int, *, python_hash_seed: str | None = None
) -> VllmSha256 | VllmSha256Cbor:
    """Returns the hasher for the settings of a running vLLM.

    Args:
        algorithm: Its `prefix_caching_hash_algo`.
        block_tokens: Tokens of one block hash.
        python_hash_seed: PYTHONHASHSEED of the engine's process; None = not set.

    Raises:
        InvalidArgumentError: The algorithm is unknown, or its root differs between processes.
    """
    known: dict[str, type[VllmSha256 | VllmSha256Cbor]] = {
        "sha256": VllmSha256,
        "sha256_cbor": VllmSha256Cbor,
    }
    if algorithm not in known:
        raise refusal(
            "prefix_caching_hash_algo",
            algorithm,
            "sha256 and sha256_cbor; the root of others differs from process to process",
            "start vLLM with --prefix-caching-hash-algo sha256_cbor",
        )
    if python_hash_seed is None:
        return known[algorithm](block_tokens)
    return known[algorithm](block_tokens, seed=python_hash_seed)


def _checked_block_tokens(block_tokens: int) -> int:
    if not 1 <= block_tokens <= _BLOCK_TOKENS_MAX:
        raise refusal(
            "block_tokens", block_tokens, f"1 to {_BLOCK_TOKENS_MAX}", "give the engine's own size"
        )
    return block_tokens


def _checked_seed(seed: str) -> str:
    # To Python, "" and "random" mean another hash seed in every process.
    if seed in {"", "random"}:
        raise refusal(
            "seed",
            seed,
            "a value that is the same in every process",
            "start the engine with PYTHONHASHSEED unset or a number, and give that number",
        )
    return seed


def _checked_parent(parent: bytes) -> bytes:
    if parent and len(parent) != KEY_NBYTES:
        raise refusal(
            "parent", parent, f"empty or {KEY_NBYTES} bytes", "give a key that keys() returned"
        )
    return parent


def _checked_tokens(tokens: Tokens) -> "array[int]":
    """Copies token ids into an array of u32 in this machine's byte order."""
    values = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    try:
        return array("I", values)
    except (OverflowError, TypeError) as error:
        raise refusal(
            "tokens", tokens, "whole numbers, each 0 to 4294967295", f"check the prompt: {error}"
        ) from error


def _packed_tokens(tokens: Tokens) -> bytes:
    values = _checked_tokens(tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _split(items: _Run, count: int) -> list[_Run]:
    """Cuts into runs of `count`, without what is left over."""
    return [items[at : at + count] for at in range(0, len(items) - count + 1, count)]


def _encoded_extra(
    extra_keys: ExtraKeys | None, blocks: int, encode: Callable[[Value], bytes]
) -> dict[int, bytes]:
    """Returns position -> encoding, for positions below `blocks`."""
    out = {}
    for at, value in (extra_keys or {}).items():
        if at < 0 or not isinstance(value, tuple):
            raise refusal(
                "extra_keys", {at: value}, "position (from 0) -> tuple", "leave other blocks out"
            )
        if at < blocks:
            out[at] = encode(value)
            if len(out[at]) > _EXTRA_NBYTES_MAX:
                raise refusal(
                    "extra_keys", {at: value}, f"{_EXTRA_NBYTES_MAX} bytes a block", "give digests"
                )
    return out


def _presence_prefixed(part: str | None) -> bytes:
    if part is None:
        return b"\x00"
    encoded = part.encode("utf-8")
    return b"\x01" + len(encoded).to_bytes(8, "little") + encoded


def _pieces(*parts: bytes) -> list[bytes]:
    """Joins, then cuts so that hashlib never gives the GIL up."""
    data = b"".join(parts)
    if len(data) <= _GIL_KEPT_NBYTES_MAX:
        return [data]
    return [
        data[at : at + _GIL_KEPT_NBYTES_MAX] for at in range(0, len(data), _GIL_KEPT_NBYTES_MAX)
    ]


def _sha256(*parts: bytes) -> bytes:
    digest = _EMPTY_SHA256.copy()  # half the price of a new one
    for piece in _pieces(*parts):
        digest.update(piece)
    return digest.digest()

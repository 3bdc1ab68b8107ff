"""Two turns of one conversation: the second copies the first's KV into its own buffer.

Start a daemon first: `kvkeep serve`. The model is a stand-in whose KV of a token is 64 bytes.
"""
# ruff: noqa: T201 - an example shows what it got

import numpy as np

import kvkeep

BLOCK_TOKENS = 16
TOKEN_NBYTES = 64
BLOCK_NBYTES = BLOCK_TOKENS * TOKEN_NBYTES


def compute_kv(token_ids: list[int]) -> np.ndarray:
    """Stands for an engine's prefill: KV of some tokens, shape (tokens, 64), uint8."""
    column = np.arange(TOKEN_NBYTES, dtype=np.uint8)
    return np.asarray(token_ids).astype(np.uint8)[:, None] ^ column


def serve_turn(
    namespace: kvkeep.Namespace, hasher: kvkeep.chain_hash.Hasher, prompt: list[int]
) -> str:
    """Fills the prompt's KV, from kvkeep as far as possible, and stores what was missing."""
    keys = hasher.keys(prompt)
    kv = np.empty((len(prompt), TOKEN_NBYTES), dtype=np.uint8)

    # No RPC: probes the shared index, copies from the shared pool, checks that it was exact.
    full_tokens = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    hit_blocks = namespace.read_into(keys, kv[:full_tokens])
    hit_tokens = hit_blocks * BLOCK_TOKENS
    kv[hit_tokens:] = compute_kv(prompt[hit_tokens:])

    with namespace.store(keys) as store:
        for position, view in zip(store.new, store.views, strict=True):
            first = position * BLOCK_TOKENS
            view[:] = kv[first : first + BLOCK_TOKENS].tobytes()
    return f"{len(prompt)} tokens: {hit_tokens} found, {len(prompt) - hit_tokens} computed"


def main() -> None:
    """Runs both turns."""
    hasher = kvkeep.chain_hash.KvkeepBlake2b(BLOCK_TOKENS)
    spec = kvkeep.NamespaceSpec(
        model="tiny",
        weights_fingerprint="v1",
        engine="prefix_reuse",
        layout_version="1",
        kv_dtype="uint8",
        hash_algorithm=hasher.algorithm,
        hash_root=hasher.root,
        groups=[kvkeep.Group.full("kv", tokens_per_block=BLOCK_TOKENS, block_nbytes=BLOCK_NBYTES)],
    )
    first_turn = list(range(100))
    second_turn = first_turn + list(range(200, 260))
    with kvkeep.connect() as client:
        namespace = client.open_namespace(spec)
        print(serve_turn(namespace, hasher, first_turn))
        print(serve_turn(namespace, hasher, second_turn))


if __name__ == "__main__":
    main()

"""Stores two blocks, and finds them again as the beginning of a longer prompt.

Start a daemon first: `kvkeep serve`.
"""
# ruff: noqa: T201 - an example shows what it got

import kvkeep

hasher = kvkeep.chain_hash.KvkeepBlake2b(16)  # 16 tokens a block
spec = kvkeep.NamespaceSpec(
    model="tiny",
    weights_fingerprint="v1",
    engine="hello",
    layout_version="1",
    kv_dtype="uint8",
    hash_algorithm=hasher.algorithm,
    hash_root=hasher.root,
    groups=[kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=4096)],
)

with kvkeep.connect() as client:
    namespace = client.open_namespace(spec)
    with namespace.store(hasher.keys(range(32))) as store:  # a prompt of 32 tokens
        for view in store.views:
            view[:] = b"KV" * 2048  # the engine copies its KV here
    with namespace.acquire(hasher.keys(range(64))) as hit:  # a longer prompt begins alike
        print(hit.blocks, "of 4 blocks are there:", bytes(hit.views()[0][:4]))

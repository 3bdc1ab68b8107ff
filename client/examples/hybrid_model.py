"""A model with full attention, a sliding window and a recurrent state: what a prefix needs of each.

Start a daemon first: `kvkeep serve`. The bytes stand for an engine's KV.
"""
# ruff: noqa: T201 - an example shows what it got

import kvkeep

BLOCK_TOKENS = 16
STATE_TOKENS = 64
GLOBAL, WINDOW, STATE = range(3)
GROUPS = [
    kvkeep.Group.full("global", tokens_per_block=BLOCK_TOKENS, block_nbytes=4096),
    # Of the last 32 tokens only.
    kvkeep.Group.window(
        "window", tokens_per_block=BLOCK_TOKENS, block_nbytes=1024, window_tokens=32
    ),
    # A snapshot at every 64th token. Without it the engine replays a few tokens; a model that
    # cannot do that asks for state_mode=kvkeep.StateMode.EXACT.
    kvkeep.Group.state("state", tokens_per_block=STATE_TOKENS, block_nbytes=2048),
]


def store(namespace: kvkeep.Namespace, keys: bytes) -> None:
    """Stores a prompt's blocks; of those that only an earlier end needs, the oldest leave first."""
    count = len(keys) // namespace.spec.key_nbytes
    every = STATE_TOKENS // BLOCK_TOKENS
    positions = {
        WINDOW: range(count),
        STATE: range(every - 1, count, every),
    }
    with namespace.store(keys, positions=positions) as pending:
        for group in pending.groups:
            for position, view in zip(
                pending.new_of(group), pending.group_views(group), strict=True
            ):
                view[:] = bytes([position]) * len(view)


def main() -> None:
    """Stores a prompt of 160 tokens, and asks for a longer one."""
    hasher = kvkeep.chain_hash.KvkeepBlake2b(BLOCK_TOKENS)
    spec = kvkeep.NamespaceSpec(
        model="tiny-hybrid",
        weights_fingerprint="v1",
        engine="hybrid_model",
        layout_version="1",
        kv_dtype="uint8",
        hash_algorithm=hasher.algorithm,
        hash_root=hasher.root,
        groups=GROUPS,
    )
    with kvkeep.connect() as client:
        namespace = client.open_namespace(spec)
        store(namespace, hasher.keys(range(160)))
        longer = hasher.keys(range(240))
        found = namespace.lookup(longer)
        print(f"{found.tokens} of 240 tokens, the last {found.replay_tokens} with a replay")
        with namespace.acquire(longer) as hit:
            for number, group in enumerate(GROUPS):
                positions = list(hit.positions(group=number))
                assert [view[0] for view in hit.views(group=number)] == positions
                print(f"{group.name}: blocks {positions}")


if __name__ == "__main__":
    main()

"""An engine's scheduler: it asks, goes on with its steps, and waits for nothing.

Start a daemon first: `kvkeep serve`. The bytes stand for an engine's KV.
"""
# ruff: noqa: T201 - an example shows what it got

import select

import kvkeep

BLOCK_TOKENS = 16
BLOCK_NBYTES = 4096
DEADLINE_S = 0.25  # what takes longer is computed instead


def copy_in(ticket: kvkeep.AcquireTicket) -> int:
    """Blocks that were found and read. Not READY, for whatever reason: none."""
    if ticket.state is not kvkeep.TicketState.READY or ticket.acquired is None:
        return 0
    with ticket.acquired as found:
        return len([bytes(view) for view in found.views()])


def store(namespace: kvkeep.Namespace, keys: bytes) -> kvkeep.CommitTicket | None:
    """Stores what is new. A daemon that is away, or has no room, is no reason to wait."""
    try:
        pending = namespace.store(keys, timeout_s=0)
    except kvkeep.KVKeepError:
        return None
    for view in pending.views:
        view[:] = b"KV" * (BLOCK_NBYTES // 2)
    return pending.submit_commit(DEADLINE_S)


def serve(client: kvkeep.Client, namespace: kvkeep.Namespace, keys: bytes) -> int:
    """One request, to its end; an engine has many under way. Blocks that were found."""
    found = 0
    waiting: set[object] = {namespace.submit_acquire(keys, timeout_s=DEADLINE_S)}
    while waiting:
        # An engine computes its step here. A loop that has nothing to do sleeps on the descriptor.
        select.select([client.fileno()], [], [], DEADLINE_S)
        for ticket in client.poll():
            if ticket.done:
                waiting.discard(ticket)
            if ticket.done and isinstance(ticket, kvkeep.AcquireTicket):
                found = copy_in(ticket)
                commit = store(namespace, keys)
                waiting |= {commit} - {None}
    return found


def main() -> None:
    """Three requests, each with the one before at its head."""
    hasher = kvkeep.chain_hash.KvkeepBlake2b(BLOCK_TOKENS)
    groups = [kvkeep.Group.full("kv", tokens_per_block=BLOCK_TOKENS, block_nbytes=BLOCK_NBYTES)]
    spec = kvkeep.NamespaceSpec(
        model="tiny",
        weights_fingerprint="v1",
        engine="scheduler",
        layout_version="1",
        kv_dtype="uint8",
        hash_algorithm=hasher.algorithm,
        hash_root=hasher.root,
        groups=groups,
    )
    with kvkeep.connect() as client:
        namespace = client.open_namespace(spec)
        for tokens in (64, 96, 96):
            found = serve(client, namespace, hasher.keys(range(tokens)))
            print(f"{tokens} tokens: {found * BLOCK_TOKENS} found")


if __name__ == "__main__":
    main()

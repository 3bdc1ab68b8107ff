"""An engine that starts, uses the cache, and ends: what a restart of an engine is.

    python -m tests.e2e.restarted_engine WHERE FACTS

FACTS is a JSON list: of each namespace, what differs in its specification. Prints a list of
{"found", "exact", "stored"}: blocks that it found, those that were exact, those that it stored.
"""

import json
import sys

import kvkeep
from kvkeep.chain_hash import VllmSha256Cbor
from tests.fakes.generated_blocks import blocks_of, place_of, spec, store_chain
from tests.fakes.ways import connect

BLOCK_NBYTES = 24_000
BLOCK_TOKENS = 16
BLOCKS = 38


def use(client: kvkeep.Client, facts: dict) -> dict:
    place = json.dumps(facts, sort_keys=True)
    size = facts.pop("block_nbytes", BLOCK_NBYTES)
    hasher = VllmSha256Cbor(BLOCK_TOKENS)
    tokens = list(range(5, 5 + BLOCKS * BLOCK_TOKENS))
    keys = hasher.keys(tokens, {3: (("image", 17),)})
    identity = {"hash_algorithm": hasher.algorithm, "hash_root": hasher.root, **facts}
    namespace = client.open_namespace(spec(size, **identity))
    found = namespace.lookup(keys).blocks
    buffer = bytearray(BLOCKS * size)
    read = namespace.read_into(keys, buffer)
    expected = blocks_of(place_of(place), keys, size)
    exact = [buffer[i * size : (i + 1) * size] == expected[i].tobytes() for i in range(read)]
    stored = store_chain(namespace, keys, place=place).stored
    return {"found": found, "exact": exact.count(True), "stored": stored}


def main(where: str, namespaces: list[dict]) -> None:
    with connect(where) as client:
        sys.stdout.write(json.dumps([use(client, facts) for facts in namespaces]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

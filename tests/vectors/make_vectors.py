"""Writes the test vectors of proto/kvkeep/v1 from shared_memory.md and record.md alone, in plain
integers.

It imports nothing of the product and uses no numpy, so that neither side can be tested against
itself. Run: python tests/vectors/make_vectors.py shared_memory|record [path]; without a path it
prints.
"""

import hashlib
import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import xxhash

MASK = 2**64 - 1
SEED = 20240601
LAYOUT_VERSION = 2


def hex64(value: int) -> str:
    """JSON numbers are doubles in many readers, so a u64 travels as a string."""
    return f"0x{value:016x}"


def words_of(key: bytes) -> list[int]:
    """The key as little-endian u64, the last one filled up with zero bytes."""
    padded = key + bytes(-len(key) % 8)
    return [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]


def fingerprint(
    a: list[int], b: list[int], namespace_id: bytes, group: int, key: bytes
) -> tuple[int, int]:
    """(tag, check) as shared_memory.md, section 4, writes it down."""
    n0, n1 = words_of(namespace_id)
    w = words_of(key)
    c = (group * 2**32 + len(key)) & MASK
    h = a[15]
    for x in (n0, n1, c):
        h = ((h ^ x) * a[14]) & MASK
        h ^= h >> 32
    s = (b[15] + n0 * b[14] + n1 * b[13] + c * b[12]) & MASK
    for i, word in enumerate(w):
        h = ((h ^ word) * a[i]) & MASK
        h ^= h >> 32
        s = (s + word * b[i]) & MASK
    s ^= s >> 29
    s = (s * b[11]) & MASK
    s ^= s >> 32
    return max(h, 1), s


def home_bucket(tag: int, buckets: int) -> int:
    """The bucket where probing begins."""
    return ((tag >> 32) * buckets) >> 32


def fingerprint_sets(rng: random.Random) -> list[dict[str, Any]]:
    """Two sets of multipliers, each with keys of every legal length class, several namespaces and
    groups."""
    sets = []
    for _ in range(2):
        a = [rng.getrandbits(64) | 1 for _ in range(16)]
        b = [rng.getrandbits(64) | 1 for _ in range(16)]
        namespaces = [bytes(16), b"\xff" * 16, rng.randbytes(16), rng.randbytes(16)]
        cases = []
        for namespace_id in namespaces:
            for key_nbytes in (16, 17, 20, 24, 31, 32, 33, 48, 63, 64):
                group = rng.choice([0, 1, 3, 15])
                for key in (rng.randbytes(key_nbytes), bytes(key_nbytes)):
                    tag, check = fingerprint(a, b, namespace_id, group, key)
                    cases.append(
                        {
                            "namespace_id": namespace_id.hex(),
                            "group": group,
                            "key": key.hex(),
                            "tag": hex64(tag),
                            "check": hex64(check),
                            "home_buckets": {
                                str(buckets): home_bucket(tag, buckets)
                                for buckets in (1, 8192, 250_001, 2**31)
                            },
                        }
                    )
        sets.append({"a": [hex64(x) for x in a], "b": [hex64(x) for x in b], "cases": cases})
    return sets


def addresses() -> list[dict[str, Any]]:
    """Section 2."""
    cases = [(0, 1), (0, 2**32 - 1), (1, 1), (7, 262_143), (65_535, 4_096)]
    return [{"chunk": c, "page": p, "address": hex64(p | c << 32)} for c, p in cases]


def chunk_header() -> dict[str, Any]:
    """Section 3."""
    fields = {
        "chunk_id": 7,
        "server_epoch": 0x1122334455667788,
        "nbytes": 1 << 30,
        "generations_offset": 4096,
        "data_offset": 4096 + 2 * 1024 * 1024,
    }
    encoded = struct.pack("<8sIIQQQQ", b"KVKCHNK1", LAYOUT_VERSION, *fields.values())
    return {
        "fields": fields | {"server_epoch": hex64(fields["server_epoch"])},
        "encoded": encoded.hex(),
    }


def index_table(rng: random.Random) -> dict[str, Any]:
    """Section 4: a whole table of three buckets: a full one, from which two rows ran over into the
    next ones, and a row that was removed again."""
    a = [rng.getrandbits(64) | 1 for _ in range(16)]
    b = [rng.getrandbits(64) | 1 for _ in range(16)]
    buckets, column_nbytes = 3, 4096
    rows = 8 * buckets
    offsets = [4096 + i * column_nbytes for i in range(5)]
    nbytes = 4096 + 5 * column_nbytes
    header = struct.pack(
        "<8sIIQQQQQ5Q", b"KVKINDX1", LAYOUT_VERSION, 1, 42, 3, buckets, rows, nbytes, *offsets
    )
    header = header.ljust(128, b"\0") + struct.pack("<16Q", *a) + struct.pack("<16Q", *b)
    namespace_id, group = rng.randbytes(16), 1
    columns = [[0] * rows for _ in range(4)]
    passed = [0] * buckets
    entries: list[dict[str, Any]] = []
    for number, wanted in enumerate([0] * 10 + [1, 1]):
        key = rng.randbytes(32)
        while home_bucket(fingerprint(a, b, namespace_id, group, key)[0], buckets) != wanted:
            key = rng.randbytes(32)
        tag, check = fingerprint(a, b, namespace_id, group, key)
        removed = number == 11
        runs_over = 8 <= number < 10
        passed[0] += runs_over
        bucket = (1 << (tag & 15)) % buckets if runs_over else wanted
        row = 8 * bucket + sum(tag != 0 for tag in columns[0][8 * bucket : 8 * bucket + 8])
        address = 0 if removed else 5 + 14 * number
        on_nvme = not removed and number % 3 == 0
        values = (0 if removed else tag, check, address | on_nvme << 63, 2 * (number + 1))
        for column, value in zip(columns, values, strict=True):
            column[row] = value
        entries.append(
            {
                "key": key.hex(),
                "found": not removed,
                "row": row,
                "address": hex64(address),
                "on_nvme": on_nvme,
                "version": 2 * (number + 1),
            }
        )
    data = [struct.pack(f"<{rows}{'I' if i == 3 else 'Q'}", *c) for i, c in enumerate(columns)]
    data.append(struct.pack(f"<{buckets}H", *passed))
    names = ("tag", "check", "place", "version", "passed")
    return {
        "fields": {
            "state": 1,
            "server_epoch": hex64(42),
            "table_id": 3,
            "buckets": buckets,
            "rows": rows,
            "nbytes": nbytes,
            "offsets": offsets,
        },
        "namespace_id": namespace_id.hex(),
        "group": group,
        "header": header.hex(),
        "columns": {name: column.hex() for name, column in zip(names, data, strict=True)},
        "entries": entries,
    }


def touch_ring() -> dict[str, Any]:
    """Section 6."""
    header = struct.pack("<8sII", b"KVKTUCH1", LAYOUT_VERSION, 4096).ljust(64, b"\0")
    header += struct.pack("<Q", 5001)
    fields = {
        "number": 5000,
        "set_index": 3,
        "group": 1,
        "blocks_asked": 64,
        "blocks_found": 63,
        "row": 123_456,
        "version": 18,
        "engine_hit_tokens": 2**40,
        "output_tokens": 777,
        "stop_reason": 2,
        "sub_agent": 1,
        "blocks_read": 1,
        "session": b"\x01\x02\x03\x04\x05\x06\x07\x08",
    }
    encoded = struct.pack(
        "<QIIIIIIQIBBBBQQ",
        fields["number"] + 1,
        fields["set_index"],
        fields["group"],
        fields["blocks_asked"],
        fields["blocks_found"],
        fields["row"],
        fields["version"],
        fields["engine_hit_tokens"],
        fields["output_tokens"],
        fields["stop_reason"],
        fields["sub_agent"],
        fields["blocks_read"],
        0,
        int.from_bytes(fields["session"], "little"),
        fields["number"] + 1,
    )
    shown = fields | {"session": fields["session"].hex()}
    return {
        "records": 4096,
        "header": header.hex(),
        "record_offset": 4096 + (fields["number"] % 4096) * 64,
        "fields": shown,
        "record": encoded.hex(),
    }


def field(number: int, value: bytes) -> bytes:
    """One field of a namespace's encoding."""
    return struct.pack("<BI", number, len(value)) + value


def u64(value: int) -> bytes:
    """A number of a namespace's encoding."""
    return struct.pack("<Q", value)


def group_encoding(group: dict[str, Any]) -> bytes:
    """One group of section 7."""
    return (
        field(1, group["name"].encode())
        + field(2, u64(group["kind"]))
        + field(3, u64(group["tokens_per_block"]))
        + field(4, u64(group["block_nbytes"]))
        + field(5, u64(group["window_tokens"]))
        + field(6, u64(group["state_mode"]))
    )


def namespace_encoding(spec: dict[str, Any]) -> bytes:
    """Section 7."""
    texts = ("tenant", "model", "weights_fingerprint", "engine", "layout_version", "kv_dtype")
    out = field(0, b"kvkeep-namespace-v1")
    for number, name in enumerate((*texts, "hash_algorithm"), start=1):
        out += field(number, spec[name].encode())
    out += field(8, bytes.fromhex(spec["hash_root"])) + field(9, u64(spec["key_nbytes"]))
    for number, name in enumerate(("tp_size", "pp_size", "dp_size", "cp_size"), start=10):
        out += field(number, u64(spec[name] or 1))
    out += field(14, struct.pack("<B", spec["replicated"]))
    for group in spec["groups"]:
        out += field(15, group_encoding(group))
    for switch in spec["layout_switches"]:
        out += field(16, switch.encode())
    return out + field(17, u64(spec["namespace_epoch"]))


def namespace_specs() -> list[dict[str, Any]]:
    """A plain one, one with everything set, and one whose strings are hard."""
    kv = {
        "name": "kv",
        "kind": 1,
        "tokens_per_block": 16,
        "block_nbytes": 58_368,
        "window_tokens": 0,
        "state_mode": 0,
    }
    plain = {
        "tenant": "",
        "model": "llama-3.1-8b",
        "weights_fingerprint": "sha256:00ff",
        "engine": "vllm",
        "layout_version": "vllm-0.32/NHD/1",
        "kv_dtype": "bfloat16",
        "hash_algorithm": "sha256_cbor",
        "hash_root": "",
        "key_nbytes": 32,
        "tp_size": 0,
        "pp_size": 0,
        "dp_size": 0,
        "cp_size": 0,
        "replicated": False,
        "groups": [kv],
        "layout_switches": [],
        "namespace_epoch": 0,
    }
    window = kv | {"name": "swa", "kind": 2, "window_tokens": 4096}
    state = kv | {"name": "state", "kind": 3, "tokens_per_block": 128, "state_mode": 2}
    full = plain | {
        "tenant": "acme",
        "hash_root": "ab" * 32,
        "key_nbytes": 64,
        "tp_size": 2,
        "pp_size": 3,
        "dp_size": 4,
        "cp_size": 5,
        "replicated": True,
        "groups": [kv, window, state],
        "layout_switches": ["A=1", "B=2"],
        "namespace_epoch": 2**40,
    }
    hard = plain | {"tenant": "a\0b", "model": "模型/..\n", "layout_switches": ["", "A=1B=2"]}
    return [plain, plain | {"tp_size": 1}, plain | {"kv_dtype": "fp8_e4m3"}, full, hard]


def namespaces() -> list[dict[str, Any]]:
    """Identities of sets and of ranks."""
    out = []
    for spec in namespace_specs():
        encoding = namespace_encoding(spec)
        set_id = hashlib.sha256(encoding).digest()[:16]
        ranks = [
            {
                "rank": rank,
                "namespace_id": hashlib.sha256(b"kvkeep-rank-v1" + set_id + struct.pack("<I", rank))
                .digest()[:16]
                .hex(),
            }
            for rank in (0, 1, 119)
        ]
        out.append(
            {"spec": spec, "encoding": encoding.hex(), "set_id": set_id.hex(), "ranks": ranks}
        )
    return out


def call_frames() -> list[dict[str, Any]]:
    """A call, its reply, and one that is refused; section 1, the call socket."""
    frames = [
        ("Release of lease 7", 4, 0, 258, bytes.fromhex("0a0107")),
        ("OK, released 1", 0, 0, 258, bytes.fromhex("0801")),
        ("RESOURCE_EXHAUSTED, again in 250 ms", 8, 250, 4294967295, b"enough"),
    ]
    return [
        {
            "what": what,
            "method_or_status": number,
            "retry_after_ms": retry_after_ms,
            "call_id": call_id,
            "payload": payload.hex(),
            "frame": b"".join(
                [
                    len(payload).to_bytes(4, "little"),
                    number.to_bytes(2, "little"),
                    bytes(2),
                    retry_after_ms.to_bytes(4, "little"),
                    call_id.to_bytes(4, "little"),
                    payload,
                ]
            ).hex(),
        }
        for what, number, retry_after_ms, call_id, payload in frames
    ]


def vectors() -> dict[str, Any]:
    """Everything, in the order of shared_memory.md."""
    rng = random.Random(SEED)
    return {
        "layout_version": LAYOUT_VERSION,
        "addresses": addresses(),
        "chunk_header": chunk_header(),
        "fingerprints": fingerprint_sets(rng),
        "index_table": index_table(rng),
        "touch_ring": touch_ring(),
        "namespaces": namespaces(),
        "call_frames": call_frames(),
    }


# --- record.md


def record_header(fields: dict[str, Any]) -> bytes:
    """The 320 bytes of a record's header."""
    key, parent = bytes.fromhex(fields["key"]), bytes.fromhex(fields["parent"])
    body = struct.pack(
        "<8sHHI16s16sHHBBHQQQQQQQQ24s64s64sQ32x",
        b"KVKRECD1",
        1,
        fields["flags"],
        fields["group"],
        bytes.fromhex(fields["namespace_id"]),
        bytes.fromhex(fields["boundary_id"]),
        fields["boundary_members"],
        fields["boundary_member"],
        len(key),
        len(parent),
        0,
        fields["payload_nbytes"],
        fields["payload_nbytes"],
        int(fields["checksum"], 16),
        int(fields["checksum"], 16),
        int(fields["record_seq"], 16),
        int(fields["location"], 16),
        fields["created_ms"],
        fields["last_used_ms"],
        fields["retention_class"].encode(),
        key,
        parent,
        int(fields["target"], 16),
    )
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def payload_checksum(namespace_id: bytes, group: int, key: bytes, payload: bytes) -> int:
    """Bound to all of these and the length."""
    bound = namespace_id + struct.pack("<IQ", group, len(payload))
    seed = xxhash.xxh3_64_intdigest(key, xxhash.xxh3_64_intdigest(bound))
    return xxhash.xxh3_64_intdigest(payload, seed)


def record_case(rng: random.Random, key_nbytes: int, payload: bytes, page: int) -> dict[str, Any]:
    """One record in segment 7; an empty payload makes it a tombstone."""
    key, namespace_id, group = rng.randbytes(key_nbytes), rng.randbytes(16), rng.randrange(16)
    checksum = payload_checksum(namespace_id, group, key, payload) if payload else 0
    fields = {
        "flags": 0 if payload else 1,
        "group": group,
        "namespace_id": namespace_id.hex(),
        "boundary_id": rng.randbytes(16).hex() if payload else "00" * 16,
        "boundary_members": 8 if payload else 1,
        "boundary_member": 5 if payload else 0,
        "payload_nbytes": len(payload),
        "checksum": hex64(checksum),
        "record_seq": hex64((7 << 32) + page),
        "location": hex64((7 << 32) + page),
        "created_ms": 1_700_000_000_000,
        "last_used_ms": 1_700_000_259_200,
        "retention_class": "global" if payload else "",
        "key": key.hex(),
        "parent": rng.randbytes(key_nbytes).hex() if payload and page > 1 else "",
        "target": hex64(0),
    }
    return {"fields": fields, "payload": payload.hex(), "header": record_header(fields).hex()}


def page_of(body: bytes) -> bytes:
    """A page with a checksum behind its content."""
    return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(4096, b"\0")


def segment(rng: random.Random) -> dict[str, Any]:
    """A whole sealed segment of five records; pages of zeros are left to the reader."""
    cases, page = [], 1
    for key_nbytes, payload_nbytes in ((16, 1), (32, 4096), (64, 4097), (33, 0), (32, 0)):
        cases.append(record_case(rng, key_nbytes, rng.randbytes(payload_nbytes), page))
        page += 1 + -(-payload_nbytes // 4096)
    cases[4]["fields"] |= {"flags": 2, "target": cases[1]["fields"]["location"]}
    cases[4]["header"] = record_header(cases[4]["fields"]).hex()
    table = b"".join(bytes.fromhex(case["header"]) for case in cases)
    header = struct.pack("<8sIIQQQ24s", b"KVKSEGM1", 1, 0, 7, 64, 1_700_000_000_000, b"global")
    checksum = xxhash.xxh3_64_intdigest(table)
    footer = struct.pack("<8sIIQQQQ", b"KVKFOOT1", 1, 0, 7, page, len(cases), checksum)
    whole = page_of(header)
    for case in cases:
        payload = bytes.fromhex(case["payload"])
        whole += bytes.fromhex(case["header"]).ljust(4096, b"\0")
        whole += payload + bytes(-len(payload) % 4096)
    whole += table.ljust(4096, b"\0") + page_of(footer)
    return {
        "number": 7,
        "pages": 64,
        "table_page": page,
        "header": page_of(header)[:72].hex(),
        "footer": page_of(footer)[:56].hex(),
        "records": cases,
        "nbytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }


def render_record() -> str:
    """The text of record_vectors.json."""
    shown = {"record_version": 1, "segment": segment(random.Random(SEED))}
    return json.dumps(shown, indent=1, ensure_ascii=True) + "\n"


def render() -> str:
    """The text of shared_memory_vectors.json."""
    return json.dumps(vectors(), indent=1, ensure_ascii=True) + "\n"


def main(arguments: list[str]) -> None:
    """Write to the path given, else to the standard output."""
    text = {"shared_memory": render, "record": render_record}[arguments[0]]()
    if arguments[1:]:
        Path(arguments[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
